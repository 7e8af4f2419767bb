"""A model for trainings that a fault of the drive ends, and the weights after each of their steps."""

import functools
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_ssd import SSDOffloadStrategy
from tests.support.models import ToyModel

WIDTH, STEPS = 48, 3


class Toy(ToyModel):
    """Two matrices, whose states are offloaded."""

    def __init__(self) -> None:
        super().__init__(functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9), seed=3)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(2)))

    def loss(self, batch: Tensor) -> Tensor:
        return self.blocks(batch).pow(2).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.blocks(batch)


def offload(backend: Any, **arguments: Any) -> SSDOffloadStrategy:
    small = dict(states="ssd", min_bytes=1024, offload="none", gpu_memory="1B", ssd_capacity="512KiB", backend=backend)
    return SSDOffloadStrategy(**(small | arguments))


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor], names: Any = None) -> bool:
    return all(torch.equal(one[name], other[name]) for name in names or one)


class Keep(pl.Callback):
    """Records the weights at the start and after each batch."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Tensor]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.kept.append(weights(pl_module))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.kept.append(weights(pl_module))
