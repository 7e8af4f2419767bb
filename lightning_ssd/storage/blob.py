"""A blob: bytes on the SSDs, in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a blob on one volume, the unit of a transfer.

    Attributes:
        volume: index of the volume.
        offset: byte offset in the volume's file, a multiple of 4096.
        start: byte offset in the blob, a multiple of 4096.
        nbytes: bytes of the piece. Its slot has these rounded up to 4096.
    """

    volume: int
    offset: int
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Blob:
    """SSD space for `nbytes` bytes, divided into consecutive pieces.

    Attributes:
        pieces: pieces of the blob, ordered by `start`.
    """

    nbytes: int
    pieces: tuple[Piece, ...]

    def overlaps(self, start: int, nbytes: int) -> Iterator[tuple[Piece, int, int]]:
        """Yields each piece that overlaps the `nbytes` bytes from offset `start`.

        Yields:
            The piece, and the begin and end of the overlap as offsets in the blob.
        """
        for piece in self.pieces:
            low, high = max(start, piece.start), min(start + nbytes, piece.start + piece.nbytes)
            if low < high:
                yield piece, low, high


@dataclass(frozen=True, slots=True)
class FileRange:
    """Consecutive bytes of a file.

    Attributes:
        path: the file.
        offset: offset of the first byte.
        nbytes: number of bytes.
    """

    path: Path
    offset: int
    nbytes: int
