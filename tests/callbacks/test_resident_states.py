"""`ResidentStates`: offloaded model states of compiled code are moved to the device where it has room for them."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ssd import PrefetchScheduler, SSDOffloadStrategy
from lightning_ssd.activations import ResidentLimit
from lightning_ssd.callbacks import AutoPlanner, auto_planner, recompilation, region_planner, resident_states
from lightning_ssd.callbacks.plan_cache import SWITCH
from lightning_ssd.callbacks.resident_states import ResidentStates
from lightning_ssd.callbacks.seen_batches import BatchShape
from lightning_ssd.callbacks.step_timer import StepTimer
from lightning_ssd.model_states import StatesConfig
from tests.support.compare import assert_same
from tests.support.compiled import fresh_dynamo  # noqa: F401
from tests.support.meter import Meter, use
from tests.support.plans import quiet_trainer
from tests.support.products import thorough
from tests.support.regions import Blocks, See, tick, train
from tests.support.slow_records import record_slowly

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("deterministic")]

AUTO: dict[str, Any] = {"min_bytes": 1, "host_memory": "64MiB"}


class Clock:
    """A clock on which a step takes a second, and `off` more for each flat parameter that is off the device."""

    def __init__(self, off: float) -> None:
        self.off = off
        self.seconds = 0.0
        self.stores = 0

    def now(self) -> float:
        return self.seconds

    def elapsed(self, start: float, end: float) -> float:
        return end - start


class Reached(Exception):
    """Enough steps were timed."""


class Timed:
    """A strategy that is asked for its tiers once enough steps were timed."""

    def present_tiers(self) -> None:
        raise Reached


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([100, 95, 90, 85, 80, 99], True),  # padding to the longest sample
        ([100, 50, 100, 50, 100, 50, 100, 50, 100, 50], True),
        ([9, *[100] * 16], True),  # the first timed batch is an odd one
        ([100, 50, 20, 10, 5, 2], False),
    ],
)
def test_steps_with_batches_of_about_the_same_size_are_timed(lengths: list[int], expected: bool) -> None:
    clock = Clock(0.0)
    states = ResidentStates(Timed(), clock)
    reached = False
    for length in (100, *lengths) if lengths[0] != 9 else lengths:
        states.begin_micro_batch(BatchShape(((4, length),), 4 * length), begins_step=True, timed=True)
        clock.seconds += length
        try:
            states.end_step(None)  # type: ignore[arg-type]
        except Reached:
            reached = True
            break
    assert reached is expected


class Moving(Clock):
    """A clock whose readings within a step differ."""

    def now(self) -> float:
        self.seconds += 1e-6
        return self.seconds


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
    """Moves the clock on, and records the flat parameters that are off the device in each step."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.stores: list[int] = []
        self.tiers: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        stores = trainer.strategy.model_states.stores
        self.clock.seconds += 1.0 + self.clock.off * len(stores)
        self.stores.append(len(stores))
        self.tiers.append(trainer.strategy.present_tiers())


@pytest.fixture(autouse=True)
def offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Model states begin off the device."""
    monkeypatch.setattr(StatesConfig, "offloads", lambda *_, **__: True)


def run(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    meter: Meter,
    off: float,
    steps: int = 24,
    rows: int = 16,
    callbacks: Any = (),
    slow: bool = False,
    **how: Any,
) -> tuple[Any, Watch, See]:
    clock = Clock(off)
    watch, see = Watch(clock), See()
    if slow:
        record_slowly(clock, monkeypatch)
    use(meter, monkeypatch)
    monkeypatch.setattr(auto_planner, "make_clock", lambda device: clock)
    strategy = SSDOffloadStrategy(path, **AUTO | how)
    numbers, _ = train("aot_eager", strategy, path, shapes=[(rows,)] * steps, callbacks=[watch, see, *callbacks])
    return numbers, watch, see


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("slow", [False, True])
def test_states_are_moved_to_a_device_with_room(
    slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the host needs long to record the state for a second attempt."""
    plain, _ = train("aot_eager", "auto", tmp_path, 24)
    with caplog.at_level("INFO"):
        numbers, watch, see = run(tmp_path, monkeypatch, Meter(4e6, 300_000), off=1.0, slow=slow)
    assert_same(numbers, plain)
    assert watch.stores[0] > 0 == watch.stores[-1] and see.outcome == "keep"
    assert "model states of the first units are kept on the device: a step takes 1.000 s" in caplog.text


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
        clock = Clock(1.0)
        watch = Watch(clock)
        monkeypatch.setattr(auto_planner, "make_clock", lambda device, clock=clock: clock)
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

    _, watch, _ = run(tmp_path, monkeypatch, Meter(4e6, 300_000), off=1.0, steps=12, callbacks=[Versions()])
    moved = [one != before for one, before in zip(watch.stores[1:], watch.stores, strict=False)]
    renewed = [one != before for one, before in zip(versions[1:], versions, strict=False)]
    assert any(moved) and renewed[moved.index(True) :][:2] != [False, False]
    assert not any(renewed[: moved.index(True)])


