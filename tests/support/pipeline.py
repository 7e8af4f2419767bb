"""Trainings of a two-stage pipeline in two processes on the CPU, with and without offloaded activations.

`python -m tests.support.pipeline ROOT CASE...` launches the second process, as users' scripts do. Each process writes a
file for each case, `CASE.RANK`, with the text of an error, which ends both. `ROOT failing RANK` trains until one stage
fails.
"""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from lightning_ssd import ActivationOffload, PrefetchScheduler, follow_stages
from lightning_ssd.callbacks.find import find_offloader
from tests.support.compare import assert_same
from tests.support.faults import Move, Operation, WrappingBackend
from tests.support.measurements import measure_few_bytes
from tests.support.offloader import wait_for_writes
from tests.support.trainings import ROWS, WIDTH, Look, batches, make_trainer, scratch_directories, small_arguments

CHUNKS = 4
"""Micro-batches of a schedule."""

TENSOR = ROWS // CHUNKS * WIDTH * 4
"""Bytes of a saved tensor."""


class Part(nn.Module):
    """The layers of one stage. `before` is called with the number of each forward of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
        self.before: Callable[[int], None] = lambda number: None
        self.number = 0

    def forward(self, batch: Tensor) -> Tensor:
        self.before(self.number)
        self.number += 1
        return self.net(batch)


class Pipeline(pl.LightningModule):
    """Learns the identity in a schedule; keeps losses and gradients of each step."""

    def __init__(self, schedule: Any = Schedule1F1B, *, follow: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.schedule_class = schedule
        self.follow = follow
        self.losses: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def configure_model(self) -> None:
        torch.manual_seed(self.global_rank)
        self.part = Part()
        self.stage = PipelineStage(self.part, self.global_rank, 2, self.trainer.strategy.root_device)
        self.schedule = self.schedule_class(self.stage, CHUNKS, loss_fn=nn.functional.mse_loss)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        losses: list[Tensor] = []
        self.part.number = 0
        with follow_stages(self.trainer, *[self.stage] if self.follow else []):
            if self.stage.is_first:
                self.schedule.step(batch)
            else:
                self.schedule.step(target=batch, losses=losses)
        self.losses += [loss.detach() for loss in losses]
        self.gradients += [parameter.grad.clone() for parameter in self.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class HeldReads(WrappingBackend):
    """Holds reads between `hold` and `release`.

    Attributes:
        reading: set when a read has begun since `hold`.
    """

    name = "held"

    def __init__(self) -> None:
        super().__init__()
        self.reading, self._released = threading.Event(), threading.Event()
        self._released.set()

    def hold(self) -> None:
        self.reading.clear()
        self._released.clear()

    def release(self) -> None:
        self._released.set()

    def transfer(self, operation: Operation, call: Move, buffer: Tensor, offset: int) -> int:
        if operation == "read":
            self.reading.set()
            assert self._released.wait(60)
        return call(buffer, offset)


def train(root: Path, module: Pipeline, *callbacks: pl.Callback, steps: int = 3) -> Any:
    """Trains one stage in each process, and returns the module."""
    strategy = pl.strategies.ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
    make_trainer(root, strategy, devices=2, callbacks=list(callbacks)).fit(module, batches(steps))
    return module


def offload(path: Path | None = None, **arguments: Any) -> ActivationOffload:
    return ActivationOffload(path, **small_arguments() | {"min_bytes": 1} | arguments)


def window() -> PrefetchScheduler:
    """Returns a window of one saved tensor."""
    return PrefetchScheduler(window_bytes=TENSOR)


def numbers(module: Pipeline) -> list[Tensor]:
    return [*module.losses, *module.gradients, *(parameter.detach() for parameter in module.parameters())]


def same_numbers(root: Path) -> None:
    """Losses, gradients and weights of two schedules are those without offloading."""
    for schedule in (Schedule1F1B, ScheduleGPipe):
        plain = train(root, Pipeline(schedule))
        assert len(plain.losses) == (3 * CHUNKS if plain.global_rank else 0) and plain.gradients
        for follow in (True, False):
            look = Look(root)
            offloaded = train(root, Pipeline(schedule, follow=follow), offload(), window(), look)
            assert_same(numbers(offloaded), numbers(plain))
            assert look.bytes_in["ssd"]


def own_directories(root: Path) -> None:
    """Each stage has scratch files in a directory of its own, and leaves none."""
    look = Look(root)
    drive = root / f"drive{os.environ.get('LOCAL_RANK', 0)}"
    drive.mkdir(parents=True)
    train(root, Pipeline(), offload(drive), look, steps=1)
    directories = [f"{Path(path).parent.name} {path[-5:]}" for path in look.directories]
    assert look.bytes_in["ssd"] and directories == ["drive0 rank0", "drive1 rank1"], directories
    assert scratch_directories(drive) == []


class Ordered(Pipeline):
    """Holds reads in each forward until its module is called, and notes the forwards in which one has begun."""

    def __init__(self, backend: HeldReads) -> None:
        super().__init__()
        self.backend = backend
        self.reading: list[int] = []

    def configure_model(self) -> None:
        super().configure_model()
        self.receive = self.stage.get_fwd_recv_ops
        self.stage.get_fwd_recv_ops = self.hold  # type: ignore[method-assign]
        self.part.before = self.release

    def hold(self, number: int) -> Any:
        """Called by the schedule right before each forward."""
        offloader = find_offloader(self.trainer)
        assert offloader is not None
        wait_for_writes(offloader)  # later loads read the file
        self.backend.hold()
        return self.receive(number)

    def release(self, number: int) -> None:
        """Called in each forward. The first step shows the order of the schedule."""
        if self.gradients:
            if self.stage.is_first and number > 1:
                assert self.backend.reading.wait(60), f"nothing is read in forward {number}"
            if self.backend.reading.is_set():
                self.reading.append(number)
        self.backend.release()


def order(root: Path) -> None:
    """The first stage runs F0 F1 B0 F2 B1 F3 B2 B3: in F2 and F3 it reads for the backward that follows.

    What B0 needs first is kept. The last stage runs F0 B0 F1 B1 ..., and reads nothing in a forward.
    """
    backend = HeldReads()
    module = train(root, Ordered(backend), offload(backend=backend), window(), steps=2)
    assert module.reading == ([] if module.global_rank else [2, 3]), module.reading


CASES: dict[str, Callable[[Path], None]] = {case.__name__: case for case in (same_numbers, own_directories, order)}


class Failing(Pipeline):
    """Fails in the second step, in the forward of a micro-batch on one stage."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.failing = rank

    def configure_model(self) -> None:
        super().configure_model()
        self.part.before = self.fail

    def fail(self, number: int) -> None:
        if self.gradients and number == 2 and self.global_rank == self.failing:
            raise KeyError("deliberate")


def main(root: Path, *names: str) -> None:
    torch.set_num_threads(1)
    if names[0] == "failing":
        train(root, Failing(int(names[1])), offload())
        return
    for name in names:
        file = root / f"{name}.{os.environ.get('LOCAL_RANK', 0)}"
        try:
            CASES[name](root / name)
        except BaseException:
            file.write_text(traceback.format_exc())
            raise  # the other process waits for this one
        file.write_text("")


if __name__ == "__main__":
    measure_few_bytes()
    main(Path(sys.argv[1]), *sys.argv[2:])
