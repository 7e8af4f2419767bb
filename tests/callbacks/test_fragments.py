"""Plans of compiled code leave memory to fragments for which the allocator frees its cached memory in steps."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_ssd import PrefetchScheduler, SSDOffloadStrategy
from lightning_ssd.callbacks import AutoPlanner, region_planner
from lightning_ssd.callbacks.fragments import CHECKED_STEPS, FRAGMENT_RESERVE_STEP, MAX_FRAGMENT_RESERVE
from lightning_ssd.callbacks.step_timer import StepTimer
from tests.support.compare import assert_same
from tests.support.compiled import fresh_dynamo  # noqa: F401
from tests.support.meter import Meter, use
from tests.support.plans import BOTH
from tests.support.products import thorough
from tests.support.regions import See, Ticks, keep_code, train

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("deterministic")]

MOST, LEVEL = 300_000, 250_000
SHARE = int(FRAGMENT_RESERVE_STEP * MOST)
MOST_RESERVED = round(MAX_FRAGMENT_RESERVE / FRAGMENT_RESERVE_STEP)


class Fragmented(Meter, pl.Callback):
    """An allocator that frees its cached memory in each step whose peak exceeds `enough` bytes."""

    def __init__(self, enough: float) -> None:
        Meter.__init__(self, MOST, LEVEL, LEVEL)
        self.enough = enough
        self.peaks: list[int] = []
        self.count = 0

    def reset_peak(self) -> None:
        self.highest = self.level

    def retries(self) -> int:
        return self.count

    def on_before_backward(self, trainer: Any, *_: Any) -> None:
        self.peaks.append(self.level + trainer.strategy.offloader.resident_bytes())
        self.highest = max(self.highest, self.peaks[-1])
        self.count += self.peaks[-1] > self.enough


class Steps(Ticks, pl.Callback):
    """A clock on which a step takes a second, and a second more without a plan, or with one."""

    def __init__(self, planned: bool) -> None:
        super().__init__()
        self.planned = planned

    def now(self) -> float:
        return self.seconds

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        regions = next(one for one in trainer.callbacks if isinstance(one, AutoPlanner)).regions
        planned = regions is not None and regions.followed is not None and regions.followed.plan is not None
        self.seconds += 1.0 if planned == self.planned else 2.0


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("planned", [thorough(False), True])
@pytest.mark.parametrize(("enough", "reserved"), [(MOST, 0), (MOST - 1.5 * SHARE, 2), thorough(0, MOST_RESERVED)])
def test_plans_leave_memory_to_fragments(
    enough: float, reserved: int, planned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are made again with a step of the reserve more, until few steps need it or it is as large as it may be."""
    steps = 20 + (reserved + 1) * (CHECKED_STEPS + 20)
    plain, _ = train("aot_eager", "auto", tmp_path, steps)
    memory, see, clock = Fragmented(enough), See(), Steps(planned)
    use(memory, monkeypatch)
    keep_code(monkeypatch)
    monkeypatch.setattr(region_planner, "make_clock", lambda device: clock)
    monkeypatch.setattr(StepTimer, "excluded", lambda timer: nullcontext())
    messages: list[str] = []
    monkeypatch.setattr(pl.utilities, "rank_zero_info", messages.append)
    callbacks = [memory, clock, see, PrefetchScheduler(window_bytes=0)]
    numbers, _ = train("aot_eager", SSDOffloadStrategy(**BOTH), tmp_path, steps, callbacks=callbacks)
    assert_same(numbers, plain)
    assert see.regions.decided and (see.regions.applied.plan is not None) == planned
    made = [message for message in messages if "reserved for them" in message]
    assert len(see.regions.trials) == (1 if made else 2)  # what the search has found before is not searched again
    if enough:
        assert len(made) == reserved
        last = memory.peaks[-CHECKED_STEPS:]
        assert max(last) <= enough and max(last) > MOST - (reserved + 1) * SHARE
    else:  # fewer if nothing is kept any more
        assert 1 <= len(made) <= reserved
