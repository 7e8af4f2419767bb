"""Clean-up failures are logged and never raised: they would hide the error that the clean-up follows."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_ssd.storage.errors import from_os_error

_log = logging.getLogger(__name__)


@contextmanager
def clean_up(action: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Logs an error of its body, one step of clean-up on a file or directory, as a warning, so that later steps run.

    No data is lost by a failed clean-up: writes have been checked when their futures are done.
    """
    try:
        yield
    except OSError as error:
        _log.warning("%s", from_os_error(error, action, path))
    except RuntimeError as error:  # raised by a backend's library
        _log.warning("could not %s %s: %s", action, Path(path), error)


def close_fd(fd: int, path: str | os.PathLike[str]) -> None:
    """Closes a descriptor of `path`, as a step of clean-up. Linux frees a descriptor also if `close` fails."""
    with clean_up("close", path):
        os.close(fd)
