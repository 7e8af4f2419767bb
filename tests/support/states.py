"""Trainings of a small model whose states are offloaded, and of the same model under plain Lightning."""

import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_ssd import SSDOffloadStrategy
from tests.support import trainings

STEPS = 7


def loader(batches: int = STEPS, seed: int = 1) -> Any:
    tokens = torch.randint(32, (batches * 4, 9), generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=4)


def host(**arguments: Any) -> SSDOffloadStrategy:
    return SSDOffloadStrategy(states="host", min_bytes=1, **arguments)


def train(path: Path, strategy: Any, model: Any, *, batches: int = STEPS, **arguments: Any) -> Any:
    """Trains a copy of `model` for two epochs of `batches` batches, and validates it after each."""
    defaults: dict[str, Any] = {"num_sanity_val_steps": 0, "max_epochs": 2}
    return trainings.train(path, strategy, model, loader(batches), loader(2, seed=2), **defaults | arguments)


def offloading(states: str = "host", **arguments: Any) -> SSDOffloadStrategy:
    """Returns a strategy that offloads the states of all parameters, with little scratch space."""
    return SSDOffloadStrategy(
        **{"states": states, "min_bytes": 1, "offload": "none", "ssd_capacity": "8MiB"} | arguments  # type: ignore[arg-type]
    )


def ssd(**arguments: Any) -> SSDOffloadStrategy:
    return SSDOffloadStrategy(**{"states": "ssd", "min_bytes": 1, "offload": "none"} | arguments)


def some_stay() -> SSDOffloadStrategy:
    """Returns a strategy that keeps a part of `Model`'s units on the device, and the others in host memory."""
    return ssd(states="auto", gpu_memory="90kB", tier="host")


def assert_nothing_is_left(path: Path) -> None:
    assert not list(path.glob("lightning_ssd-*"))
    assert not trainings.package_threads()


class Large(pl.LightningModule):
    """16 blocks of 4 MiB, so 192 MiB with AdamW's states."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
        self.extra = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.blocks(batch[0].float().repeat(1, 114)[:, :1024]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 2:
            assert self.trainer.strategy.model_states is not None  # type: ignore[attr-defined]
            self.trainer.strategy.model_states.drain()  # type: ignore[attr-defined]
            before = most = memory()
            ended = threading.Event()

            def watch() -> None:
                nonlocal most
                while not ended.wait(0.001):
                    most = max(most, memory())

            watcher = threading.Thread(target=watch)
            watcher.start()
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "large.ckpt")
            ended.set()
            watcher.join()
            self.extra = most - before


def memory() -> int:
    """Bytes of this process's own memory."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))
