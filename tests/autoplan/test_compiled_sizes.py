"""Batches of several shapes in trainings with compiled code: one plan, and no more memory than there is."""

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_ssd import PrefetchScheduler, SSDOffloadStrategy
from lightning_ssd.callbacks import AutoPlanner
from lightning_ssd.callbacks.offloader import find_offloader
from lightning_ssd.planning import StoragePlan
from tests.support.compare import assert_same
from tests.support.compiled import INDUCTOR, fresh_dynamo  # noqa: F401
from tests.support.compiled_blocks import See, train
from tests.support.meter import Meter, use
from tests.support.plans import BOTH
from tests.support.products import thorough

pytestmark = pytest.mark.timeout(300)

Shape = tuple[int, ...]


class Memory(Meter, pl.Callback):
    """An allocator that has saved storages on the device, and transient bytes that depend on the batch's shape.

    Args:
        most: the limit, in bytes.
        transient: returns the transient bytes of a batch.
    """

    def __init__(self, most: float, transient: Callable[[torch.Size], int]) -> None:
        Meter.__init__(self, most, 0)
        self._transient = transient
        self._shape = torch.Size()
        self.needed: list[int] = []
        """Peak of each micro-batch."""
        self.followed: list[StoragePlan | None] = []

    def reset_peak(self) -> None:
        self.highest = self.level

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Tensor, batch_idx: int) -> None:
        self._shape = batch.shape

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        offloader = find_offloader(trainer)
        assert offloader is not None
        auto = next(one for one in trainer.callbacks if isinstance(one, AutoPlanner))
        rows = prod(self._shape[:-1])
        kept = offloader.resident_bytes() if offloader.policy.hooks_enabled else SAVED * rows
        self.needed.append(self._transient(self._shape) + kept)
        self.highest = max(self.highest, self.needed[-1])
        self.followed.append(None if auto.compiled is None else auto.compiled.followed)


def fit(
    memory: Memory, shapes: Sequence[Shape], path: Path, monkeypatch: pytest.MonkeyPatch, **how: Any
) -> tuple[list[Tensor], See]:
    see = See()
    use(memory, monkeypatch)
    callbacks = [memory, see, PrefetchScheduler(window_bytes=0), *how.pop("callbacks", [])]
    how = {"backend": "aot_eager", "callbacks": callbacks} | how
    numbers, _ = train(strategy=SSDOffloadStrategy(**BOTH), path=path, shapes=shapes, **how)
    return numbers, see


def by_rows(shape: torch.Size) -> int:
    return 500 * prod(shape[:-1])


def by_length(shape: torch.Size) -> int:
    return 10 * shape[0] * shape[1] ** 2


SMALL, LARGE = (16,), (32,)


@pytest.mark.thorough
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_alternating_shapes_have_a_row_each(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch is recorded. Those of half its size have room for more of their tensors."""
    shapes = [LARGE, SMALL] * 14
    memory = Memory(by_rows(torch.Size([*LARGE, 32])) + 30_000, by_rows)
    plain, _ = train(backend, "auto", tmp_path, shapes=shapes)
    numbers, see = fit(memory, shapes, tmp_path, monkeypatch, backend=backend)
    assert_same(numbers, plain)
    assert see.compiled.decided and max(memory.needed[1:]) <= memory.most
    last = memory.followed[-8:]
    assert last[::2] == [last[0]] * 4 and last[1::2] == [last[1]] * 4
    assert last[0] is not None and last[1] is not None
    assert sum(last[0].sizes) == pytest.approx(2 * sum(last[1].sizes), rel=0.01)
    assert last[1].offloaded_bytes < last[0].offloaded_bytes / 2


def random_shapes(seed: int, choices: Sequence[Shape]) -> list[Shape]:
    random = Random(seed)
    return [shape for _ in range(24) for shape in [random.choice(choices)] * random.randint(1, 8)]


SAVED = 3744
"""Saved bytes of a row."""

LEAST = 220
"""Saved bytes of a row that are not offloaded: backward needs them first, or user code refers to them."""

SQUARE, LONG, SHORT = (8, 8), (4, 16), (16, 4)


def fit_short(
    transient: Callable[[torch.Size], int], shapes: list[Shape], path: Path, monkeypatch: pytest.MonkeyPatch
) -> Memory:
    """Trains with hardly more memory than the largest batch needs without offloaded storages."""
    needed = (transient(torch.Size([*shape, 32])) + LEAST * prod(shape) for shape in shapes)
    memory = Memory(1.02 * max(needed), transient)
    fit(memory, shapes, path, monkeypatch)
    assert max(memory.needed[2:]) <= memory.most
    return memory


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("transient", "shapes"),
    [
        pytest.param(by_rows, [LARGE] * 2 + [SMALL] * 40 + [LARGE] * 2, id="larger"),
        thorough(by_length, [SHORT] * 16 + [LONG, SQUARE] * 2, id="longer"),
    ],
)
def test_a_batch_of_another_shape_never_needs_more_memory_than_there_is(
    transient: Callable[[torch.Size], int], shapes: list[Shape], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger, or longer with as many bytes, before the plan and after it."""
    memory = fit_short(transient, shapes, tmp_path, monkeypatch)
    assert any(plan is not None for plan in memory.followed)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("transient", "choices"),
    [(by_rows, [(8,), SMALL, (24,), LARGE]), (by_length, [SQUARE, LONG, SHORT, (4, 8), (2, 16)])],
    ids=["rows", "length"],
)
def test_random_shapes_never_need_more_memory_than_there_is(
    transient: Callable[[torch.Size], int],
    choices: Sequence[Shape],
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fit_short(transient, random_shapes(seed, choices), tmp_path, monkeypatch)
