"""The location table has every tensor of the model states, and its addresses have the values of plain Lightning."""

import logging
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_ssd import SSDOffloadStrategy, tensor_locations
from lightning_ssd.model_states import TensorLocation, units
from lightning_ssd.model_states.split import split
from lightning_ssd.sizes import format_bytes
from lightning_ssd.storage import BlobStore
from tests.support.models import Block, Model, ToyModel
from tests.support.moves import TIERS, Mover, PartMover
from tests.support.products import thorough
from tests.support.states import host, some_stay
from tests.support.trainings import nothing_left, rows, train

__all__ = ["nothing_left"]

FORMATS = [("32-true", "fp32"), ("bf16-mixed", "fp32"), ("bf16-true", "fp32"), ("bf16-true", "split")]

Snapshot = dict[str, Tensor]
"""Weights and optimizer states by the names of their rows."""


class Blocks(ToyModel):
    def __init__(self, width: int = 16, hidden: int = 64, depth: int = 3, make_optimizer: Any = None) -> None:
        super().__init__(make_optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True)))
        self.width = width
        self.blocks = torch.nn.ModuleList(Block(width, hidden) for _ in range(depth))

    def loss(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return (batch - 1).square().mean()


class Snapshots(pl.Callback):
    """Weights and optimizer states after each step."""

    def __init__(self) -> None:
        self.after: dict[int, Snapshot] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        found = {name: value.clone() for name, value in pl_module.state_dict().items()}
        for name, state in zip(list(found), trainer.optimizers[0].state_dict()["state"].values(), strict=True):
            found |= {f"{name}.{key}": value.clone() for key, value in state.items() if value.dim()}
        self.after[trainer.global_step] = found


class Locations(pl.Callback):
    """Location tables after each step, compared with snapshots of another training.

    Attributes:
        tables: the tables.
    """

    def __init__(self, expected: dict[int, Snapshot] | None = None, *, halves: bool = False) -> None:
        self._expected, self._halves = expected, halves
        self.tables: list[list[TensorLocation]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        table = tensor_locations(trainer)
        self.tables.append(table)
        assert len({(row.kind, row.name) for row in table}) == len(table)
        if self._expected is not None:
            self._compare(table, self._expected[trainer.global_step])

    def _compare(self, table: list[TensorLocation], expected: Snapshot) -> None:
        large = [row for row in table if row.kind in ("weight", "optimizer state") and row.nbytes > 4]
        assert {row.name for row in large} == set(expected)
        for row in table:
            assert bool(row.files) == (row.tier == "ssd"), row
            if row.kind == "gradient" or row.nbytes == 4:
                continue
            values = expected[row.name.removesuffix(".master")]
            if row.kind == "weight" and row.dtype == torch.bfloat16:
                values = halves_of(values)[0] if self._halves else values.bfloat16()
            if row.dtype == torch.int16:
                values = halves_of(values)[1]
            assert (row.dtype, row.nbytes) == (values.dtype, values.nbytes), row
            if row.files:
                assert read(row) == values.contiguous().view(torch.uint8).numpy().tobytes(), row


def halves_of(masters: Tensor) -> tuple[Tensor, Tensor]:
    weights, low = (torch.empty(masters.shape, dtype=dtype) for dtype in (torch.bfloat16, torch.int16))
    split(masters, weights, low)
    return weights, low


def read(row: TensorLocation) -> bytes:
    """Returns the bytes of a row's files."""
    found = b""
    for part in row.files:
        with part.path.open("rb") as file:
            file.seek(part.offset)
            found += file.read(part.nbytes)
    return found


def ssds(path: Path, count: int, **arguments: Any) -> SSDOffloadStrategy:
    """Returns a strategy whose states are on SSDs, striped in pages over `count` folders, until they are moved."""
    folders = [path / str(number) for number in range(count)]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    how: Any = {"states": "ssd", "min_bytes": 1, "host_memory": "32MiB", "offload": "none"}
    return SSDOffloadStrategy(folders, **how | arguments)


def check(path: Path, model: Any, mover: Mover, precision: Any, state_format: Any, *, folders: int = 2) -> Locations:
    """Trains a model whose states move, and compares each table with the training without moves."""
    how: Any = {"precision": precision, "max_epochs": 1}
    data = rows(6, model.width)
    expected = Snapshots()
    # Only in bf16-true, fp32 master weights are stepped.
    plain = "auto" if precision != "bf16-true" else host(state_format=state_format, offload="none")
    train(path, plain, model, data, callbacks=[expected], **how)
    found = Locations(expected.after, halves=state_format == "split")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BlobStore.__init__.__kwdefaults__, "piece_bytes", 4096)  # type: ignore[arg-type]
        strategy = ssds(path, folders, state_format=state_format)
        train(path, strategy, model, data, callbacks=[mover, found], **how)
    assert mover.moves
    return found


@pytest.mark.parametrize(
    ("precision", "state_format"), [FORMATS[0], thorough(*FORMATS[1]), thorough(*FORMATS[2]), FORMATS[3]]
)
def test_addresses_have_the_values_after_moves(tmp_path: Path, precision: str, state_format: str) -> None:
    found = check(tmp_path, Blocks(), Mover(), precision, state_format)
    every = [row for table in found.tables for row in table]
    assert {row.tier for row in every} == {"gpu", "host", "ssd"}
    assert {part.path.parents[1].name for row in every for part in row.files} == {"0", "1"}
    assert any(len({part.path for part in row.files}) == 2 for row in every)
    assert any(row.kind == "master weight" for row in every) == (precision != "32-true")