@pytest.mark.thorough
def test_the_first_units_are_moved_if_there_is_no_room_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = train("aot_eager", "auto", tmp_path, 24)
    numbers, watch, _ = run(tmp_path, monkeypatch, Meter(500_000, 300_000), off=1.0)
    assert_same(numbers, plain)
    assert 0 < watch.stores[-1] < watch.stores[0]
    on_device = [{"gpu"} == {tier for of in unit.parts.values() for tier in of} for unit in watch.tiers[-1].values()]
    assert on_device == sorted(on_device, reverse=True)


def test_states_are_moved_back_if_steps_are_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = train("aot_eager", "auto", tmp_path, 24)
    with caplog.at_level("INFO"):
        numbers, watch, see = run(tmp_path, monkeypatch, Meter(4e6, 300_000), off=-0.01)
    assert_same(numbers, plain)
    assert 0 in watch.stores and watch.tiers[-1] == watch.tiers[0] and see.outcome == "keep"
    assert "model states are in their first tiers again" in caplog.text


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("arguments", [{"states": "host"}, {"gpu_memory": "1MiB"}], ids=["states", "gpu_memory"])
def test_states_that_the_user_has_placed_stay(
    arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, watch, _ = run(tmp_path, monkeypatch, Meter(4e6, 300_000), off=1.0, steps=12, **arguments)
    assert watch.tiers == [watch.tiers[0]] * 12


@pytest.mark.thorough
def test_states_take_the_memory_of_saved_tensors_that_can_be_recomputed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If that is no faster, they take less memory, and are moved back if that is no faster either."""
    torch.use_deterministic_algorithms(False)  # code may be compiled again
    _, watch, _ = run(tmp_path, monkeypatch, Meter(625_000, 300_000), off=-0.01, steps=120, rows=128)
    assert _changes(watch) == sorted(_changes(watch)) and len(_changes(watch)) == 3
    assert watch.stores[-1] == watch.stores[0]


@pytest.mark.thorough
def test_the_time_to_compile_again_is_limited_for_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Code takes 100 s to compile: it is compiled again once, though states are moved three times."""
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(recompilation, "TOLERATED_STALL", -1.0)
    compiled = torch._dynamo.utils.cumulative_time_spent_ns  # which each change of the budget clears
    monkeypatch.setattr(recompilation, "compile_seconds", lambda: 100.0 if compiled else 0.0)
    monkeypatch.setattr(recompilation, "MAX_COMPILE_SECONDS", 250.0)
    monkeypatch.setattr(resident_states, "_free_bytes", lambda *_: [200_000, 140_000])
    with caplog.at_level("INFO"):
        _, watch, _ = run(tmp_path, monkeypatch, Meter(455_000, 300_000), off=1.0, steps=120, rows=64)
    assert _changes(watch)[:2] == [3, 4]
    assert caplog.text.count("code is compiled again") == 1


@pytest.mark.thorough
def test_the_time_to_return_to_an_earlier_budget_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code takes 100 s to compile, also where an earlier value is applied again, or states are moved."""
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(recompilation, "TOLERATED_STALL", -1.0)
    compiled, reset = torch._dynamo.utils.cumulative_time_spent_ns, torch.compiler.reset
    monkeypatch.setattr(recompilation, "compile_seconds", lambda: 100.0 if compiled else 0.0)
    monkeypatch.setattr(recompilation, "MAX_COMPILE_SECONDS", 650.0)
    monkeypatch.setattr(resident_states, "_free_bytes", lambda *_: [200_000, 140_000])
    changes: list[None] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: (changes.append(None), reset()))
    watch = Watch(Moving(1.0))
    for module in (auto_planner, region_planner):
        monkeypatch.setattr(module, "make_clock", lambda device: watch.clock)
    monkeypatch.setattr(StepTimer, "excluded", lambda timer: nullcontext())
    use(Meter(455_000, 300_000), monkeypatch)
    train("aot_eager", SSDOffloadStrategy(tmp_path, **AUTO), tmp_path, shapes=[(64,)] * 160, callbacks=[watch])
    assert _changes(watch) == [3, 4, 3]
    assert 3 <= len(changes) - 1 <= 6  # the end of the training compiles no code


def _changes(watch: Watch) -> list[int]:
    """Returns the number of flat parameters that are off the device after each move."""
    return [one for one, before in zip(watch.stores[1:], watch.stores, strict=False) if one != before]


@pytest.mark.thorough
@pytest.mark.parametrize(("seconds", "trials"), [(1.0, 1), (0.8, 1), (1.2, 2)])
def test_a_rule_is_found_again_where_states_are_moved_back(
    seconds: float, trials: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two units on the device are faster than one: the rule for saved tensors is not searched a second time then.

    Unless its steps, of a second before, are slower by now.
    """
    clock = tick(monkeypatch)
    monkeypatch.setattr(
        clock, "elapsed", lambda start, end: (end - start) * (seconds if len(_changes(watching)) == 3 else 1.0)
    )
    monkeypatch.setenv(SWITCH, "0")  # without a cache, too
    monkeypatch.setattr(resident_states, "_free_bytes", lambda *_: [200_000, 140_000])
    plain, _ = train("aot_eager", "auto", tmp_path, shapes=[(64,)] * 70)
    searched: dict[Any, int] = {}

    class Searches(pl.Callback):
        """The most trials in steps with each number of flat parameters off the device, since the last move."""

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            planner = next(one for one in trainer.callbacks if isinstance(one, AutoPlanner))
            if planner.regions is not None:
                searched[len(_changes(watching)), watching.stores[-1]] = len(planner.regions.trials)

    watching = Watch(Clock(1.0))
    monkeypatch.setattr(auto_planner, "make_clock", lambda device: watching.clock)
    use(Meter(455_000, 300_000), monkeypatch)
    strategy = SSDOffloadStrategy(tmp_path, **AUTO)
    with caplog.at_level("INFO"):
        numbers, _ = train("aot_eager", strategy, tmp_path, shapes=[(64,)] * 70, callbacks=[watching, Searches()])
    assert_same(numbers, plain)
    assert _changes(watching) == [3, 4, 3]
    assert searched[1, 3] == searched[2, 4] == 2 and searched[3, 3] == trials
    found = f"compiled code was planned with model states in these tiers before: a step takes {seconds:.4f} s"
    assert (found in caplog.text) == (trials == 1)


class Budgets(Watch):
    """The nearer `activation_memory_budget` is to `best`, the shorter is a step; a plan makes it shorter, too. Records
    rules by placement."""

    def __init__(self, best: float) -> None:
        super().__init__(Moving(1.0))
        self.best = best
        self.rules: list[tuple[int, bool, float, Any]] = []
        """Moves so far, whether states are in their final tiers, the budget, and the sizes in the plan in force."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        planner = next(one for one in trainer.callbacks if isinstance(one, AutoPlanner))
        regions = planner.regions
        if regions is not None:
            self.clock.seconds += abs(regions.memory_budget - self.best)
            self.clock.seconds += 0.0 if regions.followed and regions.followed.plan else 1.0
        super().on_train_batch_end(trainer)
        if regions is not None and planner.states is not None:
            followed = regions.followed
            plan = followed and followed.plan and followed.plan.sizes
            self.rules.append((len(_changes(self)), planner.states.decided, regions.memory_budget, plan))

    @classmethod
    def of_training(cls, best: float, free: list[int], path: Path, monkeypatch: pytest.MonkeyPatch) -> "Budgets":
        torch.use_deterministic_algorithms(False)
        monkeypatch.setenv(SWITCH, "0")
        monkeypatch.setattr(recompilation, "TOLERATED_STALL", -1.0)
        monkeypatch.setattr(StepTimer, "excluded", lambda timer: nullcontext())
        monkeypatch.setattr(resident_states, "_free_bytes", lambda *_: free)
        watching = cls(best)
        for module in (auto_planner, region_planner):
            monkeypatch.setattr(module, "make_clock", lambda device: watching.clock)
        use(Meter(455_000, 300_000), monkeypatch)
        train("aot_eager", SSDOffloadStrategy(path, **AUTO), path, shapes=[(64,)] * 160, callbacks=[watching])
        return watching


@pytest.mark.thorough
def test_a_search_goes_on_where_states_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of a placement to which states are moved back is the first trial of a search, not the only one."""
    watching = Budgets.of_training(0.4, [200_000, 140_000], tmp_path, monkeypatch)
    assert _changes(watching) == [3, 4, 3]
    for number in (1, 2):
        of_tiers = [value for moved, _, value, _ in watching.rules if moved == number]
        assert len(set(of_tiers)) > 1 and of_tiers == sorted(of_tiers, reverse=True)
    before = {value for moved, _, value, _ in watching.rules if moved == 1}
    final = {value for moved, decided, value, _ in watching.rules if moved == 3 and decided}
    assert min(before) in final and final - before


@pytest.mark.thorough
@pytest.mark.parametrize("best", [0.4, 1.0])
def test_plans_are_of_the_code_that_runs(best: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a search that has returned to an earlier value goes on, once the tiers of states are final."""
    watching = Budgets.of_training(best, [200_000], tmp_path, monkeypatch)
    assert _changes(watching) == [3] and watching.rules[-1][1]
    assert len({value for moved, _, value, _ in watching.rules if moved == 1}) > 1
    for number in (0, 1):
        sizes = {(value, plan) for moved, _, value, plan in watching.rules if moved == number and plan}
        assert len({value for value, _ in sizes}) == len(sizes) > 0


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
    plain, _ = train("aot_eager", "auto", tmp_path, shapes=[(64,)] * 96)
    torch.use_deterministic_algorithms(not recomputes)  # else code may be compiled again
    memory = Memory(most)
    callbacks = [memory, PrefetchScheduler(window_bytes=0)]
    numbers, watch, _ = run(tmp_path, monkeypatch, memory, off=1.0, steps=96, rows=64, callbacks=callbacks)
    assert_same(numbers, plain)
    assert max(memory.peaks) <= most and watch.stores[-1] < watch.stores[0]


@pytest.mark.thorough
def test_validations_are_not_part_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer on the clock once states are on the device."""

    class Slow(pl.Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            clock.seconds += 0.0 if trainer.strategy.model_states.stores else 1e6

    clock = Clock(1.0)
    watch = Watch(clock)
    use(Meter(4e6, 300_000), monkeypatch)
    monkeypatch.setattr(auto_planner, "make_clock", lambda device: clock)

    class Validated(Blocks):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            pass

    trainer = quiet_trainer(
        tmp_path,
        strategy=SSDOffloadStrategy(tmp_path, **AUTO),
        max_steps=24,
        callbacks=[watch, Slow()],
        val_check_interval=1,
        accumulate_grad_batches=2,
    )
    data: Any = torch.randn(16 * 48, 32)
    trainer.fit(Validated("aot_eager"), DataLoader(data, batch_size=16), DataLoader(data[:16], batch_size=16))
    assert watch.stores[0] > 0 == watch.stores[-1]


class Units:
    """A strategy of ten units of 100 bytes. Its tiers are the number of units on the device."""

    def __init__(self) -> None:
        self.on_device = 0
        self.moves: list[int] = []
        self.model_states = self

    @property
    def stores(self) -> range:
        return range(10 - self.on_device)

    def present_tiers(self, resident_bytes: int = 0) -> int:
        return min(10, self.on_device + resident_bytes // 100)

    def move_states_to(self, tiers: int) -> None:
        self.on_device = tiers
        self.moves.append(tiers)


@given(
    seconds=st.lists(st.integers(1, 9), min_size=11, max_size=11),
    most=st.integers(0, 2500),
    saved=st.integers(0, 1000),
)
def test_the_fastest_of_the_trials_is_applied(seconds: list[int], most: int, saved: int) -> None:
    """Trials have fewer and fewer units on the device, until one is slower than an earlier one, or had all of them."""
    torch.use_deterministic_algorithms(False)
    meter = Meter(1000 + most, 1000)
    limit, clock, units = ResidentLimit(meter), Clock(0.0), Units()
    limit.begin(0)
    limit.end()
    limit.begin(saved)
    states = ResidentStates(units, clock)  # type: ignore[arg-type]
    for _ in range(40):
        states.begin_micro_batch(None, begins_step=True, timed=True)
        clock.seconds += seconds[units.on_device]
        before = list(units.moves)
        assert states.end_step(limit) == (units.moves != before)
    assert states.decided
    fastest = min(seconds[tried] for tried in (0, *units.moves))
    assert seconds[units.on_device] == fastest
    tried = list(dict.fromkeys(units.moves))
    assert [one for one in tried if one] == sorted((one for one in tried if one), reverse=True)
    assert tried == [10] or tried[:1] != [10] or seconds[10] >= seconds[0]


@pytest.mark.parametrize("alike", [0, 6])
def test_the_trials_end_if_batches_of_a_step_differ_in_size(alike: int) -> None:
    """From the first step on, or from the first trial on, whose tiers are not applied then."""
    torch.use_deterministic_algorithms(False)
    limit, clock, units = ResidentLimit(Meter(2000, 1000)), Clock(0.0), Units()
    limit.begin(0)
    limit.end()
    limit.begin(100)
    states = ResidentStates(units, clock)  # type: ignore[arg-type]
    for step in range(100):
        for index, rows in enumerate((8, 8 if step < alike else 1)):
            states.begin_micro_batch(BatchShape(((rows,),), rows), begins_step=index == 0, timed=True)
            clock.seconds += rows
        states.end_step(limit)
    assert states.decided and units.on_device == 0 and bool(units.moves) == bool(alike)
