"""Calibration: a short timed write and read of every volume's own scratch file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter

import torch

from lightning_ssd.futures import all_of
from lightning_ssd.storage.blob import Piece
from lightning_ssd.storage.engine import Engine
from lightning_ssd.storage.errors import StorageFullError
from lightning_ssd.storage.slab import Slab
from lightning_ssd.storage.slots import PAGE, align_down
from lightning_ssd.storage.volume import Volume

_MAX_BYTES = 64 * 2**20
"""Most bytes of a pass, for each volume."""

_MAX_BLOCKS = 64
"""Most transfers of a pass, for each volume."""

_MAX_PASS_SECONDS = 0.5
"""Time limit of a pass: a slow drive is measured on fewer bytes."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured bandwidths of a store's volumes.

    Attributes:
        weights: bandwidth of each volume alone, with equal bytes written and read, bytes/s.
        write_bandwidth: write bandwidth of all volumes together, bytes/s.
        read_bandwidth: read bandwidth of all volumes together, bytes/s.
    """

    weights: tuple[float, ...]
    write_bandwidth: float
    read_bandwidth: float


def calibrate(volumes: Sequence[Volume], *, piece_bytes: int, threads: int, capacity: int) -> Calibration:
    """Measures the volumes by an `Engine` with the run's piece size and number of threads.

    Args:
        volumes: volumes without other transfers. Each grows by up to 64 MiB.
        capacity: most bytes by which all volumes together may grow.

    Raises:
        StorageFullError: a volume cannot grow by a page.
        StorageError: a transfer failed.
    """
    # Files never shrink. A half of the free space is left to other scratch files: a training may have two of them, one
    # of model states and one of saved tensors.
    halves = [volume.disk_free() // (2 * len(volumes)) for volume in volumes]
    share = align_down(min(capacity // len(volumes), *halves))
    if share == 0:
        raise StorageFullError(
            f"no room to measure {', '.join(str(volume.path) for volume in volumes)}: {2 * PAGE} free bytes needed on "
            f"each, {capacity} available in all. Free space, or give other paths."
        )
    block = min(piece_bytes, share, _MAX_BYTES)
    size = min(_MAX_BYTES, _MAX_BLOCKS * block, share) // block * block
    # The slab belongs to this function until the engine is closed. All volumes share it: the bytes do not
    # matter.
    slab = Slab(size, pin=False)
    _fill(slab.tensor)
    blocks: list[list[Piece]] = []
    for index, volume in enumerate(volumes):
        volume.extend(size)
        offset = volume.slots.allocate(size)
        assert offset is not None
        blocks.append([Piece(index, offset + start, start, block) for start in range(0, size, block)])
    with closing(Engine([(volume.path, volume.file) for volume in volumes], threads=threads)) as engine:
        # The first pass is not timed: fresh extents are slower than extents that were written before, which a run
        # mostly writes.
        written = [_transfer(engine, pieces, slab.tensor, write=True)[0] for pieces in blocks]
        speeds = [_measure(engine, pieces, slab.tensor) for pieces in written]
        weights = tuple(2 / (1 / write + 1 / read) for write, read in speeds)
        if len(volumes) > 1:
            # Together they may be slower than the sum: two paths on one drive, or on one PCIe link.
            together = [piece for pieces in zip(*written, strict=False) for piece in pieces]
            speeds = [_measure(engine, together, slab.tensor)]
    for volume, pieces in zip(volumes, blocks, strict=True):
        volume.slots.free(pieces[0].offset)
    return Calibration(weights, *speeds[0])


def _measure(engine: Engine, pieces: Sequence[Piece], memory: torch.Tensor) -> tuple[float, float]:
    """Returns the bandwidths (write, read) of a pass in each direction, bytes/s."""
    written, write_seconds = _transfer(engine, pieces, memory, write=True)
    read, read_seconds = _transfer(engine, pieces, memory, write=False)
    return _nbytes(written) / write_seconds, _nbytes(read) / read_seconds


def _transfer(
    engine: Engine, pieces: Sequence[Piece], memory: torch.Tensor, *, write: bool
) -> tuple[list[Piece], float]:
    """Transfers pieces for up to `_MAX_PASS_SECONDS`. Returns the transferred pieces, at least one, and the seconds."""
    begin = perf_counter()
    futures = [engine.submit(piece, memory[piece.start : piece.start + piece.nbytes], write=write) for piece in pieces]
    all_of(futures).wait(_MAX_PASS_SECONDS)
    for future in futures[1:]:
        future.cancel()
    moved = [piece for piece, future in zip(pieces, futures, strict=True) if not future.cancelled()]
    for future in futures:
        if not future.cancelled():
            future.result()
    return moved, perf_counter() - begin


def _nbytes(pieces: Sequence[Piece]) -> int:
    return sum(piece.nbytes for piece in pieces)


def _fill(memory: torch.Tensor) -> None:
    """Fills memory with bytes that a drive cannot compress. The user's random number generators are not used."""
    noise = torch.frombuffer(bytearray(os.urandom(min(memory.numel(), 2**20))), dtype=torch.uint8)
    for start in range(0, memory.numel(), noise.numel()):
        part = memory[start : start + noise.numel()]
        part.copy_(noise[: part.numel()])
