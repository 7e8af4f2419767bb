"""`SwapPlanner`: results are the same under every plan; it compares predictions with measurements."""

import csv
import itertools
import logging
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_ssd import ActivationOffload, ModelProfiler, PrefetchScheduler, SSDOffloadStrategy, SwapPlanner
from lightning_ssd.activations import offloader
from lightning_ssd.activations.ssd import SSDTier
from lightning_ssd.autoplan import plan_report, plan_runner
from lightning_ssd.device import clock
from lightning_ssd.model_states import find_units
from lightning_ssd.model_states.optimizers import step_work
from lightning_ssd.model_states.steps import step
from lightning_ssd.model_states.units import units
from lightning_ssd.model_states.weights import prefetcher
from lightning_ssd.planning import (
    OFFLOADED_LAUNCH,
    HardwareProfile,
    HostOverhead,
    ModelProfile,
    PartPlan,
    Plan,
    Prediction,
    simulate,
    swap_coefficient,
)
from lightning_ssd.profiling import profiler
from tests.support.compare import assert_same
from tests.support.models import Model
from tests.support.moves import TIERS
from tests.support.parity import SharedStorages, TinyGPT, train
from tests.support.plans import BOTH, MACHINE, Watch, draw, pinned, planner, quiet_trainer
from tests.support.products import thorough
from tests.support.states import train as train_states

pytestmark = pytest.mark.timeout(120)


def check_plans(**how: Any) -> None:
    """Asserts that a training has plain Lightning's numbers under its own plan, and under two random ones."""
    plain = train("auto", **how)
    first = planner()
    assert_same(plain, train(SSDOffloadStrategy(**BOTH), callbacks=[first], **how))
    assert first.cycle.plan is not None
    for seed, recompute in ((0, 1.0), (1, 0.5)):
        watch = Watch()
        callbacks = [pinned(draw(first.cycle.plan, first.cycle.runner.profile, seed, recompute=recompute)), watch]
        assert_same(plain, train(SSDOffloadStrategy(**BOTH), callbacks=callbacks, **how))
        assert watch.stats.recomputed


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("model", "precision", "accumulate", "checkpointing"),
    [
        thorough(TinyGPT, "32-true", 1, "none"),
        thorough(TinyGPT, "bf16-mixed", 3, "none"),
        thorough(TinyGPT, "bf16-mixed", 1, "non_reentrant"),
        (TinyGPT, "32-true", 1, "reentrant"),
        thorough(SharedStorages, "32-true", 3, "none"),
        thorough(SharedStorages, "bf16-mixed", 1, "none"),
        (SharedStorages, "32-true", 1, "non_reentrant"),
    ],
)
def test_results_are_the_same_under_every_plan(model: Any, precision: str, accumulate: int, checkpointing: Any) -> None:
    check_plans(model=model, precision=precision, accumulate=accumulate, checkpointing=checkpointing, steps=8)


