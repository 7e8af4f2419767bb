"""The order of steps, writes and records: versions that a record names are on the drive, and are not overwritten."""

import os
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ssd.model_states.journal.plain_data import decode, from_bytes
from lightning_ssd.storage import Backend, PosixBackend
from tests.support.endings import WIDTH, Toy, offload
from tests.support.faults import Move, Operation, WrappingBackend
from tests.support.trainings import make_trainer, nothing_left  # noqa: F401


class WatchedWrites(WrappingBackend):
    """Sets `arrived` before each write, and blocks writes while `open_gate` is cleared."""

    name = "watched"

    def __init__(self) -> None:
        super().__init__()
        self.open_gate = threading.Event()
        self.open_gate.set()
        self.arrived = threading.Event()

    def transfer(self, operation: Operation, call: Move, buffer: Tensor, offset: int) -> int:
        if operation == "write":
            self.arrived.set()
            assert self.open_gate.wait(timeout=60)
        return call(buffer, offset)


def recorded_step(path: Path) -> int:
    """Returns the last step in the journal."""
    content = (path / "lightning_ssd-kept-rank0" / "journal").read_bytes()
    return int(decode(from_bytes(content)["training"])["global_step"])


def train(path: Path, backend: Backend, callback: pl.Callback, model: type[Toy] = Toy, **arguments: Any) -> None:
    rows = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(5))
    strategy = offload(backend, recover=True)
    make_trainer(path, strategy, callbacks=[callback], **arguments).fit(model(), DataLoader(rows, 4))


def states_of(trainer: pl.Trainer) -> Any:
    return trainer.strategy.model_states  # type: ignore[attr-defined]


def test_a_record_is_written_when_the_bytes_are_that_it_names(tmp_path: Path) -> None:
    """The writes of a step are blocked: until they have ended, the record is that of the previous step."""
    backend, seen = WatchedWrites(), []

    class Hold(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                states_of(trainer).finish()
                assert recorded_step(tmp_path) == 2
                backend.open_gate.clear()
            if batch_idx == 3:  # the record of step 3 is requested, and ready jobs of its thread are done
                states_of(trainer).records._journal._worker.submit(lambda: None).result()
                seen.append(recorded_step(tmp_path))
                backend.open_gate.set()
                states_of(trainer).finish()
                seen.append(recorded_step(tmp_path))

    train(tmp_path, backend, Hold())
    assert seen == [2, 3]


def test_recorded_versions_are_not_overwritten_before_the_next_record_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of a step is blocked while the next step is made, which must not overwrite recorded versions."""
    backend, early = WatchedWrites(), []
    held = threading.Event()
    flush = os.fdatasync

    def hold(file: int) -> None:
        if held.is_set():
            held.clear()
            backend.arrived.clear()
            early.append(backend.arrived.wait(timeout=0.5))  # it arrives at once if it does not wait
        flush(file)

    class Hold(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                states_of(trainer).drain()
                held.set()

    monkeypatch.setattr(os, "fdatasync", hold)
    train(tmp_path, backend, Hold())
    assert early == [False]


def test_bytes_are_flushed_before_they_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the record may survive a loss of power that the bytes don't."""
    events: list[str] = []
    flush, rename = os.fdatasync, os.rename

    def flushed(file: int) -> None:
        flush(file)
        events.append("flush")

    def renamed(*arguments: Any, **options: Any) -> None:
        rename(*arguments, **options)
        events.append(str(arguments[1]))

    monkeypatch.setattr(os, "fdatasync", flushed)
    monkeypatch.setattr(os, "rename", renamed)
    train(tmp_path, PosixBackend(), pl.Callback())
    records = [index for index, event in enumerate(events) if event == "journal"]
    assert len(records) == 5
    assert all(events[index - 1] == "flush" for index in records)
