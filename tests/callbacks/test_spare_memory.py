"""Plans of compiled code use the memory that their first steps leave."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_ssd import PrefetchScheduler, SSDOffloadStrategy
from lightning_ssd.callbacks import region_planner
from tests.support.compare import assert_same
from tests.support.compiled import fresh_dynamo  # noqa: F401
from tests.support.meter import Meter, use
from tests.support.plans import BOTH
from tests.support.regions import See, Ticks, train

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("deterministic")]

MOST = 1_000_000
TRANSIENT = 20_000
LEVEL = MOST - 2 * TRANSIENT
"""A micro-batch that keeps no storages peaks `TRANSIENT` bytes below the limit."""


class Allocator(Meter, pl.Callback):
    """An allocator with storages that are kept, and transient tensors at the same time or at another one.

    Args:
        together: whether transient tensors are alive together with the storages.
    """

    def __init__(self, together: bool) -> None:
        Meter.__init__(self, MOST, LEVEL, LEVEL)
        self.together = together
        self.peaks: list[int] = []

    def reset_peak(self) -> None:
        self.highest = self.level

    def on_before_backward(self, trainer: Any, *_: Any) -> None:
        kept = LEVEL + trainer.strategy.offloader.resident_bytes()
        self.peaks.append(kept + TRANSIENT if self.together else max(kept, LEVEL + TRANSIENT))
        self.highest = max(self.highest, self.peaks[-1])


class Steps(Ticks, pl.Callback):
    """A clock on which a step takes the longer, the more bytes it offloads."""

    def __init__(self) -> None:
        super().__init__()
        self.stored = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        stored = trainer.strategy.offloader.stats().stored
        self.seconds += stored - self.stored
        self.stored = stored


@pytest.mark.parametrize("together", [False, True])
def test_a_plan_keeps_what_the_peak_of_its_steps_leaves(
    together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything else needs most memory when no storages are alive: as many more bytes are kept as transient ones."""
    plain, _ = train("aot_eager", "auto", tmp_path)
    memory, clock, see = Allocator(together), Steps(), See()
    use(memory, monkeypatch)
    monkeypatch.setattr(region_planner, "make_clock", lambda device: clock)
    callbacks = [memory, clock, see, PrefetchScheduler(window_bytes=0)]
    numbers, _ = train("aot_eager", SSDOffloadStrategy(**BOTH), tmp_path, callbacks=callbacks)
    assert_same(numbers, plain)
    assert max(memory.peaks) <= MOST and see.regions.decided
    plans = [trial.plan for trial in see.regions.trials if trial.plan is not None]
    assert len(plans) == (1 if together else 2)
    if not together:
        assert TRANSIENT / 2 < plans[0].offloaded_bytes - plans[1].offloaded_bytes <= TRANSIENT
        assert see.regions.applied.plan is plans[1]
        assert see.stored[-1] - see.stored[-2] == plans[1].offloaded_bytes
