"""Time as the training device sees it: spans of the compute stream, read without a host sync."""

from abc import ABC, abstractmethod
from collections import deque
from time import perf_counter
from typing import Any

import torch

from lightning_ssd.device.cuda_events import Event, Events, Mark


class Clock(ABC):
    """Measures spans on the device's compute stream, host waits that leave it idle included."""

    @abstractmethod
    def now(self) -> Any:
        """Returns a point in time; `elapsed` of two of them is known once the device has passed both."""

    @abstractmethod
    def elapsed(self, start: Any, end: Any) -> float | None:
        """Returns the seconds between two points, or `None` while the device has not passed them.

        On a CUDA device the marks that its copies return are points, too.
        """


class HostClock(Clock):
    """The clock of a CPU device: what runs is what the host runs."""

    def now(self) -> float:
        return perf_counter()

    def elapsed(self, start: float, end: float) -> float:
        return end - start


class CUDAClock(Clock):
    """The clock of a CUDA device: timing events on the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self._events = Events(device)

    def now(self) -> Event:
        return self._events.record(self._events.compute_stream(), timed=True)

    def elapsed(self, start: Event, end: Event) -> float | None:
        return start.seconds_until(end) if end.reached() and start.reached() else None


class Stopwatch:
    """Adds up spans of one clock. Spans are read when the device has passed them, so `seconds` lags behind a little."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: deque[tuple[Any, Any]] = deque()
        self._seconds = 0.0
        self.now = clock.now
        """Returns the compute stream's present end, to give to `add`."""

    def add(self, start: Any, awaited: Mark = None) -> None:
        """Adds the time that the compute stream has waited since `start`.

        Args:
            start: what `now` returned before the wait.
            awaited: the mark that the stream was told to wait for, of a copy; None: the wait is over at the stream's
                present end. A mark that is reached before `start` adds nothing.
        """
        self._open.append((start, self.now() if awaited is None else awaited))

    @property
    def seconds(self) -> float:
        """Seconds in all the spans that the device has passed."""
        while self._open and (span := self._clock.elapsed(*self._open[0])) is not None:
            self._seconds += max(0.0, span)
            self._open.popleft()
        return self._seconds


def make_clock(device: torch.device) -> Clock:
    """Returns the clock for `device`."""
    return CUDAClock(device) if device.type == "cuda" else HostClock()
