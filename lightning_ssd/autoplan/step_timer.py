"""`StepTimer`: durations of steps on the device's clock, without a wait of the host."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_ssd.device import Clock

__all__ = ["StepTimer"]


class StepTimer:
    """Times steps between points of the device's clock, which are read once the device has passed them.

    All methods are called on the training thread; none waits for the device.

    Args:
        clock: the device's clock.
        history: number of last steps whose durations are stored.
        warm_up: first steps that are not timed.

    Attributes:
        seconds: durations of the last steps that the device has ended, in their order.
        num_steps: timed steps that the host has ended.
    """

    def __init__(self, clock: Clock, history: int, warm_up: int = 0) -> None:
        self.seconds: deque[float] = deque(maxlen=history)
        self.num_steps = 0
        self._clock = clock
        self._warm_up = warm_up
        """Steps that are still not timed."""
        self._timed = False
        """Whether the present step is timed."""
        self._began: Any = None
        """Begin of the present span of the present step; `None`: it is not timed, or paused."""
        self._spans: list[tuple[Any, Any]] = []
        """Earlier spans of the present step: pauses are between them."""
        self._pending: deque[list[tuple[Any, Any]]] = deque()
        """Spans of steps that the device has not ended."""

    def begin(self) -> bool:
        """Ends the step before, if it was timed, and begins one; returns whether it is timed."""
        self.end()
        self._timed = not self._warm_up
        self._warm_up = max(0, self._warm_up - 1)
        self.resume()
        return self._timed

    def end(self) -> None:
        """Ends the present step, if it is timed. The next one begins with `begin`."""
        self.pause()
        if self._timed:
            self._pending.append(self._spans)
            self.num_steps += 1
        self.skip()
        while self._pending and (seconds := self._seconds_of(self._pending[0])) is not None:
            self._pending.popleft()
            self.seconds.append(seconds)

    def pause(self) -> None:
        """Excludes the time until `resume` from the present step, such as that of a validation in it or after it."""
        if self._began is not None:
            self._spans.append((self._began, self._clock.now()))
            self._began = None

    def resume(self) -> None:
        """Includes the time from now on, after `pause`."""
        if self._timed and self._began is None:
            self._began = self._clock.now()

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Excludes the time in the context from the present step, in which no validation runs.

        A device that still computes meanwhile is not delayed by the host: then nothing is excluded.
        """
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def skip(self) -> None:
        """Excludes the present step."""
        self._timed, self._began, self._spans = False, None, []

    def reset(self, warm_up: int = 0) -> None:
        """Excludes all steps so far, and the next `warm_up` steps."""
        self.num_steps = 0
        self._warm_up = warm_up
        self.skip()
        self._pending.clear()
        self.seconds.clear()

    def _seconds_of(self, spans: list[tuple[Any, Any]]) -> float | None:
        """Returns the duration of a step; `None`: the device has not ended it."""
        total = 0.0
        for span in spans:
            seconds = self._clock.elapsed(*span)
            if seconds is None:
                return None
            total += seconds
        return total
