"""Micro-batches that need long to record the state for a second attempt."""

from typing import Any, Protocol

import pytest

from lightning_ssd.retry.micro_batch_retry import MicroBatchRetry
from lightning_ssd.run import attempts

LONG = 1e6
"""Seconds in which a state is recorded."""


class FakeClock(Protocol):
    """A clock whose time a test sets."""

    seconds: float


def record_slowly(clock: FakeClock, patch: pytest.MonkeyPatch) -> list[float]:
    """Moves `clock` on when a state is recorded. Returns a list, to which the times of the records are added."""
    times: list[float] = []

    class Slow(MicroBatchRetry):
        def __init__(self, *args: Any, **how: Any) -> None:
            super().__init__(*args, **how)
            times.append(clock.seconds)
            clock.seconds += LONG

    patch.setattr(attempts, "MicroBatchRetry", Slow)
    return times
