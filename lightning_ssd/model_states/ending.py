"""The end of something that has several parts: all of them are ended, and the first error is the one that is raised."""

import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


class Ending:
    """Runs one step of an end after the other, each whatever happens to the others.

    Args:
        failure: what has failed before, if something has: it stays the error that a person sees.

    Attributes:
        failure: the first error.
    """

    def __init__(self, failure: BaseException | None = None) -> None:
        self._before = failure
        self.failure = failure

    def run(self, step: Callable[..., object], *arguments: Any, **options: Any) -> None:
        """Runs a step; its error is kept if it is the first, else logged."""
        try:
            step(*arguments, **options)
        except BaseException as error:
            self.add(error)

    def add(self, error: BaseException) -> None:
        """Keeps the error of a step if it is the first, else logs it."""
        if self.failure is None:
            self.failure = error
        elif error is not self.failure:
            log.warning("another error at the end of training: %s", error)

    def raise_failure(self) -> None:
        """Raises the first error of the steps, unless something has failed before: that is raised elsewhere."""
        if self.failure is not None and self._before is None:
            raise self.failure