class HostBytes(pl.Callback):
    """Records after each step the host memory that model states take."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        assert isinstance(trainer.strategy, SSDOffloadStrategy) and trainer.strategy.model_states is not None
        self.seen.append(trainer.strategy.model_states.nbytes.host)


@pytest.mark.parametrize(("clip", "planned"), [("auto", "deferred"), ("speculative", "speculative")])
def test_plans_expect_steps_and_host_memory_of_the_clip_mode_in_force(clip: Any, planned: str, tmp_path: Path) -> None:
    """All steps are clipped, so that "auto" defers, although a CPU so slow would gain by speculation."""
    slow = tmp_path / "machine.json"
    replace(HardwareProfile.from_json(MACHINE), cpu_step_rate=1e5).to_json(slow)
    first, states = planner(machine=slow, gpu_memory="1GiB"), HostBytes()
    strategy = SSDOffloadStrategy(states="host", clip=clip, min_bytes=1, host_memory="64MiB", gpu_memory="1B")
    callbacks = [first, states]
    train_states(tmp_path, strategy, Model(), callbacks=callbacks, limit_val_batches=0, gradient_clip_val=1e-3)
    plan, prediction = first.cycle.plan, first.cycle.prediction
    assert plan is not None and prediction is not None and plan.clip == planned
    assert swap_coefficient(first.cycle.runner.profile, plan) == 0
    assert prediction.host_peak_bytes == pytest.approx(states.seen[-1], rel=0.1)  # without padding of each buffer


class SavedByUser(Model):
    """Saves the tensors of its blocks by hooks of its own.

    Args:
        hooks: makes the hooks.
    """

    def __init__(self, hooks: Any) -> None:
        super().__init__()
        self.hooks = hooks

    def forward(self, tokens: Tensor) -> Tensor:
        with self.hooks():
            return super().forward(tokens)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "hooks",
    [
        torch.autograd.graph.save_on_cpu,  # keeps the memory of the weights themselves on a CPU
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy),
    ],
    ids=["save_on_cpu", "numpy"],
)
@pytest.mark.parametrize("plans", [False, True])
def test_offloaded_weights_that_hooks_of_the_user_save(plans: bool, hooks: Any, tmp_path: Path) -> None:
    plain = train_states(tmp_path, "auto", SavedByUser(hooks), limit_val_batches=0)
    chosen = [planner()] if plans else []
    strategy = SSDOffloadStrategy(states="host", min_bytes=1, host_memory="64MiB", gpu_memory="1B")
    model = train_states(tmp_path, strategy, SavedByUser(hooks), callbacks=chosen, limit_val_batches=0)
    assert all(one.cycle.plan is not None for one in chosen)
    assert model.losses == plain.losses
    assert_same(list(model.parameters()), list(plain.parameters()))


class Unsteady(TinyGPT):
    """Runs additional operators in every other step, before its blocks and inside them."""

    def __init__(self, checkpointing: Any) -> None:
        super().__init__(checkpointing)
        block: Any = self.model.transformer.h[1]
        block.register_forward_pre_hook(self._perturb)
        block.mlp.register_forward_hook(self._perturb)
        self.count = 0

    def _perturb(self, module: nn.Module, args: Any, output: Any = None) -> None:
        if self.count % 2:
            torch.ones(7).sum()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.count += 1
        if self.count % 2:
            torch.zeros(3) + 1
        return super().training_step(batch, batch_idx)


class Changing(pl.LightningModule):
    """Writes to tensors after their use, from some step on; only recomputation needs their old values."""

    def __init__(self, checkpointing: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.count = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.count += 1
        hidden = batch[..., None].expand(-1, -1, 32)
        for block in self.blocks:
            shifted = block(hidden) + 1.0
            hidden = (shifted * 2.0).tanh() * torch.rand_like(shifted)
            if self.count > 6:
                with torch.no_grad():
                    shifted.mul_(3.0)
        return hidden.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("model", [Unsteady, Changing])
def test_a_forward_that_differs_from_the_recorded_one(model: Any) -> None:
    check_plans(model=model, steps=10)


class _Foreign(torch.autograd.Function):
    """A kernel outside of torch writes its result to the memory of a torch tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        np.tanh(x.detach().numpy(), out=out.numpy())
        copied = x.contiguous() * 1.0
        np.negative(copied.numpy(), out=copied.numpy())
        ctx.save_for_backward(out, copied)
        return out + copied

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        out, copied = ctx.saved_tensors
        return grad * (1 - out * out) * copied.cos()


class Hazards(pl.LightningModule):
    """Effects that no operator schema names: foreign kernels, statistics, inference tensors; and a long chain."""

    def __init__(self, checkpointing: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(24)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.teacher = nn.Linear(32, 32).requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.norm(batch[..., None].expand(-1, -1, 32).to(self.blocks[0].weight.dtype))
        with torch.inference_mode():
            taught = self.teacher(hidden.detach())
        for block in self.blocks:
            hidden = block(hidden)
            hidden = hidden * torch.rand(hidden.shape)  # of the default dtype
            for _ in range(150):
                hidden = (hidden * 1.01).tanh()
        if hidden.dtype == torch.float32:
            hidden = _Foreign.apply(hidden)  # type: ignore[no-untyped-call]
        return (hidden * taught.clone()).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["32-true", thorough("bf16-true")])
def test_effects_that_no_operator_schema_names(precision: str) -> None:
    check_plans(model=Hazards, precision=precision, steps=8)


