"""The planners."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.swap_coefficients import plan_with_coefficient
from lightning_ssd.planning import (
    PLANNERS,
    FixedPlacement,
    HardwareProfile,
    HostOverhead,
    ModelProfile,
    PartPlan,
    Plan,
    UnitPlan,
    calibrate,
    calibrate_step_rate,
    make_plan,
    plan_for_least_memory,
    simulate,
    simulator,
)
from lightning_ssd.planning.holistic import CAUTION, PLAIN_GAIN, SAME_EXCESS, min_memory_plan
from lightning_ssd.planning.resident import resident_by_kind
from lightning_ssd.planning.saved_groups import build_plan, default_plan, default_window, saved_groups
from lightning_ssd.planning.simulator import OFFLOADED_COST, REMAP_BANDWIDTH
from lightning_ssd.planning.whole_units import checkpoint, checkpoint_all, keep_all, offload_inputs
from lightning_ssd.types import Choice, ClipMode, InputChoice, Tier
from tests.support.products import combinations
from tests.support.profiles import GB, GIB, H100, divide, machines, make_model, models
from tests.support.transformer import transformer_profile


@settings(max_examples=50, deadline=None)
@given(models(), machines())
def test_holistic_is_never_worse(model: ModelProfile, machine: HardwareProfile) -> None:
    """All plans match the model. Holistic's fits if another one does. Then no plan that fits is faster, if steps of
    offloaded states are counted as longer.

    If it intercepts no unit, others may be faster by `PLAIN_GAIN`. If none fits, no plan of about its excess is faster,
    and none has far less.
    """
    scores = {}
    for name, planner in PLANNERS.items():
        plan = planner(model, machine, None)
        plan.check(model)
        prediction = simulate(model, machine.with_host_overhead(CAUTION), plan)
        scores[name] = (prediction.excess_bytes(machine), prediction.cost_seconds)
    excess, seconds = min(scores.values())
    of_holistic = scores["holistic"]
    if excess:
        assert of_holistic[0] <= excess + SAME_EXCESS * machine.gpu_bytes
        seconds = min(seconds for over, seconds in scores.values() if over <= of_holistic[0])
    else:
        assert not of_holistic[0]
    faster = PLAIN_GAIN if not excess and not any(make_plan(model, machine).intercepted) else 0.0
    assert (1 - faster) * of_holistic[1] <= seconds * (1 + 1e-8)


KEEP: InputChoice = "keep"


@pytest.mark.parametrize("spare", [1.0, 1.02, 1.1])
def test_tensors_that_must_leave_the_device_are_in_host_memory_where_that_is_faster(spare: float) -> None:
    """The plan of least memory offloads to drives what can't be recomputed. It is not the only one that fits."""
    model = make_model(8, saved=GB, inputs=GB // 2, parameters=0, forward=0.01)
    fixed = FixedPlacement(("gpu",) * 8, ("gpu",) * 8)
    in_host = min_memory_plan(model, ssd_bytes=0)
    machine = replace(H100, gpu_bytes=round(spare * simulate(model, H100, in_host).gpu_peak_bytes))
    best = simulate(model, machine, make_plan(model, machine, fixed=fixed))
    assert not best.excess_bytes(machine)
    assert best.step_seconds <= 1.01 * simulate(model, machine, in_host).step_seconds


@pytest.mark.parametrize("clip", ["off", "deferred"])
def test_inputs_of_checkpointed_units_leave_the_device_where_they_have_no_room(clip: ClipMode) -> None:
    """All units are checkpointed, and their inputs do not fit: no unit is intercepted, which takes the host long."""
    model = make_model(8, saved=4 * GB, inputs=GB, forward=0.1)
    model = replace(model, units=tuple(replace(unit, checkpoint_bytes=0) for unit in model.units))
    fixed = FixedPlacement(("gpu",) * 8, ("gpu",) * 8, clip=clip)
    kept = keep_all(fixed.apply(model, min_memory_plan(model)))
    checkpointed = checkpoint_all(model, kept)
    assert checkpointed is not None
    peaks = [simulate(model, H100, plan).gpu_peak_bytes for plan in (checkpointed, offload_inputs(checkpointed))]
    assert peaks[0] - peaks[1] > 3 * GB
    machine = replace(H100, gpu_bytes=peaks[0] - GB, host_overhead=HostOverhead(dispatch=0.1))
    plan = make_plan(model, machine, fixed=fixed)
    assert not simulate(model, machine, plan).excess_bytes(machine)
    assert [unit.checkpoint for unit in plan.units.values()] == [True] * 8 and not any(plan.intercepted)
    assert [unit.input for unit in plan.units.values()] == ["keep", *["host"] * 7]


def choices(plan: Plan) -> set[str]:
    return {choice for unit in plan.units.values() for choice in unit.operators.values()}


def test_ssdtrain_offloads_the_hidden_bytes() -> None:
    """States are on the GPU. A forward of 8 s at 1 byte/s offloads the first 8 bytes; the rest is kept."""
    machine = replace(H100, ssd_write=1.0)
    plan = make_plan(make_model(8, saved=3, inputs=0), machine, "ssdtrain")
    assert {unit.states for unit in plan.units.values()} == {"gpu"}
    assert [unit.operators["work"] for unit in plan.units.values()] == ["ssd"] * 2 + ["keep"] * 6


def test_fuyou_swaps_to_ssds_only() -> None:
    """States and swapped activations are on SSDs, and the rest is recomputed; with a slow GPU everything is swapped."""
    slow = make_plan(make_model(), H100, "fuyou")
    assert choices(slow) == {"ssd"}
    fast = make_plan(make_model(forward=1e-12), H100, "fuyou")
    assert choices(fast) == {"recompute"}
    assert {unit.input for unit in fast.units.values()} == {"ssd"}
    assert {unit.states for unit in fast.units.values()} == {"ssd"}


def test_lohan_fills_host_memory_first() -> None:
    """Swapped activations are in host memory as long as it has room, then on SSDs."""
    model = make_model(8, saved=GB)
    plan = make_plan(model, replace(H100, host_bytes=14 * GB), "lohan")
    assert choices(plan) == {"host", "ssd"}
    assert {unit.states for unit in plan.units.values()} == {"ssd"}
    assert choices(make_plan(model, H100, "lohan")) == {"host"}
    # Transfers bound the step already: swapping more than the inputs doesn't help.
    assert choices(make_plan(make_model(8, forward=1e-12), H100, "lohan")) == {"recompute"}


def test_holistic_keeps_all_that_fits() -> None:
    """A model that fits on the GPU is kept there."""
    model = make_model(8)
    plan = make_plan(model, H100)
    prediction = simulate(model, H100, plan)
    assert prediction.stall_seconds == pytest.approx(0, abs=1e-6)
    assert prediction.step_seconds == pytest.approx(model.forward_seconds + model.backward_seconds)


def test_gradients_that_are_clipped() -> None:
    """Every planner's plan has a clip mode."""
    model = make_model(8, clip_norm=True)
    for planner in PLANNERS:
        assert make_plan(model, H100, planner).clip in ("deferred", "speculative")


@pytest.mark.parametrize(("planner", "gpu_bytes"), [("holistic", 28 * GB), ("holistic", 46 * GB), ("teraio", 40 * GB)])
def test_memory_between_the_sizes_of_two_units_is_used_by_parts(planner: str, gpu_bytes: int) -> None:
    """Units have 18 GB of states. With parts of 4.5 GB, more bytes are on the GPU, and the step is shorter."""
    whole = make_model(8, forward=0.01, parameters=10**9, saved=10**6, inputs=10**6)
    machine = replace(H100, gpu_bytes=gpu_bytes, host_bytes=200 * GB)
    found = []
    for model in (whole, divide(whole, 4)):
        plan = make_plan(model, machine, planner)
        prediction = simulate(model, machine, plan)
        assert not prediction.excess_bytes(machine)
        parts = list(zip(model.parts, plan.parts(model), strict=True))
        resident = sum(profile.resident_bytes for (_, profile), part in parts if part.states == "gpu")
        found.append((resident, prediction.step_seconds))
    (of_units, slower), (of_parts, faster) = found
    assert of_units % (18 * GB) == 0 < of_parts % (18 * GB)
    assert of_units < of_parts and faster < slower


@settings(max_examples=20, deadline=None)
@given(models(), machines(), st.sampled_from(["holistic", "teraio"]))
def test_parts_never_make_a_plan_worse(model: ModelProfile, machine: HardwareProfile, planner: str) -> None:
    """The plan of the same model with units that are placed as a whole is no better."""
    of_parts, of_units = (
        simulate(model, machine, make_plan(planned, machine, planner)) for planned in (model, model.undivided)
    )
    assert of_parts.excess_bytes(machine) <= of_units.excess_bytes(machine)
    if of_parts.excess_bytes(machine) == of_units.excess_bytes(machine):
        assert of_parts.step_seconds <= 1.002 * of_units.step_seconds


def test_unknown_planner() -> None:
    """The message names the planners."""
    with pytest.raises(ValueError, match="`planner='best'` must be one of 'holistic', .*'teraio'"):
        make_plan(make_model(), H100, "best")


def sweep(model: ModelProfile) -> Iterator[Plan]:
    """Yields plans over swap coefficients and tiers: kinds of operators are swapped, the others recomputed."""
    order = ["up", "qkv", "attention", "out", "logits", "gelu", "norm1", "norm2", "norm"]
    window = 2 * max(unit.weight_bytes + unit.input_bytes for unit in model.units)
    for states in ("gpu", "host", "ssd"):
        for tier in ("keep", "host", "ssd"):
            for count in range(len(order) + 1):
                units = {}
                for unit in model.units:
                    operators: dict[str, Choice] = {
                        item.name: tier if not item.saved_bytes or item.name in order[:count] else "recompute"  # type: ignore[misc]
                        for item in unit.operators
                    }
                    units[unit.name] = UnitPlan(states, states, tier, operators)  # type: ignore[arg-type]
                yield Plan(units, window, 2 * window)


@combinations(
    "shape, host_bytes, gpu_bytes",
    [(2048, 24, 16), (4096, 8, 4)],
    [24 * GIB, 110 * GIB],
    [12 * GIB, 24 * GIB, 72 * GIB],
    quick=[((2048, 24, 16), 110 * GIB, 24 * GIB), ((4096, 8, 4), 24 * GIB, 12 * GIB)],
)
def test_holistic_against_a_sweep(gpu_bytes: int, host_bytes: int, shape: tuple[int, int, int]) -> None:
    """No swap coefficient, in any tier, is more than 2 % better."""
    hidden, layers, batch = shape
    machine = replace(H100, gpu_bytes=gpu_bytes, host_bytes=host_bytes)
    model = transformer_profile(
        machine, hidden=hidden, layers=layers, heads=hidden // 128, sequence=1024, batch=batch, vocabulary=50257
    )
    predictions = [simulate(model, machine, plan) for plan in sweep(model)]
    fitting = [item.step_seconds for item in predictions if item.excess_bytes(machine) == 0]
    chosen = simulate(model, machine, make_plan(model, machine))
    assert chosen.excess_bytes(machine) == 0
    assert chosen.step_seconds <= 1.02 * min(fitting, default=float("inf"))


def test_the_bytes_that_may_be_written_in_a_day() -> None:
    """Tensors are recomputed instead of written to SSDs; if other writes exceed the limit, the plan does not fit."""
    model = make_model(8, saved=4 * GB, inputs=GB, parameters=0)
    fixed = FixedPlacement(("gpu",) * 8, ("gpu",) * 8)
    machine = replace(H100, gpu_bytes=20 * GB, host_bytes=20 * GB, ssd_write=30e9, ssd_read=30e9, ssd_mixed=30e9)
    free = simulate(model, machine, make_plan(model, machine, fixed=fixed))
    assert free.ssd_written_bytes > 0 and free.excess_bytes(machine) == 0
    per_day = free.ssd_written_bytes * 86400 / free.step_seconds
    careful = replace(machine, ssd_bytes_per_day=per_day / 4)
    plan = make_plan(model, careful, fixed=fixed)
    prediction = simulate(model, careful, plan)
    assert prediction.excess_bytes(careful) == 0
    assert prediction.ssd_written_bytes * 86400 / prediction.step_seconds <= per_day / 4
    assert "recompute" in choices(plan)


def test_memory_that_holds_little_is_used() -> None:
    """Host memory is too small for staging: tensors for which the GPU has room are kept, the others recomputed."""
    model = make_model(8, saved=4 * GB, inputs=GB, parameters=0)
    fixed = FixedPlacement(("gpu",) * 8, ("gpu",) * 8)
    machine = replace(H100, gpu_bytes=26 * GB, host_bytes=2 * GB)
    prediction = simulate(model, machine, make_plan(model, machine, fixed=fixed))
    assert prediction.excess_bytes(machine) == 0
    assert prediction.step_seconds < 24 + 5.1  # at least three of eight need not be recomputed


def test_least_memory() -> None:
    """The plan needs less memory, and at most `SLACK` more time."""
    model = make_model(8, saved=4 * GB, inputs=GB, parameters=0)
    fixed = FixedPlacement(("gpu",) * 8, ("gpu",) * 8)
    fastest = simulate(model, H100, make_plan(model, H100, fixed=fixed))
    least = simulate(model, H100, plan_for_least_memory(model, H100, fixed=fixed))
    assert fastest.gpu_peak_bytes == 40 * GB
    assert least.gpu_peak_bytes < 20 * GB
    assert least.step_seconds <= 1.02 * fastest.step_seconds


@pytest.mark.timeout(60)
@pytest.mark.parametrize("gpu_bytes", [1, 2, 99])
def test_the_search_for_the_least_memory_ends(gpu_bytes: int) -> None:
    """No plan fits the GPU, however small the difference of two budgets is."""
    model, machine = make_model(2), replace(H100, gpu_bytes=gpu_bytes)
    found = simulate(model, machine, plan_for_least_memory(model, machine))
    assert found.excess_bytes(machine)


def test_a_busy_host_gets_no_more_work() -> None:
    """If launches bound the step, less memory would take longer: all is kept if it fits."""
    model = make_model(8, saved=4 * GB, inputs=GB, parameters=0, launch=2.0, operations=9)
    fixed = FixedPlacement(("gpu",) * 8, ("gpu",) * 8)
    machine = replace(H100, host_overhead=HostOverhead(0.1, 0.1, 0.1, 0.1, 0.1, 0.1))
    least = plan_for_least_memory(model, machine, fixed=fixed)
    assert simulate(model, machine, least).gpu_peak_bytes == 40 * GB
    assert simulate(model, H100, plan_for_least_memory(model, H100, fixed=fixed)).gpu_peak_bytes < 20 * GB
    small = replace(machine, gpu_bytes=20 * GB)
    assert simulate(model, small, make_plan(model, small, fixed=fixed)).excess_bytes(small) == 0


@given(models(), machines(), st.floats(0.7, 1.4))
@settings(max_examples=30, deadline=None)
def test_the_resource_that_bounds_the_step_is_corrected(
    model: ModelProfile, machine: HardwareProfile, factor: float
) -> None:
    """The corrected profile predicts the measured time; if no correction does, nothing is changed."""
    plan = make_plan(model, machine)
    seconds = factor * simulate(model, machine, plan).step_seconds
    corrected = calibrate(model, machine, plan, seconds)
    if corrected is not None:
        assert simulate(*corrected, plan).step_seconds == pytest.approx(seconds, rel=0.006)


def test_a_slow_host_is_corrected() -> None:
    """If the host bounds the step, the host's times are corrected, including the overhead of a plan that has any."""
    model = make_model(4, parameters=0, launch=4.0)
    machine = replace(H100, host_overhead=HostOverhead(1, 2, 3, 4, 5, 6))
    fixed = FixedPlacement(("gpu",) * 4, ("gpu",) * 4)
    for plan, factor in ((make_plan(model, machine), 1.0), (plan_with_coefficient(model, machine, 0.0, fixed), 1.2)):
        corrected = calibrate(model, machine, plan, 1.2 * simulate(model, machine, plan).step_seconds)
        assert corrected is not None
        assert corrected[0].forward_seconds == model.forward_seconds
        assert corrected[0].units[0].operators[0].launch_seconds == pytest.approx(1.2 * 4, rel=0.01)
        assert corrected[1].host_overhead.offload == pytest.approx(factor * 5, rel=0.01)


def test_a_late_host_or_a_slow_gpu() -> None:
    """The more likely cause is corrected: the overhead of a plan is the least certain quantity, within bounds."""
    model = make_model(4, parameters=0, launch=1.0, operations=9)
    fixed = FixedPlacement(("gpu",) * 4, ("gpu",) * 4)
    for cost, slow in ((0.05, "host"), (0.004, "gpu")):
        machine = replace(H100, host_overhead=HostOverhead(*6 * [cost]))
        plan = plan_with_coefficient(model, machine, 0.0, fixed)
        before = simulate(model, machine, plan)
        assert before.bound == "compute"
        corrected = calibrate(model, machine, plan, 1.04 * before.step_seconds)
        assert corrected is not None
        assert simulate(*corrected, plan).step_seconds == pytest.approx(1.04 * before.step_seconds, rel=0.006)
        assert (corrected[0] == model) == (slow == "host")
        assert (corrected[1] == machine) == (slow == "gpu")


@given(models(), machines(), st.floats(1.01, 3.0))
@settings(max_examples=30, deadline=None)
def test_the_rate_of_the_cpu_beside_copies(model: ModelProfile, machine: HardwareProfile, factor: float) -> None:
    """The rate alone is no slower than measured; under the plan it is no faster, and equal if the CPU was busy.

    The measured rate of deferred jobs is that of their second halves, and both halves take longer than a whole job.
    """
    plan = make_plan(model, machine)
    before = simulate(model, machine, plan)
    parts = zip(model.parts, plan.parts(model), strict=True)
    stepped = sum(profile.parameters for (_, profile), part in parts if part.offloaded)
    seconds = factor * before.busy_seconds["cpu"]
    if not stepped:
        assert calibrate_step_rate(model, machine, plan, 1e9, 1.0) == machine
        return
    step_seconds = max(seconds, before.step_seconds)
    corrected = calibrate_step_rate(model, machine, plan, stepped / seconds, step_seconds)
    whole = machine.cpu_rest_later if plan.clip == "deferred" else 1.0
    assert corrected.cpu_step_rate >= whole * stepped / seconds * (1 - 1e-9)
    assert simulate(model, corrected, plan).busy_seconds["cpu"] >= seconds * (1 - 1e-6)
    busy = seconds == step_seconds and plan.clip != "deferred"
    if busy and before.copied_bytes / (machine.host_memory_bandwidth or 1e99) < seconds / 2:
        assert simulate(model, corrected, plan).busy_seconds["cpu"] == pytest.approx(seconds)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_activations_have_the_host_memory_that_shared_gradients_leave(micro_batches: int) -> None:
    """A training has as much host memory as its present placement takes, and a tier for activations."""
    tiers = ("ssd",) * 20
    fixed = FixedPlacement(tiers, tiers)
    model = replace(make_model(20, micro_batches=micro_batches), shares_gradients=True)
    resident = resident_by_kind(model, default_plan(model, fixed, {}, 0)).values()
    saved = sum(unit.saved_bytes + unit.input_bytes for unit in model.units)
    machine = replace(H100, host_bytes=sum(nbytes["host"] for nbytes in resident) + saved)
    plan = plan_with_coefficient(model, machine, 1.0, fixed)
    assert {choice for unit in plan.units.values() for choice in (unit.input, *unit.operators.values())} == {"host"}


@pytest.mark.parametrize("factor", [0.05, 0.5, 1.4])
def test_times_of_operators_that_were_recorded_too_long_are_corrected(factor: float) -> None:
    model = make_model(8, parameters=0, forward=0.01)
    plan = plan_with_coefficient(model, H100, 0.0, FixedPlacement(("gpu",) * 8, ("gpu",) * 8))
    before = simulate(model, H100, plan)
    assert before.bound == "compute"
    corrected = calibrate(model, H100, plan, factor * before.step_seconds)
    assert corrected is not None
    assert simulate(*corrected, plan).step_seconds == pytest.approx(factor * before.step_seconds, rel=0.006)


@pytest.mark.parametrize("factor", [0.7, 0.9, 1.2, 1.4])
@pytest.mark.parametrize("bandwidth", [None, 100e9, 20e9])
def test_a_slow_cpu_is_corrected(factor: float, bandwidth: float | None) -> None:
    """The correction holds for any share of time that copies take."""
    model = make_model(8, parameters=10**9, forward=0.01)
    machine = replace(H100, host_memory_bandwidth=bandwidth, host_bytes=300 * GB)
    plan = plan_with_coefficient(model, machine, 0.0, FixedPlacement(("host",) * 8, ("host",) * 8))
    before = simulate(model, machine, plan)
    assert before.bound == "cpu"
    corrected = calibrate(model, machine, plan, factor * before.step_seconds)
    assert corrected is not None
    assert simulate(*corrected, plan).step_seconds == pytest.approx(factor * before.step_seconds, rel=0.006)


def test_a_cpu_that_bounds_the_step_is_slow_and_not_the_host_beside_it() -> None:
    """Although launches that took three times as long would explain the step, too."""
    model = replace(make_model(8, parameters=10**9, forward=0.01, launch=0.06, operations=9), synchronizes=True)
    machine = replace(H100, host_bytes=300 * GB, host_overhead=HostOverhead(*7 * [1e-3]))
    fixed = FixedPlacement(("host",) * 8, ("host",) * 8, clip="deferred")
    plan = plan_with_coefficient(model, machine, 0.0, fixed)
    before = simulate(model, machine, plan)
    assert before.bound == "cpu"
    later = simulate(model.with_launches(3.0), machine.with_host_overhead(3.0), plan)
    assert later.step_seconds > 1.2 * before.step_seconds
    corrected = calibrate(model, machine, plan, 1.2 * before.step_seconds)
    assert corrected is not None
    assert corrected[0] == model and corrected[1].host_overhead == machine.host_overhead
    assert corrected[1].cpu_step_rate < machine.cpu_step_rate


def test_less_memory_where_not_all_fits() -> None:
    """The fastest plan has overhead, too: plans for less memory are compared with it on an equally slow host."""
    model = make_model(8, saved=4 * GB, inputs=GB, parameters=0, launch=0.1, operations=9)
    fixed = FixedPlacement(("host",) * 8, ("host",) * 8)
    machine = replace(H100, host_overhead=HostOverhead(dispatch=0.1), gpu_bytes=38 * GB)
    best = simulate(model, machine, make_plan(model, machine, fixed=fixed))
    least = simulate(model, machine, plan_for_least_memory(model, machine, fixed=fixed))
    assert least.gpu_peak_bytes < 28 * GB < 30 * GB < best.gpu_peak_bytes
    assert least.step_seconds <= 1.02 * best.step_seconds


def test_where_launches_bound_a_step_few_units_are_intercepted() -> None:
    """The first two of eight units free the memory, and the others run as in plain training."""
    model = make_model(8, saved=4 * GB, inputs=GB, parameters=0, forward=0.01, launch=0.1, operations=9)
    fixed = FixedPlacement(("gpu",) * 8, ("gpu",) * 8)
    machine = replace(H100, host_overhead=HostOverhead(dispatch=0.01, offload=0.001), gpu_bytes=33 * GB)
    everything = {group.key: KEEP for group in saved_groups(model)}
    kept = simulate(model, machine, build_plan(model, weights=["gpu"] * 8, states=["gpu"] * 8, saved=everything))
    plan = make_plan(model, machine, fixed=fixed)
    best = simulate(model, machine, plan)
    assert best.gpu_peak_bytes <= machine.gpu_bytes < kept.gpu_peak_bytes
    assert plan.intercepted == [True] * 2 + [False] * 6
    assert best.step_seconds < kept.step_seconds + 2.5 * 9 * 0.01


@pytest.mark.parametrize(
    ("dispatch", "cost", "share"), [(0.01, 0.0, 1), (0.01, OFFLOADED_COST, 3 / 8), (0.02, OFFLOADED_COST, 1)]
)
def test_where_launches_bound_a_step_states_are_offloaded_if_that_saves_much(
    monkeypatch: pytest.MonkeyPatch, dispatch: float, cost: float, share: float
) -> None:
    """Then one unit has to be intercepted. With all states on the GPU, five would free what states need."""
    monkeypatch.setattr(simulator, "OFFLOADED_COST", cost)
    model = make_model(8, saved=4 * GB, inputs=10**7, parameters=10**8, forward=0.01, launch=0.1, operations=9)
    overhead = HostOverhead(dispatch=dispatch, offload=0.001)
    machine = replace(H100, host_overhead=overhead, gpu_bytes=30 * GB, host_bytes=200 * GB)
    plan = make_plan(model, machine)
    assert simulate(model, machine, plan).offloaded_share == share
    assert plan.intercepted == [True] * (1 if share == 1 else 3) + [False] * (7 if share == 1 else 5)


def test_all_states_are_on_the_gpu_where_that_fits_beside_checkpoints() -> None:
    """With fewer units checkpointed, steps are as fast, and have states in RAM."""
    model = make_model(12, saved=GB // 2, inputs=10**7, parameters=2 * 10**7, forward=0.003, launch=0.01, operations=30)
    model = replace(model, units=tuple(replace(unit, checkpoint_bytes=0) for unit in model.units))
    overhead = HostOverhead(dispatch=2e-5, pack=5e-5, record=1e-4, replay=1e-4, offload=2e-4, prefetch=1e-4,
                            checkpoint=2e-5, rerun=3e-5)  # fmt: skip
    machine = replace(H100, host_overhead=overhead, gpu_bytes=4_960 * 10**6, cpu_step_rate=8e9)
    plan = make_plan(model, machine)
    assert not plan.offloads_states
    assert sum(unit.checkpoint for unit in plan.units.values()) == 11


def test_the_cost_of_offloaded_states_does_not_keep_the_search_from_better_plans() -> None:
    """The best plan has all states on the GPU, and ten units that offload saved tensors.

    The search reaches it through points with some states on the GPU. If points were compared by their cost, it would
    find a plan with 0.0526 s a step.
    """
    model = make_model(
        12, saved=3 * GB, inputs=GB // 16, parameters=5 * 10**6, forward=6e-4, launch=2e-3, operations=30
    )
    units = (replace(unit, checkpoint_bytes=GB // 16 if index > 1 else 0) for index, unit in enumerate(model.units))
    model = replace(model, clip_norm=True, units=tuple(units))
    machine = replace(H100, gpu_bytes=int(16.5 * GB), host_bytes=37 * GB, cpu_step_rate=17e9)
    assert simulate(model, machine, make_plan(model, machine)).step_seconds < 0.045


@pytest.mark.parametrize("states", ["gpu", "host"])
def test_saved_tensors_are_packed_where_weights_are_offloaded(states: Tier) -> None:
    """Units that keep all saved tensors have no other overhead, and checkpointed ones none."""
    model = make_model(8, saved=GB, inputs=10**7, parameters=0, forward=0.01, launch=0.1, operations=9)
    model = replace(model, units=tuple(replace(unit, checkpoint_bytes=0) for unit in model.units))
    machine = replace(H100, host_overhead=HostOverhead(dispatch=100.0, pack=1.0))
    everything = {group.key: KEEP for group in saved_groups(model)}
    kept = build_plan(model, weights=[states] * 8, states=[states] * 8, saved=everything)
    freed = checkpoint(kept, [unit.name for unit in model.units[:3]])
    seconds = [simulate(model, machine, plan).busy_seconds["launch"] for plan in (kept, freed)]
    assert seconds[0] == pytest.approx(8 * 0.15 + (8 * 2 if states == "host" else 0))
    assert seconds[1] == pytest.approx(8 * 0.15 + 3 * 0.1 + (5 * 2 if states == "host" else 0))


@pytest.mark.parametrize("fixed", [None, FixedPlacement(("host",) * 8, ("host",) * 8)])
def test_every_block_is_checkpointed_with_offloaded_states(fixed: FixedPlacement | None) -> None:
    """It frees memory faster than a slow link, and takes the host less time than the recomputation of operators."""
    model = make_model(8, saved=4 * GB, inputs=10**7, parameters=10**9, forward=1.0, launch=0.1, operations=9)
    model = replace(model, units=tuple(replace(unit, checkpoint_bytes=0) for unit in model.units))
    machine = replace(
        H100,
        **dict.fromkeys(("copy_out", "copy_out_both", "ssd_write", "ssd_mixed"), 1e9),  # type: ignore[arg-type]
        host_overhead=HostOverhead(dispatch=0.5, record=0.1, replay=0.1),
        gpu_bytes=12 * GB,
        host_bytes=200 * GB,
    )
    plan = make_plan(model, machine, fixed=fixed)
    assert plan.offloads_states
    assert sum(unit.checkpoint for unit in plan.units.values()) >= 7, plan.describe()
    assert not any(plan.intercepted)


def checkpointable(model: ModelProfile) -> ModelProfile:
    """Returns the model with units of three operators each, which may be checkpointed."""
    units = []
    for unit in model.units:
        (work,) = unit.operators
        parts = [
            replace(
                work,
                name=f"work{index}",
                forward_seconds=work.forward_seconds / 3,
                backward_seconds=work.backward_seconds / 3,
                recompute_seconds=work.forward_seconds / 3 if index else 1e-9,  # the first is quick to recompute
                saved_bytes=work.saved_bytes // 3,
                launch_seconds=work.launch_seconds / 3,
                operations=3,
                recompute_operations=3,
            )
            for index in range(3)
        ]
        units.append(replace(unit, operators=tuple(parts), checkpoint_bytes=0))
    return replace(model, units=tuple(units))


def test_where_launches_bound_a_step_few_units_are_checkpointed() -> None:
    """The host launches a unit in 0.01 s, and takes 0.09 s if it intercepts one and recomputes its tensors."""
    model = checkpointable(make_model(8, saved=6 * GB, inputs=GB, parameters=0, forward=1e-3, launch=0.01))
    fixed = FixedPlacement(("gpu",) * 8, ("gpu",) * 8)
    machine = replace(H100, host_overhead=HostOverhead(*6 * [0.01], 1e-4), gpu_bytes=40 * GB)
    plan = make_plan(model, machine, fixed=fixed)
    best = simulate(model, machine, plan)
    count = sum(unit.checkpoint for unit in plan.units.values())
    assert 2 <= count <= 4 and plan.intercepted == [False] * 8
    assert best.gpu_peak_bytes <= machine.gpu_bytes
    kept = simulate(model, machine, build_plan(
        model, weights=["gpu"] * 8, states=["gpu"] * 8, saved={group.key: KEEP for group in saved_groups(model)}
    ))  # fmt: skip
    assert kept.gpu_peak_bytes > machine.gpu_bytes
    assert best.step_seconds == pytest.approx(kept.step_seconds + count * (0.01 + 3e-4))


def test_where_launches_bound_a_step_no_number_of_checkpointed_blocks_is_faster() -> None:
    """Single tensors of many units free more bytes per second of the host, but not in total."""
    machine = replace(H100, host_overhead=HostOverhead(5e-6, 7e-6, 15e-6, 15e-6, 4e-5, 1e-5, 3e-5))
    gpt = transformer_profile(machine, hidden=768, layers=24, heads=12, sequence=1024, batch=8, vocabulary=50304)
    launched = {"operations": 5, "recompute_operations": 5, "launch_seconds": 1e-4}
    units = [replace(unit, operators=tuple(replace(one, **launched) for one in unit.operators)) for unit in gpt.units]
    model = replace(gpt, units=(units[0], *(replace(unit, checkpoint_bytes=0) for unit in units[1:-1]), units[-1]))
    placed: list[Tier] = ["gpu"] * len(units)
    everything = {group.key: KEEP for group in saved_groups(model)}
    kept = build_plan(model, weights=placed, states=placed, saved=everything, window_bytes=0)
    machine = replace(machine, gpu_bytes=int(0.8 * simulate(model, machine, kept).gpu_peak_bytes))
    fixed = FixedPlacement(("gpu",) * len(units), ("gpu",) * len(units))
    planned = simulate(model, machine, make_plan(model, machine, fixed=fixed)).step_seconds
    names = [unit.name for unit in units[1:-1]]
    written = [simulate(model, machine, checkpoint(kept, names[:count])) for count in range(len(names) + 1)]
    fitting = [one.step_seconds for one in written if not one.excess_bytes(machine)]
    assert 0 < len(fitting) < len(written) and planned <= 1.001 * min(fitting)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("forward", [1e-3, 0.012])
def test_where_units_are_checkpointed_less_memory_is_never_faster(forward: float) -> None:
    """Plans free whole units, which may be more than asked for, and logits, which are on the GPU at the peak anyway.

    Where a plan exceeds the budget, one more unit is checkpointed; the logits are kept.
    """
    model = checkpointable(make_model(8, saved=6 * GB, inputs=GB, parameters=0, forward=forward, launch=0.01))
    (logits,) = make_model(1, saved=8 * GB, inputs=0, parameters=0, forward=1e-6).units
    model = replace(model, units=(*model.units, replace(logits, name="logits")))
    fixed = FixedPlacement(("gpu",) * 9, ("gpu",) * 9)
    machine = replace(H100, host_overhead=HostOverhead(*6 * [0.01], 1e-4))
    units = [
        UnitPlan("gpu", "gpu", "keep", {one.name: "keep" for one in unit.operators}, checkpoint=unit.name != "logits")
        for unit in model.units
    ]
    checkpointed = simulate(
        model, machine, Plan({unit.name: plan for unit, plan in zip(model.units, units, strict=True)}, 0, 0, "off")
    )
    before = inf
    for budget in range(checkpointed.gpu_peak_bytes, 68 * GB, 2 * GB):
        limited = replace(machine, gpu_bytes=budget)
        plan = make_plan(model, limited, fixed=fixed)
        seconds = simulate(model, limited, plan).step_seconds
        assert seconds <= 1.001 * min(before, checkpointed.step_seconds), budget
        assert not any(plan.intercepted), plan.describe()
        before = min(before, seconds)


def test_where_no_plan_fits_slow_drives_do_not_free_the_last_percent() -> None:
    """Units' inputs are 0.8 % of the memory, and need 80 s to be written."""
    model = replace(make_model(8, saved=6 * GB, inputs=GB // 100, parameters=0), other_gpu_bytes=20 * GB)
    fixed = FixedPlacement(("gpu",) * 8, ("gpu",) * 8)
    machine = replace(H100, gpu_bytes=10 * GB, host_bytes=GB, ssd_write=1e6, ssd_mixed=1e6)
    least = simulate(model, machine, min_memory_plan(model))
    plan = make_plan(model, machine, fixed=fixed)
    best = simulate(model, machine, plan)
    assert least.step_seconds > 80 and best.step_seconds < 1.1 * best.busy_seconds["compute"], plan.describe()
    assert 0 < least.excess_bytes(machine) < best.excess_bytes(machine) < least.excess_bytes(machine) + GB // 5


def test_where_the_device_bounds_a_step_no_unit_is_checkpointed() -> None:
    """A third of the saved tensors take no time to recompute: whole units would recompute the rest, too."""
    model = checkpointable(make_model(8, saved=6 * GB, inputs=GB, parameters=0, forward=0.1))
    fixed = FixedPlacement(("gpu",) * 8, ("gpu",) * 8)
    machine = replace(H100, host_overhead=HostOverhead(*7 * [1e-5]), gpu_bytes=47 * GB)
    plan = make_plan(model, machine, fixed=fixed)
    assert not any(unit.checkpoint for unit in plan.units.values()) and not plan.keeps_all
    assert simulate(model, machine, plan).gpu_peak_bytes <= machine.gpu_bytes


@pytest.mark.parametrize("largest", [0, 8 * GB])
def test_plans_leave_room_for_the_largest_tensor(largest: int) -> None:
    """They use the rest of the GPU."""
    model = make_model(24, saved=GB, inputs=GB // 10, parameters=GB // 20, forward=0.003)
    model = replace(model, largest_tensor_bytes=largest)
    machine = replace(H100, gpu_bytes=30 * GB, cpu_step_rate=8e9)
    for fixed in (FixedPlacement(("host",) * 24, ("host",) * 24), None):
        peak = simulate(model, machine, make_plan(model, machine, fixed=fixed)).gpu_peak_bytes
        most = min(machine.gpu_bytes, machine.gpu_cache_bytes - largest)
        assert (machine.gpu_bytes - largest if largest else 0.85 * most) < peak <= most


def with_embedding() -> ModelProfile:
    """Returns a model with a large first part, and a large tensor, such as logits."""
    model = checkpointable(make_model(8, saved=GB, inputs=GB // 10, parameters=GB // 20, forward=0.003, clip_norm=True))
    embedding = replace(make_model(1, parameters=2 * GB // 5, forward=1e-4).units[0], name="embedding")
    return replace(model, units=(embedding, *model.units), largest_tensor_bytes=4 * GB)


@pytest.mark.parametrize("clip", ["deferred", "speculative"])
def test_a_plan_has_the_clip_mode_of_the_training_although_none_fits(clip: ClipMode) -> None:
    model = make_model(4, saved=GB, parameters=10**8, clip_norm=True)
    assert make_plan(model, replace(H100, gpu_bytes=1), clip=clip).clip == clip


def test_a_window_is_narrower_where_the_largest_tensor_lacks_its_memory() -> None:
    model, machine = with_embedding(), replace(H100, gpu_bytes=12 * GB)
    plan = make_plan(model, machine, clip="deferred")
    wider = replace(plan, window_bytes=default_window(model))
    assert simulate(model, machine, wider).step_seconds > 1.02 * simulate(model, machine, plan).step_seconds


@pytest.mark.parametrize("gpu", [8, 11, 14, 20])
def test_no_number_of_first_parts_on_the_gpu_is_clearly_faster(gpu: int) -> None:
    """Also if the first one has room only where the largest tensor has its own."""
    model, machine = with_embedding(), replace(H100, gpu_bytes=gpu * GB)
    plan = make_plan(model, machine, clip="deferred")
    found = simulate(model, machine, plan).step_seconds
    for resident in range(10):
        parts = [PartPlan("gpu", "gpu")] * resident + [PartPlan("host", "host")] * (9 - resident)
        kept = keep_all(plan.placed(model, parts))
        for written in (kept, checkpoint_all(model, kept)):
            prediction = simulate(model, machine, written or kept)
            assert prediction.excess_bytes(machine) or found <= 1.03 * prediction.step_seconds


@pytest.mark.parametrize(("quick", "intercepts"), [(0.9, False), (0.2, True)])
def test_units_are_intercepted_only_where_that_is_clearly_faster(quick: float, intercepts: bool) -> None:
    """A person would checkpoint two of eight units. Recomputing most operators saves a share of their time."""
    model = make_model(8, saved=6 * GB, inputs=GB, parameters=0)
    units = []
    for unit in model.units:
        (work,) = unit.operators
        again = replace(work, recompute_seconds=quick * work.forward_seconds)
        units.append(replace(unit, operators=(again,), checkpoint_bytes=0))
    model = replace(model, units=tuple(units))
    fixed = FixedPlacement(("gpu",) * 8, ("gpu",) * 8)
    slow = dict.fromkeys(("copy_out", "copy_out_both", "copy_in", "copy_in_both"), 1e6)
    machine = replace(H100, gpu_bytes=46 * GB, host_overhead=HostOverhead(*7 * [1e-6]), **slow)  # type: ignore[arg-type]
    plan = make_plan(model, machine, fixed=fixed)
    assert any(plan.intercepted) == intercepts, plan.describe()
    assert any(unit.checkpoint for unit in plan.units.values()) != intercepts


@pytest.mark.parametrize(("copies", "offloads"), [(0.1, False), (0.4, True)])
def test_inputs_of_checkpointed_units_are_offloaded_only_where_that_is_clearly_faster(
    copies: float, offloads: bool
) -> None:
    """If they stay on the device, the largest tensor lacks room, and mapping it takes a share of a step."""
    model = make_model(8, saved=4 * GB, inputs=GB, parameters=0, forward=0.01, operations=9)
    units = tuple(replace(unit, checkpoint_bytes=0) for unit in model.units)
    model = replace(model, units=units)
    fixed = FixedPlacement(("gpu",) * 8, ("gpu",) * 8)
    kept = checkpoint_all(model, keep_all(fixed.apply(model, min_memory_plan(model))))
    assert kept is not None
    before = simulate(model, H100, kept)
    largest = round(copies * before.step_seconds * REMAP_BANDWIDTH)
    model = replace(model, largest_tensor_bytes=largest)
    fast = dict.fromkeys(("copy_out", "copy_out_both", "copy_in", "copy_in_both"), 1e12)
    overhead = HostOverhead(dispatch=10.0)
    machine = replace(H100, gpu_bytes=before.gpu_peak_bytes, host_overhead=overhead, **fast)  # type: ignore[arg-type]
    plan = make_plan(model, machine, fixed=fixed)
    assert any(unit.input == "host" for unit in plan.units.values()) == offloads, plan.describe()


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("clip", ["deferred", "speculative"])
@pytest.mark.parametrize(("units", "saved", "parameters", "rate"), [(4, 10, 100, 1e8), (2, GB // 10, GB // 20, 1e12)])
def test_plans_have_the_clip_mode_of_the_training(
    planner: str, clip: ClipMode, units: int, saved: int, parameters: int, rate: float
) -> None:
    """The training steps in that mode whatever the plan, also if the other mode were as fast."""
    model = make_model(
        units, forward=1e-3, launch=1e-3, saved=saved, inputs=GB // 50, parameters=parameters, clip_norm=True
    )
    machine = replace(H100, gpu_bytes=3 * GB, cpu_step_rate=rate)
    fixed = FixedPlacement(("host",) * units, ("host",) * units, clip=clip)
    assert make_plan(model, machine, planner, fixed).clip == clip


def test_fixed_states_are_not_moved() -> None:
    model = make_model(4)
    fixed = FixedPlacement(("host", "ssd", "gpu", "host"), ("ssd", "ssd", "gpu", "host"))
    for planner in PLANNERS:
        plan = make_plan(model, H100, planner, fixed)
        plan.check(model)
        assert FixedPlacement.of(model, plan) == fixed


def test_coefficients_are_kept_to() -> None:
    """The swapped bytes are at least the given share, and exceed it by less than an operator."""
    model = make_model(8, saved=4 * GB, inputs=GB, parameters=0)
    fixed = FixedPlacement(("gpu",) * 8, ("gpu",) * 8)
    machine = replace(H100, host_bytes=10 * GB)
    for count in range(9):
        plan = plan_with_coefficient(model, machine, count / 8, fixed)
        plan.check(model)
        swapped = [unit for unit in plan.units.values() if unit.operators["work"] != "recompute"]
        assert len(swapped) == count
        host = sum(1 for unit in plan.units.values() if unit.input == "host")
        host += sum(4 for unit in plan.units.values() if unit.operators["work"] == "host")
        assert host <= 10 and (count < 2 or host > 6)


@given(st.lists(st.integers(1, 8), min_size=2, max_size=8), st.floats(0, 1), st.integers(0, 40))
def test_coefficients_swap_what_takes_longest_to_recompute(
    seconds: list[int], coefficient: float, host_limit: int
) -> None:
    """The order is by recomputation seconds per byte, and host memory is used up to its limit for activations."""
    model = make_model(len(seconds), saved=4, inputs=2, parameters=0)
    units = tuple(
        replace(unit, operators=tuple(replace(operator, recompute_seconds=own) for operator in unit.operators))
        for unit, own in zip(model.units, map(float, seconds), strict=True)
    )
    tiers = ("gpu",) * len(seconds)
    fixed = FixedPlacement(tiers, tiers, host_limit=host_limit)
    plan = plan_with_coefficient(replace(model, units=units), H100, coefficient, fixed)
    choices = [plan.units[unit.name].operators["work"] for unit in units]
    again = [own for own, choice in zip(seconds, choices, strict=True) if choice == "recompute"]
    swapped = [own for own, choice in zip(seconds, choices, strict=True) if choice != "recompute"]
    assert max(again, default=0) <= min(swapped, default=8)
    inputs = [unit.input for unit in plan.units.values()]
    assert 4 * choices.count("host") + 2 * inputs.count("host") <= host_limit


def test_without_a_plan_the_tensors_that_backward_needs_first_are_kept() -> None:
    """Without a planner, too, the last tensors that fit into the window are kept."""
    model, tiers = make_model(4, saved=4, inputs=2, parameters=0), ("gpu",) * 4
    plan = default_plan(model, FixedPlacement(tiers, tiers), {"host": 1000}, 8)
    assert [(unit.input, unit.operators["work"]) for unit in plan.units.values()] == [
        ("host", "host"), ("host", "host"), ("host", "keep"), ("keep", "keep"),
    ]  # fmt: skip
