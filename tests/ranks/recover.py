"""Trainings of two ranks with `recover=True`, of which one rank or both are killed: a script for test_recover.py.

    python -m tests.ranks.recover FOLDER KILLS

Each training runs in two new processes of one that has imported everything. The last one, which is not killed, must
have the losses and weights of a training that was not interrupted.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_ssd import SSDOffloadStrategy
from tests.support.killed import DyingBackend, apart, fit, outcome, recovering, same
from tests.support.measurements import measure_few_bytes


class DieAt(pl.Callback):
    def __init__(self, batch: int) -> None:
        self._batch = batch

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if int(module.batches) == self._batch:
            os.kill(os.getpid(), signal.SIGKILL)


def die_before_the_record(number: int) -> None:
    """Kills this process when all of a record but its name is written."""
    rename, left = os.rename, number

    def die(source: str, target: str, **arguments: Any) -> None:
        nonlocal left
        if target == "journal":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target, **arguments)

    os.rename = die  # type: ignore[assignment]


def train(folder: Path, rank: int, strategy: SSDOffloadStrategy, **arguments: Any) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    os.environ |= {name: str(value) for name, value in names.items()} | {"TORCHELASTIC_RUN_ID": "test"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    module = fit(strategy, devices=2, **arguments)
    torch.save(outcome(module), folder / f"outcome.{rank}")


def run(folder: Path, make: Callable[[int], dict[str, Any]]) -> list[int]:
    """Trains in two new processes, with arguments of `train` that `make` returns; returns how each has ended."""
    (folder / "store").unlink(missing_ok=True)
    processes = []
    for rank in range(2):
        if (process := os.fork()) == 0:
            status = 1
            try:
                train(folder, rank, **make(rank))
                status = 0
            except Exception as error:
                print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(status)
        processes.append(process)
    return [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]


def killed(path: Path, rank: int, ranks: Sequence[int], *, write: int = 0, batch: int = -1, record: int = 0) -> Any:
    """Returns arguments of a training in which `ranks` die at their nth write, in a batch, or before the nth record."""
    dies = rank in ranks
    if dies and record:
        die_before_the_record(record)
    backend = DyingBackend(write if dies else 0, direct=False)
    return {"strategy": recovering(path, backend=backend), "callbacks": [DieAt(batch if dies else -1)]}


def main(folder: Path, num_kills: int) -> None:
    path = folder / "ssd"
    path.mkdir()
    whole = run(folder, lambda rank: {"strategy": recovering(apart(path), recover=False, states="host")})
    assert whole == [0, 0], whole
    expected = [torch.load(folder / f"outcome.{rank}") for rank in range(2)]
    kills: list[tuple[Sequence[int], dict[str, int]]] = [
        ([0], {"record": 2}),
        ([1], {"write": 4}),
        ([0, 1], {"batch": 9}),
        ([1], {"batch": 12}),
        ([0], {"write": 6}),
    ]
    for ranks, when in kills[:num_kills]:
        ends = run(folder, lambda rank: killed(path, rank, ranks, **when))  # noqa: B023
        assert all(ends[rank] == -signal.SIGKILL for rank in ranks) and 0 not in ends, (ends, ranks, when)
    ends = run(folder, lambda rank: killed(path, rank, []))
    assert ends == [0, 0], ends
    for rank in range(2):
        assert same(torch.load(folder / f"outcome.{rank}"), expected[rank]), f"rank {rank} has other numbers"
    assert not list(path.iterdir())


if __name__ == "__main__":
    measure_few_bytes()
    main(Path(sys.argv[1]), int(sys.argv[2]))
