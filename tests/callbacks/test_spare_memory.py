"""Plans of compiled code use the memory that their first steps leave."""

import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_ssd import PrefetchScheduler, SSDOffloadStrategy
from lightning_ssd.callbacks import AutoPlanner, region_planner
from tests.support.compare import assert_same
from tests.support.compiled import fresh_dynamo  # noqa: F401
from tests.support.meter import Meter, use
from tests.support.plans import BOTH
from tests.support.products import thorough
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
        transient: their bytes.
        level: bytes of everything else.
    """

    def __init__(self, together: bool, transient: int = TRANSIENT, level: int = LEVEL) -> None:
        Meter.__init__(self, MOST, level, level)
        self.together = together
        self.transient = transient
        self.peaks: list[int] = []
        self.decided: list[bool] = []
        """Whether a rule was in force for good at each peak."""

    def reset_peak(self) -> None:
        self.highest = self.level

    def on_before_backward(self, trainer: Any, *_: Any) -> None:
        kept = self.level + trainer.strategy.offloader.resident_bytes()
        self.peaks.append(kept + self.transient if self.together else max(kept, self.level + self.transient))
        self.highest = max(self.highest, self.peaks[-1])
        (planner,) = (one for one in trainer.callbacks if isinstance(one, AutoPlanner))
        self.decided.append(planner.regions is None or planner.regions.decided)


class Steps(Ticks, pl.Callback):
    """A clock on which a step takes the longer, the more bytes it offloads."""

    def __init__(self) -> None:
        super().__init__()
        self.stored = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        stored = trainer.strategy.offloader.stats().stored
        self.seconds += stored - self.stored
        self.stored = stored


@pytest.mark.quick_cases(1)
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


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("seed", [1, 13, *(thorough(seed) for seed in range(14, 24))])
def test_memory_is_within_the_limit_once_it_was_exceeded_by_a_trial(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that keeps more may have more of its window in flight at the peak than the one before."""
    generator = random.Random(seed)
    transient = generator.choice([0, 5_000, 20_000, 60_000])
    memory = Allocator(generator.random() < 0.5, transient, MOST - transient - generator.randrange(1000, 70_000))
    plain, _ = train("aot_eager", "auto", tmp_path, 60)
    clock, see = Steps(), See()
    use(memory, monkeypatch)
    monkeypatch.setattr(region_planner, "make_clock", lambda device: clock)
    numbers, _ = train("aot_eager", SSDOffloadStrategy(**BOTH), tmp_path, 60, callbacks=[memory, clock, see])
    assert_same(numbers, plain)
    assert memory.decided[-1]
    plans = [trial.plan for trial in see.regions.trials if trial.plan is not None] if see.regions else []
    # An excess reduces the room in each step, until a storage has none.
    excess = max(peak for peak, decided in zip(memory.peaks, memory.decided, strict=True) if decided) - MOST
    assert excess < min((size for plan in plans for size in plan.sizes), default=1)
    in_flight = [plan.window_bytes + sum(plan.sizes[index] for index in plan.early) for plan in plans]
    assert max(memory.peaks) <= MOST + max(in_flight, default=0)
