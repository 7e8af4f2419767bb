"""Checksums: a hash of every written piece, compared when the piece is read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import xxhash

from lightning_ssd.storage.blob import Piece
from lightning_ssd.storage.errors import ChecksumError

Hashes = dict[tuple[int, int], int]
"""Hashes of pieces, by (volume, offset)."""


class Checksums:
    """xxh3 hashes of pieces, 64 bits each, in memory.

    Thread-safe: every call is one operation on one dict.

    Args:
        hashes: hashes of pieces that were written by an earlier store.
    """

    def __init__(self, hashes: Hashes) -> None:
        self._hashes = dict(hashes)

    def all(self) -> Hashes:
        """Returns the hashes of all pieces."""
        return dict(self._hashes)

    def record(self, piece: Piece, buffer: torch.Tensor) -> None:
        """Records the hash of the piece's bytes in `buffer`, before they are written."""
        self._hashes[piece.volume, piece.offset] = self._digest(piece, buffer)

    def verify(self, piece: Piece, buffer: torch.Tensor, path: Path) -> None:
        """Compares the hash of the bytes read into `buffer` with the hash at the piece's last write.

        Raises:
            ChecksumError: the hashes differ, or the piece was never written.
        """
        written = self._hashes.get((piece.volume, piece.offset))
        where = f"{piece.nbytes} bytes at offset {piece.offset} of {path}"
        if written is None:
            raise ChecksumError(f"{where} were read but never written")
        read = self._digest(piece, buffer)
        if read != written:
            raise ChecksumError(
                f"{where} are not what was written (checksum {read:016x}, written {written:016x}). "
                "The drive or its connection corrupts data: look at `dmesg`, and use another drive."
            )

    def of(self, pieces: Iterable[Piece]) -> Hashes:
        """Returns the hashes of pieces that were written."""
        keys = [(piece.volume, piece.offset) for piece in pieces]
        return {key: self._hashes[key] for key in keys}

    def adopt(self, hashes: Hashes) -> None:
        """Records the hashes of pieces that another process has written."""
        self._hashes.update(hashes)

    def discard(self, piece: Piece) -> None:
        """Drops the hash of a freed piece."""
        self._hashes.pop((piece.volume, piece.offset), None)

    def _digest(self, piece: Piece, buffer: torch.Tensor) -> int:
        return xxhash.xxh3_64_intdigest(buffer.numpy().data[: piece.nbytes])
