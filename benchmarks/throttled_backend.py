"""A drive of a chosen speed, for benchmarks and tests of slow SSDs, and one in memory that is faster than any."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from lightning_ssd.storage import Backend, BackendFile, PosixBackend

BLOCK = 2**26
"""Bytes that a file in memory grows by."""


class ThrottledBackend(Backend):
    """Limits the bytes per second of all files together, reads and writes alike.

    Args:
        bytes_per_second: the limit.
        inner: the backend that does the transfers.
    """

    name = "throttled"
    device_buffers = False

    def __init__(self, bytes_per_second: float, inner: Backend | None = None) -> None:
        self._inner = inner or PosixBackend()
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._busy_until = 0.0

    def open(self, path: Path) -> BackendFile:
        return _ThrottledFile(self._inner.open(path), self._transfer)

    def _transfer(self, call: Callable[[Tensor, int], int], buffer: Tensor, offset: int) -> int:
        with self._lock:
            begin = max(time.monotonic(), self._busy_until)
            end = self._busy_until = begin + buffer.numel() / self._rate
        moved = call(buffer, offset)
        time.sleep(max(0.0, end - time.monotonic()))  # the drive's own time: nothing is polled
        return moved


class _ThrottledFile(BackendFile):
    def __init__(
        self, inner: BackendFile, transfer: Callable[[Callable[[Tensor, int], int], Tensor, int], int]
    ) -> None:
        self._inner = inner
        self._transfer = transfer

    def write(self, buffer: Tensor, offset: int) -> int:
        return self._transfer(self._inner.write, buffer, offset)

    def read(self, buffer: Tensor, offset: int) -> int:
        return self._transfer(self._inner.read, buffer, offset)

    def close(self) -> None:
        self._inner.close()


class MemoryBackend(Backend):
    """Keeps the bytes of files in host memory, for models of drives that are faster than those of the machine."""

    name = "memory"
    device_buffers = False

    def open(self, path: Path) -> BackendFile:
        return _MemoryFile()


class _MemoryFile(BackendFile):
    def __init__(self) -> None:
        self._blocks: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def write(self, buffer: Tensor, offset: int) -> int:
        for block, part in self._parts(buffer, offset):
            block.copy_(part)
        return buffer.numel()

    def read(self, buffer: Tensor, offset: int) -> int:
        for block, part in self._parts(buffer, offset):
            part.copy_(block)
        return buffer.numel()

    def close(self) -> None:
        self._blocks.clear()

    def _parts(self, buffer: Tensor, offset: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields parts of the file from `offset` on, and of the buffer."""
        done = 0
        while done < buffer.numel():
            number, start = divmod(offset + done, BLOCK)
            size = min(BLOCK - start, buffer.numel() - done)
            with self._lock:
                if number not in self._blocks:
                    self._blocks[number] = torch.empty(BLOCK, dtype=torch.uint8)
                block = self._blocks[number]
            yield block[start : start + size], buffer[done : done + size]
            done += size
