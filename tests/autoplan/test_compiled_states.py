"""Offloaded model states of compiled code are moved to the device, once, where saved tensors leave room for them."""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ssd import PrefetchScheduler, SSDOffloadStrategy
from lightning_ssd.model_states import StatesConfig
from tests.support.compare import assert_same
from tests.support.compiled import fresh_dynamo  # noqa: F401
from tests.support.compiled_blocks import Blocks, See, train
from tests.support.meter import Meter, use
from tests.support.plans import quiet_trainer
from tests.support.products import thorough

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("deterministic")]

AUTO: dict[str, Any] = {"min_bytes": 1, "host_memory": "64MiB"}


class Memory(Meter, pl.Callback):
    """An allocator that has model states, prefetched weights and saved tensors that are kept on the device."""

    def __init__(self, most: float) -> None:
        Meter.__init__(self, most, 0)
        self.peaks: list[int] = []

    def reset_peak(self) -> None:
        self.highest = self.level

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        states = trainer.strategy.model_states
        off = {view.parameter for flat in states.stores for view in flat.param_views}
        self.level = (
            50_000 + states.prefetched_bytes + 16 * sum(one.numel() for one in pl_module.parameters() if one not in off)
        )
        self.highest = max(self.highest, self.level)

    def on_before_backward(self, trainer: Any, *_: Any) -> None:
        self.peaks.append(self.level + trainer.strategy.offloader.resident_bytes())
        self.highest = max(self.highest, self.peaks[-1])


class Watch(pl.Callback):
    """Records the flat parameters that are off the device in each step."""

    def __init__(self) -> None:
        self.stores: list[int] = []
        self.tiers: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        stores = trainer.strategy.model_states.stores
        self.stores.append(len(stores))
        self.tiers.append(trainer.strategy.states_owner.present_tiers())


@pytest.fixture(autouse=True)
def offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Model states begin off the device."""
    monkeypatch.setattr(StatesConfig, "offloads", lambda *_, **__: True)


def run(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    meter: Meter,
    steps: int = 12,
    rows: int = 16,
    callbacks: Any = (),
    **how: Any,
) -> tuple[Any, Watch, See]:
    watch, see = Watch(), See()
    use(meter, monkeypatch)
    strategy = SSDOffloadStrategy(path, **AUTO | how)
    numbers, _ = train("aot_eager", strategy, path, shapes=[(rows,)] * steps, callbacks=[watch, see, *callbacks])
    return numbers, watch, see


def test_states_are_moved_to_a_device_with_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = train("aot_eager", "auto", tmp_path, 12)
    with caplog.at_level("INFO"):
        numbers, watch, see = run(tmp_path, monkeypatch, Meter(4e6, 300_000))
    assert_same(numbers, plain)
    assert watch.stores[0] > 0 == watch.stores[-1] and see.outcome == "keep"
    assert len(set(watch.stores)) == 2
    assert caplog.text.count("model states of the first units are kept on the device") == 1


class Functions(Blocks):
    """Calls its blocks in a compiled function."""

    def __init__(self) -> None:
        super().__init__("eager")
        for block in self.blocks:
            block._compiled_call_impl = None
        self.run = torch.compile(nn.Sequential.forward, backend="aot_eager")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.run(nn.Sequential(*self.blocks, self.head), batch).square().mean()  # type: ignore[no-any-return]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("make", [lambda: Blocks("aot_eager"), Functions], ids=["modules", "function"])
def test_code_that_an_earlier_training_has_compiled_is_recognized(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo sees no new frames then."""
    data: Any = torch.ones(16 * 12, 32)
    use(Meter(4e6, 300_000), monkeypatch)
    for _ in range(2):
        watch = Watch()
        strategy = SSDOffloadStrategy(tmp_path, **AUTO)
        trainer = quiet_trainer(tmp_path, strategy=strategy, max_epochs=1, callbacks=[watch])
        trainer.fit(make(), DataLoader(data, batch_size=16))
        assert watch.stores[0] > 0 == watch.stores[-1]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="versions of dictionaries are deprecated")
def test_guards_of_weights_are_checked_after_a_change_of_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some releases of torch skip them as long as the version of a module's dictionary of parameters is the same."""
    versions: list[int] = []

    class Versions(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            versions.append(torch._C._dynamo.guards.dict_version(pl_module.head._parameters))

    _, watch, _ = run(tmp_path, monkeypatch, Meter(4e6, 300_000), callbacks=[Versions()])
    moved = [one != before for one, before in zip(watch.stores[1:], watch.stores, strict=False)]
    renewed = [one != before for one, before in zip(versions[1:], versions, strict=False)]
    assert any(moved) and renewed[moved.index(True) :][:2] != [False, False]
    assert not any(renewed[: moved.index(True)])


@pytest.mark.thorough
def test_the_first_units_are_moved_if_there_is_no_room_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = train("aot_eager", "auto", tmp_path, 12)
    numbers, watch, _ = run(tmp_path, monkeypatch, Meter(500_000, 300_000))
    assert_same(numbers, plain)
    assert 0 < watch.stores[-1] < watch.stores[0]
    on_device = [{"gpu"} == {tier for of in unit.parts.values() for tier in of} for unit in watch.tiers[-1].values()]
    assert on_device == sorted(on_device, reverse=True)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("arguments", [{"states": "host"}, {"gpu_memory": "1MiB"}], ids=["states", "gpu_memory"])
def test_states_that_the_user_has_placed_stay(
    arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, watch, _ = run(tmp_path, monkeypatch, Meter(4e6, 300_000), **arguments)
    assert watch.tiers == [watch.tiers[0]] * 12


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("most", "recomputes"),
    [
        (520_000, False),
        thorough(370_000, True),
        *(thorough(most, one) for most in (470_000, 570_000, 720_000) for one in (False, True)),
    ],
)
def test_memory_suffices_with_the_states_that_are_moved(
    most: int, recomputes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved tensors are recomputed or offloaded where states have taken their memory, even if it was short before."""
    plain, _ = train("aot_eager", "auto", tmp_path, shapes=[(64,)] * 40)
    torch.use_deterministic_algorithms(not recomputes)  # else code may be compiled again
    memory = Memory(most)
    callbacks = [memory, PrefetchScheduler(window_bytes=0)]
    numbers, watch, _ = run(tmp_path, monkeypatch, memory, steps=40, rows=64, callbacks=callbacks)
    assert_same(numbers, plain)
    assert max(memory.peaks) <= most and watch.stores[-1] < watch.stores[0]
