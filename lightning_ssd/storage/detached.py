"""Blobs that outlive their store, in unlinked files, which the kernel frees however the process ends."""

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


class DetachedBlobs:
    """The blobs of a store that was closed by `BlobStore.detach`. Their files are freed with this object.

    Args:
        files: (former path, descriptor) of each volume's file. This object owns the descriptors.
        checksums: hashes of the written pieces; None: the store had none.
        shared: whether other processes read the files, too.
    """

    def __init__(self, files: Sequence[tuple[Path, int]], checksums: Checksums | None, *, shared: bool) -> None:
        self._files = files
        self._checksums = checksums
        # Only system calls: a finaliser may run on any thread, also while that thread holds a lock.
        weakref.finalize(self, _remove, files, None if shared else os.getpid())

    def read(self, blob: Blob, start: int, nbytes: int) -> torch.Tensor:
        """Returns `nbytes` bytes of a blob from offset `start`, on the CPU.

        Raises:
            StorageError: the bytes can't be read, or differ from the written ones.
        """
        found = torch.empty(nbytes, dtype=torch.uint8)
        for piece, low, high in blob.overlaps(start, nbytes):
            found[low - start : high - start] = self._read(piece)[low - piece.start : high - piece.start]
        return found

    def _read(self, piece: Piece) -> torch.Tensor:
        """Returns a whole piece, because a checksum covers a whole piece."""
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


def _remove(files: Sequence[tuple[Path, int]], owner: int | None) -> None:
    """Closes the files, and in the process `owner` frees their blocks."""
    for path, fd in files:
        if os.getpid() == owner:  # a forked DataLoader worker has the file open, too: its blocks are freed now
            with clean_up("truncate", path):
                os.ftruncate(fd, 0)
        close_fd(fd, path)
