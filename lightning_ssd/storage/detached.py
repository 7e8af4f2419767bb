"""Blobs that outlive their store: in files without a name, which the kernel frees however the process ends."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from lightning_ssd.storage.blob import Blob, Piece
from lightning_ssd.storage.checksums import Checksums
from lightning_ssd.storage.cleanup import clean_up, close_fd
from lightning_ssd.storage.errors import StorageError, from_os_error

__all__ = ["DetachedBlobs"]


class DetachedBlobs:
    """What `BlobStore.detach` returns. Its files go away with this object.

    Args:
        files: of each volume, the path that the file had and a descriptor of it, which is owned.
        checksums: of what was written, where the store had them.
    """

    def __init__(self, files: Sequence[tuple[Path, int]], checksums: Checksums | None) -> None:
        self._files = files
        self._checksums = checksums
        # System calls alone: a finalizer may run on any thread, inside any lock.
        weakref.finalize(self, _remove, files, os.getpid())

    def read(self, blob: Blob, start: int, nbytes: int) -> torch.Tensor:
        """Returns bytes of a blob, on the CPU.

        Raises:
            StorageError: they can't be read, or are not what was written.
        """
        found = torch.empty(nbytes, dtype=torch.uint8)
        for piece in blob.pieces:
            low, high = max(start, piece.start), min(start + nbytes, piece.start + piece.nbytes)
            if low < high:
                found[low - start : high - start] = self._read(piece)[low - piece.start : high - piece.start]
        return found

    def _read(self, piece: Piece) -> torch.Tensor:
        """Returns a whole piece, which is what a checksum is of."""
        path, fd = self._files[piece.volume]
        buffer = torch.empty(piece.nbytes, dtype=torch.uint8)
        view, done = buffer.numpy().data, 0
        action = f"read {piece.nbytes} bytes at offset {piece.offset}"
        while done < piece.nbytes:
            try:
                read = os.preadv(fd, [view[done:]], piece.offset + done)
            except OSError as error:
                raise from_os_error(error, action, path) from error
            if read == 0:
                raise StorageError(
                    f"could not {action} in {path}: the file ends after {done} of them. Check the drive."
                )
            done += read
        if self._checksums is not None:
            self._checksums.verify(piece, buffer, path)
        return buffer


def _remove(files: Sequence[tuple[Path, int]], owner: int) -> None:
    for path, fd in files:
        if os.getpid() == owner:  # a forked DataLoader worker has the file open too: its blocks go now
            with clean_up("truncate", path):
                os.ftruncate(fd, 0)
        close_fd(fd, path)
