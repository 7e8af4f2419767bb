"""Stopwatches add up waits that end at a point in time, or at the awaited mark."""

from lightning_ssd.device import Clock, Stopwatch


class Steps(Clock):
    """A device whose clock is `present`."""

    present = 0.0

    def now(self) -> float:
        return self.present

    def elapsed(self, start: float, end: float) -> float | None:
        return end - start


def test_a_wait_ends_when_its_mark_is_reached() -> None:
    """Marks that are reached before the wait begins add nothing, because the compute stream did not wait."""
    clock = Steps()
    stopwatch = Stopwatch(clock)
    clock.present = 5.0
    stopwatch.add(3.0)  # until now
    stopwatch.add(3.0, 4.5)  # type: ignore[arg-type]
    stopwatch.add(3.0, 1.0)  # type: ignore[arg-type]
    assert stopwatch.seconds == 2.0 + 1.5
