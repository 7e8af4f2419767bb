"""Clean-up that fails: a warning, never an error, so that the error that led to the clean-up stays the first."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_ssd.storage.errors import from_os_error

__all__ = ["clean_up", "close_fd"]

_log = logging.getLogger(__name__)


@contextmanager
def clean_up(action: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Runs one step of clean-up. Its error is logged, and the steps after it run.

    No byte that is still needed depends on clean-up: writes have been checked when their futures are done.

    Args:
        action: the step, such as ``"close"``.
        path: the file or directory of the step.
    """
    try:
        yield
    except OSError as error:
        _log.warning("%s", from_os_error(error, action, path))
    except RuntimeError as error:  # of a backend's library
        _log.warning("could not %s %s: %s", action, Path(path), error)


def close_fd(fd: int, path: str | os.PathLike[str]) -> None:
    """Closes a descriptor of `path`, as a step of clean-up. Linux frees it also where it returns an error."""
    with clean_up("close", path):
        os.close(fd)
