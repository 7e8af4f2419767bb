"""Trainings whose optimizer states are in fewer bytes than fp32 (`state_format`)."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_ssd import SSDOffloadStrategy, SwapPlanner
from lightning_ssd.locations import tensor_locations
from lightning_ssd.model_states import AdamOptimizer, StagedState, StepHalf, StepInput
from lightning_ssd.model_states.checkpoints.lazy import LazyTensor
from lightning_ssd.model_states.optimizers import adam_c
from lightning_ssd.profiling import machine
from tests.support.compare import assert_same, same
from tests.support.models import Model
from tests.support.states import host, ssd, train

FORMATS = ["bf16", "8bit"]


def amsgrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True)


def slow(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def states_of(trained: Any) -> dict[str, Any]:
    """Returns the optimizer's states after training."""
    return {
        f"{number}.{name}": torch.as_tensor(value).clone()
        for number, state in trained.trainer.optimizers[0].state_dict()["state"].items()
        for name, value in state.items()
    }


@pytest.mark.parametrize("state_format", FORMATS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_numbers_do_not_depend_on_tiers_overlap_and_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Any, state_format: Any
) -> None:
    """Weights, losses, and the states that the user's optimizer has after training, which are in fp32."""
    how: dict[str, Any] = {"state_format": state_format}
    expected = train(tmp_path, host(**how), Model(slow), precision=precision)
    states = states_of(expected)
    assert all(value.dtype == torch.float32 for value in states.values())
    assert any(bool(value.any()) for name, value in states.items() if "exp_avg" in name)
    for strategy in (ssd(**how), ssd(overlap="none", **how)):
        found = train(tmp_path, strategy, Model(slow), precision=precision)
        assert_same(found, expected)
        assert same(states_of(found), states)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        adam_c.load_library.cache_clear()
        assert_same(train(tmp_path, host(**how), Model(slow), precision=precision), expected)
    adam_c.load_library.cache_clear()


@pytest.mark.parametrize("state_format", FORMATS)
def test_states_stay_in_their_format_after_the_training_until_they_are_read(tmp_path: Path, state_format: Any) -> None:
    """Copies in fp32 would take several times their bytes, and more host memory than the training."""
    trained = train(tmp_path, host(state_format=state_format), Model(slow))
    states = [state["exp_avg"] for state in trained.trainer.optimizers[0].state.values()]
    assert states and all(isinstance(state, LazyTensor) for state in states)
    assert all(bool((state != 0).any()) for state in states)
    assert not any(isinstance(state, LazyTensor) for state in states)


@pytest.mark.parametrize("state_format", FORMATS)
@pytest.mark.parametrize("checkpoints", ["file", "sharded"])
def test_a_training_resumes_from_its_checkpoint_bit_for_bit(
    tmp_path: Path, state_format: Any, checkpoints: Any
) -> None:
    """The checkpoint has fp32 states, which plain Lightning loads, too."""
    how: dict[str, Any] = {"state_format": state_format, "checkpoints": checkpoints}
    expected = train(tmp_path, host(**how), Model())
    saves = pl.callbacks.ModelCheckpoint(tmp_path / "saved", save_last=True)
    train(tmp_path, ssd(**how), Model(), max_epochs=1, enable_checkpointing=True, callbacks=[saves])
    path = tmp_path / "saved" / "last.ckpt"
    resumed = train(tmp_path, host(**how), Model(), ckpt_path=path)
    assert resumed.losses == expected.losses[-len(resumed.losses) :]
    assert same(dict(resumed.state_dict()), dict(expected.state_dict()))
    assert same(states_of(resumed), states_of(expected))
    if checkpoints == "file":
        (states,) = torch.load(path, weights_only=False)["optimizer_states"]
        assert {value.dtype for state in states["state"].values() for value in state.values()} == {torch.float32}
        plain = train(tmp_path, "auto", Model(), ckpt_path=path)
        assert plain.losses != resumed.losses
        assert plain.losses[-1] == pytest.approx(resumed.losses[-1], rel=0.05)


