"""Deferred steps in two parts: plain Lightning's numbers, and a share of units that depends on backward's waits."""

import itertools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_ssd.device import CPUCopyEngine, Mark
from lightning_ssd.futures import Future
from lightning_ssd.model_states import build
from lightning_ssd.model_states.gradients import gradient, gradient_offload
from lightning_ssd.model_states.gradients.gradient_offload import GradientOffloader
from lightning_ssd.model_states.optimizers.adam import any_kernel
from lightning_ssd.model_states.steps import step_scheduler, weights_first
from lightning_ssd.model_states.steps.step import OptimizerStep
from lightning_ssd.model_states.steps.weights_first import WeightsFirst
from tests.support.compare import assert_same
from tests.support.models import Model
from tests.support.products import combinations
from tests.support.states import STEPS, offloading, train


def test_the_share_of_units_follows_the_time_that_backward_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr("lightning_ssd.model_states.steps.weights_first.perf_counter", lambda: float(next(clock)))
    share = WeightsFirst(8)

    def covered() -> int:
        return [share.covers(unit) for unit in range(8)].index(False) if not share.covers(7) else 8

    share.note(0.5)  # the begin of the first step is unknown
    assert covered() == 8
    for _ in range(3):
        share.note(0.5)
    assert covered() == 6
    for _ in range(8):
        share.note(0.5)
    assert covered() == 0
    for _ in range(20):
        share.note(0.001)
    assert covered() == 8


@pytest.mark.parametrize("drains", [False, True])
def test_units_have_whole_steps_if_other_code_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drains: bool
) -> None:
    """For example a callback that reads the weights after every step; here a wait takes 1 s, and a step 10 s."""
    if any_kernel() is None:
        pytest.skip("there is no C compiler")
    for module, seconds in ((step_scheduler, 1.0), (weights_first, 10.0)):
        clock = itertools.count(0.0, seconds)
        monkeypatch.setattr(module, "perf_counter", lambda clock=clock: next(clock))
    covered: list[bool] = []
    note = WeightsFirst.note

    def noted(share: WeightsFirst, waited: float) -> None:
        note(share, waited if waited >= 1.0 else 0.0)
        covered.append(share.covers(0))

    class Reads(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if drains:
                trainer.strategy.model_states.drain()

    monkeypatch.setattr(WeightsFirst, "note", noted)
    train(tmp_path, offloading(clip="deferred"), Model(), gradient_clip_val=0.5, callbacks=[Reads()])
    assert covered[0] and covered[-1] != drains


class Device(CPUCopyEngine):
    """A device that has computed everything that was issued, or, while a gradient is received, is behind the host."""

    is_behind = False

    def on_d2h(self, mark: Mark) -> "Future[None]":
        return Future() if self.is_behind else super().on_d2h(mark)


@pytest.mark.parametrize("behind", [False, True])
def test_a_wait_counts_if_the_device_has_nothing_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    """The host waits for an earlier step of the flat parameter, which is held here."""
    clock = itertools.count(0.0, 1.0)
    monkeypatch.setattr(gradient_offload, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(build, "make_copy_engine", Device)
    held: list[Future[None]] = []
    waited: list[float] = []
    wait_for, receive, note = gradient.wait_for, GradientOffloader.receive, WeightsFirst.note

    def received(gradients: GradientOffloader, flat: Any, index: int, grad: Tensor) -> None:
        if gradients[flat].consumed.done():
            held.append(Future())
            gradients[flat].consumed = held[-1]
        monkeypatch.setattr(Device, "is_behind", behind)
        receive(gradients, flat, index, grad)
        monkeypatch.setattr(Device, "is_behind", False)

    def waiting(future: "Future[None]", work: str) -> None:
        if held and future is held[-1]:
            held.pop().set_result(None)
        wait_for(future, work)

    monkeypatch.setattr(gradient, "wait_for", waiting)
    monkeypatch.setattr(GradientOffloader, "receive", received)
    monkeypatch.setattr(WeightsFirst, "note", lambda share, seconds: (waited.append(seconds), note(share, seconds)))
    strategy = offloading(clip="deferred")
    train(tmp_path, strategy, Model(), gradient_clip_val=0.5, max_epochs=1)
    assert len(waited) == STEPS and (sum(waited) > 0) != behind


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, weight_decay=0.1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


@combinations(
    "optimizer, precision, state_format, accumulate, share",
    [adamw, adam],
    ["32-true", "bf16-mixed", "bf16-true"],
    ["fp32", "split", "bf16", "8bit"],
    [1, 3],
    [0.5, 1.0],
    quick=[
        (adam, "bf16-true", "fp32", 3, 0.5),
        (adamw, "bf16-true", "split", 1, 1.0),
        (adamw, "bf16-mixed", "bf16", 1, 0.5),
        (adamw, "bf16-true", "8bit", 1, 0.5),
    ],
)
def test_numbers_are_those_of_whole_steps(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: Any,
    precision: Any,
    state_format: Any,
    accumulate: int,
    share: float,
) -> None:
    """Weights, losses and optimizer states, bit for bit, with every unit or half of them in two parts."""
    parts: list[str] = []
    make = OptimizerStep._make

    def noted(step: OptimizerStep, staged: Any, scale: float, half: Any = "whole") -> Any:
        parts.append(half)
        return make(step, staged, scale, half)

    monkeypatch.setattr(OptimizerStep, "_make", noted)
    monkeypatch.setattr(WeightsFirst, "covers", lambda self, unit: unit < share * self._units)
    how = dict(precision=precision, gradient_clip_val=0.5, accumulate_grad_batches=accumulate)
    whole = offloading(overlap="none", clip="deferred", state_format=state_format)
    expected = train(tmp_path, whole, Model(optimizer), **how)
    assert set(parts) == {"whole"}
    parts.clear()
    strategy = offloading(clip="deferred", state_format=state_format, gpu_memory="1B")
    assert_same(train(tmp_path, strategy, Model(optimizer), **how), expected)
    in_parts = any_kernel() is not None and (
        optimizer is adamw or (precision == "bf16-true" and state_format == "fp32")
    )
    if in_parts:
        assert parts.count("weights") == parts.count("opt_state") > 0
        assert ("whole" in parts) == (share < 1)