class StepsBetween(pl.LightningModule):
    """Manual optimization: a step between a forward and its backward, which needs no stepped weight."""

    def __init__(self, checkpointing: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        optimizer: Any = self.optimizers()
        first = self.blocks[0](batch[..., None].expand(-1, -1, 32))
        second = self.blocks[1](batch[..., None].expand(-1, -1, 32)) * first.detach().tanh()
        optimizer.zero_grad()
        self.manual_backward(first.square().mean())
        optimizer.step()
        optimizer.zero_grad()
        loss = second.square().mean()
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss.detach()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("states", ["gpu", "host"])
def test_steps_between_forward_and_backward(states: Any) -> None:
    how: Any = {"model": StepsBetween, "steps": 16, "recorded": False}
    plain = train("auto", **how)
    first, watch = planner(), Watch()
    strategy = SSDOffloadStrategy(**BOTH | {"states": states, "gpu_memory": "1B"})
    run = train(strategy, callbacks=[first, watch], **how)
    assert first.cycle.plan is not None and not watch.stats.recomputed
    assert_same(run.losses, plain.losses)


class Keeps(TinyGPT):
    """Keeps a reference to a hidden state of every step."""

    def __init__(self, checkpointing: Any) -> None:
        super().__init__(checkpointing)
        self.kept: list[Tensor] = []
        self.model.transformer.h[1].mlp.act.register_forward_hook(lambda *args: self.kept.append(args[2].detach()))


def test_a_hidden_state_that_user_code_keeps_keeps_no_other_memory() -> None:
    first = planner()
    train(SSDOffloadStrategy(**BOTH), callbacks=[first], model=Keeps)
    assert first.cycle.plan is not None
    used = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            cache = trainer.strategy.offloader
            cache._collect()
            used.append(cache.tiers["host"].pool.used_bytes)

    callbacks = [pinned(draw(first.cycle.plan, first.cycle.runner.profile, 0, recompute=1.0)), Look()]
    train(SSDOffloadStrategy(**BOTH), callbacks=callbacks, model=Keeps)
    assert used[-1] == used[8]


class CompiledFunction(TinyGPT):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        compiled = torch.compile(lambda x: x * 2, backend="eager")
        return super().training_step(batch, batch_idx) + 0 * compiled(batch).sum()


def test_it_plans_for_the_activation_offload_callback() -> None:
    plain = train("auto")
    arguments = {name: value for name, value in BOTH.items() if name != "states"}
    first = planner()
    assert_same(plain, train("auto", callbacks=[ActivationOffload(**arguments), first]))
    assert first.cycle.plan is not None


def test_a_plan_that_keeps_all_runs_no_dispatch_mode() -> None:
    found = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            cache = trainer.strategy.offloader
            found.append((cache.policy.mode, cache.stats().stored))

    first = planner()
    assert_same(train("auto"), train(SSDOffloadStrategy(**BOTH), callbacks=[first, Look()]))
    assert first.cycle.plan is not None
    assert {choice for unit in first.cycle.plan.units.values() for choice in unit.operators.values()} == {"keep"}
    assert found[0][1] > 0
    assert found[-1] == (None, found[8][1])


class Looks(pl.Callback):
    """Records for each batch whether hooks were enabled."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.found.append(trainer.strategy.offloader.policy.hooks_enabled)


def test_a_plan_that_keeps_all_enables_hooks_for_larger_batches_only() -> None:
    """A batch that is longer than the recorded one may need more memory than available, also with fewer samples."""
    sizes = [(2, 16)] * 20 + [(2, 8), (2, 24), (1, 32), (2, 16)]
    texts = [torch.randn(*size, generator=torch.Generator().manual_seed(0)) for size in sizes]
    looks = Looks()
    weights = []
    for arguments in (
        {"strategy": SSDOffloadStrategy(**BOTH), "callbacks": [planner(), looks]},
        {"strategy": "auto"},
    ):
        pl.seed_everything(0)
        module = TinyGPT("none")
        loader = torch.utils.data.DataLoader(texts, batch_size=None)
        quiet_trainer(max_epochs=1, **arguments).fit(module, loader)
        weights.append(list(module.parameters()))
    assert looks.found[0] and looks.found[-5:] == [False, False, True, True, False]
    assert_same(*weights)


def test_a_calibration_plan_precedes_the_plan(tmp_path: Path) -> None:
    """It checkpoints. There is none before a user's plan, or if it would exceed the memory."""
    for arguments, steps, expected in (
        ({"save": tmp_path / "plan.yaml"}, 7, [True, False]),
        ({"plan": tmp_path / "plan.yaml"}, 12, [False]),
        ({"gpu_memory": "1B"}, 7, [False]),
    ):
        first = planner(**arguments)
        applied = AppliedPlans(first)
        train(SSDOffloadStrategy(**BOTH), callbacks=[first, applied], steps=steps)
        assert [item.calibrating for item in applied.found] == expected
        assert (first.cycle.offloaded is None) == expected[0]  # such steps stand for a training without a plan
        assert any(unit.checkpoint for unit in applied.found[0].plan.units.values()) or not expected[0]


def test_a_model_that_checkpoints_its_layers_is_timed_as_it_is_trained() -> None:
    """No unit of it may be checkpointed, and offloading its saved tensors would take host memory and time."""
    first, module = planner(), TinyGPT("none")
    module.model.gradient_checkpointing_enable({"use_reentrant": False})
    applied = AppliedPlans(first)
    train(SSDOffloadStrategy(**BOTH), callbacks=[first, applied], model=lambda _: module, steps=7)
    assert [(item.calibrating, item.plan.keeps_all) for item in applied.found] == [(True, True), (False, True)]


class InNoGrad(SharedStorages):
    """Most of its first block's work runs without gradients."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.blocks[0](batch[..., None].expand(-1, -1, 32))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("model", [TinyGPT, SharedStorages, InNoGrad])  # checkpoints within layers, and around them
@pytest.mark.parametrize("states", ["host", "gpu"])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non_reentrant"])
def test_profiles_tell_units_that_user_code_checkpoints(checkpointing: Any, states: Any, model: Any) -> None:
    """And not those that the calibration checkpoints."""
    first = planner(gpu_memory="1GiB")
    strategy = SSDOffloadStrategy(**BOTH | {"states": states})
    train(strategy, callbacks=[first], model=model, checkpointing=checkpointing, steps=7)
    found = {unit.name.partition(" ")[0] for unit in first.cycle.runner.profile.units if unit.reruns}
    blocks = "model.transformer.h" if model is TinyGPT else "blocks"
    assert found == (set() if checkpointing == "none" else {f"{blocks}.{index}" for index in range(3)})


class Clock:
    """A fake clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of steps and operators. The host launches each unit in 10 ms, beside which plans take it no time."""
    made, launches = Clock(), itertools.count()
    monkeypatch.setattr(clock, "perf_counter", made.perf_counter)
    monkeypatch.setattr(profiler, "perf_counter", lambda: 0.01 * next(launches))
    for module in (offloader, prefetcher):
        monkeypatch.setattr(module, "perf_counter", lambda: 0.0)
    for module in ("profiler", "machine"):
        monkeypatch.setattr(f"lightning_ssd.profiling.{module}.measure_host_overhead", lambda device: HostOverhead())
    return made


@dataclass(frozen=True)
class AppliedPlan:
    """A plan, its first step, and the planner's state at its begin."""

    plan: Plan
    step: int
    calibrating: bool
    prediction: Prediction
    profile: ModelProfile
    hardware: HardwareProfile


class AppliedPlans(pl.Callback):
    """Records the plans that `planner`, an earlier callback, has applied."""

    def __init__(self, planner: SwapPlanner) -> None:
        self.found: list[AppliedPlan] = []
        self._planner = planner

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        cycle = self._planner.cycle
        if cycle.plan is None or (self.found and cycle.plan is self.found[-1].plan):
            return
        assert cycle.prediction is not None
        self.found.append(
            AppliedPlan(
                cycle.plan,
                trainer.global_step,
                cycle.calibrating,
                cycle.prediction,
                cycle.runner.profile,
                cycle.runner.hardware,
            )
        )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("states", "factors", "measured"),
    [
        ("gpu", [1.2], 1.2),
        ("gpu", [1.3, 1.0, 1.2], 1.0),  # the minimum of three steps
        ("host", [1.2], 1.2),
        ("host", [1.0, 1.3, 1.2], 1.2),  # without the first one, which waits for no optimizer jobs
    ],
)
def test_steps_of_the_calibration_plan_correct_the_profile(
    time: Clock, states: Any, factors: list[float], measured: float
) -> None:
    """They last `factors` tenths of a second; afterwards the prediction is `measured` tenths."""
    first = planner(steps=len(factors))
    applied = AppliedPlans(first)
    slow = SlowCalibration(first, time, factors)
    strategy = SSDOffloadStrategy(**BOTH | {"states": states})
    train(strategy, callbacks=[first, applied], model=lambda _: slow, steps=14, recorded=False)
    calibration = applied.found[0]
    assert calibration.calibrating and len(applied.found) == 2
    # Each reading of the fake clock advances it.
    corrected = simulate(applied.found[1].profile, applied.found[1].hardware, calibration.plan)
    assert corrected.step_seconds == pytest.approx(0.1 * measured, rel=0.1)


