"""Plans for which model states are moved, and those of timed steps."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_ssd.autoplan import PlanCycle, plan_maker
from lightning_ssd.autoplan.plan_maker import PlanMaker, PlanOptions
from lightning_ssd.planning import (
    FixedPlacement,
    HardwareProfile,
    ModelProfile,
    Plan,
    checkpoint_all,
    default_plan,
    make_plan,
    offload_inputs,
    simulate,
)
from lightning_ssd.profiling import offloading_plan
from lightning_ssd.types import Tier
from tests.support.profiles import GB, H100, make_model


def look_elsewhere(
    monkeypatch: pytest.MonkeyPatch, model: ModelProfile, machine: HardwareProfile, tier: Tier
) -> tuple[Plan, list[Plan], Plan | None]:
    """Returns the plan with all states in a tier, the plans that a search elsewhere has found, and its result."""
    tiers = (tier,) * len(model.parts)
    fixed = FixedPlacement(tiers, tiers)
    present = make_plan(model, machine, fixed=fixed)
    runner: Any = SimpleNamespace(profile=model, hardware=machine, placement=fixed)
    found: list[Plan] = []

    def make(*given: Any) -> Plan:
        found.append(make_plan(*given))
        return found[-1]

    monkeypatch.setattr(plan_maker, "make_plan", make)
    elsewhere = PlanMaker(PlanOptions(), machine, torch.device("cpu")).make_elsewhere(runner, present)
    return present, found, elsewhere


@pytest.mark.parametrize(
    ("gpu_bytes", "largest", "cpu_step_rate", "searches", "moved"),
    [(10 * GB, 0, 2e9, 0, False), (60 * GB, 0, 2e9, 1, True), (60 * GB, 55 * GB, 2e10, 1, False)],
)
def test_states_are_not_moved_to_a_device_without_room_for_saved_tensors(
    monkeypatch: pytest.MonkeyPatch, gpu_bytes: int, largest: int, cpu_step_rate: float, searches: int, moved: bool
) -> None:
    """No plan is searched for. If all room is the largest tensor's, one that takes it is, and saves too little."""
    model = make_model(24, saved=GB, inputs=GB // 10, parameters=GB // 20, forward=0.003)
    model = replace(model, largest_tensor_bytes=largest)
    machine = replace(H100, gpu_bytes=gpu_bytes, cpu_step_rate=cpu_step_rate)
    present, found, elsewhere = look_elsewhere(monkeypatch, model, machine, "host")
    assert not simulate(model, machine, present).excess_bytes(machine)
    assert len(found) == searches
    assert elsewhere is (found[0] if moved else None)


@pytest.mark.parametrize(("cpu_step_rate", "frees_more"), [(1e9, True), (3e9, True), (6e9, False), (1e11, False)])
def test_states_move_in_place_of_saved_tensors_if_that_saves_time_or_host_memory(
    cpu_step_rate: float, frees_more: bool
) -> None:
    """The search finds a plan that checkpoints more units, and saves 78 % of a step or 42 %; one that saves 7 %; or one
    that saves 1 %, and has a fifth of the states on the GPU."""
    model = make_model(24, saved=GB, inputs=GB // 10, parameters=GB // 20, forward=0.003)
    machine = replace(H100, gpu_bytes=32 * GB, cpu_step_rate=cpu_step_rate)
    fixed = FixedPlacement(("host",) * 24, ("host",) * 24)
    present, best = make_plan(model, machine, fixed=fixed), make_plan(model, machine)
    runner: Any = SimpleNamespace(profile=model, hardware=machine, placement=fixed)
    elsewhere = PlanMaker(PlanOptions(), machine, torch.device("cpu")).make_elsewhere(runner, present)
    assert (best.num_freeing > present.num_freeing) is frees_more
    assert elsewhere == best


def test_timed_steps_offload_inputs_where_keeping_them_does_not_fit() -> None:
    """Where that does not fit either, all saved tensors are offloaded, without a plan."""
    model = make_model(8, saved=4 * GB, inputs=GB, forward=0.1)
    model = replace(model, units=tuple(replace(unit, checkpoint_bytes=0) for unit in model.units))
    fixed = FixedPlacement(("gpu",) * 8, ("gpu",) * 8)
    tiers, policy = {"host": SimpleNamespace(capacity=64 * GB)}, SimpleNamespace(window_bytes=0)
    offloader: Any = SimpleNamespace(tiers=tiers, policy=policy)
    runner: Any = SimpleNamespace(profile=model, hardware=H100, placement=fixed)
    offloading = offloading_plan(model, fixed, offloader)
    checkpointing = checkpoint_all(model, offloading)
    assert checkpointing is not None
    freeing = offload_inputs(checkpointing)
    made = []
    for gpu_bytes in (64 * GB, simulate(model, H100, freeing).gpu_peak_bytes, GB):
        runner.hardware = replace(H100, gpu_bytes=gpu_bytes)
        maker = PlanMaker(PlanOptions(), runner.hardware, torch.device("cpu"))
        made.append(maker.make_calibration(runner, offloading))
    assert made[1:] == [freeing, None] and made[0] is not None
    assert all(unit.checkpoint for plan in made[:2] if plan is not None for unit in plan.units.values())
    assert [{unit.input for unit in plan.units.values()} for plan in (made[0], freeing)] == [{"keep"}, {"keep", "host"}]


@pytest.mark.parametrize(("missing_bytes", "searches"), [(0, 0), (4 * GB, 1)])
def test_the_plan_for_which_states_were_moved_is_applied_without_another_search_if_it_is_as_expected(
    monkeypatch: pytest.MonkeyPatch, missing_bytes: int, searches: int
) -> None:
    model = make_model(24, saved=GB, inputs=GB // 10, parameters=GB // 20, forward=0.003)
    machine = replace(H100, gpu_bytes=32 * GB)
    elsewhere = make_plan(model, machine)
    placement = FixedPlacement.of(model, elsewhere)
    after = replace(machine, gpu_bytes=machine.gpu_bytes - missing_bytes)
    runner: Any = SimpleNamespace(profile=model, hardware=after, placement=placement)
    found = []
    monkeypatch.setattr(plan_maker, "make_plan", lambda *given: found.append(make_plan(*given)) or found[-1])
    maker = PlanMaker(PlanOptions(), machine, torch.device("cpu"))
    plan = maker.make_moved(runner, elsewhere, simulate(model, machine, elsewhere))
    assert len(found) == searches and plan == (found[0] if found else elsewhere)
    assert not simulate(model, after, plan).excess_bytes(after)


def test_states_move_where_that_is_fastest_in_the_clip_mode_of_the_training() -> None:
    """A plan that is searched for in the other mode saves less than a tenth of a step in this mode."""
    model = make_model(24, saved=GB, inputs=GB // 10, parameters=GB // 20, forward=0.004, clip_norm=True)
    machine = replace(H100, gpu_bytes=32 * GB, cpu_step_rate=4.5e9)
    fixed = FixedPlacement(("host",) * 24, ("host",) * 24, clip="deferred")
    present, other = make_plan(model, machine, fixed=fixed), make_plan(model, machine).clipped(fixed.clip)
    runner: Any = SimpleNamespace(profile=model, hardware=machine, placement=fixed)
    elsewhere = PlanMaker(PlanOptions(), machine, torch.device("cpu")).make_elsewhere(runner, present)
    assert elsewhere is not None and elsewhere.clip == "deferred"
    faster, slower = (simulate(model, machine, plan).step_seconds for plan in (elsewhere, other))
    assert faster < 0.9 * simulate(model, machine, present).step_seconds < slower


@pytest.mark.parametrize(
    ("gpu_bytes", "recomputes", "cpu_step_rate", "searches", "moves"),
    [
        pytest.param(22 * GB, True, 2e9, 1, True, id="no plan fits beside the states"),
        pytest.param(GB, True, 2e9, 1, True, id="nor elsewhere, with less memory"),
        pytest.param(40 * GB, True, 2e9, 0, False, id="no plan can save a third of a step"),
        pytest.param(40 * GB, False, 2e8, 1, False, id="none that is found does"),
        pytest.param(40 * GB, False, 2e10, 1, True, id="one does"),
    ],
)
def test_states_leave_the_device_where_no_plan_fits_or_for_a_large_gain(
    monkeypatch: pytest.MonkeyPatch, gpu_bytes: int, recomputes: bool, cpu_step_rate: float, searches: int, moves: bool
) -> None:
    model = make_model(24, saved=GB, inputs=GB // 10, parameters=GB // 20, forward=0.003)
    if not recomputes:
        kept = [(replace(unit.operators[0], recompute_seconds=None),) for unit in model.units]
        units = zip(model.units, kept, strict=True)
        model = replace(model, units=tuple(replace(unit, operators=operators) for unit, operators in units))
    machine = replace(H100, gpu_bytes=gpu_bytes, cpu_step_rate=cpu_step_rate)
    present, found, elsewhere = look_elsewhere(monkeypatch, model, machine, "gpu")
    assert (len(found), elsewhere is not None) == (searches, moves)
    if elsewhere is not None:
        before, after = (simulate(model, machine, plan) for plan in (present, elsewhere))
        excess = before.excess_bytes(machine), after.excess_bytes(machine)
        assert excess[1] < excess[0] or (excess == (0, 0) and after.step_seconds <= 2 / 3 * before.step_seconds)


def test_states_on_the_device_stay_there_under_the_plan_of_a_paper() -> None:
    model = make_model(24, saved=GB, inputs=GB // 10, parameters=GB // 20, forward=0.003)
    fixed = FixedPlacement(("gpu",) * 24, ("gpu",) * 24)
    runner: Any = SimpleNamespace(profile=model, hardware=H100, placement=fixed)
    maker = PlanMaker(PlanOptions("lohan"), H100, torch.device("cpu"))
    assert maker.make_elsewhere(runner, make_plan(model, H100, "lohan", fixed)) is None


@pytest.mark.parametrize("failed_share", [1.0, 1.02, 1.5])
def test_the_plan_after_one_that_did_not_fit_needs_less_memory(failed_share: float) -> None:
    """Whether it fits or not: no tensor can be recomputed, and their transfers take most of a step."""
    model = make_model(8, saved=GB, inputs=GB // 2, parameters=0, forward=0.01)
    fixed = FixedPlacement(("gpu",) * 8, ("gpu",) * 8)
    least = simulate(model, H100, make_plan(model, replace(H100, gpu_bytes=GB), fixed=fixed))
    machine = replace(H100, gpu_bytes=GB)
    runner: Any = SimpleNamespace(profile=model, hardware=machine, placement=fixed)
    maker = PlanMaker(PlanOptions(), machine, torch.device("cpu"))
    failed = replace(least, gpu_peak_bytes=int(failed_share * least.gpu_peak_bytes))
    smaller = maker.make_smaller(runner, maker.make(runner), failed)
    if failed_share == 1.0:
        assert smaller is None
    else:
        assert smaller is not None
        assert simulate(model, machine, smaller).gpu_peak_bytes <= 0.99 * failed.gpu_peak_bytes


@pytest.mark.parametrize(("gpu_bytes", "again"), [(24 * GB, False), (20 * GB, True)])
def test_states_may_move_again_if_no_plan_fits_beside_those_that_stayed(gpu_bytes: int, again: bool) -> None:
    """A step has run out of memory, after which plans have less. The 12 parts on the device need 10 GB."""
    model = make_model(24, saved=GB, inputs=GB // 10, parameters=GB // 20, forward=0.003)
    model = replace(model, other_gpu_bytes=8 * GB)
    tiers: Any = ("gpu",) * 12 + ("host",) * 12
    options = PlanOptions(gpu_memory=f"{gpu_bytes}B")
    machine = replace(H100, gpu_bytes=gpu_bytes)
    runner: Any = SimpleNamespace(profile=model, hardware=machine, placement=FixedPlacement(tiers, tiers))
    maker = PlanMaker(options, machine, torch.device("cpu"))
    runner.prediction = simulate(model, machine, maker.make(runner))
    owner = SimpleNamespace(can_move_states=lambda: True)
    moved: list[Any] = []
    applied: list[Any] = []

    def move(runner: Any, owner: Any, plan: Any) -> Any:
        moved.append(plan)
        runner.placement = FixedPlacement.of(model, plan)
        return runner

    cycle: Any = SimpleNamespace(
        runner=runner, _maker=maker, _unmoved=None, _states_moved=True, _move_states=move, offloaded=None,
        training=SimpleNamespace(owner=owner, states=object(), inform=lambda text: None),
        _apply=lambda runner, plan: applied.append(plan),
    )  # fmt: skip
    cycle._place_states = lambda runner, plan: PlanCycle._place_states(cycle, runner, plan)
    assert PlanCycle.plan_smaller(cycle)
    assert bool(moved) == again and len(applied) == 1
    assert not simulate(model, runner.hardware, applied[0]).excess_bytes(runner.hardware)


@pytest.mark.parametrize("ran_without", [True, False])
def test_a_plan_that_ran_out_of_memory_is_not_replaced_by_one_that_is_slower_than_none(ran_without: bool) -> None:
    """Steps that offloaded all saved tensors had memory, and were faster: a smaller plan recomputes all. States stay
    where they are in that case."""
    model = make_model(8, saved=GB, inputs=GB // 100, forward=1.0)
    machine = replace(H100, gpu_bytes=6 * GB, host_bytes=0, ssd_bytes=0)
    fixed = FixedPlacement(("gpu",) * 8, ("gpu",) * 8)
    runner: Any = SimpleNamespace(profile=model, hardware=machine, placement=fixed)
    maker = PlanMaker(PlanOptions(gpu_memory="6GB"), machine, torch.device("cpu"))
    runner.prediction = simulate(model, machine, maker.make(runner))
    offloaded = default_plan(model, fixed, {"host": 100 * GB}, 2 * GB)
    applied: list[Any] = []
    moved: list[Any] = []

    def place(runner: Any, plan: Any) -> Any:
        moved.append(plan)
        return runner, plan

    cycle: Any = SimpleNamespace(
        runner=runner, _maker=maker, _unmoved=None, _states_moved=True, offloaded=offloaded if ran_without else None,
        training=SimpleNamespace(owner=None, states=None, inform=lambda text: None),
        _apply=lambda runner, plan: applied.append(plan), _place_states=place,
    )  # fmt: skip
    assert PlanCycle.plan_smaller(cycle) is not ran_without
    assert len(applied) == len(moved) == (not ran_without)
