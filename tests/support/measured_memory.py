"""A program that trains on the CPU, and prints the host memory before and after each step, counted and measured.

It prints JSON. Its arguments are `gpu_memory` of `SwapPlanner` and the number of blocks, of 8 MiB of weights each.
"""

import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ssd import SSDOffloadStrategy, SwapPlanner
from lightning_ssd.device import process_ram, trim_heap
from lightning_ssd.device.cgroups import PROC, read_text
from lightning_ssd.host_memory import host_memory_of
from tests.support.trainings import quiet

WIDTH = 512
ROWS = 256
STEPS = 24


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
    """Measures when the training begins, and after each step.

    Args:
        before: proportional set size before the training.
    """

    def __init__(self, before: int) -> None:
        self.before = before
        self.rows: list[dict[str, int]] = []

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.measure(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.measure(trainer)

    def measure(self, trainer: Any) -> None:
        trainer.strategy.model_states.drain()
        memory = host_memory_of(trainer.strategy.model_states, trainer.strategy.offloader)
        taken = proportional_set_size() - self.before
        activations = sum(tier.host_bytes for tier in trainer.strategy.offloader.tiers.values())
        row = {"counted": memory.total, "activations": activations, "limit": memory.limit, "taken": taken}
        self.rows.append(row)


def proportional_set_size() -> int:
    """Returns the bytes of RAM of this process without objects that nothing references, and without mapped files: its
    share of libraries falls when other processes load the same ones meanwhile."""
    gc.collect()
    fields = [line.split() for line in read_text(PROC / "self/smaps_rollup").splitlines()]
    return process_ram() - sum(1024 * int(field[1]) for field in fields if field[0] == "Pss_File:")


def fit(strategy: Any, depth: int, steps: int, **arguments: Any) -> None:
    loader = DataLoader(torch.randn(ROWS, WIDTH).expand(steps, ROWS, WIDTH), batch_size=None)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as root:
        pl.Trainer(strategy=strategy, **(quiet(Path(root)) | arguments)).fit(Model(depth), loader)


def main() -> None:
    fit("auto", 1, 2)  # what torch and Lightning take in any training
    trim_heap()
    memory = Memory(proportional_set_size())
    gpu_memory, depth = sys.argv[1], int(sys.argv[2])
    limits: dict[str, Any] = {"host_memory": depth * 60 * 2**20, "gpu_memory": "16MiB", "min_bytes": 2**16}
    strategy = SSDOffloadStrategy(states="host", tier="host", **limits)
    fit(strategy, depth, STEPS, callbacks=[memory, SwapPlanner(gpu_memory=gpu_memory, warm_up=1, steps=1)])
    print(json.dumps(memory.rows))


if __name__ == "__main__":
    main()
