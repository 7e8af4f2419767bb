"""Trainings that resume from checkpoints of other numbers of ranks. A script for `processes.launch`.

All ranks have the same batches, so that two ranks train with the bits of one.
"""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ssd import SSDOffloadStrategy
from tests.support.measurements import measure_few_bytes

WIDTH, HALF, STEPS = 32, 2, 4
CHECKPOINT = f"step={HALF}.ckpt"
"""The file that `train` writes in the middle of a training."""


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def loss(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Tensor, index: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def ours(**arguments: Any) -> SSDOffloadStrategy:
    return SSDOffloadStrategy(**{"states": "host", "min_bytes": 1024} | arguments)


def batches() -> DataLoader:
    """Returns the data of an epoch, which is half of a training."""
    rows = torch.randn(HALF, 4, WIDTH, generator=torch.Generator().manual_seed(1))
    return DataLoader(list(rows), batch_size=None)


def make_trainer(strategy: Any, devices: int, **arguments: Any) -> pl.Trainer:
    return pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, use_distributed_sampler=False, logger=False,
        enable_progress_bar=False, enable_model_summary=False, **{"max_steps": STEPS} | arguments,
    )  # fmt: skip


def train(folder: Path, strategy: Any = "auto", devices: int = 1, ckpt_path: Path | None = None) -> Net:
    """Trains for all steps, with a checkpoint in `folder` in the middle, and one at the end by `save_checkpoint`."""
    module = Net()
    every = ModelCheckpoint(folder, "{step}", every_n_train_steps=HALF, save_top_k=-1)
    trainer = make_trainer(strategy, devices, callbacks=[every])
    trainer.fit(module, batches(), ckpt_path=ckpt_path)
    trainer.save_checkpoint(folder / "after.ckpt")
    return module


def evaluate(trainer: pl.Trainer, module: Net) -> list[Any]:
    return [
        trainer.validate(module, batches(), verbose=False),
        trainer.test(module, batches(), verbose=False),
        torch.stack(trainer.predict(module, batches())).tolist(),  # type: ignore[arg-type]
    ]


def twice(strategy: Any = "auto", devices: int = 1) -> tuple[Net, list[Any]]:
    """Trains in two calls of `fit`, and evaluates before, between and after them."""
    module, trainer = Net(), make_trainer(strategy, devices, max_steps=-1, max_epochs=1, enable_checkpointing=False)
    found = evaluate(trainer, module)
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, batches())
        found += evaluate(trainer, module)
    return module, found


def main(root: Path) -> None:
    """Writes the weights of each training to `root/NAME.SIZE.RANK`."""
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    trained = {}
    for name, states in (("file", "host"), ("sharded", "ssd")):
        strategy = ours(checkpoints=name, states=states)
        if size == 2:
            trained[name] = train(root / name, strategy, size)
        resumed = ours(states=states)
        trained[f"{name}-resumed"] = train(root / f"{size}-{name}", resumed, size, root / name / CHECKPOINT)
    if size == 2:
        trained["plain"] = train(root / "from-plain", ours(), size, root / "plain" / CHECKPOINT)
        trained["twice"], evaluations = twice(ours(states="ssd"), size)
        torch.save(evaluations, root / f"evaluations.{dist.get_rank()}")
    for name, module in trained.items():
        torch.save(module.state_dict(), root / f"{name}.{size}.{dist.get_rank()}")


if __name__ == "__main__":
    measure_few_bytes()
    main(Path(sys.argv[1]))
