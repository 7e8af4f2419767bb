"""Batches of several shapes: one plan with a row for each size, all tensors of larger ones offloaded, equal numbers."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ssd import PrefetchScheduler, SSDOffloadStrategy
from lightning_ssd.autoplan import plan_runner
from lightning_ssd.autoplan.batches import ROWS, size_of_row
from lightning_ssd.callbacks import AutoPlanner
from lightning_ssd.callbacks.find import find_offloader
from lightning_ssd.planning import Plan, simulate
from tests.support.compare import assert_same
from tests.support.limited_memory import LimitedMemory
from tests.support.meter import Meter, use
from tests.support.plans import BOTH, planner, quiet_trainer

pytestmark = pytest.mark.timeout(180)

Shape = tuple[int, int]

WIDE, TALL, LARGE, SMALL = (4, 32), (32, 4), (16, 32), (8, 16)


class Layers(pl.LightningModule):
    """Takes batches of any shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = batch[..., None].expand(-1, -1, 8)
        for layer in self.layers:
            hidden = torch.nn.functional.dropout(layer(hidden).tanh(), 0.1)
        return hidden.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class See(pl.Callback):
    """Records the dispatch mode of each micro-batch, and the plan of its row."""

    def __init__(self) -> None:
        self.modes: list[str] = []
        self.rows: list[Plan | None] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        offloader = find_offloader(trainer)
        assert offloader is not None
        auto = next(one for one in trainer.callbacks if isinstance(one, AutoPlanner))
        swaps = auto.planner
        self.modes.append(type(offloader.policy.mode).__name__)
        row = None if swaps is None or swaps.runner is None else swaps.runner.row
        self.rows.append(None if row is None or swaps is None or swaps.measuring else row.plan)