class SlowCalibration(TinyGPT):
    """Steps under the calibration plan last `factors` tenths of a second, one factor after the other."""

    def __init__(self, planner: SwapPlanner, time: Clock, factors: Sequence[float]) -> None:
        super().__init__("none")
        vars(self).update(planner=planner, time=time, factors=itertools.cycle(factors))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.planner.cycle.calibrating:
            self.time.now += 0.1 * next(self.factors)
        return super().training_step(batch, batch_idx)


def test_only_memory_that_a_prediction_lacks_is_added() -> None:
    first = planner()
    train(SSDOffloadStrategy(**BOTH), callbacks=[first], steps=24, recorded=False)
    runner, comparison = first.cycle.runner, first.cycle.comparison
    assert runner is not None and comparison is not None
    peak = comparison.predicted.gpu_peak_bytes
    for measured, expected in ((peak - 1, peak), (peak + 123, peak + 123)):
        runner.add_missing_memory(replace(comparison, gpu_peak_bytes=measured))
        assert first.cycle.prediction is not None and first.cycle.prediction.gpu_peak_bytes == expected


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_of_less_work_than_the_recorded_one_are_not_measured(time: Clock, accumulate: int) -> None:
    """Without accumulation every second batch is half as large; with it every second step is one micro-batch."""
    first = planner()
    found: list[float] = []

    class Sized(TinyGPT):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            time.now += batch.shape[0] / 4
            if first.cycle.comparison is not None:
                found.append(first.cycle.comparison.step_seconds)
            return super().training_step(batch, batch_idx)

    rows = 3 * [4] if accumulate == 2 else 4 * [2, 4]
    texts = [torch.randn(count, 16) for count in rows]
    trainer = quiet_trainer(
        max_steps=50, accumulate_grad_batches=accumulate, strategy=SSDOffloadStrategy(**BOTH), callbacks=[first]
    )
    trainer.fit(Sized("none"), torch.utils.data.DataLoader(texts, batch_size=None))  # type: ignore[arg-type]
    assert found and found == pytest.approx([float(accumulate)] * len(found), rel=0.01)


