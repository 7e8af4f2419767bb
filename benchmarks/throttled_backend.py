"""A drive of a chosen speed, for benchmarks and tests of slow SSDs."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from lightning_ssd.storage import Backend, BackendFile, PosixBackend


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