@pytest.mark.parametrize("state_format", FORMATS)
def test_a_training_converges_as_with_exact_states(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, state_format: Any
) -> None:
    """The first log lines name the approximation."""
    exact, rounded = (
        train(tmp_path, host(state_format=kind), Model(slow), precision="bf16-mixed", max_epochs=12)
        for kind in ("fp32", state_format)
    )
    lines = " ".join(caplog.text.replace("ssd_offload: ", "").split())
    assert lines.count(" rounded to ") == lines.count(f"; exp_avg, exp_avg_sq rounded to {state_format} ") == 1
    assert rounded.losses != exact.losses
    assert rounded.losses[-1] < 0.7 * rounded.losses[0]
    assert rounded.losses[-1] == pytest.approx(exact.losses[-1], rel=0.05)


@pytest.mark.parametrize(("state_format", "nbytes"), [("fp32", 14), ("split", 12), ("bf16", 8), ("8bit", 6)])
def test_bytes_of_a_parameter(tmp_path: Path, state_format: Any, nbytes: int) -> None:
    """Weight, master weight and both moments, without the gradient, and without the scales of blocks."""
    found: list[float] = []

    class Watching(Model):
        def on_train_batch_end(self, *_: Any) -> None:
            strategy: Any = self.trainer.strategy
            layouts = [store.layout for store in strategy.model_states.stores.values()]
            numel = sum(layout.flat.numel for layout in layouts)
            found.append(sum(layout.flat.nbytes + layout.opt_state_bytes for layout in layouts) / numel)
            rows = [row for row in tensor_locations(self.trainer) if row.kind != "gradient" and "scale" not in row.name]
            assert sum(row.nbytes for row in rows) == nbytes * sum(p.numel() for p in self.parameters())

    train(tmp_path, host(state_format=state_format), Watching(), precision="bf16-true", max_epochs=1, batches=2)
    assert found == [nbytes + (8 / 256 if state_format == "8bit" else 0)] * 2


@pytest.mark.parametrize("state_format", FORMATS)
@pytest.mark.parametrize("states", ["host", "auto"])
@pytest.mark.parametrize(
    ("make_optimizer", "message"),
    [
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), "parameters have the optimizer SGD"),
        (lambda parameters: torch.optim.RMSprop(parameters), "parameters have the optimizer RMSprop"),
        (amsgrad, "AdamW: .*without `amsgrad`.*state_format='split'"),
    ],
    ids=["sgd", "rmsprop", "amsgrad"],
)
def test_other_optimizers_are_refused_at_start(
    tmp_path: Path, make_optimizer: Any, message: str, states: Any, state_format: Any
) -> None:
    """With `states="auto"`, all states fit on the device."""
    strategy = SSDOffloadStrategy(states=states, min_bytes=1, state_format=state_format)
    with pytest.raises(ValueError, match=message):
        train(tmp_path, strategy, Model(make_optimizer))


def test_options_that_change_to_unsupported_ones_are_refused(tmp_path: Path) -> None:
    class Changing(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                self.trainer.optimizers[0].param_groups[0]["betas"] = (torch.tensor(0.9), torch.tensor(0.999))

    with pytest.raises(RuntimeError, match="numbers as `betas`"):
        train(tmp_path, host(state_format="bf16"), Changing(slow))


@pytest.mark.parametrize("state_format", ["fp32", "8bit"])
def test_plans_have_the_rate_of_the_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state_format: Any) -> None:
    """The planner times steps of the CPU's optimizer on states of the training's format."""
    timed: list[int] = []

    class Watched(AdamOptimizer):
        def step(self, given: StepInput, staged: StagedState, half: StepHalf = "whole") -> None:
            timed.append(sum(values.nbytes for values in staged.states.values()) // len(staged.weights))
            super().step(given, staged, half)

    monkeypatch.setattr(machine, "AdamOptimizer", Watched)
    for size in ("STEP_PARAMETERS", "COPY_BYTES"):
        monkeypatch.setattr(machine, size, 2**16)
    train(tmp_path, host(state_format=state_format), Model(slow), batches=1, max_epochs=1, callbacks=[SwapPlanner()])
    assert set(timed) == {8 if state_format == "fp32" else 2}
