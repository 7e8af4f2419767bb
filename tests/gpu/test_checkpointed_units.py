"""Checkpointed units on a CUDA device: numbers of plain Lightning, and the memory that the plan predicts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration

from lightning_ssd import SSDOffloadStrategy, SwapPlanner
from lightning_ssd.activations import PlanMode, UnitCall
from lightning_ssd.planning import HostOverhead
from lightning_ssd.profiling import measure_machine
from tests.support.compare import assert_same
from tests.support.garbage import collect
from tests.support.plans import KEEP_CHECKPOINT_OFFLOAD, in_turn, pinned, quiet_trainer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.usefixtures("deterministic")]

ROWS, TOKENS, STEPS = 8, 512, 40


class HostBound(pl.LightningModule):
    """A T5 with small operators, whose launches take longer than the operators; with dropout and a cache."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = T5ForConditionalGeneration(
            T5Config(
                vocab_size=512, d_model=256, d_kv=32, d_ff=1024, num_layers=8, num_heads=8, decoder_start_token_id=0
            )
        ).train()  # fmt: skip
        self.losses: list[Tensor] = []
        self.peak = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.detach().clone())
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == STEPS - 4:
            torch.cuda.reset_peak_memory_stats()
        self.peak = torch.cuda.max_memory_allocated()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def train(path: Path, strategy: Any, *callbacks: pl.Callback) -> HostBound:
    collect()
    torch.cuda.empty_cache()
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(512, (ROWS, TOKENS), generator=generator) for _ in range(STEPS)]
    trainer = quiet_trainer(
        path,
        accelerator="gpu",
        max_steps=STEPS,
        precision="bf16-mixed",
        strategy=strategy,
        callbacks=list(callbacks),
    )
    module = HostBound()
    torch.manual_seed(2)
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return module


def test_a_host_bound_model_is_checkpointed_where_memory_is_short(tmp_path: Path) -> None:
    """The machine's file has a host that intercepts operations slowly: how slowly this one does depends on its load."""
    slow = HostOverhead(*6 * [1e-3], checkpoint=1e-5)
    replace(measure_machine(None), host_overhead=slow).to_json(tmp_path / "machine.json")
    plain = train(tmp_path, "auto")
    first = SwapPlanner(gpu_memory=int(0.6 * plain.peak), machine=tmp_path / "machine.json")
    planned = train(tmp_path, SSDOffloadStrategy(states="gpu"), first)
    assert_same(planned, plain)
    assert first.cycle.plan is not None and first.cycle.comparison is not None
    count = sum(unit.checkpoint for unit in first.cycle.plan.units.values())
    assert 0 < count, first.cycle.plan.describe()
    assert planned.peak <= 0.63 * plain.peak
    print(f"{count} units checkpointed; {first.cycle.comparison}")


def test_memory_of_checkpointed_units_is_the_predicted_one(tmp_path: Path) -> None:
    plain = train(tmp_path, "auto")
    first = SwapPlanner()
    assert_same(train(tmp_path, SSDOffloadStrategy(states="gpu"), first), plain)
    assert first.cycle.plan is not None
    may = {unit.name for unit in first.cycle.runner.profile.units if unit.checkpoint_bytes is not None}
    assert len(may) == 16
    units = {
        name: replace(unit, input="keep", operators=dict.fromkeys(unit.operators, "keep"), checkpoint=name in may)
        for name, unit in first.cycle.plan.units.items()
    }
    second = pinned(replace(first.cycle.plan, units=units))
    checkpointed = train(tmp_path, SSDOffloadStrategy(states="gpu"), second)
    assert_same(checkpointed, plain)
    assert checkpointed.peak < 0.5 * plain.peak
    assert second.cycle.comparison is not None
    predicted = second.cycle.comparison.predicted.gpu_peak_bytes
    assert second.cycle.comparison.gpu_peak_bytes == pytest.approx(predicted, rel=0.1)


def test_units_keep_or_checkpoint_all_with_offloaded_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are those without a plan, and no operation of these units is intercepted."""
    offloaded: Any = {"states": "host", "gpu_memory": "1MiB"}
    expected = train(tmp_path, SSDOffloadStrategy(**offloaded, offload="none"))
    first = SwapPlanner()
    assert_same(train(tmp_path, SSDOffloadStrategy(**offloaded), first), expected)
    assert first.cycle.plan is not None
    intercepted: set[UnitCall] = set()
    may_not: set[UnitCall] = set()
    operation = PlanMode.operation

    def noted(self: PlanMode, *args: Any) -> Any:
        if not self.checking:
            may_not.update(self.schedule.plain_calls, self.schedule.checkpointed)
            intercepted.update(self._open)
        return operation(self, *args)

    monkeypatch.setattr(PlanMode, "operation", noted)
    for kinds in (KEEP_CHECKPOINT_OFFLOAD, ("checkpoint",)):
        intercepted.clear()
        may_not.clear()
        second = pinned(in_turn(first.cycle.plan, first.cycle.runner.profile, kinds))
        assert_same(train(tmp_path, SSDOffloadStrategy(**offloaded), second), expected)
        assert may_not and intercepted.isdisjoint(may_not)
        print(f"{kinds}: {second.cycle.comparison}")
