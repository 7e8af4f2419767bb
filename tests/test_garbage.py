"""Full garbage collections of a training examine the objects that it has made, and none that are older."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from tests.support.models import Model
from tests.support.states import host, train


@pytest.fixture(autouse=True)
def nothing_is_frozen() -> Iterator[None]:
    """Also that a training leaves no callback: the next full collection would freeze objects for ever."""
    assert gc.get_freeze_count() < 1000
    yield
    gc.collect()
    frozen = gc.get_freeze_count()
    gc.unfreeze()
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
            gc.collect()
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


def test_objects_that_user_code_has_frozen_stay_frozen(tmp_path: Path) -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    train(tmp_path, host(), Model(), callbacks=[Collects()])
    assert 0.9 * count < gc.get_freeze_count() <= count  # some were freed, and none was added
    gc.unfreeze()
