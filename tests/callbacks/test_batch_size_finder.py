"""Lightning's search for the largest batch finds one that fits with offloaded tensors, not the one that plain fits."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ssd import SSDOffloadStrategy, SwapPlanner
from lightning_ssd.callbacks import AutoPlanner
from tests.support.limited_memory import LimitedMemory
from tests.support.meter import use
from tests.support.plans import BOTH, quiet_trainer

pytestmark = pytest.mark.timeout(120)

MOST = 150_000

DATA = torch.randn(2**13, 16)


MEMORY: dict[str, LimitedMemory] = {}
"""The memory that counts: global, since state of the module is restored before a second attempt of a micro-batch."""


class Sized(pl.LightningModule):
    """A deep stack of layers, whose saved tensors are most of the memory of a large batch."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Tanh())))
        self.batch_size = batch_size
        self.outcome = ""

    def train_dataloader(self) -> Any:
        return DataLoader(DATA, batch_size=self.batch_size)  # type: ignore[arg-type]

    def on_train_start(self) -> None:
        """Counts in place of the callback of `LimitedMemory`, as the Tuner removes all callbacks."""
        MEMORY["used"].counting.begun = True

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        MEMORY["used"].counting.in_micro_batch = True

    def on_after_backward(self) -> None:
        MEMORY["used"].counting.in_micro_batch = False

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        callbacks: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        self.outcome = next((one.outcome for one in callbacks if isinstance(one, AutoPlanner)), "")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mode", "how", "states", "smallest"),
    [
        ("power", "callback", "gpu", 256),
        pytest.param("binsearch", "tuner", "gpu", 320, marks=pytest.mark.thorough),
        pytest.param("power", "tuner", "host", 256, marks=pytest.mark.thorough),
    ],
)
def test_the_largest_batch_is_one_that_fits_with_offloaded_tensors(
    mode: Any, how: str, states: Any, smallest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain Lightning runs out of memory with it, and the training with it is planned."""
    memory = LimitedMemory(MOST)
    use(memory, monkeypatch)
    monkeypatch.setitem(MEMORY, "used", memory)
    search: dict[str, Any] = {"mode": mode, "steps_per_trial": 3, "init_val": 128, "margin": 0.0, "max_trials": 4}
    given = [BatchSizeFinder(**search)] if how == "callback" else []
    strategy = SSDOffloadStrategy(tmp_path, **BOTH | {"states": states})
    trainer = quiet_trainer(tmp_path, strategy=strategy, max_steps=6, callbacks=given)
    module = Sized(64)
    with memory:
        if how == "tuner":
            Tuner(trainer).scale_batch_size(module, **search)
            memory.counting.begun = memory.counting.in_micro_batch = False
        trainer.fit(module)
    assert trainer.global_step == 6 and smallest <= module.batch_size < 512
    assert module.outcome == "plan"
    assert not any(isinstance(one, AutoPlanner | SwapPlanner) for one in trainer.callbacks)  # type: ignore[attr-defined]
    plain = LimitedMemory(MOST)
    monkeypatch.setitem(MEMORY, "used", plain)
    with plain, pytest.raises(torch.OutOfMemoryError):
        quiet_trainer(tmp_path, max_steps=3).fit(Sized(module.batch_size))
