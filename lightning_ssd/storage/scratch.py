"""A scratch directory: one per run and rank, gone when the run ends, swept by the next if it was killed.

Or kept for it: a directory whose name is known, which the next run takes over with all in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
from pathlib import Path

from lightning_ssd.storage.errors import StorageError, from_os_error

__all__ = ["ScratchDirectory", "kept_directory"]

_log = logging.getLogger(__name__)
_NAME = re.compile(r"lightning_ssd-[0-9a-f]{16}-rank\d+")
_LOCK = "lock"


def kept_directory(path: str | Path, rank: int = 0) -> Path:
    """Returns the directory inside `path` that a killed run keeps for the next one."""
    return Path(path).absolute() / f"lightning_ssd-kept-rank{rank}"


class ScratchDirectory:
    """A directory ``lightning_ssd-<random>-rank<k>`` with mode 0700 inside the user's directory.

    It is alive as long as somebody holds the flock on the lock file inside it. That is this process, and
    those it forks (a DataLoader worker that outlives a killed run still counts). Exec'ed programs do not
    inherit the lock. Creating one sweeps the directories whose lock is free: those of killed runs.

    One that is kept has the name that `kept_directory` returns, and is never swept. Its lock is free as soon as its
    process is killed: those that it forked let go of it.

    Args:
        path: an existing, writable directory on the drive to use.
        rank: rank of this process in its run.
        keep: whether the next run takes the directory over, unless `close` removes it.

    Attributes:
        path: the directory.

    Raises:
        StorageError: `path` is missing, is no directory, or cannot be written or locked; or a live run has the
            directory to be taken over.
    """

    def __init__(self, path: str | Path, rank: int = 0, *, keep: bool = False) -> None:
        parent = Path(path).absolute()
        if not parent.exists():
            raise StorageError(f"path {str(path)!r} does not exist: create it first (`mkdir -p {parent}`)")
        if not parent.is_dir():
            raise StorageError(f"path {str(path)!r} is not a directory: give one on the drive to use")
        self._owner = os.getpid()
        self._lock: int | None = None
        try:
            _sweep(parent)
            if keep:
                self.path = kept_directory(path, rank)
                self._lock = _take_over(self.path)
            while self._lock is None:  # once, unless another process sweeps at this very moment
                self.path = parent / f"lightning_ssd-{secrets.token_hex(8)}-rank{rank}"
                self._lock = _create(self.path)
        except OSError as error:
            raise from_os_error(error, "create a scratch directory (argument `path`)", parent) from error

    @property
    def empty(self) -> bool:
        """Whether there is nothing in it."""
        return {entry.name for entry in os.scandir(self.path)} <= {_LOCK}

    def clear(self) -> None:
        """Removes all that is in it."""
        _clear(self.path)

    def close(self, *, remove: bool = True) -> None:
        """Lets go of the directory. Idempotent; in a forked child it does nothing.

        Args:
            remove: it goes away, with all in it.
        """
        if os.getpid() != self._owner or self._lock is None:
            return
        if remove:
            _remove(self.path, self._lock)
        else:
            os.close(self._lock)
        _kept_locks.discard(self._lock)
        self._lock = None


_kept_locks: set[int] = set()
"""Of this process; a fork closes its copies, which would hold the locks longer than the process that was killed."""


def _let_go_in_child() -> None:
    for lock in _kept_locks:
        os.close(lock)
    _kept_locks.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


def _take_over(directory: Path) -> int:
    """Makes a directory, or takes an existing one, and returns its lock, which is held.

    Raises:
        StorageError: another process holds it.
    """
    while True:
        directory.mkdir(mode=0o700, exist_ok=True)
        lock = directory / _LOCK
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:  # its owner has just removed it
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), lock.stat()):
                _kept_locks.add(fd)
                return fd
        except BlockingIOError as error:
            os.close(fd)
            raise StorageError(
                f"another run, which is alive, keeps its states in {directory}: give this one another `path`"
            ) from error
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _create(directory: Path) -> int | None:
    """Makes a directory with its lock held, and returns the lock.

    Until it is locked, a new directory looks like a killed run's, and another process may sweep it: the result is
    None then. (A lock on the parent would prevent that, but NFS locks no directories.)
    """
    directory.mkdir(mode=0o700)
    lock = directory / _LOCK
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except FileNotFoundError:  # swept before it had a lock
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), lock.stat()):
            return fd
    except (BlockingIOError, FileNotFoundError):  # being swept, or swept: the sweeper removes it
        pass
    except BaseException:
        _remove(directory, fd)
        raise
    os.close(fd)
    return None


def _sweep(parent: Path) -> None:
    with os.scandir(parent) as entries:
        found = [
            Path(entry.path) for entry in entries if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
    for directory in found:
        try:
            fd = os.open(directory / _LOCK, os.O_RDWR)
        except FileNotFoundError:  # killed between mkdir and lock; or not yet locked; or being removed
            with contextlib.suppress(OSError):
                directory.rmdir()  # and nothing that is not empty: its owner may have made the lock by now
            continue
        except OSError:  # another user's
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # a live run's
            os.close(fd)
        except BaseException:
            os.close(fd)
            raise
        else:
            _log.info("removing the scratch directory of a killed run: %s", directory)
            _remove(directory, fd)


def _clear(directory: Path) -> None:
    for entry in list(os.scandir(directory)):
        if entry.name == _LOCK:
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(entry)


def _remove(directory: Path, lock: int) -> None:
    """Removes a directory whose lock is held, and lets the lock go.

    The lock file is the last to go, so that a directory with data always has one. Errors don't stop it: another
    process may be removing the same entries.
    """
    with contextlib.suppress(OSError):
        _clear(directory)
    with contextlib.suppress(OSError):
        os.unlink(directory / _LOCK)
    os.close(lock)  # before rmdir: NFS keeps the name of a removed file that is open
    try:
        directory.rmdir()
    except FileNotFoundError:
        pass
    except OSError:
        _log.warning("could not remove the scratch directory %s: remove it by hand", directory)
