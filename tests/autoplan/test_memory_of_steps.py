"""Steps of optimizer states that a plan has moved to the device have the memory that the plan expects."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.callbacks import AutoPlanner
from lightning_ssd.model_states import StatesConfig
from tests.support.limited_memory import LimitedMemory
from tests.support.meter import use, use_slow_transfers
from tests.support.plans import BOTH, quiet_trainer

STEPS = 12

LAYER = 4 * 12 * 128**2
"""Bytes of a layer's weights."""


class LargeWeights(pl.LightningModule):
    """Its saved tensors need far less memory than its weights. The optimizer is the one that torch chooses on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = GPT2LMHeadModel(
            GPT2Config(n_layer=6, n_embd=128, n_head=2, vocab_size=64, n_positions=16, use_cache=False)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), foreach=True)


class Peaks(pl.Callback):
    """The most bytes of each step, the optimizer's included, and the plan's prediction."""

    def __init__(self, memory: LimitedMemory) -> None:
        self._memory = memory
        self.found: list[int] = []
        self.predicted = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.found.append(self._memory.highest)
        self._memory.reset_peak()
        planners = [one.planner for one in trainer.callbacks if isinstance(one, AutoPlanner)]
        if planners and planners[0] is not None and planners[0].runner is not None:
            prediction = planners[0].runner.prediction
            self.predicted = 0 if prediction is None else prediction.gpu_peak_bytes


def fit(precision: Any, strategy: Any, path: Path, memory: LimitedMemory) -> Peaks:
    peaks = Peaks(memory)
    trainer = quiet_trainer(
        path, strategy=strategy, callbacks=[memory.counting, peaks], max_epochs=1, precision=precision
    )
    batches = [torch.randint(0, 64, (1, 16), generator=torch.Generator().manual_seed(7)) for _ in range(STEPS)]
    trainer.fit(LargeWeights(), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return peaks


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_steps_of_moved_states_have_memory(precision: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their optimizer allocates 4 bytes a parameter meanwhile. No step had any of it when the plan was made.

    In mixed precision, weights on the device are the fp32 ones, of which no 16-bit copy remains between steps.
    """
    with LimitedMemory() as plain:
        fit(precision, "auto", tmp_path, plain)
    weights = sum(4 * parameter.numel() for parameter in LargeWeights().parameters())
    with LimitedMemory(0.8 * (plain.highest_ever + weights)) as limited:
        use(limited, monkeypatch)
        use_slow_transfers(monkeypatch)
        monkeypatch.setattr(StatesConfig, "offloads", lambda *_, **__: True)
        peaks = fit(precision, SSDOffloadStrategy(**{**BOTH, "states": "auto"}), tmp_path, limited)
    moved = peaks.found[-1]
    assert moved > 1.5 * peaks.found[0]  # nothing was on the device then
    # The CPU's training reserves no memory for the weights of an offloaded layer, which are there beside the step.
    assert 0.9 * peaks.predicted < moved < peaks.predicted + 1.1 * LAYER
    assert peaks.predicted <= limited.most
