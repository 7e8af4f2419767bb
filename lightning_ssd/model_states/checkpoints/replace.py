"""Atomic replacement of files and directories: after a kill at any moment, the old one or the new one exists."""

import contextlib
import ctypes
import errno
import io
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
"""Error numbers of a kernel or a filesystem without `renameat2`."""


@contextlib.contextmanager
def replacing(path: Path, part: Path) -> Iterator[io.BufferedWriter]:
    """Yields a new file that replaces `path` on exit, when it is durable. If the body raises, it is removed.

    Args:
        part: temporary name of the new file, in the same directory.
    """
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        put_in_place(part, path)
    except BaseException:
        remove(part)
        raise


def put_in_place(part: Path, path: Path) -> None:
    """Renames the file or directory `part` to `path`, and removes the old `path`.

    At every moment either the old or the new one has the name `path`. The exception is a directory on a filesystem that
    can't exchange two names: for a moment the old one has another name, under which `find_replaced` finds it.

    Args:
        part: new file or directory, whose content is durable, in the same directory as `path`.

    Raises:
        OSError: `path` is unchanged; or it is replaced, but the replacement may not survive a loss of power.
    """
    aside = _aside(path)
    if find_replaced(path) == aside:  # a process was killed before it could rename the new one
        os.rename(aside, path)
    if not _is_directory(part) and not _is_directory(path):
        os.replace(part, path)
    elif not os.path.lexists(path):
        os.rename(part, path)
    elif not _exchange(part, path):
        remove(aside)
        os.rename(path, aside)
        try:
            os.rename(part, path)
        except BaseException:
            os.rename(aside, path)
            raise
    sync_directory(path.parent)
    for old in (part, aside):
        remove(old)


def find_replaced(path: Path) -> Path:
    """Returns `path`, or its temporary name if the process that was replacing it was killed."""
    aside = _aside(path)
    return aside if not os.path.lexists(path) and os.path.lexists(aside) else path


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def remove(path: Path) -> None:
    """Removes a file, or a directory with its entries, if it exists. Entries that can't be removed are kept."""
    if _is_directory(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two names atomically; returns False if the filesystem can't."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    sys.audit("os.rename", str(one), str(other), -1, -1)  # as `os.rename` does
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))
