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
from lightning_ssd.model_states import TensorLocation
from lightning_ssd.model_states.stores.split import split
from lightning_ssd.model_states.units import units
from lightning_ssd.sizes import format_bytes
from lightning_ssd.storage import BlobStore
from tests.support.models import Block, Model, ToyModel
from tests.support.moves import TIERS, Mover, PartMover
from tests.support.products import thorough
from tests.support.states import host, loader, some_stay
from tests.support.trainings import nothing_left, rows, train

__all__ = ["nothing_left"]

FORMATS = [("32-true", "fp32"), ("bf16-mixed", "fp32"), ("bf16-true", "fp32"), ("bf16-true", "split")]
"""Precision and state format."""

CLIPPED = {"gradient_clip_val": 0.5}

Snapshot = dict[str, Tensor]
"""Weights and optimizer states by the names of their rows."""


class Blocks(ToyModel):
    def __init__(self, width: int = 16, hidden: int = 64, depth: int = 3, make_optimizer: Any = None) -> None:
        super().__init__(make_optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-2)))
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
        stored = [row for row in table if row.kind != "gradient" and not row.name.endswith(".step")]
        assert {row.name for row in stored if row.kind != "master weight"} == set(expected)
        for row in stored:
            assert bool(row.files) == (row.tier == "ssd"), row
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


def mover_for(state_format: str, seed: int = 0) -> Mover:
    """Returns a mover; split weights are rounded otherwise on the device, so that numbers would differ there."""
    return Mover(seed, TIERS[1:] if state_format == "split" else TIERS)


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


def check(
    path: Path, model: Any, mover: Mover, how: Any, state_format: Any = "fp32", *, folders: int = 2, **arguments: Any
) -> Locations:
    """Trains a model whose states move, and compares each table with the training without moves.

    Args:
        path: directory of scratch files.
        model: the model.
        mover: moves the states.
        how: precision and clipping, arguments of the Trainer.
        state_format: argument of the strategy.
        folders: number of folders over which states are striped.
        **arguments: other arguments of the strategy.
    """
    data = rows(6, model.width)
    expected = Snapshots()
    # Only in bf16-true, fp32 master weights are stepped.
    plain = "auto" if how["precision"] != "bf16-true" else host(state_format=state_format, offload="none")
    train(path, plain, model, data, callbacks=[expected], max_epochs=1, **how)
    found = Locations(expected.after, halves=state_format == "split")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BlobStore.__init__.__kwdefaults__, "piece_bytes", 4096)  # type: ignore[arg-type]
        strategy = ssds(path, folders, state_format=state_format, **arguments)
        train(path, strategy, model, data, callbacks=[mover, found], max_epochs=1, **how)
    assert mover.moves
    return found


@pytest.mark.parametrize(
    ("precision", "state_format"), [FORMATS[0], thorough(*FORMATS[1]), thorough(*FORMATS[2]), FORMATS[3]]
)
def test_addresses_have_the_values_after_moves(tmp_path: Path, precision: str, state_format: str) -> None:
    """States have two versions, of which the table has the committed one."""
    how = {"precision": precision, **CLIPPED}
    found = check(tmp_path, Blocks(), mover_for(state_format), how, state_format, clip="speculative")
    every = [row for table in found.tables for row in table]
    assert {row.tier for row in every} == {"host", "ssd"} | (set() if state_format == "split" else {"gpu"})
    assert {part.path.parents[1].name for row in every for part in row.files} == {"0", "1"}
    assert any(len({part.path for part in row.files}) == 2 for row in every)
    assert any(row.kind == "master weight" for row in every) == (precision != "32-true")


