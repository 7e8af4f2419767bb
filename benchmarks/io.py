"""The blob store against raw sequential O_DIRECT on the same drives; needs no GPU.

    python -m benchmarks.io --path /nvme0 [--path /nvme1 ...] [--size 4GiB]

Every backend that works here writes and reads `--size` bytes, with host memory and, if it supports that, CUDA memory.
Bandwidths are in GB/s. `raw` is a loop of the fastest number of threads, `engine` the store, with its spread.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch

from lightning_ssd.doctor import LEAST_DRIVE
from lightning_ssd.futures import Future
from lightning_ssd.sizes import parse_bytes
from lightning_ssd.storage import (
    BlobStore,
    KvikioBackend,
    ScratchDirectory,
    Slab,
    StorageError,
    align_up,
    from_os_error,
)
from lightning_ssd.storage.preallocation import preallocate

_BLOCK = 16 * 2**20
_THREADS = 4  # of the store, per path
_RAW_THREADS = (4, 1, 2, 8)
_REPETITIONS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--path", type=Path, action="append", required=True, help="directory on the SSD; may be given several times"
    )
    parser.add_argument("--size", default="4GiB", help="bytes to write and read (default: %(default)s)")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(format_table(bench_io(arguments.path, parse_bytes(arguments.size, "--size"), device)))


@dataclass(frozen=True, slots=True)
class IOBenchRow:
    """A comparison of the store with a raw I/O loop. Bandwidths are in bytes/s, medians of the repetitions.

    Attributes:
        backend: backend of the store.
        memory: memory of the store's buffers; the raw loop's buffers are always host memory.
        direction: direction of the transfers.
        raw: bandwidth of the raw loop with its fastest number of threads.
        raw_threads: that number, per path.
        engine: bandwidth of the store.
        engine_low: bandwidth of the store's slowest repetition.
        engine_high: bandwidth of the store's fastest repetition.
    """

    backend: str
    memory: Literal["host", "cuda"]
    direction: Literal["write", "read"]
    raw: float
    raw_threads: int
    engine: float
    engine_low: float
    engine_high: float

    @property
    def ratio(self) -> float:
        """Bandwidth of the store / that of the raw loop."""
        return self.engine / self.raw


def bench_io(paths: Sequence[Path], size: int, device: torch.device) -> list[IOBenchRow]:
    """Measures writes and reads of every backend that works here, with host and, if supported, CUDA memory.

    Files are preallocated and written once before anything is timed. Repetitions of the raw loop and of the store
    alternate, so that variations of the drive's speed affect both. All files are removed, also after an error.

    Args:
        paths: directories, one per SSD.
        size: bytes per measurement, on all paths together. Each path needs twice its share of them free.
        device: the GPU, or the CPU.

    Raises:
        StorageError: a path cannot be used, is full, or a drive or filesystem failed.
    """
    rows: list[IOBenchRow] = []
    blocks = max(1, size // _BLOCK // len(paths))  # per path
    for backend, memory in _combinations(device):
        with ExitStack() as stack:
            raw = stack.enter_context(_raw_files(paths, blocks))
            store = stack.enter_context(_store(paths, blocks, backend, device, memory))
            for direction in ("write", "read"):
                rows.append(_compare(raw, store, direction, backend, memory))
    return rows


def format_table(rows: Sequence[IOBenchRow]) -> str:
    """Returns the rows as a text table, in GB/s (10^9 bytes/s), with the verdict of `lightning-ssd doctor`."""
    titles = f"{'backend':8} {'memory':6} {'op':5} {'raw, GB/s':>10} {'engine, GB/s':>12} {'(min - max)':>14}"
    lines = [f"{titles} {'ratio':>6}"]
    for row in rows:
        raw = f"{row.raw / 1e9:.2f} (x{row.raw_threads})"
        spread = f"({row.engine_low / 1e9:.2f} - {row.engine_high / 1e9:.2f})"
        lines.append(
            f"{row.backend:8} {row.memory:6} {row.direction:5} {raw:>10} {row.engine / 1e9:12.2f} {spread:>14} "
            f"{row.ratio:6.1%}  {'slow' if row.engine < LEAST_DRIVE else 'good'}"
        )
    return "\n".join(lines)


_Direction = Literal["write", "read"]
_Run = Callable[[_Direction], float]  # transfers all bytes once and returns bytes/s


def _combinations(device: torch.device) -> list[tuple[Literal["posix", "kvikio"], Literal["host", "cuda"]]]:
    combinations: list[tuple[Literal["posix", "kvikio"], Literal["host", "cuda"]]] = [("posix", "host")]
    if device.type == "cuda":
        try:
            KvikioBackend()
        except StorageError:
            return combinations
        combinations += [("kvikio", "host"), ("kvikio", "cuda")]
    return combinations


def _compare(
    raw: Callable[[_Direction, int], float],
    store: _Run,
    direction: _Direction,
    backend: str,
    memory: Literal["host", "cuda"],
) -> IOBenchRow:
    threads = max(_RAW_THREADS, key=lambda threads: raw(direction, threads))
    raw_speeds: list[float] = []
    store_speeds: list[float] = []
    for _ in range(_REPETITIONS):
        raw_speeds.append(raw(direction, threads))
        store_speeds.append(store(direction))
    return IOBenchRow(
        backend=backend,
        memory=memory,
        direction=direction,
        raw=statistics.median(raw_speeds),
        raw_threads=threads,
        engine=statistics.median(store_speeds),
        engine_low=min(store_speeds),
        engine_high=max(store_speeds),
    )


@contextmanager
def _raw_files(paths: Sequence[Path], blocks: int) -> Iterator[Callable[[_Direction, int], float]]:
    """Yields the baseline: threads that each transfer a part of a file, with buffers of their own."""
    with ExitStack() as stack:
        fds: list[int] = []
        for path in paths:
            directory = ScratchDirectory(path)
            stack.callback(directory.close)
            file = directory.path / "raw.bin"
            try:
                fd = directory.files.open_file(file.name, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
                stack.callback(os.close, fd)
                preallocate(fd, 0, blocks * _BLOCK, file)
            except OSError as error:
                raise from_os_error(error, f"make a file of {blocks * _BLOCK} bytes with O_DIRECT", file) from error
            fds.append(fd)
        most = max(_RAW_THREADS)
        # Owned by this function until it returns. Each thread alternates between two buffers of its own: as many per
        # thread as the store has, so that the processor's caches help neither more.
        slab = _noise(2 * len(fds) * most)

        def run(direction: _Direction, threads: int) -> float:
            call = os.pwritev if direction == "write" else os.preadv
            failures: list[BaseException] = []

            def loop(index: int, number: int) -> None:
                begin = 2 * (index * most + number) * _BLOCK
                views = cycle(slab.tensor[start : start + _BLOCK].numpy().data for start in (begin, begin + _BLOCK))
                try:
                    for block, view in zip(range(number, blocks, threads), views, strict=False):
                        moved = call(fds[index], [view], block * _BLOCK)
                        if moved != _BLOCK:
                            raise StorageError(f"raw {direction} moved {moved} of {_BLOCK} bytes in {paths[index]}")
                except BaseException as error:
                    failures.append(error)

            workers = [
                threading.Thread(target=loop, args=(index, number))
                for index in range(len(fds))
                for number in range(threads)
            ]
            begin = perf_counter()
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            seconds = perf_counter() - begin
            if failures:
                raise failures[0]
            return len(fds) * blocks * _BLOCK / seconds

        run("write", _THREADS)
        yield run


@contextmanager
def _store(
    paths: Sequence[Path],
    blocks: int,
    backend: Literal["posix", "kvikio"],
    device: torch.device,
    memory: Literal["host", "cuda"],
) -> Iterator[_Run]:
    checksum = memory == "host"  # the default; buffers in device memory can't be hashed
    store = BlobStore(paths, device=device, backend=backend, piece_bytes=_BLOCK, threads=_THREADS, checksum=checksum)
    try:
        size = len(paths) * blocks * _BLOCK
        store.reserve(align_up(size))
        blob = store.allocate(size)
        # Twice as many buffers as threads: transfers run in the order of their submission, so no two running ones
        # share a buffer.
        count = 2 * _THREADS * len(paths)
        slab = _noise(count)
        whole = slab.tensor.to(device) if memory == "cuda" else slab.tensor
        buffers = [whole[begin : begin + _BLOCK] for begin in range(0, whole.numel(), _BLOCK)]
        if memory == "cuda":
            torch.cuda.synchronize(device)  # the store's transfers do not wait for the current stream

        def run(direction: _Direction) -> float:
            begin = perf_counter()
            move = store.write if direction == "write" else store.read
            futures: list[Future[None]] = [
                move(piece, buffer) for piece, buffer in zip(blob.pieces, cycle(buffers), strict=False)
            ]
            for future in futures:
                future.result()
            return size / (perf_counter() - begin)

        run("write")
        yield run
    finally:
        store.close()


def _noise(blocks: int) -> Slab:
    """Returns blocks of bytes that a drive cannot compress."""
    slab = Slab(blocks * _BLOCK, pin=False)
    noise = torch.frombuffer(bytearray(os.urandom(_BLOCK)), dtype=torch.uint8)
    slab.tensor.view(blocks, _BLOCK).copy_(noise)
    return slab


if __name__ == "__main__":
    main()
