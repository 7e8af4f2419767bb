"""A blob: bytes on the SSDs, in pieces."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Blob", "Piece"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a blob: what one transfer moves.

    Attributes:
        volume: index of the volume it lies on.
        offset: where it begins in the volume's file, in bytes; a multiple of 4096.
        start: where it begins in the blob, in bytes; a multiple of 4096.
        nbytes: its bytes. Its slot is this rounded up to 4096.
    """

    volume: int
    offset: int
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Blob:
    """Room for `nbytes` bytes, cut into pieces that together cover it in order.

    Attributes:
        nbytes: bytes of the blob.
        pieces: its pieces, ordered by `start`.
    """

    nbytes: int
    pieces: tuple[Piece, ...]
