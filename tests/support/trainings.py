"""Small trainings on the CPU, and checks after each, for the tests of strategy, callbacks and failures."""

import copy
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.activations.ssd import SSDTier
from lightning_ssd.callbacks.find import find_offloader
from tests.support.models import ToyModel

WIDTH = 32
ROWS = 16
MIN_BYTES = ROWS * WIDTH * 4
"""Bytes of every activation of `SmallModel` but the loss: all of them are offloaded."""


class SmallModel(ToyModel):
    """A few linear layers that learn the identity; logs its losses."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        layers = (layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU()))
        self.net = nn.Sequential(*layers)

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch)

    def loss(self, batch: Tensor) -> Tensor:
        return (self(batch) - batch).pow(2).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9),
                "interval": "step",
            },
        }


class Watch(pl.Callback):
    """Records transferred bytes, and waits for writes before backward, so that backward reads the files."""

    def __init__(self) -> None:
        self.bytes_out: dict[str, int] = {}
        self.bytes_in: dict[str, int] = {}
        self.bytes_read = 0

    @property
    def moved(self) -> int:
        """Loaded bytes; those of the SSD tier, if there is one, are read from its files."""
        return self.bytes_read if "ssd" in self.bytes_in else self.bytes_in.get("host", 0)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        offloader = find_offloader(trainer)
        if offloader is not None and isinstance(ssd := offloader.tiers.get("ssd"), SSDTier):
            # All staging memory is free when all writes have ended.
            ssd.staging.acquire(ssd.staging.budget).release()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if (offloader := find_offloader(trainer)) is not None:
            for name, tier in offloader.tiers.items():
                self.bytes_out[name] = self.bytes_out.get(name, 0) + tier.bytes_out
                self.bytes_in[name] = self.bytes_in.get(name, 0) + tier.bytes_in
            if (io := offloader.io_stats()) is not None:
                self.bytes_read += io.bytes_read


class Look(Watch):
    """Sees the scratch directories of all processes while they train."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.directories: list[str] = []

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        trainer.strategy.barrier()
        self.directories = scratch_directories(self.root)
        trainer.strategy.barrier()


def small_model(seed: int = 0, kind: type[SmallModel] = SmallModel) -> Any:
    """Returns a model with the weights of `seed`."""
    torch.manual_seed(seed)
    return kind()


def batches(count: int = 6) -> DataLoader:
    """Returns a loader of `count` batches, always the same ones."""
    rows = torch.randn(count * ROWS, WIDTH, generator=torch.Generator().manual_seed(count))
    return DataLoader(rows, batch_size=ROWS)


def offloading(**arguments: Any) -> SSDOffloadStrategy:
    """Returns a strategy that offloads everything, with a small scratch space for a quick start."""
    return SSDOffloadStrategy(**(small_arguments() | arguments))


def small_arguments() -> dict[str, Any]:
    """Returns arguments that offload everything and start quickly."""
    return {
        "offload": 1.0,
        "min_bytes": MIN_BYTES,
        "ssd_capacity": "256KiB",
        "staging_memory": "16MiB",
        "checksum": True,
    }


def make_trainer(root: Path, strategy: Any = "auto", **arguments: Any) -> pl.Trainer:
    """Returns a quiet CPU Trainer that writes nothing but scratch files."""
    return pl.Trainer(strategy=strategy, **(quiet(root) | arguments))


def fit(
    root: Path, strategy: Any, model: Any, data: Any, val: Any = None, *, ckpt_path: Any = None, **arguments: Any
) -> Any:
    """Trains `model` in place, with the same random numbers at every call, and returns it.

    Args:
        root: the Trainer's directory.
        strategy: the Trainer's.
        model: the LightningModule.
        data: batches of training.
        val: batches of validation.
        ckpt_path: a checkpoint to resume from.
        **arguments: other arguments of the Trainer.
    """
    torch.manual_seed(2)
    make_trainer(root, strategy, **arguments).fit(model, data, val, ckpt_path=ckpt_path)
    return model


def train(root: Path, strategy: Any, model: Any, data: Any, val: Any = None, **arguments: Any) -> Any:
    """Trains a copy of `model` as `fit` does, and returns the copy."""
    return fit(root, strategy, copy.deepcopy(model), data, val, **arguments)


def rows(batches: int, width: int = 8) -> DataLoader:
    """Returns a loader of so many batches of four rows, always the same ones."""
    return DataLoader(torch.randn(4 * batches, width, generator=torch.Generator().manual_seed(1)), batch_size=4)


def quiet(root: Path) -> dict[str, Any]:
    """Returns the arguments of such a Trainer."""
    return {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(root),
    }


def scratch_directories(path: Path) -> list[str]:
    """Returns the scratch directories in or below `path`."""
    return sorted(str(found) for found in path.rglob("lightning_ssd-*"))


def package_threads() -> list[str]:
    """Returns the names of the package's threads that are alive."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_ssd")]


def script_environment() -> dict[str, str]:
    """Returns an environment for Python programs that import this checkout's packages."""
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}


def run_script(script: Path) -> "subprocess.CompletedProcess[str]":
    """Runs a Python program to its end."""
    return subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=script_environment(), timeout=120
    )


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """Every test that this fixture is imported for leaves no scratch directory and no thread of the package."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # quicker for tensors as small as these
    yield
    torch.set_num_threads(threads)
    assert scratch_directories(tmp_path) == []
    assert package_threads() == []
