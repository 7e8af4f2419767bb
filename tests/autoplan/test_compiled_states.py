"""Offloaded model states of compiled units are moved by the plan, as those of other units are."""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.model_states import StatesConfig
from tests.support.compare import assert_same
from tests.support.compiled import fresh_dynamo  # noqa: F401
from tests.support.compiled_blocks import See, train
from tests.support.meter import Meter, use, use_slow_transfers

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("deterministic")]

AUTO: dict[str, Any] = {"min_bytes": 1, "host_memory": "64MiB"}


class Watch(pl.Callback):
    """Records the flat parameters that are off the device in each step."""

    def __init__(self) -> None:
        self.stores: list[int] = []
        self.versions: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.stores.append(len(trainer.strategy.model_states.stores))
        if sys.version_info < (3, 12):
            self.versions.append(torch._C._dynamo.guards.dict_version(pl_module.head._parameters))


@pytest.fixture(autouse=True)
def offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Model states begin off the device."""
    monkeypatch.setattr(StatesConfig, "offloads", lambda *_, **__: True)


class RunsOut(pl.Callback):
    """Has the plan made again for less memory, as after a step without enough, once states were moved."""

    def __init__(self, watch: Watch, see: See) -> None:
        self.watch, self.see, self.done = watch, see, False

    def on_train_batch_end(self, *_: Any) -> None:
        if not self.done and self.watch.stores[-1] == 0:
            self.done = True
            self.see.auto.planner.plan_smaller()


def run(path: Path, monkeypatch: pytest.MonkeyPatch, runs_out: bool = False, **how: Any) -> tuple[Any, Any, Watch, See]:
    watch, see = Watch(), See()
    use(Meter(4e6, 300_000), monkeypatch)
    use_slow_transfers(monkeypatch)
    strategy = SSDOffloadStrategy(path, **AUTO | how)
    numbers, counters = train(
        "aot_eager", strategy, path, 24, callbacks=[watch, see, *[RunsOut(watch, see)] * runs_out]
    )
    return numbers, counters, watch, see


def test_states_are_moved_to_a_device_with_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo compiles what it compiles in plain training: weights are ordinary parameters in compiled code."""
    plain, expected = train("aot_eager", "auto", tmp_path, 24)
    numbers, counters, watch, see = run(tmp_path, monkeypatch)
    assert_same(numbers, plain)
    assert counters == expected
    assert watch.stores[0] > 0 == watch.stores[-1] and see.outcome == "plan"
    assert len(set(watch.stores)) == 2


def test_states_are_moved_back_if_memory_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are plain Lightning's."""
    plain, expected = train("aot_eager", "auto", tmp_path, 24)
    numbers, counters, watch, see = run(tmp_path, monkeypatch, runs_out=True)
    assert_same(numbers, plain)
    assert counters == expected
    assert watch.stores[0] == watch.stores[-1] > 0 and 0 in watch.stores and see.outcome == "plan"


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="versions of dictionaries are deprecated")
def test_guards_of_weights_are_checked_after_a_change_of_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some releases of torch skip them as long as the version of a module's dictionary of parameters is the same."""
    _, _, watch, _ = run(tmp_path, monkeypatch)
    moved = [one != before for one, before in zip(watch.stores[1:], watch.stores, strict=False)]
    renewed = [one != before for one, before in zip(watch.versions[1:], watch.versions, strict=False)]
    assert any(moved) and renewed[moved.index(True) :][:2] != [False, False]
    assert not any(renewed[: moved.index(True)])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("arguments", [{"states": "host"}, {"gpu_memory": "1MiB"}], ids=["states", "gpu_memory"])
def test_states_that_the_user_has_placed_stay(
    arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, watch, _ = run(tmp_path, monkeypatch, **arguments)
    assert set(watch.stores) == {watch.stores[0]}
