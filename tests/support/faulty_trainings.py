"""Trainings that clip, accumulate, average and save, for tests that end them by faults."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.recover import recovery
from tests.support.faults import FailingAtBackend
from tests.support.models import Block, ToyModel
from tests.support.trainings import make_trainer

WIDTH, DEPTH, BATCHES, CLIP = 16, 6, 6, 6.0

HOST_MEMORY = 142_000, 206_000
"""Budgets that have room for some flat parameters; the second one if all have two versions from the start."""

SUMS = 30_000
"""Bytes for the sums of gradients of several micro-batches."""

PACKAGE = str(Path(__file__).parents[2] / "lightning_ssd")

Place = Literal["host", "ssd", "both", "direct"]


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        place: tiers of the states; "both": a part of them is in host memory, and the rest on SSDs. "direct": on SSDs,
            without checksums, so that a backend that takes device buffers reads weights to them.
        clip: the strategy's.
        optimizers: 1, or 2 by hand, each of which steps half of the model.
        accumulate: micro-batches of a step.
        averages: whether a callback averages the weights.
        saves: whether a checkpoint is saved after half of the batches.
        recover: the strategy's.
        overlap: the strategy's.
    """

    place: Place = "ssd"
    clip: str = "deferred"
    optimizers: int = 1
    accumulate: int = 1
    averages: bool = False
    saves: bool = False
    recover: bool = False
    overlap: str = "optimized"

    def strategy(self, path: Path, backend: Any = "posix") -> SSDOffloadStrategy:
        """Returns a strategy for a training that counts as the first one of its process with `path`."""
        recovery._ended.pop(path.absolute(), None)
        budget = HOST_MEMORY[self.clip == "speculative"] + SUMS * (self.accumulate > 1 and self.optimizers == 1)
        tiers: dict[Place, dict[str, Any]] = {
            "host": dict(states="host"),
            "ssd": dict(states="ssd"),
            "direct": dict(states="ssd", checksum=False),
            "both": dict(states="auto", gpu_memory="1B", host_memory=f"{budget}B"),
        }
        return SSDOffloadStrategy(
            path=path,
            min_bytes=1,
            offload="none",
            ssd_capacity=None,
            backend=backend,
            clip=self.clip,
            recover=self.recover,
            overlap=self.overlap,
            **tiers[self.place],
        )


class Net(ToyModel):
    """Six blocks and a head; its norm is above the limit of clipping in some steps only."""

    def __init__(self, case: Case) -> None:
        super().__init__(torch.optim.AdamW)
        self.case = case
        self.automatic_optimization = case.optimizers == 1
        self.blocks = nn.Sequential(*(Block(WIDTH, 2 * WIDTH) for _ in range(DEPTH)))
        self.head = nn.Linear(WIDTH, 1)

    def loss(self, batch: Tensor) -> Tensor:
        return self.head(self.blocks(batch)).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        if (batch_idx + 1) % self.case.accumulate == 0:
            for optimizer in self.optimizers():
                self.clip_gradients(optimizer, CLIP)
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            return torch.optim.AdamW(self.parameters(), 0.01)
        rest = [*self.blocks[1:].parameters(), *self.head.parameters()]
        return [torch.optim.AdamW(self.blocks[0].parameters(), 0.01), torch.optim.Adam(rest, 0.01)]


class Arm(pl.Callback):
    """Has a backend count its transfers from the start of the training, so that its calibration does not."""

    def __init__(self, backend: FailingAtBackend) -> None:
        self._backend = backend

    def on_train_start(self, *_: Any) -> None:
        self._backend.arm()


class Save(pl.Callback):
    """Saves a checkpoint after half of the batches."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == BATCHES // 2 - 1:
            trainer.save_checkpoint(self.file)


def run(path: Path, case: Case, strategy: Any, *callbacks: pl.Callback) -> Net:
    """Trains; an error has the attribute `module`."""
    module = Net(case)
    noise = torch.Generator().manual_seed(5)
    rows = (
        torch.randn(BATCHES * 4, WIDTH, generator=noise)
        * torch.linspace(0.05, 3, BATCHES).repeat_interleave(4)[:, None]
    )
    own: list[pl.Callback] = list(callbacks)
    if case.averages:
        own.append(pl.callbacks.EMAWeightAveraging(decay=0.5))
    if case.saves:
        own.append(Save(path / "saved.ckpt"))
    automatic = dict(gradient_clip_val=CLIP, accumulate_grad_batches=case.accumulate) if case.optimizers == 1 else {}
    trainer = make_trainer(path, strategy, callbacks=own, **automatic)
    torch.manual_seed(7)
    try:
        trainer.fit(module, DataLoader(TensorDataset(rows), 4, shuffle=True))
    except BaseException as error:
        error.module = module  # type: ignore[attr-defined]
        raise
    return module


class CallCounter:
    """Counts the calls of the package's functions, and calls a function at one of them.

    Args:
        at: number of the call, from 0.
        act: the function.
        of: name of the functions whose calls count; None: of all.

    Attributes:
        counted: calls so far.
    """

    def __init__(self, at: int, act: Callable[[], object], of: str | None = None) -> None:
        self._at = at
        self._act = act
        self._of = of
        self.counted = 0

    def __enter__(self) -> CallCounter:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_name
        counts = name == self._of if self._of is not None else name != "__del__"
        if event == "call" and counts and frame.f_code.co_filename.startswith(PACKAGE):
            self.counted += 1
            if self.counted == self._at + 1:
                sys.settrace(None)
                self._act()


def kill_at(path: Path, case: Case, at: int) -> bool:
    """Trains in a forked process, which is killed when any of its threads calls a function; returns whether it was.

    Args:
        path: the Trainer's directory.
        case: the training.
        at: number of the call of a function of the package, from 0.
    """
    process = os.fork()
    if process == 0:
        try:
            counter = CallCounter(at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            threading.settrace(counter._trace)
            with counter:
                run(path, case, case.strategy(path))
        finally:
            os._exit(0)
    _, status = os.waitpid(process, 0)
    return os.WIFSIGNALED(status)


def kill(path: Path, seed: int, kills: int) -> None:
    """Kills trainings at random calls, each of which runs again: with the weights of one that was not killed."""
    chance = random.Random(seed)
    for _ in range(kills):
        case = Case("ssd", chance.choice(["deferred", "speculative", "auto"]), chance.choice([1, 2]),
                    chance.choice([1, 2]), False, chance.choice([False, True]), True)  # fmt: skip
        expected = run(path, case, "auto").state_dict()
        at = round(10 ** chance.uniform(2, 5))
        killed = kill_at(path, case, at)
        found = run(path, case, case.strategy(path)).state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected), (case, at, killed)
        left = [file.name for file in path.iterdir() if file.name.startswith("lightning_ssd")]
        assert not left, (case, at, left)
        print("killed" if killed else "ended", flush=True)
