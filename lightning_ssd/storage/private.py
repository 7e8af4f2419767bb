"""Directories and files that no other user can have written, opened by descriptor.

The parent of a scratch directory may be writable by others (`/tmp`). A name there does not tell the owner of its entry,
and the entry can be replaced between two system calls that use the name. Therefore an entry is opened once, without
following links, the open descriptor is checked, and the entry is used through this descriptor only.
"""

from __future__ import annotations

import errno
import io
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_ssd.storage.cleanup import close_fd
from lightning_ssd.storage.errors import StorageError

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK changes nothing for regular files; opening another user's FIFO would wait for its other end without it.
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_OTHER_KINDS = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ENODEV, errno.EWOULDBLOCK)
_DENIED = (errno.EACCES, errno.EPERM)


class NotPrivateError(StorageError):
    """Another user may have written a directory or file, or put it in its place. Nothing was read from it."""


class PrivateDirectory:
    """An open directory that belongs to this user and that no other user can enter.

    Args:
        fd: descriptor of the directory; owned, closed by `close`.
        path: its path, for messages.

    Attributes:
        fd: the descriptor.
        path: path of the directory, for messages: another user may have moved the directory meanwhile.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self.path = path

    @classmethod
    def open(cls, path: str | Path, *, parent: int | None = None) -> PrivateDirectory:
        """Opens an existing directory.

        Args:
            path: path of the directory. Links are followed up to its parent only.
            parent: descriptor of the parent, in which the last part of `path` is looked up.

        Raises:
            FileNotFoundError: the directory does not exist.
            NotPrivateError: the entry is a link or no directory, another user owns it, or other users have rights
                on it.
            OSError: the directory could not be opened for another reason.
        """
        path = Path(path)
        fd = _open(path if parent is None else path.name, _DIRECTORY, parent, path)
        return cls(fd, path)

    def open_file(self, name: str, flags: int) -> int:
        """Opens a file of the directory and returns its descriptor, which is closed on `exec`.

        Args:
            flags: as for `os.open`. A file that is created has mode 0600.

        Raises:
            FileNotFoundError: the file does not exist, and `flags` do not create it.
            NotPrivateError: the entry is no regular file, has another hard link, another user owns it, or other users
                have rights on it.
            OSError: the file could not be opened for another reason.
        """
        return _open(name, flags | _FILE, self.fd, self.path / name)

    def read_file(self, name: str) -> bytes:
        """Returns the content of a file, which is opened as by `open_file` and raises the same errors."""
        with os.fdopen(self.open_file(name, os.O_RDONLY), "rb") as file:
            return file.read()

    @contextmanager
    def replacing_file(self, name: str) -> Iterator[io.BufferedWriter]:
        """Yields a new file that atomically replaces the file `name` on exit.

        After a kill or a loss of power the file has either the old content or the new one. On return the new content
        is durable. If the body raises, the old file is unchanged.

        Raises:
            OSError: the new file could not be written, or made durable.
        """
        part = f"{name}.part"
        self.remove_file(part)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(self.open_file(part, flags), "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.rename(part, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException:
            with suppress(OSError):
                self.remove_file(part)
            raise
        self.sync()

    def remove_file(self, name: str) -> None:
        """Removes the file or link `name` if it exists. A link is not followed.

        Raises:
            OSError: the entry is a directory, or could not be removed for another reason.
        """
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def names(self) -> set[str]:
        """Returns the names of all entries."""
        return set(os.listdir(self.fd))

    def clear(self, *, keep: str) -> None:
        """Removes all entries but `keep`.

        Raises:
            OSError: the first error, such as that of a subdirectory, which is not removed. Other entries are removed
                all the same.
        """
        failed: OSError | None = None
        for name in sorted(self.names() - {keep}):
            try:
                self.remove_file(name)
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def sync(self) -> None:
        """Makes the names of new and renamed files durable.

        Raises:
            OSError: the filesystem failed.
        """
        os.fsync(self.fd)

    def is_in(self, parent: int) -> bool:
        """Whether the directory still has its name in the directory with descriptor `parent`."""
        try:
            entry = os.stat(self.path.name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(entry, os.fstat(self.fd))

    def close(self) -> None:
        """Closes the descriptor. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            close_fd(fd, self.path)

    def __enter__(self) -> PrivateDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(name: str | Path, flags: int, parent: int | None, path: Path) -> int:
    """Opens an entry of the directory `parent` without following a link, and checks its owner and mode.

    If `parent` is None, `name` is a path. Messages name `path`.
    """
    wanted = "directory" if flags & os.O_DIRECTORY else "regular file"
    try:
        fd = os.open(name, flags, 0o600, dir_fd=parent)
    except OSError as error:
        if error.errno not in (*_OTHER_KINDS, *_DENIED):
            raise
        reason = None
        with suppress(OSError):  # for the message only
            reason = _objection(os.stat(name, dir_fd=parent, follow_symlinks=False), wanted)
        if reason is None:  # a failing drive, or the system forbids access to an entry of this user's
            raise
        raise _not_private(path, reason) from error
    try:
        entry = os.fstat(fd)
        reason = _objection(entry, wanted)
        if reason is not None:
            raise _not_private(path, reason)
        if entry.st_nlink == 0 and wanted == "regular file":
            raise FileNotFoundError(errno.ENOENT, "removed while it was opened", str(path))
    except BaseException:
        close_fd(fd, path)
        raise
    return fd


def _objection(entry: os.stat_result, wanted: str) -> str | None:
    """Returns the reason not to trust an entry, or None if it is trusted."""
    mode = entry.st_mode
    if stat.S_ISLNK(mode):
        return f"is a symbolic link of {_user(entry.st_uid)}"
    if not (stat.S_ISDIR(mode) if wanted == "directory" else stat.S_ISREG(mode)):
        return f"is not a {wanted}; its owner is {_user(entry.st_uid)}"
    if entry.st_uid != os.geteuid():
        return f"belongs to {_user(entry.st_uid)}, and this process runs as {_user(os.geteuid())}"
    if mode & 0o077:
        return f"belongs to {_user(entry.st_uid)} and gives others rights (mode {stat.S_IMODE(mode):04o})"
    if wanted == "regular file" and entry.st_nlink > 1:
        return f"belongs to {_user(entry.st_uid)} and has {entry.st_nlink} hard links, so it is elsewhere, too"
    return None


def _not_private(path: Path, reason: str) -> NotPrivateError:
    return NotPrivateError(
        f"{path} {reason}: another user may have put it there, and it is not used. Remove it if it is yours, or give a "
        "`path` that only you can write to, on a filesystem that keeps owners and modes."
    )


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
