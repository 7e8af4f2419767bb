"""Plans of compiled code leave memory to fragments for which the allocator frees its cached memory in steps."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_ssd import PrefetchScheduler, SSDOffloadStrategy
from lightning_ssd.callbacks.fragments import CHECKED_STEPS, FRAGMENT_RESERVE_STEP, MAX_FRAGMENT_RESERVE
from tests.support.compare import assert_same
from tests.support.compiled import fresh_dynamo  # noqa: F401
from tests.support.meter import Meter, use
from tests.support.plans import BOTH
from tests.support.regions import See, tick, train

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("deterministic")]

MOST, LEVEL = 300_000, 250_000
SHARE = int(FRAGMENT_RESERVE_STEP * MOST)


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


@pytest.mark.parametrize(("enough", "reserved"), [(MOST, 0), (MOST - 1.5 * SHARE, 2), (0, None)])
def test_plans_leave_memory_to_fragments(
    enough: float, reserved: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """They are made again with a step of the reserve more, until few steps need it or it is as large as it may be."""
    steps = 60 + 6 * (CHECKED_STEPS + 20)
    plain, _ = train("aot_eager", "auto", tmp_path, steps)
    memory, see = Fragmented(enough), See()
    use(memory, monkeypatch)
    tick(monkeypatch)
    messages: list[str] = []
    monkeypatch.setattr(pl.utilities, "rank_zero_info", messages.append)
    callbacks = [memory, see, PrefetchScheduler(window_bytes=0)]
    numbers, _ = train("aot_eager", SSDOffloadStrategy(**BOTH), tmp_path, steps, callbacks=callbacks)
    assert_same(numbers, plain)
    assert see.regions.decided
    made = [message for message in messages if "reserved for them" in message]
    if reserved is None:
        assert 1 <= len(made) <= round(MAX_FRAGMENT_RESERVE / FRAGMENT_RESERVE_STEP)
    else:
        assert len(made) == reserved
        last = memory.peaks[-CHECKED_STEPS:]
        assert max(last) <= enough and max(last) > MOST - (reserved + 1) * SHARE
