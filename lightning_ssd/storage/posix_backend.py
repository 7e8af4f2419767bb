"""The POSIX backend: ``preadv`` and ``pwritev`` with O_DIRECT, past the page cache."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from lightning_ssd.storage.backend import Backend, BackendFile
from lightning_ssd.storage.cleanup import close_fd
from lightning_ssd.storage.slots import PAGE, align_down

_log = logging.getLogger(__name__)
_MAX_BYTES = align_down(0x7FFFF000)  # Linux's limit of one call


class PosixBackend(Backend):
    """Reads and writes host buffers. Where a filesystem refuses O_DIRECT, I/O uses the page cache, with a warning."""

    name = "posix"
    device_buffers = False

    def open(self, path: Path) -> BackendFile:
        return _PosixFile(path)


class _PosixFile(BackendFile):
    def __init__(self, path: Path) -> None:
        self._path = path.resolve()  # for the warning; `path` may name the file by a descriptor that is closed later
        # O_DSYNC: a write through the page cache reports its failure in the call, not later or never. The page cache
        # is used for tails shorter than a page, or for everything where O_DIRECT is refused.
        self._buffered = os.open(path, os.O_RDWR | os.O_DSYNC)
        self._direct: int | None = None
        self._refused = threading.Lock()
        self._warned = False
        try:
            self._direct = os.open(path, os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                close_fd(self._buffered, self._path)
                raise
            self._warn()
        self._use_direct = self._direct is not None

    def write(self, buffer: torch.Tensor, offset: int) -> int:
        return self._transfer(os.pwritev, buffer, offset)

    def read(self, buffer: torch.Tensor, offset: int) -> int:
        return self._transfer(os.preadv, buffer, offset)

    def close(self) -> None:
        close_fd(self._buffered, self._path)
        if self._direct is not None:
            close_fd(self._direct, self._path)

    def _transfer(self, call: Callable[[int, list[memoryview], int], int], buffer: torch.Tensor, offset: int) -> int:
        """Transfers `buffer` and returns the bytes transferred, fewer only at the end of the file.

        Python itself retries after EINTR.
        """
        view = buffer.numpy().data  # shares the caller's memory during this call
        address = buffer.data_ptr()
        done, total = 0, len(view)
        while done < total:
            size = min(total - done, _MAX_BYTES)
            fd = self._buffered
            direct = self._use_direct and size >= PAGE and not (address + done) % PAGE and not (offset + done) % PAGE
            if direct:
                assert self._direct is not None
                fd, size = self._direct, align_down(size)
            try:
                moved = call(fd, [view[done : done + size]], offset + done)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                # Some filesystems accept O_DIRECT in open() and refuse it in the first transfer.
                self._use_direct = False
                self._warn()
                continue
            if moved == 0:
                break
            done += moved
        return done

    def _warn(self) -> None:
        with self._refused:
            if self._warned:
                return
            self._warned = True
        _log.warning(
            "the filesystem of %s refuses O_DIRECT: I/O goes through the page cache, which is slower and "
            "uses host memory. Give a path on a local ext4 or XFS drive.",
            self._path,
        )
