"""A blob: bytes on the SSDs, in pieces."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Blob", "Piece"]


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
        nbytes: bytes of the blob.
        pieces: pieces of the blob, ordered by `start`.
    """

    nbytes: int
    pieces: tuple[Piece, ...]
