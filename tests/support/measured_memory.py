"""A program that trains on the CPU, and prints the host memory after each step, counted and measured, as JSON."""

import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.processes import process_ram
from lightning_ssd import SSDOffloadStrategy, SwapPlanner
from lightning_ssd.host_memory import host_memory_of
from tests.support.trainings import quiet

WIDTH = 512
ROWS = 64
DEPTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(pl.LightningModule):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Block() for _ in range(depth)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4)


class Memory(pl.Callback):
    """Measures after each step.

    Args:
        before: proportional set size before the training.
    """

    def __init__(self, before: int) -> None:
        self.before = before
        self.rows: list[dict[str, int]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.strategy.model_states.drain()
        memory = host_memory_of(trainer.strategy.model_states, trainer.strategy.offloader)
        taken = proportional_set_size() - self.before
        self.rows.append({"counted": memory.total, "limit": memory.limit, "taken": taken})


def proportional_set_size() -> int:
    """Returns the bytes of RAM of this process without objects that nothing references."""
    gc.collect()
    return process_ram()


def fit(strategy: Any, depth: int, steps: int, **arguments: Any) -> None:
    loader = DataLoader(torch.randn(steps * ROWS, WIDTH), batch_size=ROWS)
    with tempfile.TemporaryDirectory() as root:
        pl.Trainer(strategy=strategy, **(quiet(Path(root)) | arguments)).fit(Model(depth), loader)


def main() -> None:
    fit("auto", 1, 1)  # what torch and Lightning take in any training
    memory = Memory(proportional_set_size())
    strategy = SSDOffloadStrategy(states="host", tier="host", host_memory="320MiB", gpu_memory="16MiB", min_bytes=2**16)
    fit(strategy, DEPTH, 24, callbacks=[memory, SwapPlanner(warm_up=1, steps=1)])
    print(json.dumps(memory.rows))


if __name__ == "__main__":
    main()
