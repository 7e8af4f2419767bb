"""`offload="auto"` on a CUDA device trains if plain Lightning can't, and disables hooks if all fits."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ssd import PrefetchScheduler, SSDOffloadStrategy
from lightning_ssd.autoplan import recompilation
from lightning_ssd.callbacks import AutoPlanner
from lightning_ssd.model_states import StatesConfig
from tests.support.garbage import collect
from tests.support.meter import use_slow_transfers
from tests.support.plans import KEEP_CHECKPOINT_OFFLOAD, in_turn, pinned, planner, quiet_trainer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.usefixtures("deterministic")]

ROWS, TOKENS, STEPS = 8, 1024, 32


@pytest.fixture
def uncapped() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


class Llama(pl.LightningModule):
    """A Llama of 8 layers that saves some GiB of a batch, and whose weights and states take less than half a GiB."""

    def __init__(self, compiled: bool = False, mode: str | None = None) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=512, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
                num_key_value_heads=2, max_position_embeddings=2 * TOKENS, use_cache=False,
            )
        )  # fmt: skip
        if compiled:
            for layer in self.model.model.layers:
                layer.compile(mode=mode)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class See(pl.Callback):
    """Records outcomes and hooks of each micro-batch, the peak of memory, and the number of units that a plan frees."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.hooks: list[bool] = []
        self.freeing = self.peak = 0
        self.offloaded: list[int] = []
        """Flat parameters that are off the device in each micro-batch."""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        auto = next((one for one in trainer.callbacks if isinstance(one, AutoPlanner)), None)
        if auto is not None:
            self.outcomes.append(auto.outcome)
            self.hooks.append(trainer.strategy.offloader.policy.hooks_enabled)
            states = trainer.strategy.model_states
            self.offloaded.append(0 if states is None else len(states.stores))
            plan = None if auto.planner is None else auto.planner.plan
            self.freeing = 0 if plan is None else plan.num_freeing

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.peak = torch.cuda.max_memory_allocated()


def fit(
    root: Path,
    strategy: str,
    lengths: Sequence[int],
    compiled: bool = False,
    mode: str | None = None,
    precision: Any = "32-true",
    callbacks: Sequence[pl.Callback] = (),
) -> tuple[list[float], See]:
    """Trains on one batch for each length, in tokens a sample; returns losses, and records of each micro-batch."""
    collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    generator = torch.Generator().manual_seed(1)
    data: Any = [torch.randint(0, 512, (ROWS, length), generator=generator) for length in lengths]
    see, module = See(), Llama(compiled, mode)
    trainer = quiet_trainer(
        root, accelerator="gpu", strategy=strategy, callbacks=[see, *callbacks], max_epochs=1, precision=precision
    )
    trainer.fit(module, DataLoader(data, batch_size=None))
    return [loss.item() for loss in module.losses], see


def cap(nbytes: float) -> None:
    collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(nbytes / torch.cuda.get_device_properties(0).total_memory)


@pytest.mark.usefixtures("uncapped")
def test_a_training_that_has_no_room_is_planned(tmp_path: Path) -> None:
    expected, plain = fit(tmp_path, "auto", [TOKENS] * STEPS)
    cap(0.65 * plain.peak)
    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path, "auto", [TOKENS] * 2)
    found, ours = fit(tmp_path, "ssd_offload", [TOKENS] * STEPS)
    assert found == expected
    assert ours.outcomes[-1] == "plan" and "plan" in ours.outcomes[:5]
    assert ours.freeing > 0  # whether the plan checkpoints units or recomputes operators depends on measured times


