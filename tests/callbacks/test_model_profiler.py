"""`ModelProfiler`: the profile equals the model's known figures, and the training does not change."""

import contextlib
import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_ssd import ModelProfiler, SSDOffloadStrategy, SwapPlanner, cli, tensor_locations
from lightning_ssd.callbacks.find import find_offloader
from lightning_ssd.device import clock as device_clock
from lightning_ssd.planning import ModelProfile
from lightning_ssd.profiling import profiler
from tests.support.compare import assert_same
from tests.support.models import Model
from tests.support.states import train
from tests.support.trainings import make_trainer

MACHINE = str(Path(__file__).parent.parent.parent / "configs/machines/h100.json")


class Saved(pl.Callback):
    """Bytes that a micro-batch saves."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        offloader = find_offloader(trainer)
        assert offloader is not None
        self.nbytes = offloader.stats().saved / offloader.stats().micro_batches


def test_a_training_without_hooks_is_profiled_and_has_none_afterwards(tmp_path: Path) -> None:
    """With everything on the GPU and `offload="none"`, saved-tensor hooks are active in profiled forwards alone."""
    enabled: list[bool] = []

    class Hooks(pl.Callback):
        def on_before_backward(self, trainer: Any, *_: Any) -> None:
            enabled.append(trainer.strategy.offloader.policy.hooks_enabled)

    names = []
    for number, offload in enumerate((0.5, "none")):
        enabled.clear()
        path = tmp_path / f"{number}.json"
        strategy = SSDOffloadStrategy(states="gpu", min_bytes=1, offload=offload)
        train(tmp_path, strategy, Model(), callbacks=[ModelProfiler(path, 2, 2), Hooks()], limit_val_batches=0)
        names.append([[one.name for one in unit.operators] for unit in ModelProfile.from_json(path).units])
    assert names[0] == names[1]
    assert enabled == [False, True, True, *[False] * (len(enabled) - 3)]  # recorded, then checked


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("states", ["gpu", "host"])
@pytest.mark.parametrize(("accumulate", "clip"), [(1, 1.0), (3, 1.0), (1, None)])
def test_a_profile_has_the_models_bytes_and_flops(
    tmp_path: Path, states: Any, accumulate: int, clip: float | None
) -> None:
    strategy = SSDOffloadStrategy(states=states, min_bytes=1, offload=0.5, gpu_memory="1B")
    saved = Saved()
    callbacks = [ModelProfiler(tmp_path / "profile.json", warm_up=2, steps=2), saved]
    how: Any = dict(accumulate_grad_batches=accumulate, gradient_clip_val=clip, limit_val_batches=0)
    model: Any = train(tmp_path, strategy, Model(), callbacks=callbacks, **how)
    assert_same(model, train(tmp_path, "auto", Model(), **how))
    assert not [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    profile = ModelProfile.from_json(tmp_path / "profile.json")
    assert profile.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (profile.micro_batches, profile.samples, profile.tokens) == (accumulate, 4, 4 * 9)
    assert profile.synchronizes  # on a CPU
    assert profile.clip_norm == (clip is not None)
    assert profile.shares_gradients == (clip is None and states == "host")
    assert profile.param_budget_bytes == (None if states == "gpu" else 1)
    names = [unit.name for unit in profile.units]
    assert names == ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "embed (2)"]  # the head's weight is tied
    assert profile.saved_bytes == pytest.approx(saved.nbytes)
    for unit in profile.units[1:5]:
        operators = {operator.name: operator for operator in unit.operators}
        assert {"norm:native_layer_norm", "up:addmm", "rest"} < operators.keys()
        assert unit.input_bytes == 4 * 8 * 16 * 4  # rows, tokens, width, fp32
        assert unit.state_bytes_read == 8 * unit.parameters or states == "host"  # parameters are aligned
        assert 8 * unit.parameters <= unit.state_bytes_read < 9 * unit.parameters
        up, rest = operators["up:addmm"], operators["rest"]  # `down` saves nothing
        assert up.forward_seconds > 0 and up.backward_seconds > 0 and up.recompute_seconds == up.forward_seconds
        assert up.flops == rest.flops == 2 * 4 * 8 * 16 * 64
        assert up.launch_seconds > 0
        assert up.operations == up.recompute_operations == 1
        assert operators["norm:native_layer_norm"].flops == 0


def test_a_plan_is_made_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    strategy = SSDOffloadStrategy(states="gpu", min_bytes=1)
    train(tmp_path, strategy, Model(), callbacks=[ModelProfiler(path, 1, 1)], precision="bf16-mixed")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("trainer: {}\n")
    assert cli.main(["plan", str(recipe), "--profile", str(path), "--machine", MACHINE, "--verbose"]) == 0
    printed = capsys.readouterr().out
    assert "blocks.0 .. blocks.3" in printed and "It fits." in printed


def test_wrong_settings_and_short_trainings_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="`warm_up=0`"):
        ModelProfiler(tmp_path / "profile.json", warm_up=0)
    with pytest.raises(ValueError, match="ModelProfiler needs `strategy='ssd_offload'`"):
        train(tmp_path, "auto", Model(), callbacks=[ModelProfiler(tmp_path / "profile.json")])
    strategy = SSDOffloadStrategy(states="gpu", min_bytes=1)
    train(tmp_path, strategy, Model(), callbacks=[ModelProfiler(tmp_path / "profile.json", steps=1000)])
    assert "training ended before 1000 steps were profiled" in caplog.text
    assert not (tmp_path / "profile.json").exists()


def test_files_are_written_relative_to_the_first_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    callback = ModelProfiler("profile.json", 1, 1, lifetimes="lifetimes.json")
    monkeypatch.chdir("elsewhere")
    train(tmp_path, SSDOffloadStrategy(states="gpu", min_bytes=1), Model(), callbacks=[callback])
    assert {file.name for file in tmp_path.iterdir()} == {"elsewhere", "profile.json", "lifetimes.json"}
    assert not list((tmp_path / "elsewhere").iterdir())


def test_files_that_can_not_be_written_are_refused_before_the_first_step(tmp_path: Path) -> None:
    class Untrained(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise AssertionError("the training has begun")

    (tmp_path / "file").touch()
    good = tmp_path / "profile.json"
    with pytest.raises(ValueError, match="`path` and `lifetimes` of ModelProfiler are both"):
        ModelProfiler(good, lifetimes=str(good))
    for bad in (tmp_path, tmp_path / "file" / "profile.json"):
        for callback, argument in (
            (ModelProfiler(bad), "`path` of ModelProfiler"),
            (ModelProfiler(good, lifetimes=bad), "`lifetimes` of ModelProfiler"),
            (SwapPlanner(save=bad), "`save` of SwapPlanner"),
        ):
            with pytest.raises(ValueError, match=f"{argument} can't be '{bad}'"):
                train(tmp_path, SSDOffloadStrategy(states="gpu", min_bytes=1), Untrained(), callbacks=[callback])


class Interrupting(Model):
    """Fails in the recorded forward, or returns no loss."""

    fails = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 0 and self.fails:
            raise InterruptedError
        return None if batch_idx == 0 else loss


@pytest.mark.parametrize("fails", [False, True])
def test_no_hooks_or_modes_are_left_after_profiling(
    tmp_path: Path, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Interrupting, "fails", fails)
    strategy = SSDOffloadStrategy(states="gpu", min_bytes=1)
    model = Interrupting()
    monkeypatch.setattr(copy, "deepcopy", lambda same: same)  # so that `train` starts from the same model
    with pytest.raises(InterruptedError) if fails else contextlib.nullcontext():
        train(tmp_path, strategy, model, callbacks=[ModelProfiler(tmp_path / "profile.json", 1, 2)])
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]


def test_validation_and_steps_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time outside of forward and backward is not attributed to operators."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    class Waiting(Model):
        def on_validation_start(self) -> None:
            nonlocal now
            now += 1e6

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            nonlocal now
            now += 1e6

    monkeypatch.setattr(device_clock, "perf_counter", clock)
    strategy = SSDOffloadStrategy(states="gpu", min_bytes=1)
    callbacks = [ModelProfiler(tmp_path / "profile.json", 1, 4)]
    train(tmp_path, strategy, Waiting(), callbacks=callbacks, val_check_interval=2)
    profile = ModelProfile.from_json(tmp_path / "profile.json")
    assert 0 < profile.forward_seconds < 1e4 and 0 < profile.backward_seconds < 1e4
    assert profile.between_seconds is not None and 1e6 <= profile.between_seconds < 1.01e6


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("drained", [False, True])
def test_a_host_that_waits_does_so_once_a_step(
    tmp_path: Path, accumulate: int, drained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the device is a backward behind except where a step waits for it, the host waits in every step."""
    behind = True

    class Behind(device_clock.HostClock):
        def elapsed(self, start: float, end: float) -> Any:
            return None if behind and start == end else super().elapsed(start, end)

    class Drains(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            nonlocal behind
            behind = trainer.fit_loop._should_accumulate() or not drained

        def on_before_backward(self, *_: Any) -> None:
            nonlocal behind
            behind = True

        def on_train_end(self, *_: Any) -> None:
            nonlocal behind
            behind = False

    monkeypatch.setattr(profiler, "make_clock", lambda device: Behind())
    path = tmp_path / "profile.json"
    callbacks = [Drains(), ModelProfiler(path, warm_up=1, steps=2)]
    strategy = SSDOffloadStrategy(states="gpu", min_bytes=1)
    train(tmp_path, strategy, Model(), callbacks=callbacks, accumulate_grad_batches=accumulate, batches=12)
    assert ModelProfile.from_json(path).synchronizes == drained


class SparseGradients(pl.LightningModule):
    """An embedding whose gradient, and with it the optimizer's momentum, is sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = torch.nn.Embedding(32, 8, sparse=True)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.located: list[int] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        hidden = self.rows(batch)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return hidden.square().mean()

    def on_train_end(self) -> None:
        if isinstance(self.trainer.strategy, SSDOffloadStrategy):
            self.located = [row.nbytes for row in tensor_locations(self.trainer) if row.kind == "optimizer state"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.arange(96) % 16, batch_size=8)


def test_sparse_optimizer_states_have_the_bytes_of_their_elements(tmp_path: Path) -> None:
    """They are profiled and located; the training does not change."""
    modules = []
    for number in range(2):
        modules.append(SparseGradients())
        strategy = SSDOffloadStrategy(states="gpu", min_bytes=1, offload=1.0) if number else "auto"
        callbacks = [ModelProfiler(tmp_path / "profile.json", warm_up=2, steps=2)] if number else []
        make_trainer(tmp_path, strategy, callbacks=callbacks).fit(modules[-1])
    assert_same(modules[1].state_dict(), modules[0].state_dict())
    sparse, *dense = modules[1].located
    assert dense == [8 * 8 * 4, 8 * 4] * 2
    assert sparse >= 16 * (8 * 4 + 8)
    assert len(ModelProfile.from_json(tmp_path / "profile.json").units) > 1
