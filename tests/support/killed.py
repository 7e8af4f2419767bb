"""Trainings with `recover=True` that are killed, again and again, and run again: for test_recovery.py.

    python -m tests.support.killed PATH KILLS READS

Kills KILLS trainings, at random moments, in new processes of one that has imported everything. Each that ends must
have the losses and weights of one that was not killed; the exit status tells whether all had. With READS "direct", the
backend reads weights to device buffers; with "staged", all values are read to staging memory.
"""

import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.storage import PosixBackend
from tests.support.faults import FaultyBackend, Move, Operation
from tests.support.measurements import measure_few_bytes
from tests.support.trainings import make_trainer


class Model(pl.LightningModule):
    """Draws random numbers everywhere; has resident and offloaded parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4))
        )
        self.head = nn.Linear(64, 1)
        self.losses: dict[int, float] = {}
        self.register_buffer("batches", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (rows,) = batch
        loss: Tensor = self.head(self.blocks(rows)).square().mean()
        self.losses[int(self.batches)] = float(loss)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.head(self.blocks(batch[0])).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3, fused=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class DyingBackend(FaultyBackend):
    """Kills the process when it writes for the nth time, after half of that write."""

    def __init__(self, dies_at: int, *, direct: bool) -> None:
        super().__init__(PosixBackend())
        self.device_buffers = direct
        self._left = dies_at

    def transfer(self, operation: Operation, call: Move, buffer: Tensor, offset: int) -> int:
        if operation == "write":
            self._left -= 1
            if self._left == 0:
                call(buffer[: buffer.numel() // 8192 * 4096], offset)
                os.kill(os.getpid(), signal.SIGKILL)
        return super().transfer(operation, call, buffer, offset)


def recovering(path: Path, **arguments: Any) -> SSDOffloadStrategy:
    return SSDOffloadStrategy(
        **{"path": path, "recover": True, "min_bytes": 1024, "offload": "none", "gpu_memory": "1B"} | arguments
    )


def apart(path: Path) -> Path:
    """Returns another directory beside `path`, for a training that does not fail, to compare with."""
    other = path.with_name(f"{path.name}-whole")
    other.mkdir(exist_ok=True)
    return other


def fit(strategy: Any, model: type[pl.LightningModule] = Model, **arguments: Any) -> Any:
    """Trains; 3 epochs of 11 batches, steps of 2, validation twice an epoch."""
    pl.seed_everything(7, verbose=False)
    module = model()
    data = TensorDataset(torch.randn(44, 64))
    train = arguments.pop("train", None)
    val = DataLoader(data, batch_size=22, shuffle=True)
    checkpoint = arguments.pop("ckpt_path", None)
    settings: dict[str, Any] = dict(
        max_epochs=3, accumulate_grad_batches=2, gradient_clip_val=0.5, val_check_interval=5, num_sanity_val_steps=1
    )
    trainer = make_trainer(Path.cwd(), strategy, **settings | arguments)
    trainer.fit(module, train() if train else DataLoader(data, 4, shuffle=True), val, ckpt_path=checkpoint)
    return module


def outcome(model: Any) -> dict[str, Any]:
    """Returns the values to compare; the losses are those since the model was built."""
    return {"losses": model.losses, "weights": {name: value.clone() for name, value in model.state_dict().items()}}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether weights are equal bit for bit, and losses where both have them."""
    weights = all(torch.equal(value, other["weights"][name]) for name, value in one["weights"].items())
    both = one["losses"].keys() & other["losses"].keys()
    return weights and bool(both) and all(one["losses"][batch] == other["losses"][batch] for batch in both)


def _run(path: Path, dies_at: int, dies_after: float | None, *, direct: bool) -> bool:
    """Trains in a new process, which may be killed; returns whether the training ended."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            strategy = recovering(path, backend=DyingBackend(dies_at, direct=direct), checksum=not direct)
            torch.save(outcome(fit(strategy)), path / "outcome")
            status = 0
        finally:
            os._exit(status)
    if dies_after is not None and signal.sigtimedwait([signal.SIGCHLD], dies_after) is None:
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        sys.exit("a training failed")
    return os.WIFEXITED(status)


def main(path: Path, kills: int, reads: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    run = partial(_run, path, direct=reads == "direct")
    begin = time.perf_counter()
    assert run(dies_at=0, dies_after=None)
    whole = time.perf_counter() - begin
    expected = torch.load(path / "outcome")
    random.seed(1)
    killed = ended = 0
    while killed < kills:
        if random.random() < 0.5:
            done = run(dies_at=random.randint(1, 120), dies_after=None)
        else:
            done = run(dies_at=0, dies_after=random.uniform(0, 0.8 * whole))
        killed += not done
        if done:
            ended += 1
            if not same(torch.load(path / "outcome"), expected):
                sys.exit(f"after {killed} kills, the numbers of training {ended} are others")
    while not run(dies_at=0, dies_after=None):
        pass
    if not same(torch.load(path / "outcome"), expected):
        sys.exit("the numbers of the last training are others")
    print(f"{killed} kills, {ended + 1} trainings")


KEPT = "lightning_ssd-kept-rank0"


class Failure(Exception):
    pass


class FailAt(pl.Callback):
    """Raises once, in the batch of a number."""

    def __init__(self, batch: int) -> None:
        self._batch = batch

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if int(module.batches) == self._batch:
            self._batch = -1
            raise Failure


if __name__ == "__main__":
    measure_few_bytes()
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