def test_a_recorded_batch_that_a_hook_skips_is_recorded_again() -> None:
    """`on_train_batch_start` returns -1 to skip the rest of the epoch, in the step that is recorded first."""

    class Skips(TinyGPT):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
            return -1 if first.cycle.phase == "recording" and not self.current_epoch else None

    first = planner()
    loader = torch.utils.data.DataLoader([torch.randn(2, 16) for _ in range(8)], batch_size=None)  # type: ignore[arg-type]
    quiet_trainer(max_steps=20, strategy=SSDOffloadStrategy(**BOTH), callbacks=[first]).fit(Skips("none"), loader)
    assert first.cycle.runner.profile.saved_bytes > 0 and first.cycle.runner.profile.forward_seconds > 0


def test_the_launch_time_of_a_forward_does_not_include_offloading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each offloaded tensor takes the host one second."""
    made = Clock()
    store = SSDTier.store

    def slow(self: SSDTier, *args: Any, **kwargs: Any) -> Any:
        made.now += 1.0
        return store(self, *args, **kwargs)

    monkeypatch.setattr(SSDTier, "store", slow)
    for module in (offloader, profiler):
        monkeypatch.setattr(module, "perf_counter", made.perf_counter)
    first = planner()
    train(SSDOffloadStrategy(**BOTH | {"host_memory": 0}), callbacks=[first], steps=8, recorded=False)
    assert 0 < sum(item.launch_seconds for unit in first.cycle.runner.profile.units for item in unit.operators) < 1.0
    assert made.now > 10.0


def test_the_launch_time_of_a_forward_does_not_include_waits_for_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait takes a second, as where the CPU steps weights after a backward, and forwards need them."""
    made = Clock()
    wait_for = prefetcher.wait_for

    def slow(future: Any, work: str) -> Any:
        made.now += 1.0
        return wait_for(future, work)

    monkeypatch.setattr(prefetcher, "wait_for", slow)
    for module in (prefetcher, profiler):
        monkeypatch.setattr(module, "perf_counter", made.perf_counter)
    first = planner()
    train(
        SSDOffloadStrategy(**BOTH | {"states": "host", "gpu_memory": "1B"}), callbacks=[first], steps=8, recorded=False
    )
    assert 0 < sum(item.launch_seconds for unit in first.cycle.runner.profile.units for item in unit.operators) < 1.0
    assert made.now > 10.0


@pytest.mark.parametrize(("states", "factor"), [("gpu", 1.0), ("host", OFFLOADED_LAUNCH)])
def test_launch_times_are_those_of_weights_on_the_device(time: Clock, states: str, factor: float) -> None:
    """Blocks take 10 ms of the host, wherever their weights are: those of offloaded ones take longer than others."""
    first = planner()
    train(SSDOffloadStrategy(**BOTH | {"states": states, "gpu_memory": "1B"}), callbacks=[first], steps=8)
    launches = [unit.launch_seconds for unit in first.cycle.runner.profile.units if ".h." in unit.name]
    assert launches == pytest.approx([0.01 / factor] * 3)


