"""Batches of several shapes in trainings with compiled code: a plan for each, and no more memory than there is."""

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
from lightning_ssd.callbacks import AutoPlanner, planned_shapes, region_planner, region_progress, region_recording
from lightning_ssd.callbacks.offloader import find_offloader
from lightning_ssd.callbacks.region_progress import Trial
from lightning_ssd.profiling import SavedTimelineRecorder
from tests.support.compare import assert_same
from tests.support.compiled import INDUCTOR, fresh_dynamo  # noqa: F401
from tests.support.meter import Meter, use
from tests.support.plans import BOTH
from tests.support.products import thorough
from tests.support.regions import See, Ticks, keep_code, train

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
        self.followed: list[Trial | None] = []

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
        self.followed.append(None if auto.regions is None else auto.regions.followed)


def fit(
    memory: Memory, shapes: Sequence[Shape], path: Path, monkeypatch: pytest.MonkeyPatch, **how: Any
) -> tuple[list[Tensor], See]:
    see = See()
    use(memory, monkeypatch)
    monkeypatch.setattr(region_progress, "MIN_GAIN", -1e9)  # plans are applied, however fast they are
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
def test_alternating_shapes_have_a_plan_each(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shapes = [LARGE, SMALL] * 28
    memory = Memory(by_rows(torch.Size([*LARGE, 32])) + 30_000, by_rows)
    monkeypatch.setattr(planned_shapes, "LOOSELY_PLANNED", 1)
    plain, _ = train(backend, "auto", tmp_path, shapes=shapes)
    with caplog.at_level("INFO"):
        numbers, see = fit(memory, shapes, tmp_path, monkeypatch, backend=backend)
    assert_same(numbers, plain)
    assert see.regions.decided and max(memory.needed[1:]) <= memory.most
    assert len([line for line in caplog.messages if "planning for them, too" in line]) == 1
    last = memory.followed[-8:]
    assert last[::2] == [last[0]] * 4 and last[1::2] == [last[1]] * 4
    sizes = [trial.plan.sizes for trial in last[:2] if trial is not None and trial.plan is not None]
    assert sum(sizes[0]) == 2 * sum(sizes[1])


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
    assert any(trial is not None and trial.plan is not None for trial in memory.followed)


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


@pytest.mark.thorough
def test_steps_of_other_shapes_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticks()

    class Slow(pl.Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            clock.seconds += 1e6 if pl_module.rows == SMALL[0] else 0

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Tensor, batch_idx: int) -> None:
            pl_module.rows = len(batch)

    keep_code(monkeypatch)
    monkeypatch.setattr(region_planner, "make_clock", lambda device: clock)
    memory = Memory(by_rows(torch.Size([*LARGE, 32])) + 30_000, by_rows)
    how: dict[str, Any] = {"accumulate_grad_batches": 3, "callbacks": [Slow()]}
    _, see = fit(memory, [*[LARGE] * 6, SMALL, *[LARGE] * 5] * 8, tmp_path, monkeypatch, **how)
    assert see.regions.decided and len(see.regions.trials) == 2
    assert all(0 < trial.seconds < 1e4 for trial in see.regions.trials)


@pytest.mark.thorough
def test_steps_of_a_shape_that_was_recorded_in_vain_are_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps are much shorter than those of the shape that is recorded after it, and planned."""
    clock, rows, in_vain = Ticks(), [0], [0]

    class FailsOnce(SavedTimelineRecorder):
        def end(self) -> None:
            if in_vain[0]:
                super().end()
            in_vain[0] = in_vain[0] or rows[0]

    class Slow(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Tensor, batch_idx: int) -> None:
            rows[0] = len(batch)

        def on_before_backward(self, *_: Any) -> None:
            clock.seconds += 0 if rows[0] == in_vain[0] else 1e6

    keep_code(monkeypatch)
    monkeypatch.setattr(region_planner, "make_clock", lambda device: clock)
    monkeypatch.setattr(region_recording, "SavedTimelineRecorder", FailsOnce)
    memory = Memory(by_rows(torch.Size([40, 32])) + 30_000, by_rows)
    _, see = fit(memory, [(40,), (39,)] * 20, tmp_path, monkeypatch, callbacks=[Slow()])
    assert see.regions.decided and len(see.regions.trials) == 2 and in_vain[0]
    assert all(1e6 < trial.seconds < 2e6 for trial in see.regions.trials)
