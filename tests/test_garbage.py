"""Full garbage collections of a training examine the objects that it has made, and none that are older."""

import gc
import threading
import weakref
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_ssd import garbage
from lightning_ssd.garbage import ShortCollections, without_collections
from tests.support.garbage import collect
from tests.support.models import Model
from tests.support.states import host, train


@pytest.fixture(autouse=True)
def nothing_is_frozen() -> Iterator[None]:
    """After a test, so that each training has ended its exemption."""
    gc.unfreeze()
    yield
    collect()
    frozen = gc.get_freeze_count()
    gc.freeze()  # as it was before the test
    assert frozen < 1000


class Collects(pl.Callback):
    """Collects garbage in the second step, and counts the objects that later collections examine.

    Args:
        fails: whether the step raises an error afterwards.
    """

    def __init__(self, *, fails: bool = False) -> None:
        self.before = self.examined = self.frozen = 0
        self._fails = fails

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1:
            self.before = len(gc.get_objects())
            collect()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            self.frozen = gc.get_freeze_count()
            if self._fails:
                raise ArithmeticError("a callback has failed")

    def on_train_end(self, *_: Any) -> None:
        self.examined = len(gc.get_objects())


def test_survivors_of_a_full_collection_are_exempt_until_training_ends(tmp_path: Path) -> None:
    collects = Collects()
    train(tmp_path, host(), Model(), callbacks=[collects])
    assert collects.frozen > 0.5 * collects.before and collects.examined < 0.5 * collects.before


def test_the_exemption_ends_with_a_training_that_fails(tmp_path: Path) -> None:
    collects = Collects(fails=True)
    with pytest.raises(ArithmeticError):
        train(tmp_path, host(), Model(), callbacks=[collects])
    assert collects.frozen > 0


class Counts(pl.Callback):
    """Counts the exempt objects in the last step, and the full collections of the training."""

    def on_train_start(self, *_: Any) -> None:
        self.collections = -gc.get_stats()[-1]["collections"]

    def on_train_batch_end(self, *_: Any) -> None:
        self.frozen = gc.get_freeze_count()

    def on_train_end(self, *_: Any) -> None:
        self.collections += gc.get_stats()[-1]["collections"]


@pytest.mark.parametrize(("slow", "exempt"), [(0.0, True), (inf, False)])
def test_objects_are_exempt_from_the_second_micro_batch_on_if_the_first_one_was_slow(
    slow: float, exempt: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No full collection is waited for: that and the next one would come in two later steps."""
    monkeypatch.setattr(garbage, "SLOW", slow)
    counts = Counts()
    train(tmp_path, host(), Model(), callbacks=[counts])
    assert (counts.frozen > 1000) == exempt and counts.collections == int(exempt)


class Cycle:
    """A result of a micro-batch with a reference to itself."""

    def __init__(self) -> None:
        self.own = self


class MakesCycles(Model):
    """A full collection comes while the second micro-batch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Cycle]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        cycle = Cycle()
        self.made.append(weakref.ref(cycle))
        if batch_idx == 1:
            collect()
        return super().training_step(batch, batch_idx)


class CountsCycles(pl.Callback):
    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        collect()
        self.frozen = gc.get_freeze_count()
        self.alive = sum(one() is not None for one in pl_module.made)


def test_garbage_of_a_micro_batch_is_freed_though_a_full_collection_came_while_it_ran(tmp_path: Path) -> None:
    counts = CountsCycles()
    train(tmp_path, host(), MakesCycles(), callbacks=[counts])
    assert counts.frozen > 1000 and counts.alive == 0


def test_nothing_is_exempt_while_another_thread_collects() -> None:
    collecting, released = threading.Event(), threading.Event()
    collections = ShortCollections()
    collect()

    def wait(phase: str, _: Any) -> None:
        if phase == "start" and threading.current_thread() is thread:
            collecting.set()
            released.wait()

    thread = threading.Thread(target=collect)
    gc.callbacks.append(wait)
    try:
        thread.start()
        collecting.wait()
        collections.begin_micro_batch()  # garbage of the micro-batch before would be exempt
        assert gc.get_freeze_count() < 1000
    finally:
        released.set()
        thread.join()
        gc.callbacks.remove(wait)
    collections.begin_micro_batch()
    assert gc.get_freeze_count() > 1000
    collections.end()


class Freezes(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 0:
            gc.freeze()
        collect()


def test_objects_that_user_code_freezes_in_the_training_stay_frozen(tmp_path: Path) -> None:
    train(tmp_path, host(), Model(), callbacks=[Freezes()])
    assert gc.get_freeze_count() > 1000
    gc.unfreeze()


def test_objects_that_user_code_has_frozen_stay_frozen(tmp_path: Path) -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    train(tmp_path, host(), Model(), callbacks=[Collects()])
    assert 0.9 * count < gc.get_freeze_count() <= count  # some were freed, and none was added
    gc.unfreeze()


@pytest.mark.parametrize("enabled", [True, False])
def test_collections_are_enabled_afterwards_if_they_were_before(enabled: bool) -> None:
    if not enabled:
        gc.disable()
    try:
        with without_collections():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