def test_the_launch_time_of_a_forward_includes_no_tensors_that_were_not_packed(
    time: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timed steps checkpoint all blocks, of which hooks pack the arguments alone: a tenth of the time for each."""
    monkeypatch.setattr(profiler, "measure_host_overhead", lambda device: HostOverhead(pack=1e-3))
    first = planner()
    train(SSDOffloadStrategy(**BOTH), callbacks=[first], steps=8)
    launches = [unit.launch_seconds for unit in first.cycle.runner.profile.units if ".h." in unit.name]
    assert len(launches) == 3 and all(0.0075 < seconds <= 0.01 for seconds in launches), launches


class Seconds:
    """A fake clock on which each job of the CPU optimizer takes a second."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


def test_the_rate_of_the_cpu_optimizer_is_measured_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate is that of jobs in timed steps, not that of the machine's file."""
    monkeypatch.setattr(step, "perf_counter", Seconds().perf_counter)
    monkeypatch.setattr(step_work, "perf_counter", lambda: 0.0)
    first = planner()
    jobs = []

    class CountJobs(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            flat_params = trainer.strategy.model_states.offloaded.flat_optimizers
            jobs.append(len(flat_params) / sum(item.numel for flat in flat_params for item in flat.param_views))

    strategy = SSDOffloadStrategy(states="host", overlap="none", min_bytes=1, host_memory="64MiB", gpu_memory="1B")
    train_states(tmp_path, strategy, Model(), callbacks=[first, CountJobs()], limit_val_batches=0)
    stepped = first.cycle.profiler.stepped
    assert jobs[0] * stepped.amount == pytest.approx(stepped.seconds)


class Behind(clock.HostClock):
    """The clock of a device that has not reached the last point, because the host runs ahead."""

    last = 0.0

    def now(self) -> float:
        self.last = super().now()
        return self.last

    def elapsed(self, start: float, end: float) -> Any:
        return None if end == self.last else super().elapsed(start, end)


def test_steps_are_compared_while_the_host_runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_runner, "make_clock", lambda device: Behind())
    first = planner()
    train(SSDOffloadStrategy(**BOTH), callbacks=[first], steps=24, recorded=False)
    assert first.cycle.comparison is not None


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_validations_are_not_part_of_a_step(accumulate: int, tmp_path: Path, time: Clock) -> None:
    """A validation follows every third micro-batch, in steps and between them: other steps are measured."""

    class Validated(TinyGPT):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            time.now += 1e6

    first = planner()
    trainer = quiet_trainer(
        tmp_path,
        strategy=SSDOffloadStrategy(**BOTH),
        max_steps=24,
        callbacks=[first],
        accumulate_grad_batches=accumulate,
        val_check_interval=3,
    )
    loader, one = (torch.utils.data.DataLoader(torch.randn(rows, 24), batch_size=2) for rows in (40 * accumulate, 2))
    trainer.fit(Validated("none"), loader, one)
    assert first.cycle.comparison is not None and first.cycle.comparison.step_seconds < 1e4


def test_predictions_and_measurements_are_logged(tmp_path: Path) -> None:
    """The last logged row is the planner's last comparison."""
    first = planner()
    trainer = quiet_trainer(
        strategy=SSDOffloadStrategy(**BOTH),
        max_steps=30,
        callbacks=[first],
        logger=CSVLogger(tmp_path),
        default_root_dir=tmp_path,
    )
    trainer.fit(TinyGPT("none"), torch.utils.data.DataLoader(torch.randn(60, 24), batch_size=2))
    trainer.logger.save()  # type: ignore[union-attr]
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        logged = [row for row in csv.DictReader(file) if row["SwapPlanner/predicted_step_s"]]
    assert first.cycle.comparison is not None and first.cycle.plan is not None
    expected = {
        "predicted_step_s": first.cycle.comparison.predicted.step_seconds,
        "measured_step_s": first.cycle.comparison.step_seconds,
        "predicted_host_bytes": first.cycle.comparison.predicted.host_peak_bytes,
        "measured_host_bytes": first.cycle.comparison.host_peak_bytes,
        "swap_coefficient": swap_coefficient(first.cycle.runner.profile, first.cycle.plan),
    }
    found = {name.removeprefix("SwapPlanner/"): value for name, value in logged[-1].items() if "SwapPlanner/" in name}
    assert {name: float(value) for name, value in found.items()} == pytest.approx(expected)
    assert expected["measured_step_s"] > 0 and expected["predicted_step_s"] > 0


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_the_report_is_made_when_the_training_has_ended(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No step waits for its simulations, which are made only for those who read it."""
    steps: list[int] = []
    make = plan_report.make_report

    def recorded(*arguments: Any, **settings: Any) -> Any:
        steps.append(trainer.global_step)
        return make(*arguments, **settings)

    monkeypatch.setattr(plan_report, "make_report", recorded)
    first = planner()
    trainer = quiet_trainer(tmp_path, strategy=SSDOffloadStrategy(**BOTH), max_steps=20, callbacks=[first])
    with caplog.at_level(level):
        trainer.fit(TinyGPT("none"), torch.utils.data.DataLoader(torch.randn(40, 24), batch_size=2))
    assert first.cycle.plan is not None and steps == [20] * (level == "INFO")
    assert ("report on the last plan" in caplog.text) == (level == "INFO")
    if level == "INFO":  # the comparison has the RAM of the process
        assert re.search(r"host memory: predicted .* measured, and [\d.]+ [MG]iB of the process beside it", caplog.text)


def test_the_prefetch_window_is_the_plans(tmp_path: Path) -> None:
    windows = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            windows.append(trainer.strategy.offloader.policy.window_bytes)

    first = planner()
    train(SSDOffloadStrategy(**BOTH), callbacks=[first, Look()], steps=24)
    assert first.cycle.plan is not None and windows[-1] == first.cycle.plan.window_bytes
    train(SSDOffloadStrategy(**BOTH), callbacks=[planner(), PrefetchScheduler(window_bytes=12345), Look()])
    assert windows[-1] == 12345


class Compiled(TinyGPT):
    def __init__(self, checkpointing: Any) -> None:
        super().__init__(checkpointing)
        self.model.transformer.drop.compile(backend="eager")


def test_invalid_arguments_and_trainings_are_refused(tmp_path: Path) -> None:
    for arguments, message in (
        ({"planner": "best"}, "`planner='best'` must be one of 'holistic'"),
        ({"gpu_memory": "much"}, "gpu_memory"),
        ({"warm_up": 0}, "`warm_up=0`"),
    ):
        with pytest.raises(ValueError, match=message):
            SwapPlanner(**arguments)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        SwapPlanner(plan=tmp_path / "missing.yaml")
    with pytest.raises(ValueError, match="SwapPlanner needs `strategy='ssd_offload'`"):
        train("auto", callbacks=[planner()])
    with pytest.raises(ValueError, match="`offload=0.5` decides about them, too"):
        train(SSDOffloadStrategy(offload=0.5), callbacks=[planner()])
    with pytest.raises(ValueError, match="both measure the first steps"):
        train(SSDOffloadStrategy(**BOTH), callbacks=[planner(), ModelProfiler(tmp_path / "profile.json")])
    with pytest.raises(ValueError, match="compiles a part of `training_step`"):
        train(SSDOffloadStrategy(**BOTH), callbacks=[planner()], model=CompiledFunction)
    with pytest.raises(ValueError, match=r"model.transformer.drop is compiled"):
        train(SSDOffloadStrategy(**BOTH), callbacks=[planner()], model=Compiled)


def test_a_plan_of_another_model_is_refused(tmp_path: Path) -> None:
    first = planner(save=tmp_path / "plan.yaml")
    train(SSDOffloadStrategy(**BOTH), callbacks=[first])
    assert first.cycle.plan is not None
    with pytest.raises(ValueError, match=r"`units\.model"):
        train(SSDOffloadStrategy(**BOTH), callbacks=[pinned(first.cycle.plan)], model=SharedStorages)


def test_short_trainings_have_no_plan(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train(SSDOffloadStrategy(**BOTH), callbacks=[SwapPlanner()], steps=2)
    assert "takes 7 steps: there was no plan" in caplog.text


def test_a_training_that_ends_while_it_is_profiled_again_had_a_plan(caplog: pytest.LogCaptureFixture) -> None:
    """A part of the model is unfrozen after the plan was applied."""

    class Unfreeze(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            planned = first.cycle.plan is not None and not first.cycle.calibrating
            pl_module.model.transformer.h[0].requires_grad_(planned)

        def on_train_end(self, *_: Any) -> None:
            assert first.cycle is not None and first.cycle.measuring

    first = planner()
    with caplog.at_level(logging.INFO):
        train(SSDOffloadStrategy(**BOTH), callbacks=[Unfreeze(), first], steps=9, recorded=False)
    assert "other parameters are trained than before: the training is profiled again" in caplog.text
    assert "there was no plan" not in caplog.text and "report on the last plan" in caplog.text


def test_no_hooks_are_left_on_the_model() -> None:
    module = TinyGPT("none")
    train(SSDOffloadStrategy(**BOTH), callbacks=[planner()], model=lambda _: module)
    for part in module.modules():
        assert not part._forward_pre_hooks and not part._forward_hooks
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_a_users_plan_places_model_states(tmp_path: Path) -> None:
    """Weights and states of units are placed on all three tiers from the start."""
    how: Any = {"limit_val_batches": 0}
    plain = train_states(tmp_path, "auto", Model(), **how)
    first = planner()
    auto: Any = {"min_bytes": 1, "host_memory": "64MiB"}
    train_states(tmp_path, SSDOffloadStrategy(**auto), Model(), callbacks=[first], **how)
    assert first.cycle.plan is not None
    tiers: list[Any] = [("gpu", "gpu"), ("host", "host"), ("host", "ssd"), ("ssd", "ssd"), ("ssd", "host")]
    drawn = draw(first.cycle.plan, first.cycle.runner.profile, 0)
    units = {
        name: replace(unit, weights=weights, states=states)
        for (name, unit), (weights, states) in zip(drawn.units.items(), [*tiers, tiers[0]], strict=True)
    }
    second = pinned(replace(drawn, units=units))
    model = train_states(tmp_path, SSDOffloadStrategy(**auto), Model(), callbacks=[second], **how)
    assert second.cycle.plan is not None
    found = [(unit.weights, unit.states) for unit in second.cycle.plan.units.values()]
    assert found == [*tiers, tiers[0]]
    assert model.losses == plain.losses
    assert_same(list(model.parameters()), list(plain.parameters()))
    with pytest.raises(ValueError, match="on SSDs, and `tier='host'` rules that out"):
        train_states(tmp_path, SSDOffloadStrategy(tier="host", **auto), Model(), callbacks=[second], **how)
    half = {**units, "blocks.1": replace(units["blocks.1"], weights="gpu")}
    with pytest.raises(ValueError, match="on the GPU with both of them"):
        train_states(
            tmp_path, SSDOffloadStrategy(**auto), Model(), callbacks=[pinned(replace(drawn, units=half))], **how
        )
    del units["blocks.1"]
    with pytest.raises(ValueError, match=r"does not place the unit `blocks\.1`"):
        train_states(
            tmp_path, SSDOffloadStrategy(**auto), Model(), callbacks=[pinned(replace(drawn, units=units))], **how
        )


@pytest.mark.parametrize("seed", [0, *(thorough(seed) for seed in range(1, 4))])
def test_a_plan_file_places_parts_of_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Parts of one unit are in tiers of their own from the start, with the same numbers."""
    monkeypatch.setattr(units, "PART_ELEMENTS", 512)
    how: dict[str, Any] = {"limit_val_batches": 0}
    common: dict[str, Any] = {"min_bytes": 1, "host_memory": "64MiB"}
    first = planner()
    plain = train_states(tmp_path, SSDOffloadStrategy(gpu_memory="1B", **common), Model(), callbacks=[first], **how)
    assert first.cycle.plan is not None
    generator = random.Random(seed)
    parts = [PartPlan(*generator.choice(TIERS)) for _ in first.cycle.runner.profile.parts]
    drawn = draw(first.cycle.plan, first.cycle.runner.profile, seed).placed(first.cycle.runner.profile, parts)
    assert any(unit.parts for unit in drawn.units.values())
    placed: dict[str, tuple[str, str]] = {}

    class Placements(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            for flat, store in trainer.strategy.model_states.stores.items():
                placed.update({view.name: store.buffers.tiers for view in flat.param_views})

    second = pinned(drawn)
    strategy = SSDOffloadStrategy(gpu_memory="64MiB", **common)
    actual = train_states(tmp_path, strategy, Model(), callbacks=[second, Placements()], **how)
    assert_same(actual, plain)
    assert second.cycle.plan is not None
    assert {**second.cycle.plan.units, "embed (2)": None} == {**drawn.units, "embed (2)": None}  # which has no states
    planned = {
        name: drawn.units[unit.name].of(part.name)
        for unit in find_units(actual)
        for part in unit.parts
        for name, _ in part.parameters
    }
    assert placed == {name: (part.weights, part.states) for name, part in planned.items() if part.weights != "gpu"}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("skipped", [range(0, 100, 2), range(1, 100, 2), range(1, 100, 3), range(7), range(100)])
@pytest.mark.parametrize(("accumulate", "after"), [(1, False), (2, False), (2, True)])
def test_batches_that_training_step_skips_before_or_after_the_forward(
    skipped: Sequence[int], accumulate: int, after: bool, tmp_path: Path
) -> None:
    """The next step that begins with a forward and its backward is recorded in place of one that does not."""

    class Skips(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            skips = batch_idx in skipped
            loss = None if skips and not after else super().training_step(batch, batch_idx)
            return None if skips else loss

    how: dict[str, Any] = {"accumulate_grad_batches": accumulate, "batches": 12}
    plain = train_states(tmp_path, "auto", Skips(), **how)
    first = planner()
    assert_same(train_states(tmp_path, SSDOffloadStrategy(**BOTH), Skips(), callbacks=[first], **how), plain)
    assert (first.cycle.plan is None) == all(batch in skipped for batch in range(0, 100, accumulate))