@pytest.mark.thorough
@settings(max_examples=20, deadline=None)
@given(
    width=st.integers(1, 40),
    hidden=st.integers(1, 200),
    depth=st.integers(1, 4),
    kind=st.sampled_from(FORMATS),
    folders=st.integers(1, 3),
    seed=st.integers(0, 2**16),
    clip=st.sampled_from([None, "speculative", "deferred"]),
)
def test_addresses_of_random_models(
    tmp_path_factory: pytest.TempPathFactory,
    width: int,
    hidden: int,
    depth: int,
    kind: tuple[str, str],
    folders: int,
    seed: int,
    clip: Any,
) -> None:
    path, (precision, state_format) = tmp_path_factory.mktemp("random"), kind
    how = {"precision": precision} | (CLIPPED if clip else {})
    model = Blocks(width, hidden, depth)
    check(path, model, mover_for(state_format, seed), how, state_format, folders=folders, clip=clip or "auto")


def test_rows_name_the_parts_that_a_plan_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`PartMover` compares the table with its plan after each move."""
    monkeypatch.setattr(units, "PART_ELEMENTS", 512)
    mover = PartMover()
    check(tmp_path, Blocks(), mover, {"precision": "32-true"}, states="auto", gpu_memory="16kB")
    assert mover.divided


@pytest.mark.parametrize("strategy", [lambda: "auto", host, some_stay], ids=["plain", "host", "some stay"])
def test_gradients_have_rows_while_they_exist(tmp_path: Path, strategy: Any) -> None:
    """Gradients that are accumulated in fp32, on the host or on the device, and those that a step has used."""
    found = Locations()
    train(tmp_path, strategy(), Model(), loader(4), callbacks=[found], accumulate_grad_batches=2)
    weights, first, second = (
        {row.name: row for row in table if row.kind == kind}
        for table, kind in ((found.tables[0], "weight"), (found.tables[0], "gradient"), (found.tables[2], "gradient"))
    )
    assert set(first) == set(second) == {f"{name}.grad" for name in weights}
    for name, row in weights.items():
        gradient = first[f"{name}.grad"]
        assert (gradient.tier, gradient.nbytes, gradient.dtype) == (row.tier, row.nbytes, torch.float32)


class Frozen(Blocks):
    """Two of three blocks are trained."""

    def __init__(self) -> None:
        super().__init__(make_optimizer=lambda p: torch.optim.RMSprop(p, lr=1e-3))
        self.blocks[0].requires_grad_(False)


def test_frozen_weights_and_states_in_memory_have_rows(tmp_path: Path) -> None:
    """RMSprop keeps its states in host memory, wherever the weights are."""
    found = Locations()
    train(tmp_path, ssds(tmp_path, 1), Frozen(), rows(2, 16), callbacks=[found])
    table = found.tables[-1]
    weights = {row.name for row in table if row.kind == "weight"}
    assert weights == {name for name, _ in Frozen().named_parameters()}
    assert {row.tier for row in table if row.kind == "weight"} == {"ssd"}
    states = {row.name: row.tier for row in table if row.kind == "optimizer state"}
    assert set(states) == {
        f"{name}.{key}" for name in weights if not name.startswith("blocks.0") for key in ("square_avg", "step")
    }
    assert set(states.values()) == {"host"}


def test_the_summary_has_the_bytes_of_the_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Start(Locations):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.tables.append(tensor_locations(trainer))

    found = Start()
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    strategy = ssds(tmp_path, 2, states="auto", gpu_memory="40kB", host_memory="128kB", state_format="split")
    train(tmp_path, strategy, Blocks(), rows(1, 16), callbacks=[found], precision="bf16-true")
    (line,) = {message for message in caplog.messages if message.startswith("ssd_offload:")}
    for kinds, before in ((["weight"], "weights"), (["master weight", "optimizer state"], "optimizer states")):
        for tier, where in (("host", "in host memory"), ("ssd", "on SSD")):
            nbytes = sum(row.nbytes for row in found.tables[0] if row.kind in kinds and row.tier == tier)
            said = re.search(rf"^ssd_offload: {before}: [^;\n]*?(\S+ \S+) {where}", line, re.M)
            assert (said is not None and said[1] == format_bytes(nbytes)) if nbytes else said is None, line
