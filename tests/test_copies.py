"""Copies of a Trainer amid its training, which user code may make at any hook: those of a callback that has it, too."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

import lightning_ssd
from lightning_ssd import SSDOffloadStrategy
from tests.support.compare import assert_same
from tests.support.meter import MACHINE
from tests.support.models import Model
from tests.support.products import thorough
from tests.support.states import host, loader, ssd
from tests.support.trainings import (
    batches,
    fit,
    make_trainer,
    nothing_left,  # noqa: F401
    offloading,
    small_arguments,
    small_model,
)

HOOKS = [name for name in dir(pl.Callback) if name.startswith("on_") and not name.endswith(("checkpoint", "exception"))]


class TrainerCopies(pl.Callback):
    """Copies the Trainer at every hook, and keeps the module of each last copy."""

    def __init__(self) -> None:
        self.modules: dict[str, Any] = {}


def _copy_at(hook: str) -> Callable[..., None]:
    def run(self: TrainerCopies, trainer: pl.Trainer, *_: Any) -> None:
        kept, self.modules = self.modules, {}
        kept[hook] = copy.deepcopy(trainer).lightning_module
        self.modules = kept

    return run


for _hook in HOOKS:
    setattr(TrainerCopies, _hook, _copy_at(_hook))


def train(root: Path, strategy: Any, *callbacks: pl.Callback, num_batches: int = 2) -> Any:
    """Returns the module, and the modules of the copied Trainers by hook."""
    copies, module = TrainerCopies(), small_model()
    make_trainer(root, strategy, callbacks=[*callbacks, copies]).fit(module, batches(num_batches), batches(1))
    assert len(copies.modules) > 15
    return module, copies.modules


@pytest.mark.parametrize(
    "strategy",
    [
        SSDOffloadStrategy,
        offloading,
        thorough(host),
        thorough(ssd),
        lambda: ssd(recover=True),
    ],
)
def test_a_copy_of_the_trainer_has_the_weights_and_no_part_of_the_training(tmp_path: Path, strategy: Any) -> None:
    expected, plain = train(tmp_path, "auto")
    module, copied = train(tmp_path, strategy())
    assert_same(module, expected)
    assert list(copied) == list(plain)
    for hook in plain:
        assert_same(dict(copied[hook].state_dict()), dict(plain[hook].state_dict()))


class Pickles(pl.Callback):
    """Pickles the strategy after every batch."""

    def __init__(self) -> None:
        self.pickled: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.pickled.append(pickle.dumps(trainer.strategy))


@pytest.mark.parametrize("strategy", [host, ssd])
def test_a_strategy_that_is_pickled_during_a_training_trains_another_model(tmp_path: Path, strategy: Any) -> None:
    callback = Pickles()
    expected = fit(tmp_path, strategy(), Model(), loader(2), callbacks=[callback])
    assert len(callback.pickled) == 2
    for pickled in callback.pickled:
        copied = pickle.loads(pickled)
        assert type(copied) is SSDOffloadStrategy and copied.model_states is None
        copied.accelerator = None  # its Trainer sets it
        assert_same(fit(tmp_path, copied, Model(), loader(2)), expected)


CALLBACKS: dict[str, Callable[[], pl.Callback]] = {
    "ActivationOffload": lambda: lightning_ssd.ActivationOffload(**small_arguments()),
    "MicroBatchSwitch": lightning_ssd.MicroBatchSwitch,
    "ModelProfiler": lambda: lightning_ssd.ModelProfiler("profile.json", warm_up=1, steps=1),
    "OffloadMonitor": lightning_ssd.OffloadMonitor,
    "PrefetchScheduler": lightning_ssd.PrefetchScheduler,
    "SwapPlanner": lambda: lightning_ssd.SwapPlanner(machine=MACHINE, warm_up=1, steps=1),
    "TimelineRecorder": lightning_ssd.TimelineRecorder,
}

QUICK = "ActivationOffload"


@pytest.mark.parametrize("name", [*(thorough(name) for name in CALLBACKS if name != QUICK), QUICK])
def test_copies_of_the_packages_callbacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    expected, _ = train(tmp_path, "auto", num_batches=6)
    strategy = "auto" if name == "ActivationOffload" else offloading(offload="auto" if name == "SwapPlanner" else 1.0)
    assert_same(train(tmp_path, strategy, CALLBACKS[name](), num_batches=6)[0], expected)
