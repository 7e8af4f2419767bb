"""Running all steps of a shutdown, even if some fail, and raising the first error afterwards."""

import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


class Shutdown:
    """Runs the steps of a shutdown one after the other, each even if others fail.

    Args:
        failure: an error before the shutdown, which is raised elsewhere and must not be hidden; None: there was none.

    Attributes:
        failure: the first error.
    """

    def __init__(self, failure: BaseException | None = None) -> None:
        self._before = failure
        self._traceback = None if failure is None else failure.__traceback__
        self.failure = failure

    def run(self, step: Callable[..., object], *arguments: Any, **options: Any) -> None:
        """Runs a step. Its error is stored if it is the first one, else logged."""
        try:
            step(*arguments, **options)
        except BaseException as error:
            self.add(error)

    def add(self, error: BaseException) -> None:
        """Stores the error of a step if it is the first one, else logs it."""
        if self.failure is None:
            self.failure = error
        elif error is not self.failure:
            log.warning("another error at the end of training: %s", error)

    def raise_failure(self) -> None:
        """Raises the first error of the steps, unless there was an error before, which is raised elsewhere.

        Steps may have raised that error, too, such as that of a rank: its traceback is again that of the training.
        """
        if self._before is not None:
            self._before.__traceback__ = self._traceback
        elif self.failure is not None:
            raise self.failure
