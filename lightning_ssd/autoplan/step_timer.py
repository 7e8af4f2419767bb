"""`StepTimer`: durations of steps on the device's clock, without a wait of the host."""

from collections import deque
from typing import Any

from lightning_ssd.device import Clock


class StepTimer:
    """Times steps between points of the device's clock, which are read once the device has passed them.

    All methods are called on the training thread; none waits for the device.

    Args:
        clock: the device's clock.
        history: number of last steps whose durations are stored.

    Attributes:
        seconds: durations of the last steps that the device has ended, in their order.
        num_steps: timed steps that the host has ended.
    """

    def __init__(self, clock: Clock, history: int) -> None:
        self.seconds: deque[float] = deque(maxlen=history)
        self.num_steps = 0
        self._clock = clock
        self._began: Any = None
        """Begin of the present step; `None`: it is not timed."""
        self._pending: deque[tuple[Any, Any]] = deque()
        """Begin and end of steps that the device has not ended."""

    def begin(self) -> None:
        """Ends the step before, if it was timed, and begins one."""
        self.end()
        self._began = self._clock.now()

    def end(self) -> None:
        """Ends the present step, if it is timed. The next one begins with `begin`."""
        if self._began is not None:
            self._pending.append((self._began, self._clock.now()))
            self.num_steps += 1
        self.skip()
        while self._pending and (seconds := self._clock.elapsed(*self._pending[0])) is not None:
            self._pending.popleft()
            self.seconds.append(seconds)

    def skip(self) -> None:
        """Excludes the present step."""
        self._began = None

    def reset(self) -> None:
        """Excludes all steps so far."""
        self.num_steps = 0
        self.skip()
        self._pending.clear()
        self.seconds.clear()
