"""Small models of blocks and their trainings, for tests that compare whole trainings with plain Lightning's."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ssd import SSDOffloadStrategy
from tests.support.trainings import make_trainer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.line = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.line(self.norm(x)).tanh()


def offloading(states: str = "host", **arguments: Any) -> SSDOffloadStrategy:
    """Returns a strategy that offloads the states of all parameters."""
    return SSDOffloadStrategy(
        **{"states": states, "min_bytes": 1, "offload": "none", "ssd_capacity": "8MiB"} | arguments
    )


def train_copy(path: Path, strategy: Any, model: Any, steps: int, ckpt_path: Any = None, **arguments: Any) -> Any:
    """Trains a copy of `model`, so many steps an epoch, and returns it."""
    model = copy.deepcopy(model)
    rows = torch.randn(4 * steps, 8, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)  # lazy modules draw their values
    make_trainer(path, strategy, **arguments).fit(model, DataLoader(rows, batch_size=4), ckpt_path=ckpt_path)
    return model


def assert_same(one: Any, other: Any) -> None:
    """Asserts that two trainings have had the same losses and have the same weights."""
    assert one.losses == other.losses and one.losses
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