def fit(strategy: Any, shapes: Sequence[Shape], callbacks: Sequence[pl.Callback] = (), **how: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    module, data = Layers(), [torch.randn(shape) for shape in shapes]
    with TemporaryDirectory() as root:
        trainer = quiet_trainer(Path(root), strategy=strategy, callbacks=list(callbacks), max_epochs=1, **how)
        trainer.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return dict(module.state_dict())


def fit_short(shapes: Sequence[Shape], monkeypatch: pytest.MonkeyPatch, most: float = 2e4, **how: Any) -> See:
    """Trains where saved tensors do not fit, and compares the weights with plain Lightning's."""
    see = See()
    use(Meter(most, int(0.95 * most)), monkeypatch)
    assert_same(fit("auto", shapes, **how), fit(SSDOffloadStrategy(**BOTH), shapes, [see], **how))
    return see


def offloaded(plan: Plan | None) -> int:
    """Returns the number of operators whose saved tensors a plan offloads or recomputes."""
    assert plan is not None
    return sum(choice != "keep" for unit in plan.units.values() for choice in unit.operators.values())


def test_shapes_of_which_none_is_within_the_other_follow_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one offloads all saved tensors until its saved bytes are known. Neither is profiled again."""
    see = fit_short([WIDE, TALL] * 18, monkeypatch)
    assert see.modes.count("TraceMode") == 1
    assert see.modes[-8:] == ["PlanMode"] * 8


def test_smaller_batches_offload_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are drawn anew for each batch. All follow the rows of one plan, which is made for the longest ones.

    Measured times decide which operators are offloaded: a smaller batch may offload more of them, of fewer bytes.
    """
    lengths = [32, 32, 32, *(random.Random(0).choices([8, 16, 24, 31, 32], k=40))]
    see = fit_short([(16, length) for length in lengths], monkeypatch, most=120_000)
    assert see.modes.count("TraceMode") == 1
    rows = dict(zip(lengths[20:], see.rows[20:], strict=True))
    assert offloaded(rows[8]) < min(offloaded(rows[24]), offloaded(rows[32]))
    assert rows[31] is rows[32]


def test_larger_batches_have_a_row_once_they_recur(monkeypatch: pytest.MonkeyPatch) -> None:
    see = fit_short([*[SMALL] * 20, *([LARGE, SMALL] * 8)], monkeypatch, most=2e5)
    assert see.modes.count("TraceMode") == 1
    assert see.rows[20] is None and None not in see.rows[-8:]


def test_larger_batches_for_which_no_plan_has_room_offload_all(monkeypatch: pytest.MonkeyPatch) -> None:
    see = fit_short([*[SMALL] * 20, *([LARGE, SMALL] * 8)], monkeypatch, most=1e4)
    assert see.rows[-2] is None and see.rows[-1] is not None


class PeakMeter(Meter):
    """Its peak is set by a test, until it is reset."""

    def __init__(self) -> None:
        super().__init__(1e9, 0)

    def reset_peak(self) -> None:
        self.highest = 0


@pytest.mark.parametrize(("missing", "num_plans"), [(1000, 1), (90_000, 2)])
def test_plan_and_rows_have_the_memory_that_measured_steps_leave(
    missing: int, num_plans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps under the first plan need more memory than predicted. The plan is made again if they exceed the limit."""
    swaps, meter, plans = planner(gpu_memory="200000B"), PeakMeter(), []

    class Look(pl.Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            cycle = swaps.cycle
            if not cycle.measuring:
                assert cycle.plan is not None and cycle.prediction is not None
                meter.highest = cycle.prediction.gpu_peak_bytes + (cycle.comparison is None) * missing
                plans.append(cycle.plan)

    monkeypatch.setattr(plan_runner, "allocator_memory", lambda device: meter)
    fit(SSDOffloadStrategy(**BOTH), [*[(16, 32)] * 8, *[(16, 32), (16, 16)] * 12], [swaps, Look()])
    runner = swaps.cycle.runner
    assert len({id(plan) for plan in plans}) == num_plans
    assert runner is not None and runner.main is not None and runner.profile.other_gpu_bytes == missing and runner.rows
    for number, row in [(ROWS, runner.main), *runner.rows.items()]:
        assert row.prediction == simulate(runner.profile.with_size(size_of_row(number)), runner.hardware, row.plan)
        assert row.prediction.gpu_peak_bytes <= 201_000


@pytest.mark.parametrize("name", ["holistic", "teraio"])
def test_a_plan_is_made_again_once_for_memory_that_none_reduces(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of a callback in every step."""
    swaps, meter, plans = planner(gpu_memory="200000B", planner=name), PeakMeter(), []

    class Look(pl.Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            if not swaps.cycle.measuring:
                meter.highest = 210_000
                plans.append(swaps.cycle.plan)

    monkeypatch.setattr(plan_runner, "allocator_memory", lambda device: meter)
    fit(SSDOffloadStrategy(**BOTH), [(16, 32)] * 60, [swaps, Look()])
    assert len({id(plan) for plan in plans}) <= 2


def test_peaks_of_other_rows_are_not_those_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    swaps, meter = planner(gpu_memory="120000B"), PeakMeter()

    class Look(pl.Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            runner = swaps.cycle.runner
            meter.highest = max(meter.highest, 100 if runner is None or runner.row is runner.main else 1000)

    monkeypatch.setattr(plan_runner, "allocator_memory", lambda device: meter)
    fit(SSDOffloadStrategy(**BOTH), [*[(16, 32)] * 18, (16, 16)], [swaps, Look()])
    runner = swaps.cycle.runner
    assert runner is not None and runner.row is not runner.main
    comparison = runner.measured(1)
    assert comparison is not None and comparison.gpu_peak_bytes == 100


def fit_and_freeze(frozen: Callable[[AutoPlanner, int], bool], monkeypatch: pytest.MonkeyPatch) -> See:
    """Trains where saved tensors do not fit, with a layer that is frozen in some steps, as plain Lightning does."""

    class Freeze(pl.Callback):
        def __init__(self) -> None:
            self.steps: list[bool] = []

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            auto = next(one for one in trainer.callbacks if isinstance(one, AutoPlanner))
            self.steps.append(frozen(auto, batch_idx))
            pl_module.layers[0].requires_grad_(not self.steps[-1])

    class FreezeAgain(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            pl_module.layers[0].requires_grad_(not freeze.steps[batch_idx])

    see, freeze, shapes = See(), Freeze(), [WIDE] * 64
    use(Meter(6e4, 59_000), monkeypatch)
    found = fit(SSDOffloadStrategy(**BOTH), shapes, [freeze, see])
    assert_same(fit("auto", shapes, [FreezeAgain()]), found)
    return see


def test_micro_batches_with_other_trained_parameters_offload_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that alternate are not profiled again and again."""
    see = fit_and_freeze(lambda auto, batch_idx: batch_idx % 2 == 0, monkeypatch)
    assert see.modes.count("TraceMode") == 1
    last = see.rows[-8:]
    assert (None in last) == (last[0] is None or last[1] is None) and len({row is None for row in last[::2]}) == 1


def test_parameters_that_are_unfrozen_while_steps_are_timed_have_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = False

    def frozen(auto: AutoPlanner, batch_idx: int) -> bool:
        nonlocal timed
        timed = timed or (auto.planner is not None and auto.planner.phase == "timing")
        return not timed

    see = fit_and_freeze(frozen, monkeypatch)
    assert timed and see.modes.count("TraceMode") == 2 and None not in see.rows[-8:]


class BatchClock:
    """A clock on which a batch lasts a second."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def elapsed(self, start: float, end: float) -> float:
        return end - start


def test_steps_of_other_shapes_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step under a plan lasts one batch, although batches of the other shape are between two of them."""
    clock, measured = BatchClock(), []

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            clock.seconds += 1

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            planner = next(one for one in trainer.callbacks if isinstance(one, AutoPlanner)).planner
            assert planner is not None and planner.runner is not None
            measured.extend([planner.runner.measured(4, min), planner.runner.measured(4, max)])

    use(Meter(2e4, 19_000), monkeypatch)
    monkeypatch.setattr(plan_runner, "make_clock", lambda device: clock)
    fit(SSDOffloadStrategy(**BOTH), [WIDE, TALL] * 28, [Look()])
    assert [comparison.step_seconds for comparison in measured] == [1.0, 1.0]


def least_memory(shapes: Sequence[Shape], **how: Any) -> int:
    memory = LimitedMemory()
    with memory:
        scheduler = PrefetchScheduler(window_bytes=0)
        fit(SSDOffloadStrategy(**BOTH, offload=1.0), shapes, [memory.counting, scheduler], **how)
    return memory.highest_ever


def check_never_out_of_memory(pool: Sequence[Shape], order: Sequence[int], share: float, accumulate: int) -> None:
    """Trains within `share` of the memory that offloading everything needs."""
    how: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    shapes = [pool[index % len(pool)] for index in order]
    memory = LimitedMemory(share * least_memory(shapes, **how))
    with pytest.MonkeyPatch.context() as patch:
        use(memory, patch)
        with memory:
            found = fit(SSDOffloadStrategy(**BOTH), shapes, [memory.counting], **how)
    assert_same(fit("auto", shapes, **how), found)


SHAPES = st.tuples(st.integers(1, 24), st.integers(1, 24))


@pytest.mark.thorough
def test_shapes_that_alternate_at_the_limit_do_not_run_out_of_memory() -> None:
    check_never_out_of_memory([(8, 24), (24, 8), (10, 24)], [0, 1] * 12 + [2, 0, 1] * 6, 1.05, 1)


@pytest.mark.thorough
def test_a_large_batch_between_small_ones_does_not_run_out_of_memory() -> None:
    check_never_out_of_memory([(1, 1), (24, 2)], [*13 * [0], *4 * [1], 0, 0, 1], 1.01, 1)


@pytest.mark.thorough
def test_a_large_batch_after_many_small_ones_under_a_plan_does_not_run_out_of_memory() -> None:
    check_never_out_of_memory([(5, 7), (7, 19)], [0, 0, 0, 1, 0, 0, 1, *22 * [0], 1, 0], 1.025, 2)


@pytest.mark.thorough
@pytest.mark.timeout(600)
@settings(max_examples=12, deadline=None)
@given(
    st.lists(SHAPES, min_size=1, max_size=4),
    st.lists(st.integers(0, 3), min_size=8, max_size=50),
    st.floats(1.01, 1.6),
    st.integers(1, 2),
)
def test_random_shapes_never_run_out_of_memory_where_offloading_everything_fits(
    pool: list[Shape], order: list[int], share: float, accumulate: int
) -> None:
    check_never_out_of_memory(pool, order, share, accumulate)
