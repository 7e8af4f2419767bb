"""`PlanRunner`: plans that a caller applies in the middle of a training keep its numbers, and are measured."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_ssd import SSDOffloadStrategy, SwapPlanner
from lightning_ssd.autoplan import COMPARED_STEPS, WARMUP_AFTER_CHANGE, Comparison
from lightning_ssd.planning import Plan, simulate
from tests.support.compare import assert_same
from tests.support.parity import BATCHES, TinyGPT, train
from tests.support.plans import BOTH, Watch, draw, planner

pytestmark = pytest.mark.timeout(120)

FIRST = 9
"""Step from which on a plan of the planner is in force."""


class Sweep(pl.Callback):
    """Applies plans, each until `steps` of its steps are measured."""

    def __init__(self, planner: SwapPlanner, make: Callable[[int, Plan], Plan], steps: int, count: int) -> None:
        self.planner, self.make, self.steps, self.count = planner, make, steps, count
        self.applied: list[Plan] = []
        self.measured: list[Comparison] = []
        self.ended: list[range] = []
        """Steps under each plan that ended before it was measured."""
        self._began = 0

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        runner = self.planner.cycle.runner
        if runner is None or trainer.global_step < FIRST:
            return
        if self.applied:
            measured = runner.measured(self.steps)
            if measured is None:
                return
            self.measured.append(measured)
            self.ended.append(range(self._began, trainer.global_step - 1))  # one is pending: the host does not wait
        if len(self.applied) < self.count:
            assert runner.plan is not None
            self.applied.append(self.make(len(self.applied), runner.plan))
            runner.apply(self.applied[-1])
            assert runner.measured(1) is None and runner.plan is self.applied[-1]
            assert runner.prediction == simulate(runner.profile, runner.hardware, self.applied[-1])
            self._began = trainer.global_step


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_plans_that_a_caller_applies_keep_the_numbers(accumulate: int) -> None:
    how: Any = {"model": TinyGPT, "accumulate": accumulate, "steps": 26}
    plain = train("auto", **how)
    first, watch = planner(), Watch()
    seeds = iter(range(3))

    def other(index: int, plan: Plan) -> Plan:
        return draw(plan, first.cycle.runner.profile, next(seeds), recompute=(0.0, 1.0, 0.5)[index])

    sweep = Sweep(first, other, steps=2, count=3)
    assert_same(plain, train(SSDOffloadStrategy(**BOTH), callbacks=[first, sweep, watch], **how))
    assert [item.plan for item in sweep.measured[:3]] == sweep.applied and len(sweep.applied) == 3
    windows = math.ceil(BATCHES / accumulate)
    for ended in sweep.ended[:3]:
        # The last window of an epoch has fewer micro-batches, and its step is not measured.
        short = [step for step in ended[WARMUP_AFTER_CHANGE:] if BATCHES % accumulate and step % windows == windows - 1]
        assert len(ended) == WARMUP_AFTER_CHANGE + sweep.steps + len(short)
    assert all(item.step_seconds > 0 and item.predicted.step_seconds > 0 for item in sweep.measured)
    assert watch.stats.recomputed


class HostBytes(pl.Callback):
    """Records the pinned memory for activations after each step."""

    def __init__(self) -> None:
        self.slabs: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.slabs.append(trainer.strategy.offloader.tiers["host"].pool.slab_total)


def test_host_memory_of_profiled_steps_is_freed_and_not_counted_under_a_plan() -> None:
    """All activations are offloaded while steps are profiled, and none under the plan."""

    def keep_all(index: int, plan: Plan) -> Plan:
        units = {
            name: replace(unit, input="keep", operators=dict.fromkeys(unit.operators, "keep"))
            for name, unit in plan.units.items()
        }
        return replace(plan, units=units)

    host, first = HostBytes(), planner()
    sweep = Sweep(first, keep_all, steps=COMPARED_STEPS, count=1)
    strategy = SSDOffloadStrategy(states="gpu", tier="host", min_bytes=1, host_memory="64MiB")
    train(strategy, callbacks=[first, sweep, host], model=TinyGPT, steps=FIRST + COMPARED_STEPS + 8)
    assert sweep.measured[0].host_peak_bytes == 0 == host.slabs[-1] < max(host.slabs)


def test_a_plan_of_another_model_is_not_applied() -> None:
    first = planner()
    train(SSDOffloadStrategy(**BOTH), callbacks=[first], steps=12)
    assert first.cycle.runner is not None and first.cycle.plan is not None
    units = dict(list(first.cycle.plan.units.items())[1:])
    with pytest.raises(ValueError, match=r"`units\."):
        first.cycle.runner.apply(Plan(**{**vars(first.cycle.plan), "units": units}))
    assert first.cycle.runner.plan is first.cycle.plan and len(first.cycle.plan.units) > len(units)
