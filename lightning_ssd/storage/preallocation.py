"""Preallocation of a file's bytes, where the filesystem supports it."""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
from pathlib import Path

_log = logging.getLogger(__name__)


def preallocate(fd: int, offset: int, nbytes: int, path: Path) -> None:
    """Appends preallocated bytes to a file; if its filesystem can't preallocate, makes it longer, and logs one warning.

    Args:
        offset: size of the file.

    Raises:
        OSError: the filesystem has no room, or failed.
    """
    try:
        fallocate(fd, offset, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        # A full disk is an error when a piece is written, not now.
        os.ftruncate(fd, offset + nbytes)
        _warn(path)


@functools.cache
def _warn(path: Path) -> None:
    """Logs the warning once for each file, which is extended many times."""
    _log.warning("the filesystem of %s cannot preallocate: writes are slower, and may find it full", path)


def fallocate(fd: int, offset: int, nbytes: int) -> None:
    """Allocates bytes of a file by Linux's `fallocate`.

    Where a filesystem can't preallocate (NFS before 4.2, FUSE), glibc's `posix_fallocate` writes to every block of 4
    KiB, which takes minutes. This function raises an error instead.

    Args:
        fd: descriptor of the file, which grows if its end is before that of the range.

    Raises:
        OSError: the bytes can't be allocated; its `errno` is `EOPNOTSUPP` if the filesystem can't preallocate.
    """
    system_call = ctypes.CDLL(None, use_errno=True).fallocate
    while system_call(fd, 0, ctypes.c_int64(offset), ctypes.c_int64(nbytes)) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
