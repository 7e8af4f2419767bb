"""A scratch directory: one per run and rank, gone when the run ends, swept by the next if it was killed."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from lightning_ssd.storage.errors import StorageError, from_os_error

__all__ = ["ScratchDirectory"]

_log = logging.getLogger(__name__)
_NAME = re.compile(r"lightning_ssd-[0-9a-f]{16}-rank\d+")
_LOCK = "lock"


class ScratchDirectory:
    """A directory ``lightning_ssd-<random>-rank<k>`` with mode 0700 inside the user's directory.

    It is alive as long as somebody holds the flock on the lock file inside it. That is this process, and
    those it forks (a DataLoader worker that outlives a killed run still counts). Exec'ed programs do not
    inherit the lock. Creating one sweeps the directories whose lock is free: those of killed runs.

    Args:
        path: an existing, writable directory on the drive to use.
        rank: rank of this process in its run.

    Attributes:
        path: the new directory.

    Raises:
        StorageError: `path` is missing, is no directory, or cannot be written or locked.
    """

    def __init__(self, path: str | Path, rank: int = 0) -> None:
        parent = Path(path).absolute()
        if not parent.exists():
            raise StorageError(f"path {str(path)!r} does not exist: create it first (`mkdir -p {parent}`)")
        if not parent.is_dir():
            raise StorageError(f"path {str(path)!r} is not a directory: give one on the drive to use")
        self.path = parent / f"lightning_ssd-{secrets.token_hex(8)}-rank{rank}"
        self._owner = os.getpid()
        self._lock: int | None = None
        try:
            # The lock on the user's directory makes creating and sweeping take turns: between its mkdir and
            # its lock, a new directory looks like a killed run's.
            with _locked(parent):
                _sweep(parent)
                self.path.mkdir(mode=0o700)
                try:
                    self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BaseException:
                    self.close()
                    raise
        except OSError as error:
            raise from_os_error(error, "create a scratch directory (argument `path`)", parent) from error

    def close(self) -> None:
        """Removes the directory and all in it. Idempotent; in a forked child it does nothing."""
        if os.getpid() != self._owner:
            return
        _remove(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _sweep(parent: Path) -> None:
    with os.scandir(parent) as entries:
        found = [
            Path(entry.path) for entry in entries if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
    for directory in found:
        try:
            fd = os.open(directory / _LOCK, os.O_RDWR)
        except FileNotFoundError:  # killed between mkdir and lock, or its owner is removing it right now
            _remove(directory)
            continue
        except OSError:  # another user's
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _log.info("removing the scratch directory of a killed run: %s", directory)
            _remove(directory)
        except BlockingIOError:  # a live run's
            pass
        finally:
            os.close(fd)


def _remove(directory: Path) -> None:
    # Errors don't stop it: another process may be removing the same entries.
    shutil.rmtree(directory, ignore_errors=True)
    if directory.exists():
        _log.warning("could not remove the scratch directory %s: remove it by hand", directory)
