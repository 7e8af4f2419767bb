"""A model for trainings that a fault of the drive ends."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_ssd import SSDOffloadStrategy
from tests.support.trainings import Watch, make_trainer, nothing_left, package_threads  # noqa: F401

WIDTH, STEPS = 48, 3


class Toy(pl.LightningModule):
    """Two blocks that leave and a scale that may stay; keeps its weights after each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(2)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(batch).pow(2).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.blocks(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.5, momentum=0.9)


def offload(backend: Any, **arguments: Any) -> SSDOffloadStrategy:
    small = dict(states="ssd", min_bytes=1024, offload="none", gpu_memory="1B", ssd_capacity="512KiB", backend=backend)
    return SSDOffloadStrategy(**(small | arguments))
