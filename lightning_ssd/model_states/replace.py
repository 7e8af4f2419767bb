"""Files and directories that are replaced whole: after a kill at any moment, the old one or the new one is there."""

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
"""What a kernel or a filesystem without `renameat2` answers."""


@contextlib.contextmanager
def replacing(path: Path, part: Path) -> Iterator[io.BufferedWriter]:
    """Yields a file that takes the place of `path` at the end, when it is on the drive; none if something is raised.

    Args:
        path: what is replaced.
        part: its name until then, in the same directory.
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
    """Renames the file or directory `part` to `path`, and removes what has that name.

    At every instant one of the two is whole under the name `path`. Only where a directory is replaced on a filesystem
    that can't exchange two names, the old one has another name for a moment, under which `find_replaced` finds it.

    Args:
        part: what is to be in place, on the drive; in the same directory as `path`.
        path: the name.

    Raises:
        OSError: what had the name `path` has it still; or all is in place, and may not survive a loss of power.
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
    """Returns where `path` is: there, or aside, if the process that was replacing it was killed meanwhile."""
    aside = _aside(path)
    return aside if not os.path.lexists(path) and os.path.lexists(aside) else path


def sync_directory(path: Path) -> None:
    """Returns when the names in a directory survive a loss of power."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def remove(path: Path) -> None:
    """Removes a file, or a directory with what it holds, if it is there; what can't be removed stays."""
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
    """Exchanges two names at once; returns whether the filesystem can."""
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
