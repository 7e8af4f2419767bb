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
from contextlib import ExitStack
from pathlib import Path

from lightning_ssd.storage.cleanup import clean_up, close_fd
from lightning_ssd.storage.errors import StorageError, from_os_error
from lightning_ssd.storage.private import NotPrivateError, PrivateDirectory

__all__ = ["ScratchDirectory", "kept_directory"]

_log = logging.getLogger(__name__)
_NAME = re.compile(r"lightning_ssd-[0-9a-f]{16}-rank\d+")


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

    Others may be able to write to the user's directory. Everything in it is opened by descriptor and checked (see
    `PrivateDirectory`), used and removed through its descriptor, and the lock file has the name of its directory, so
    that another private directory of this user, moved here by somebody else, is not mistaken for a scratch directory.

    Args:
        path: an existing, writable directory on the drive to use.
        rank: rank of this process in its run.
        keep: whether the next run takes the directory over, unless `close` removes it.

    Attributes:
        path: the directory, for messages and for whoever looks at it; files are opened through `files`.
        files: the directory, open.

    Raises:
        StorageError: `path` is missing, is no directory, or cannot be written or locked; or a live run has the
            directory to be taken over; or another user may have put it there (`NotPrivateError`).
    """

    def __init__(self, path: str | Path, rank: int = 0, *, keep: bool = False) -> None:
        parent = Path(path).absolute()
        self._owner = os.getpid()
        self._open = False
        opened: tuple[PrivateDirectory, int] | None = None
        with ExitStack() as undo:
            try:
                if not parent.exists():
                    raise StorageError(f"path {str(path)!r} does not exist: create it first (`mkdir -p {parent}`)")
                if not parent.is_dir():
                    raise StorageError(f"path {str(path)!r} is not a directory: give one on the drive to use")
                # The user's own word: links in it are followed, once.
                self._parent = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                undo.callback(close_fd, self._parent, parent)
                _sweep(self._parent, parent)
                while opened is None:  # once, unless another process sweeps at this very moment
                    name = parent / f"lightning_ssd-{secrets.token_hex(8)}-rank{rank}"
                    opened = _open_locked(self._parent, kept_directory(path, rank) if keep else name, keep=keep)
            except OSError as error:
                raise from_os_error(error, "create a scratch directory (argument `path`)", parent) from error
            undo.pop_all()
        self.files, self._lock = opened
        if keep:
            _kept_locks.add(self._lock)
        self.path = self.files.path
        self._open = True

    @property
    def empty(self) -> bool:
        """Whether there is nothing in it."""
        return self.files.names() <= {_lock_name(self.path)}

    def clear(self) -> None:
        """Removes all that is in it.

        Raises:
            StorageError: an entry could not be removed.
        """
        try:
            self.files.clear(keep=_lock_name(self.path))
        except OSError as error:
            raise from_os_error(error, "clear the scratch directory", self.path) from error

    def close(self, *, remove: bool = True) -> None:
        """Lets go of the directory. Idempotent; in a forked child it does nothing.

        Args:
            remove: it goes away, with all in it. What cannot be removed is named in a warning.
        """
        if os.getpid() != self._owner or not self._open:
            return
        self._open = False
        _kept_locks.discard(self._lock)
        if remove:
            _remove(self._parent, self.files, self._lock)
        else:
            close_fd(self._lock, self.path)
            self.files.close()
        close_fd(self._parent, self.path.parent)


_kept_locks: set[int] = set()
"""Of this process; a fork closes its copies, which would hold the locks longer than the process that was killed."""


def _let_go_in_child() -> None:
    for lock in _kept_locks:
        os.close(lock)
    _kept_locks.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


def _lock_name(directory: Path) -> str:
    return f"lock.{directory.name}"


def _open_locked(parent: int, path: Path, *, keep: bool) -> tuple[PrivateDirectory, int] | None:
    """Makes a directory, or with `keep` opens the existing one, and returns it with its lock, which is held.

    Until it is locked, a new directory looks like a killed run's, and another process may remove it: the result is
    None then. (A lock on the parent would prevent that, but NFS locks no directories.)

    Raises:
        StorageError: another process holds the lock of the existing directory.
        NotPrivateError: another user may have put the directory there.
        OSError: the filesystem failed. A directory that was made is removed.
    """
    lock_name = _lock_name(path)
    with ExitStack() as undo:
        made = True
        try:
            os.mkdir(path.name, 0o700, dir_fd=parent)
            undo.callback(_remove_if_empty, parent, path.name)
        except FileExistsError:
            if not keep:
                raise
            made = False
        try:
            files = PrivateDirectory.open(path, parent=parent)
            undo.callback(files.close)
            names = files.names()
            # The lock is the first entry of a scratch directory, and the last that is removed.
            if names and (not keep or lock_name not in names):
                raise NotPrivateError(
                    f"{path} has files but is no scratch directory that was made here, and it is not used: move it "
                    "elsewhere, or give a `path` that only you can write to."
                )
            lock = files.open_file(lock_name, os.O_RDWR | os.O_CREAT | (0 if keep else os.O_EXCL))
            undo.callback(close_fd, lock, path / lock_name)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _is_lock_of(files, lock):
                    return None
                if keep:
                    files.sync()
                    os.fsync(parent)
            except (FileNotFoundError, BlockingIOError):  # another process has it, or had
                raise
            except OSError:
                if made:
                    with clean_up("remove the lock file", path):
                        files.remove_file(lock_name)
                raise
        except FileNotFoundError:
            return None
        except BlockingIOError as error:
            if not keep:  # the process that holds it removes the directory
                return None
            raise StorageError(
                f"another run, which is alive, keeps its states in {path}: give this one another `path`"
            ) from error
        undo.pop_all()
        return files, lock


def _is_lock_of(files: PrivateDirectory, lock: int) -> bool:
    """Whether an open lock file still has its name in the directory: whoever removes a directory removes it.

    Raises:
        FileNotFoundError: it has not, nor has another.
    """
    entry = os.stat(_lock_name(files.path), dir_fd=files.fd, follow_symlinks=False)
    return os.path.samestat(entry, os.fstat(lock))


def _sweep(parent: int, path: Path) -> None:
    for name in os.listdir(parent):
        if not _NAME.fullmatch(name):
            continue
        try:
            files = PrivateDirectory.open(path / name, parent=parent)
        except (OSError, NotPrivateError):  # another user's, or being removed
            continue
        with files:
            try:
                lock = files.open_file(_lock_name(files.path), os.O_RDWR)
            except FileNotFoundError:  # killed between mkdir and lock; or not yet locked; or being removed
                _remove_if_empty(parent, name)  # its owner may have made the lock by now
                continue
            except (OSError, NotPrivateError):
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # a live run's
                close_fd(lock, files.path)
            except BaseException:
                close_fd(lock, files.path)
                raise
            else:
                _log.info("removing the scratch directory of a killed run: %s", files.path)
                _remove(parent, files, lock)


def _remove(parent: int, files: PrivateDirectory, lock: int) -> None:
    """Removes a directory whose lock is held, closes it, and lets the lock go.

    The lock file is the last to go, so that a directory with data always has one.
    """
    with clean_up("remove the files of a scratch directory", files.path):
        files.clear(keep=_lock_name(files.path))
        files.remove_file(_lock_name(files.path))
    close_fd(lock, files.path)  # before rmdir: NFS keeps the name of a removed file that is open
    try:
        if files.is_in(parent):
            os.rmdir(files.path.name, dir_fd=parent)
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.warning("could not remove the scratch directory %s (%s): remove it by hand", files.path, error.strerror)
    files.close()


def _remove_if_empty(parent: int, name: str) -> None:
    """Removes the directory `name`, if it is empty.

    `rmdir` takes a name, so another user may have exchanged the directory. Then at most an empty directory goes that
    they could have removed themselves: moving it here takes the same rights.
    """
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=parent)
