"""Trainings with compiled blocks, whose saved tensors are planned where memory is short."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch._functorch.config as functorch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ssd.autoplan import compiled_plan
from lightning_ssd.callbacks import AutoPlanner
from lightning_ssd.callbacks.offloader import find_offloader
from tests.support.compiled import counted
from tests.support.plans import quiet_trainer

STEPS = 48


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)).tanh().sin())  # type: ignore[no-any-return]


class Blocks(pl.LightningModule):
    """Compiled blocks, and eager code around them."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        for block in self.blocks:
            block.compile(backend=backend)
        self.head = nn.Linear(32, 8)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        loss = self.head(batch).square().mean()
        self.losses.append(loss.detach().clone())
        return loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class See(pl.Callback):
    """Records the rule and the saved bytes of each micro-batch."""

    def __init__(self) -> None:
        self.placements: list[type] = []
        self.settings: list[float] = []
        self.saved: list[int] = []
        self.stored: list[int] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.auto = next(one for one in trainer.callbacks if isinstance(one, AutoPlanner))
        offloader = find_offloader(trainer)
        assert offloader is not None
        self.placements.append(type(offloader.policy.placement))
        self.settings.append(functorch.activation_memory_budget)
        self.saved.append(offloader.stats().saved)
        self.stored.append(offloader.stats().stored)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.compiled = self.auto.compiled
        self.outcome = self.auto.outcome


def train(
    backend: str, strategy: Any, path: Path, steps: int = STEPS, shapes: Sequence[tuple[int, ...]] = (), **how: Any
) -> tuple[list[Tensor], Any]:
    """Returns the losses and the last weights, and Dynamo's counts of frames, graphs, breaks and recompilations.

    Args:
        backend: Dynamo's backend.
        strategy: the Trainer's strategy.
        path: the Trainer's directory.
        steps: steps of the training.
        shapes: shapes of the batches, without the last dimension, which is 32; else 16 rows in each.
        **how: further arguments of the Trainer.
    """
    generator = torch.Generator().manual_seed(1)
    data: Any = [torch.randn(*shape, 32, generator=generator) for shape in shapes or [(16,)] * steps]
    with counted() as counts:
        module = Blocks(backend)
        trainer = quiet_trainer(path, strategy=strategy, max_steps=len(shapes) or steps, **how)
        trainer.fit(module, DataLoader(data, batch_size=None))
    return [*module.losses, *(parameter.detach().clone() for parameter in module.parameters())], counts


class Ticks:
    """A clock that each reading moves on by a second."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        self.seconds += 1
        return self.seconds

    def elapsed(self, start: float, end: float) -> float:
        return end - start


def compile_again(monkeypatch: pytest.MonkeyPatch, value: float = 0.5) -> None:
    """Has the plan of recorded storages ask for code that saves less."""
    monkeypatch.setattr(compiled_plan, "smaller_budget", lambda *_: value)
