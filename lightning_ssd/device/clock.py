"""Time on the training device: spans of the compute stream, read without synchronizing the host."""

from abc import ABC, abstractmethod
from collections import deque
from time import perf_counter
from typing import Any

import torch

from lightning_ssd.device.cuda_events import Event, Events, Mark


class Clock(ABC):
    """Measures spans on the device's compute stream, including idle time in which the stream waits for the host."""

    @abstractmethod
    def now(self) -> Any:
        """Returns the present end of the compute stream, as a point in time for `elapsed`."""

    @abstractmethod
    def elapsed(self, start: Any, end: Any) -> float | None:
        """Returns the seconds between two points, or `None` while the device has not passed both.

        On a CUDA device the marks that `CopyEngine` returns are points, too.
        """


class HostClock(Clock):
    """The clock of a CPU device, whose computation is the host's."""

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
    """Adds up spans of one clock. A span counts once the device has passed its end, so `seconds` lags a little."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: deque[tuple[Any, Any]] = deque()
        self._seconds = 0.0
        self.now = clock.now
        """Returns the present end of the compute stream, the `start` of a span for `add`."""

    def add(self, start: Any, awaited: Mark = None) -> None:
        """Adds the time that the compute stream has waited since `start`.

        Args:
            awaited: mark of the copy that the stream waits for; None: the wait is over at the stream's present end. A
                mark that is reached before `start` adds nothing.
        """
        self._open.append((start, self.now() if awaited is None else awaited))

    @property
    def seconds(self) -> float:
        """Sum of the spans that the device has passed, seconds."""
        while self._open and (span := self._clock.elapsed(*self._open[0])) is not None:
            self._seconds += max(0.0, span)
            self._open.popleft()
        return self._seconds


def make_clock(device: torch.device) -> Clock:
    """Returns the clock for `device`."""
    return CUDAClock(device) if device.type == "cuda" else HostClock()
