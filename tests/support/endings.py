"""A model for trainings that a fault of the drive ends."""

import functools
from typing import Any

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
