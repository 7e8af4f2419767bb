"""Scratch directories: one per path, run and rank, removed when the run ends; the next run removes a killed run's.

A kept directory is the other kind: its name is known, and the run after a killed one resumes from its files.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from lightning_ssd.storage.cleanup import clean_up, close_fd
from lightning_ssd.storage.errors import StorageError, from_os_error
from lightning_ssd.storage.private import NotPrivateError, PrivateDirectory

_log = logging.getLogger(__name__)
_JOINED = "joined"
"""File that processes which have joined a directory lock, each for itself alone."""
_NAME = re.compile(r"lightning_ssd-[0-9a-f]{16}-rank\d+")


def kept_directory(path: str | Path, rank: int = 0) -> Path:
    """Returns the directory inside `path` in which a killed run leaves its files for the next one."""
    return Path(path).absolute() / f"lightning_ssd-kept-rank{rank}"


def striped_free_bytes(paths: Sequence[str | Path]) -> int:
    """Returns the bytes for which the drives of `paths` have room, if data are striped evenly over the directories.

    Raises:
        StorageError: a path is missing, or is no directory, or its filesystem failed.
    """
    drives: list[int] = []
    free: list[int] = []
    for path in paths:
        _check_directory(path)
        try:
            drives.append(os.stat(path).st_dev)
            free.append(shutil.disk_usage(path).free)
        except OSError as error:
            raise from_os_error(error, "ask for free space", path) from error
    return len(paths) * min(nbytes // drives.count(drive) for nbytes, drive in zip(free, drives, strict=True))


def _check_directory(path: str | Path) -> None:
    parent = Path(path).absolute()
    if not parent.exists():
        raise StorageError(f"path {str(path)!r} does not exist: create it first (`mkdir -p {parent}`)")
    if not parent.is_dir():
        raise StorageError(f"path {str(path)!r} is not a directory: give one on the drive to use")


class ScratchDirectory:
    """A directory ``lightning_ssd-<random>-rank<k>`` with mode 0700 inside the user's directory.

    The directory is in use as long as a process holds the flock on the lock file inside it: this process, or a
    process that it forked (a DataLoader worker that outlives a killed run holds the lock, too). Exec'ed programs do
    not inherit the lock. Creating a scratch directory removes the directories of killed runs, whose locks are free.

    A kept directory has the name that `kept_directory` returns, and is never removed as a killed run's. Its lock is
    free as soon as its process is killed, because forked processes close their copies of it.

    Other users may be able to write to `path`. Everything in it is opened by descriptor and checked (see
    `PrivateDirectory`), used and removed through its descriptor. The lock file contains the name of its directory, so
    that another private directory of this user, moved here by another user, is not mistaken for a scratch directory.

    Args:
        path: an existing, writable directory on the drive to use.
        rank: rank of this process in its run.
        keep: True for a kept directory, from which the next run resumes unless `close` removes it.

    Attributes:
        path: path of the scratch directory, for messages; files are opened through `files`.

    Raises:
        StorageError: `path` is missing, is no directory, or cannot be written or locked; or another run that is
            alive uses the kept directory; or another user may have made it (`NotPrivateError`).
    """

    def __init__(self, path: str | Path, rank: int = 0, *, keep: bool = False) -> None:
        parent = Path(path).absolute()
        self._owner = os.getpid()
        self._open = False
        opened: tuple[PrivateDirectory, int] | None = None
        with ExitStack() as undo:
            try:
                _check_directory(path)
                # The user gave this path: links in it are followed, once.
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
        """True if the directory has no file but its lock."""
        return self.files.names() <= {_lock_name(self.path), _JOINED}

    def clear(self) -> None:
        """Removes all files but the lock.

        Raises:
            StorageError: an entry could not be removed.
        """
        try:
            self.files.clear(keep=_lock_name(self.path))
        except OSError as error:
            raise from_os_error(error, "clear the scratch directory", self.path) from error

    def close(self, *, remove: bool = True) -> None:
        """Closes the directory and releases its lock. Idempotent; without effect in a forked child.

        Args:
            remove: remove the directory with its files. Entries that cannot be removed are named in a warning.
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


class JoinedDirectory(ScratchDirectory):
    """The scratch directory of another process of this run, which holds its lock and removes it.

    If that process is killed, no later run uses a kept directory while this process may still write to its files.

    Raises:
        StorageError: it can't be opened; or another user may have made it (`NotPrivateError`).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with ExitStack() as undo:
            try:
                self.files = undo.enter_context(PrivateDirectory.open(self.path))
                self._lock = self.files.open_file(_JOINED, os.O_RDWR | os.O_CREAT)
                undo.callback(close_fd, self._lock, self.path)
                fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as error:
                raise from_os_error(error, "open the scratch directory of another process", self.path) from error
            undo.pop_all()
        _kept_locks.add(self._lock)
        self._open = True

    def close(self, *, remove: bool = True) -> None:
        if self._open and self._lock in _kept_locks:  # a forked child has closed its copy
            self._open = False
            _kept_locks.discard(self._lock)
            close_fd(self._lock, self.path)
            self.files.close()


_kept_locks: set[int] = set()
"""Lock descriptors of this process's kept directories. A forked child closes its copies, which would keep the locks
after this process is killed."""


def _close_locks_in_child() -> None:
    for lock in _kept_locks:
        os.close(lock)
    _kept_locks.clear()


os.register_at_fork(after_in_child=_close_locks_in_child)


def _lock_name(directory: Path) -> str:
    return f"lock.{directory.name}"


def _open_locked(parent: int, path: Path, *, keep: bool) -> tuple[PrivateDirectory, int] | None:
    """Makes a directory, or with `keep` opens the existing one, locks it, and returns both.

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
                    _check_left(files)
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


def _check_left(files: PrivateDirectory) -> None:
    """Raises StorageError if a process has joined the directory, and has not ended since its run was killed."""
    try:
        joined = files.open_file(_JOINED, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(joined, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StorageError(
            f"other processes of the run that was killed, which has left {files.path}, are still alive. Wait until "
            "they have ended, which takes some seconds, or end them"
        ) from error
    finally:
        close_fd(joined, files.path)


def _is_lock_of(files: PrivateDirectory, lock: int) -> bool:
    """Returns whether the directory's lock file is the open one: another process may have removed it meanwhile.

    Raises:
        FileNotFoundError: the directory has no lock file.
    """
    entry = os.stat(_lock_name(files.path), dir_fd=files.fd, follow_symlinks=False)
    return os.path.samestat(entry, os.fstat(lock))


def _sweep(parent: int, path: Path) -> None:
    """Removes the scratch directories of killed runs in the directory `path`, whose descriptor is `parent`."""
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
    """Removes a directory whose lock is held, closes it, and releases the lock.

    The lock file is removed last, so that a directory with data always has one.
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

    `rmdir` takes a name, so another user may have exchanged the directory. Then at most an empty directory is removed
    that the other user could have removed as well: moving it here needs the same rights.
    """
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=parent)
