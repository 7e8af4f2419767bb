"""Trainings with compiled blocks, whose saved tensors are planned where memory is short."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ssd.callbacks import AutoPlanner
from lightning_ssd.callbacks.find import find_offloader
from tests.support.compiled import counted
from tests.support.plans import quiet_trainer

STEPS = 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(nn.functional.gelu(self.up(x)), 0.1, self.training).tanh().sin()
        return x + self.down(hidden)  # type: ignore[no-any-return]


def compile_in_place(block: nn.Module, backend: str) -> nn.Module:
    block.compile(backend=backend)
    return block


def compile_wrapped(block: nn.Module, backend: str) -> nn.Module:
    return torch.compile(block, backend=backend)  # type: ignore[return-value]


def compile_forward(block: nn.Module, backend: str) -> nn.Module:
    block.forward = torch.compile(block.forward, backend=backend)  # type: ignore[method-assign]
    return block


class Blocks(pl.LightningModule):
    """Compiled blocks, and eager code around them.

    Args:
        backend: Dynamo's backend.
        make: makes a block.
        compiles: compiles a block, and returns it.
    """

    def __init__(
        self,
        backend: str,
        make: Callable[[], nn.Module] = Block,
        compiles: Callable[[nn.Module, str], nn.Module] = compile_in_place,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(compiles(make(), backend) for _ in range(4))
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
        self.stored: list[int] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.auto = next(one for one in trainer.callbacks if isinstance(one, AutoPlanner))
        offloader = find_offloader(trainer)
        assert offloader is not None
        self.placements.append(type(offloader.policy.placement))
        self.stored.append(offloader.stats().stored)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.planner = self.auto.planner
        self.outcome = self.auto.outcome


def train(
    backend: str,
    strategy: Any,
    path: Path,
    steps: int = STEPS,
    shapes: Sequence[tuple[int, ...]] = (),
    build: Callable[[str], pl.LightningModule] = Blocks,
    **how: Any,
) -> tuple[list[Tensor], Any]:
    """Returns the losses and the last weights, and Dynamo's counts of frames, graphs, breaks and recompilations.

    Args:
        backend: Dynamo's backend.
        strategy: the Trainer's strategy.
        path: the Trainer's directory.
        steps: steps of the training.
        shapes: shapes of the batches, without the last dimension, which is 32; else 16 rows in each.
        build: builds the model, compiled by a backend.
        **how: further arguments of the Trainer.
    """
    generator = torch.Generator().manual_seed(1)
    data: Any = [torch.randn(*shape, 32, generator=generator) for shape in shapes or [(16,)] * steps]
    with counted() as counts:
        module: Any = build(backend)
        trainer = quiet_trainer(path, strategy=strategy, max_steps=len(shapes) or steps, **how)
        trainer.fit(module, DataLoader(data, batch_size=None))
    return [*module.losses, *(parameter.detach().clone() for parameter in module.parameters())], counts