@pytest.mark.usefixtures("uncapped")
def test_larger_batches_run_under_a_plan(tmp_path: Path) -> None:
    lengths = [TOKENS] * 20 + [TOKENS * 5 // 4, TOKENS, TOKENS // 2, TOKENS * 5 // 4] + [TOKENS * 5 // 4] * 16
    expected, plain = fit(tmp_path, "auto", lengths)
    cap(0.6 * plain.peak)
    found, ours = fit(tmp_path, "ssd_offload", lengths)
    assert found == expected and ours.outcomes[-1] == "plan"


@pytest.mark.parametrize("compiled", [False, True])
def test_no_hook_stays_where_everything_fits(compiled: bool, tmp_path: Path) -> None:
    lengths = [TOKENS // 2] * 5 + [TOKENS] * 2 + [TOKENS // 2] * 2
    expected, plain = fit(tmp_path, "auto", lengths, compiled)
    found, ours = fit(tmp_path, "ssd_offload", lengths, compiled)
    assert found == expected
    assert ours.outcomes[2:] == ["keep"] * 7
    assert ours.hooks == [True, True, False, False, False, True, False, False, False]


@pytest.mark.usefixtures("uncapped")
def test_a_compiled_training_that_has_no_room_is_planned(tmp_path: Path) -> None:
    expected, plain = fit(tmp_path, "auto", [TOKENS] * STEPS, compiled=True)
    cap(0.75 * plain.peak)
    found, ours = fit(tmp_path, "ssd_offload", [TOKENS] * STEPS, compiled=True)
    assert found == expected and all(ours.hooks)
    assert ours.outcomes[-1] == "plan"


def test_compiled_units_are_checkpointed_with_the_same_numbers(tmp_path: Path) -> None:
    """Backward runs the code of the forward again. The plan is the user's, so that no measured time chooses."""
    lengths = [TOKENS] * (STEPS // 2)
    expected, _ = fit(tmp_path, "auto", lengths, compiled=True)
    first = planner(machine=None)
    fit(tmp_path, "ssd_offload", lengths, compiled=True, callbacks=[first])
    assert first.cycle.plan is not None
    plan = in_turn(first.cycle.plan, first.cycle.runner.profile, KEEP_CHECKPOINT_OFFLOAD)
    second = pinned(plan)
    found, _ = fit(tmp_path, "ssd_offload", lengths, compiled=True, callbacks=[second])
    assert found == expected
    assert second.cycle.plan is not None and sum(one.checkpoint for one in second.cycle.plan.units.values()) > 1


@pytest.mark.usefixtures("uncapped")
def test_compiled_code_without_room_is_compiled_again_to_save_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a plan would cost. Numbers are the same within rounding."""
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(recompilation, "MIN_PLAN_LOSS", -1.0)
    expected, plain = fit(tmp_path, "auto", [TOKENS] * STEPS, compiled=True)
    cap(0.85 * plain.peak)
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        found, _ = fit(tmp_path, "ssd_offload", [TOKENS] * STEPS, compiled=True)
    assert "code is compiled again with activation_memory_budget=0." in caplog.text
    assert found == pytest.approx(expected, rel=1e-2)


@pytest.mark.usefixtures("uncapped")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_offloaded_states_of_compiled_code_are_moved_to_the_device(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where saved tensors leave room for all of them. In bf16-mixed, weights become fp32.

    The profile of the machine has a link that is slower than any computation.
    """
    expected, _ = fit(tmp_path, "auto", [TOKENS] * STEPS, compiled=True, precision=precision)
    monkeypatch.setattr(StatesConfig, "offloads", lambda *_, **__: True)
    use_slow_transfers(monkeypatch)
    found, ours = fit(tmp_path, "ssd_offload", [TOKENS] * STEPS, compiled=True, precision=precision)
    assert found == pytest.approx(expected, rel=1e-2)
    assert ours.offloaded[0] > 0 == ours.offloaded[-1]


def test_cuda_graphs_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Saved tensors of CUDA graphs are in memory of these graphs, and are not offloaded.

    A later training of the process, whose compiled code records none, is not taken for one with graphs.
    """
    expected, _ = fit(tmp_path, "auto", [TOKENS] * 8, compiled=True, mode="reduce-overhead")
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        found, ours = fit(tmp_path, "ssd_offload", [TOKENS] * 8, compiled=True, mode="reduce-overhead")
    assert found == expected and ours.outcomes[1:] == ["keep"] * 7 and not any(ours.hooks[1:])
    assert "records CUDA graphs" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        fit(tmp_path, "ssd_offload", [TOKENS] * 2, compiled=True)
    assert "records CUDA graphs" not in caplog.text


LEFT: list[str] = []
"""Phases that are still to run out of memory: a global variable, which no attempt restores."""


class _RunsOut(torch.autograd.Function):
    """Its backward asks for more memory than the GPU has, once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        if "backward" in LEFT:
            LEFT.remove("backward")
            torch.empty(2**44, dtype=torch.uint8, device=grad.device)
        return grad


class Demanding(Llama):
    """Asks for more memory than the GPU has, once in a forward and once in a backward."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and "forward" in LEFT:
            LEFT.remove("forward")
            torch.empty(2**44, dtype=torch.uint8, device=self.device)
        return _RunsOut.apply(loss) if batch_idx == 3 else loss  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_micro_batch_that_runs_out_of_memory_is_run_again(
    precision: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generator = torch.Generator().manual_seed(1)
    data: Any = [torch.randint(0, 512, (ROWS, TOKENS // 2), generator=generator) for _ in range(8)]

    def losses(strategy: str) -> list[float]:
        module = Demanding()
        trainer = quiet_trainer(
            tmp_path, accelerator="gpu", strategy=strategy, max_epochs=1, accumulate_grad_batches=2, precision=precision
        )
        trainer.fit(module, DataLoader(data, batch_size=None))
        return [loss.item() for loss in module.losses]

    LEFT.clear()
    expected = losses("auto")
    LEFT.extend(["forward", "backward"])
    with caplog.at_level("INFO"):
        assert losses("ssd_offload") == expected
    assert LEFT == []
    lines = [line for line in caplog.messages if "has run out of memory in the" in line]
    assert len(lines) == 2 and "forward" in lines[0] and "backward" in lines[1]


@pytest.mark.usefixtures("uncapped")
@pytest.mark.parametrize("room", [1.1, 1.3])
def test_trains_from_the_first_step_wherever_offloading_everything_fits(room: float, tmp_path: Path) -> None:
    lengths = [TOKENS] * 20
    expected, _ = fit(tmp_path, "auto", lengths)
    window: Any = PrefetchScheduler(window_bytes=0)
    with_all_offloaded: Any = SSDOffloadStrategy(offload=1.0)
    collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    module = Llama()
    generator = torch.Generator().manual_seed(1)
    data: Any = [torch.randint(0, 512, (ROWS, TOKENS), generator=generator) for _ in range(2)]
    trainer = quiet_trainer(tmp_path, accelerator="gpu", strategy=with_all_offloaded, callbacks=[window], max_epochs=1)
    trainer.fit(module, DataLoader(data, batch_size=None))
    least = torch.cuda.max_memory_reserved()
    del module, trainer
    cap(room * least)
    found, _ = fit(tmp_path, "ssd_offload", lengths)
    assert found == expected
