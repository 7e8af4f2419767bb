"""Errors of this folder: each names the file, the offset and the user's remedy."""

from __future__ import annotations

import errno
import os
from pathlib import Path


class StorageError(RuntimeError):
    """A transfer, a file or a scratch directory failed."""


class StorageFullError(StorageError):
    """There is no room for the bytes asked for."""


class ChecksumError(StorageError):
    """The bytes read are not the bytes written."""


def from_os_error(error: OSError, action: str, path: str | os.PathLike[str]) -> StorageError:
    """Converts an operating system error to a StorageError.

    Args:
        action: operation that failed, such as ``"write 4096 bytes at offset 0"``.
        path: file or directory of the operation.

    Returns:
        A StorageFullError if the error means "no room", else a StorageError. The caller raises it from
        `error`.
    """
    reason = f"[{errno.errorcode.get(error.errno or 0, 'unknown errno')}] {error.strerror or error}"
    text = f"could not {action} in {Path(path)}: {reason}"
    if error.errno in _NO_ROOM:
        return StorageFullError(f"{text}. {_NO_ROOM[error.errno]}")
    return StorageError(f"{text}. {_REMEDIES.get(error.errno or 0, 'Check the drive and its filesystem.')}")


_NO_ROOM = {
    errno.ENOSPC: "Free space on this filesystem, or give a path on a larger drive.",
    errno.EDQUOT: "Your quota on this filesystem is used up: have it raised, or give another path.",
    errno.EFBIG: "The file size limit is reached: raise it (`ulimit -f unlimited`), or give several paths.",
}
_REMEDIES = {
    errno.EIO: "The drive failed: look at `dmesg` and its SMART data, or give a path on another drive.",
    errno.EACCES: "Make it readable and writable for this user, or give another path.",
    errno.EPERM: "Make it readable and writable for this user, or give another path.",
    errno.EROFS: "The filesystem is mounted read-only: give a path on a writable one.",
    errno.ENODEV: "The drive is gone: look at `dmesg`, or give a path on another drive.",
    errno.ENXIO: "The drive is gone: look at `dmesg`, or give a path on another drive.",
    errno.EMFILE: "Too many open files: raise the limit (`ulimit -n`).",
}
