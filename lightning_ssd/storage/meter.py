"""A meter: bytes transferred in one direction, and the seconds during which at least one transfer ran."""

from __future__ import annotations

import threading
from time import perf_counter

__all__ = ["Meter"]


class Meter:
    """Thread-safe. Overlapping transfers count their common seconds once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._since = 0.0
        self._seconds = 0.0
        self._nbytes = 0

    def start(self) -> None:
        """Records the begin of a transfer."""
        with self._lock:
            if self._running == 0:
                self._since = perf_counter()
            self._running += 1

    def stop(self, nbytes: int) -> None:
        """Records the end of a transfer of `nbytes` bytes, 0 if it failed."""
        with self._lock:
            self._nbytes += nbytes
            self._running -= 1
            if self._running == 0:
                self._seconds += perf_counter() - self._since

    def read(self) -> tuple[int, float]:
        """Returns (bytes transferred, seconds with a running transfer) so far."""
        with self._lock:
            running = perf_counter() - self._since if self._running else 0.0
            return self._nbytes, self._seconds + running
