"""The simulation of a step, against steps calculated by hand, and against properties of all steps."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ssd.planning import (
    OFFLOADED_LAUNCH,
    HardwareProfile,
    HostOverhead,
    ModelProfile,
    OperatorProfile,
    Plan,
    UnitPlan,
    UnitProfile,
    simulate,
)
from lightning_ssd.planning.event_simulation import COMPUTE, COPY_IN, COPY_OUT, CPU, SSD, URGENT, Task, run
from lightning_ssd.planning.resident import JOBS_AHEAD, resident_by_kind, resident_bytes
from lightning_ssd.planning.simulator import REMAP_BANDWIDTH, simulate_every_micro_batch
from lightning_ssd.planning.step_tasks import BoundedFifo, StepTasks
from lightning_ssd.sizes import GPU_USABLE
from lightning_ssd.types import Choice
from tests.support.profiles import GB, H100, divide, machines, make_model, models, plans

# A machine on which bytes and parameters are seconds.
UNIT = HardwareProfile("unit", 1.0, 1e12, *[1.0] * 8, 10**9, 10**9, 10**9)  # type: ignore[arg-type]
RATES = ("copy_out", "copy_in", "copy_out_both", "copy_in_both", "ssd_read", "ssd_write", "ssd_mixed", "cpu_step_rate")
FAST = replace(UNIT, **dict.fromkeys(RATES, 1e15))  # type: ignore[arg-type]


def plan_of(model: ModelProfile, weights: Any, states: Any, inputs: Any, work: Any, **fields: Any) -> Plan:
    """Returns a plan that treats all units alike."""
    unit = UnitPlan(weights, states, inputs, {"work": work})
    return Plan({profile.name: unit for profile in model.units}, 10**9, 10**9, **fields)


def test_copies_share_the_link() -> None:
    """10 bytes are copied out, alone for 4 s, then at half the speed while 3 bytes are copied in."""
    machine = replace(UNIT, copy_out_both=0.5, copy_in_both=0.5)
    before, out = Task(COMPUTE, 4.0, 0), Task(COPY_OUT, 10, 0)
    back = Task(COPY_IN, 3, 0, before)
    run([before, out, back], machine)
    assert (back.begin, back.end) == (4, 10)
    assert (out.begin, out.end) == (0, 13)


def test_ssds_are_half_duplex() -> None:
    """Reads and writes alternate; while one kind waits for the other, both have the bandwidth of mixed requests."""
    machine = replace(UNIT, ssd_read=4.0, ssd_write=2.0, ssd_mixed=1.0)
    read, write = Task(SSD, 4, 0), Task(SSD, 4, 0, write=True)
    last = Task(SSD, 8, 0, write)
    run([read, write, last], machine)
    assert (read.begin, read.end) == (0, 4)
    assert (write.begin, write.end) == (4, 6)
    assert (last.begin, last.end) == (6, 8)


def test_gradients_share_memory_if_states_are_on_drives() -> None:
    """20 gradients of 16 bytes share the memory of 6, unless steps wait for all of them."""
    model = replace(make_model(20), shares_gradients=True)
    each = model.units[0].gradient_bytes
    assert all(unit.gradient_bytes == each > 0 for unit in model.units)

    def in_host_memory(model: ModelProfile, states: Any, **fields: Any) -> int:
        return resident_by_kind(model, plan_of(model, "host", states, "keep", "keep", **fields))["gradients"]["host"]

    assert in_host_memory(model, "ssd") == 6 * each
    assert in_host_memory(model, "host") == in_host_memory(model, "ssd", clip="deferred") == 20 * each
    assert in_host_memory(replace(model, shares_gradients=False), "ssd") == 20 * each
    summed = 4 * model.parameters  # in fp32, by each gradient for itself
    assert in_host_memory(replace(model, micro_batches=2), "ssd") == 6 * each + summed
    assert in_host_memory(replace(model, micro_batches=2), "host") == 20 * each + summed


def test_urgent_first() -> None:
    """Among ready tasks, those that the GPU will wait for run first."""
    tasks = [Task(CPU, 1, 0), Task(CPU, 1, 0), Task(CPU, 1, 0, priority=URGENT)]
    run(tasks, UNIT)
    assert [task.begin for task in tasks] == [1, 2, 0]


def test_memory_over_time() -> None:
    """Memory is allocated when a task begins, and freed when it ends."""
    task = Task(COMPUTE, 2, 0)
    task.gpu, task.host, task.ssd = (3, 1), (0, 5), 7
    assert run([task], UNIT).samples == [(0, 0, 0, 0), (0, 3, 0, 0), (2, 2, -5, 7)]


def test_memory_of_prefetched_tensors_is_allocated_when_the_copy_is_issued() -> None:
    """The window has room for two copies: both have memory while the second one waits for the first."""
    before = Task(COMPUTE, 1, 0)
    first, second = Task(COPY_IN, 5, 0, before), Task(COPY_IN, 7, 0, before)
    for copy in (first, second):
        copy.gpu = (int(copy.amount), 0)
    assert run([before, first, second], UNIT).samples == [(0, 0, 0, 0), (1, 5, 0, 0), (1, 12, 0, 0)]


def test_steps_need_memory_between_backward_and_forward() -> None:
    """Memory between steps counts if it exceeds that of forward and backward, and is not added to it."""
    model = replace(make_model(4, saved=10, inputs=0, parameters=0), between_seconds=1.0)
    plan = plan_of(model, "gpu", "gpu", "keep", "keep")
    peaks = [simulate(replace(model, between_gpu_bytes=most), UNIT, plan).gpu_peak_bytes for most in (0, 39, 100)]
    assert peaks == [40, 40, 100]


@pytest.mark.parametrize(
    ("resident", "seconds"),
    [
        (0, 5.0),  # as measured
        (2, 3.0 + 2 * 0.1),  # without the idle time for the steps of two of four units, and with their steps on the GPU
        (4, 1.0 + 4 * 0.1),
    ],
)
def test_idle_time_of_offloaded_steps_ends_with_them(resident: int, seconds: float) -> None:
    """4 s were measured for the steps of four offloaded units. A step on the GPU of one reads and writes 0.1 s."""
    model = replace(make_model(4, saved=10, inputs=0, parameters=100), between_seconds=4.0, between_offloaded=400)
    moved = sum(part.resident_bytes + part.state_bytes_written for _, part in model.parts[:1])
    machine = replace(FAST, gpu_memory_bandwidth=moved / 0.1)
    plan = plan_of(model, "host", "host", "keep", "keep")
    units = {
        name: replace(unit, weights="gpu", states="gpu") if index < resident else unit
        for index, (name, unit) in enumerate(plan.units.items())
    }
    step = simulate(model, machine, replace(plan, units=units)).step_seconds
    without = simulate(replace(model, between_seconds=0.0, between_offloaded=0), machine, replace(plan, units=units))
    assert step - without.step_seconds == pytest.approx(seconds - 1.0, rel=0.02)


@pytest.mark.parametrize("resident", [0, 1, 4])
def test_a_step_on_the_gpu_moves_the_bytes_of_the_optimizer(resident: int) -> None:
    """For each parameter on the GPU."""
    model = replace(make_model(4, saved=10, inputs=0, parameters=100), step_bytes=50.0)
    machine = replace(FAST, gpu_memory_bandwidth=100 * 50 / 0.25)  # a unit's step takes 0.25 s
    plan = plan_of(model, "host", "host", "keep", "keep")
    units = {
        name: replace(unit, weights="gpu", states="gpu") if index < resident else unit
        for index, (name, unit) in enumerate(plan.units.items())
    }
    step, without = (
        simulate(replace(model, step_bytes=nbytes), machine, replace(plan, units=units)).step_seconds
        for nbytes in (50.0, 0.0)
    )
    assert step - without == pytest.approx(0.25 * resident, rel=0.02)


def test_a_model_without_parameters_has_the_measured_idle_time() -> None:
    """A profile of such a model may be one of other parameters, which were frozen since."""
    model = replace(make_model(4, parameters=0), between_seconds=4.0, between_offloaded=400)
    plan = plan_of(model, "gpu", "gpu", "keep", "keep")
    without = simulate(replace(model, between_seconds=0.0), FAST, plan).step_seconds
    assert simulate(model, FAST, plan).step_seconds == pytest.approx(without + 4.0)


def test_all_on_the_gpu() -> None:
    """Nothing is transferred: a step is its computation."""
    model = make_model(4, parameters=0)
    prediction = simulate(model, UNIT, plan_of(model, "gpu", "gpu", "keep", "keep"))
    assert prediction.step_seconds == pytest.approx(4 * 3)
    assert prediction.stall_seconds == pytest.approx(0)
    assert prediction.bound == "compute"
    assert prediction.gpu_peak_bytes == 4 * (10 + 2)
    assert prediction.host_peak_bytes == prediction.ssd_written_bytes == prediction.ssd_read_bytes == 0


@pytest.mark.parametrize(("spare", "share"), [(60, 0.0), (50, 0.0), (20, 0.6), (0, 1.0), (-10, 1.0)])
@pytest.mark.parametrize("micro_batches", [1, 2, 9])
def test_the_largest_tensor_takes_time_as_far_as_it_lacks_room(spare: int, share: float, micro_batches: int) -> None:
    """It has 50 kB, and `spare` are the kB that the allocator may hold beside the peak. Seconds are those in which it
    maps that tensor anew."""
    model = make_model(4, saved=10_000, inputs=2_000, parameters=0, micro_batches=micro_batches)
    model = replace(model, largest_tensor_bytes=50_000)
    plan = plan_of(model, "gpu", "gpu", "keep", "keep")
    without = simulate(replace(model, largest_tensor_bytes=0), UNIT, plan)
    machine = replace(UNIT, gpu_bytes=round(GPU_USABLE * (without.gpu_peak_bytes + 1000 * spare)))
    found = (simulate(model, machine, plan).step_seconds - without.step_seconds) * REMAP_BANDWIDTH / micro_batches
    assert found == pytest.approx(share * 50_000, abs=2)


def test_recomputation_costs_time_and_no_memory() -> None:
    """A step with recomputation is one forward longer, and has activations of one unit at a time."""
    model = make_model(4, parameters=0)
    prediction = simulate(model, UNIT, plan_of(model, "gpu", "gpu", "keep", "recompute"))
    assert prediction.step_seconds == pytest.approx(4 * 4)
    assert prediction.gpu_peak_bytes == 4 * 2 + 10


@pytest.mark.parametrize(
    ("forward", "waits", "seconds"),
    [
        (1.0, True, 4 * 3),  # each unit is launched when the previous one is computed
        (1.5, True, 4 * 3 + 4 * 0.5),  # all of forward is launched late, and backward in time
        (1.5, False, 4 * 3),  # the host was ahead
        (4.0, True, 4 * 6),  # 4 s for each forward, 2 s for each backward
        (4.0, False, 4 * 6),
    ],
)
def test_the_gpu_computes_only_launched_work(forward: float, waits: bool, seconds: float) -> None:
    """If the host waits in every step, late launches delay the step; else a step is as long as its launches."""
    model = replace(make_model(4, parameters=0, launch=forward, operations=2), synchronizes=waits)
    for between in (0.0, 5.0):
        model = replace(model, between_seconds=between)
        prediction = simulate(model, UNIT, plan_of(model, "gpu", "gpu", "keep", "keep"))
        assert prediction.step_seconds == pytest.approx(seconds + between)
        assert prediction.busy_seconds["launch"] == pytest.approx(4 * 1.5 * forward + between)
        assert prediction.bound == ("launch" if forward == 4 else "compute")


def test_units_whose_weights_are_offloaded_take_longer_to_launch() -> None:
    """Also where they run again in backward."""
    model = make_model(2, parameters=40, launch=2.0, operations=2)
    model = replace(model, units=tuple(replace(unit, checkpoint_bytes=0) for unit in model.units))
    for checkpoint, launched in ((False, 1.5), (True, 2.5)):
        plan = plan_of(model, "gpu", "gpu", "keep", "keep")
        units = {name: replace(unit, checkpoint=checkpoint) for name, unit in plan.units.items()}
        on_gpu = simulate(model, UNIT, replace(plan, units=units)).busy_seconds["launch"]
        name = next(iter(units))
        units[name] = replace(units[name], weights="host", states="host")
        mixed = simulate(model, UNIT, replace(plan, units=units)).busy_seconds["launch"]
        assert mixed - on_gpu == pytest.approx((OFFLOADED_LAUNCH - 1) * launched * 2.0)


def test_the_host_launches_a_forward_after_the_jobs_that_it_waits_for() -> None:
    """The next forward waits for a job of 40 s. Only then does the host launch it, in 6 s, and the backward, in 3 s."""
    launch = 6.0
    model = replace(make_model(1, parameters=40, launch=launch / OFFLOADED_LAUNCH, operations=2), synchronizes=True)
    machine = replace(FAST, cpu_step_rate=1.0)
    plan = plan_of(model, "host", "host", "keep", "keep")
    at_once = replace(make_model(1, parameters=40), synchronizes=True)
    assert simulate(at_once, machine, plan).step_seconds == pytest.approx(40 + 3)  # forward and backward
    for synchronizes in (True, False):  # a host that is ahead waits for the job, too
        prediction = simulate(replace(model, synchronizes=synchronizes), machine, plan)
        assert prediction.step_seconds == pytest.approx(40 + 1.5 * launch)


def test_the_host_launches_a_forward_after_the_reads_of_its_weights() -> None:
    """Weights of 80 bytes are read in 80 s after the job of 40 s."""
    model = replace(make_model(1, parameters=40, launch=6.0 / OFFLOADED_LAUNCH, operations=2), synchronizes=True)
    machine = replace(FAST, cpu_step_rate=1.0, ssd_read=1.0, ssd_mixed=1.0)
    plan = plan_of(model, "ssd", "host", "keep", "keep")
    later = simulate(model, machine, plan).step_seconds - simulate(model.with_launches(0), machine, plan).step_seconds
    assert later == pytest.approx(6 - 1)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        # Each of four units has two dispatched operations and two saved tensors.
        ("keep", 0),
        ("recompute", 4 * (2 * 1 + 2 * 10 + 2 * (100 + 1000))),
        ("host", 4 * (2 * 1 + 2 * 10 + 1e4 + 1e5)),
    ],
)
def test_plans_account_for_the_host_time(work: str, seconds: float) -> None:
    model = make_model(4, parameters=0, operations=2)
    machine = replace(FAST, host_overhead=HostOverhead(1, 10, 100, 1000, 1e4, 1e5))
    prediction = simulate(model, machine, plan_of(model, "gpu", "gpu", "keep", work))
    assert prediction.busy_seconds["launch"] == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("count", "peak"),
    [
        (0, 4 * 12),
        (1, 2 + 3 + 3 * 12),
        (3, 3 * (2 + 3) + 12),
        (4, 3 * (2 + 3) + 2 + 3 + 10),  # the forward of the last unit has run again
    ],
)
def test_checkpointed_units_run_again_before_their_backward(count: int, peak: int) -> None:
    """Each has an input of 2 bytes, 10 bytes of saved tensors, and 3 bytes that stay."""
    model = make_model(4, parameters=0, launch=7.0, operations=2)
    model = replace(model, units=tuple(replace(unit, checkpoint_bytes=3) for unit in model.units))
    plan = plan_of(model, "gpu", "gpu", "keep", "keep")
    units = {name: replace(unit, checkpoint=index < count) for index, (name, unit) in enumerate(plan.units.items())}
    machine = replace(FAST, host_overhead=HostOverhead(checkpoint=100))
    prediction = simulate(model, machine, replace(plan, units=units))
    assert prediction.busy_seconds["launch"] == pytest.approx(4 * 7 * 1.5 + count * (7 + 100))
    assert prediction.busy_seconds["compute"] == pytest.approx(4 * 3 + count)
    assert prediction.gpu_peak_bytes == peak


@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize(("transients", "peak"), [((100, 0), 50 + 100), ((0, 100), 90 + 100), ((10, 0), 90)])
def test_a_forward_that_runs_again_has_its_own_peak(transients: tuple[int, int], peak: int, rest: bool) -> None:
    """The first of two operators saves 50 bytes, and the second one 40. One of them also needs transient bytes.

    If the first one does, the second one has not saved its bytes then. The rest of the unit, which saves nothing, may
    be a stage of its own.
    """
    (unit,) = make_model(1, parameters=0, inputs=2).units
    (work,) = unit.operators
    operators = tuple(
        replace(work, name=f"work{index}", saved_bytes=saved, forward_bytes=transient, recompute_seconds=None)
        for index, (saved, transient) in enumerate(zip((50, 40), transients, strict=True))
    )
    if rest:
        operators += (replace(work, name="rest", saved_bytes=0, forward_bytes=1, recompute_seconds=None),)
    model = replace(make_model(1), units=(replace(unit, operators=operators, checkpoint_bytes=0),))
    choices: dict[str, Choice] = {operator.name: "keep" for operator in operators}
    plan = Plan({unit.name: UnitPlan("gpu", "gpu", "keep", choices, checkpoint=True)}, 0, 0, "off")
    assert simulate(model, FAST, plan).gpu_peak_bytes == 2 + max(peak, 90 + rest)


@pytest.mark.parametrize(("checkpoint", "reruns"), [(False, False), (True, False), (False, True)])
def test_casts_of_weights_on_the_device_live_as_long_as_backward_needs_them(checkpoint: bool, reruns: bool) -> None:
    """Those of a checkpointed unit are freed in between, also if user code checkpoints it. Weights that are no casts
    are always there."""
    model = make_model(4, parameters=100)
    model = replace(model, units=tuple(replace(unit, checkpoint_bytes=0) for unit in model.units))
    plan = plan_of(model, "gpu", "gpu", "keep", "keep")
    if checkpoint:
        plan = replace(plan, units={name: replace(unit, checkpoint=True) for name, unit in plan.units.items()})
    casting = replace(model, units=tuple(replace(unit, casts=True, reruns=reruns) for unit in model.units))
    weights = model.units[0].weight_bytes
    peaks = [simulate(one, FAST, plan).gpu_peak_bytes for one in (model, casting)]
    assert peaks[0] - peaks[1] == (3 * weights if checkpoint or reruns else 0) and weights > 0


def test_the_host_launches_a_forward_again_that_user_code_checkpoints() -> None:
    """In its backward, whose measured seconds have the kernels of the rerun."""
    model = make_model(4, parameters=0, launch=0.1, operations=5)
    rerun = replace(model, units=tuple(replace(unit, reruns=True) for unit in model.units))
    once, twice = (simulate(one, UNIT, plan_of(one, "gpu", "gpu", "keep", "keep")) for one in (model, rerun))
    assert twice.busy_seconds["launch"] - once.busy_seconds["launch"] == pytest.approx(4 * 0.1)
    assert twice.busy_seconds["compute"] == once.busy_seconds["compute"]


@pytest.mark.parametrize("measured", [0, 1, 4])
def test_steps_on_the_device_allocate_for_parameters_that_no_measured_step_had_there(measured: int) -> None:
    model = replace(make_model(4, parameters=100), between_seconds=1.0, between_offloaded=(4 - measured) * 100)
    plan = plan_of(model, "gpu", "gpu", "keep", "keep")
    before = resident_bytes(model, plan)[0]
    allocating = replace(model, step_workspace=1000)
    assert simulate(model, FAST, plan).gpu_peak_bytes < before + 100_000
    expected = before + 1000 * 100 * (4 - measured) if measured < 4 else simulate(model, FAST, plan).gpu_peak_bytes
    assert simulate(allocating, FAST, plan).gpu_peak_bytes == expected


def test_weights_are_kept_while_they_fit() -> None:
    """They occupy the budget permanently, at least one unit; the last ones are not prefetched again in backward."""
    model = make_model(4, saved=0, inputs=0)  # weights of 200 bytes each, and gradients
    plan = replace(plan_of(model, "host", "host", "keep", "keep"), window_bytes=0)
    peaks, prefetched = [], []
    for room in (None, 0, 200, 450, 10**6):
        prediction = simulate(replace(model, param_budget_bytes=room), UNIT, plan)
        peaks.append(prediction.gpu_peak_bytes)
        prefetched.append(prediction.busy_seconds["copy_in"])
    assert peaks[1:] == [200 + 200, 200 + 200, 450 + 200, 4 * 200 + 200]
    assert prefetched == pytest.approx([8 * 200, 7 * 200, 7 * 200, 6 * 200, 4 * 200])


@pytest.mark.parametrize("window_bytes", [0, 20, 10**9])
def test_prefetched_tensors_have_their_memory_before_they_are_read(window_bytes: int) -> None:
    """Slow reads do not reduce the peak."""
    model = make_model(6, saved=10, parameters=0)
    slow = replace(FAST, ssd_read=1.0)
    in_host, on_ssd, on_slow_ssd = (
        simulate(model, machine, replace(plan_of(model, "gpu", "gpu", where, where), window_bytes=window_bytes))
        for machine, where in ((FAST, "host"), (FAST, "ssd"), (slow, "ssd"))
    )
    assert in_host.gpu_peak_bytes == on_ssd.gpu_peak_bytes == on_slow_ssd.gpu_peak_bytes


def test_fast_transfers_are_hidden() -> None:
    """With enough bandwidth, offloading everything to SSDs costs no time, and the GPU needs little memory."""
    model = make_model(20, saved=10**6)
    prediction = simulate(model, FAST, replace(plan_of(model, "ssd", "ssd", "ssd", "ssd"), window_bytes=10**6))
    assert prediction.step_seconds == pytest.approx(20 * 3, rel=1e-6)
    assert prediction.gpu_peak_bytes < 5 * 10**6


@pytest.mark.parametrize(
    ("slow", "bound", "seconds"),
    [
        # 50 units of 100 parameters: weights are copied in twice and gradients out once a step, 2 bytes per parameter.
        ({"copy_in": 50.0, "copy_in_both": 50.0}, "copy_in", 50 * 2 * 200 / 50),
        ({"copy_out": 20.0, "copy_out_both": 20.0}, "copy_out", 50 * 200 / 20),
        # Bytes per parameter: 12 of states read and written, 2 of weights read twice and written once: 30.
        ({"ssd_read": 500.0, "ssd_write": 500.0, "ssd_mixed": 500.0}, "ssd", 50 * 100 * 30 / 500),
        ({"cpu_step_rate": 20.0}, "cpu", 50 * 100 / 20),
    ],
)
def test_the_slowest_resource_bounds_the_step(slow: dict[str, float], bound: str, seconds: float) -> None:
    """A step lasts as long as the slowest resource is busy, and little longer."""
    model = make_model(50, forward=0.1, saved=0, inputs=0)
    prediction = simulate(model, replace(FAST, **slow), plan_of(model, "ssd", "ssd", "keep", "keep"))  # type: ignore[arg-type]
    assert prediction.bound == bound
    assert prediction.busy_seconds[bound] == pytest.approx(seconds)
    assert seconds <= prediction.step_seconds * (1 + 1e-9)
    assert prediction.step_seconds <= seconds + 50 * 0.3


def test_the_optimizer_runs_under_backward_and_the_next_forward() -> None:
    """Optimizer jobs of 2 s for each unit are hidden behind 3 s of computation, unless they wait for the norm."""
    model = make_model(10, parameters=200)
    machine = replace(FAST, cpu_step_rate=100.0)
    overlapped = simulate(model, machine, plan_of(model, "host", "host", "keep", "keep"))
    deferred = simulate(model, machine, plan_of(model, "host", "host", "keep", "keep", clip="deferred"))
    # Forward takes 10 s, all jobs take 20 s: the first units wait for their own jobs, not for all.
    assert 30 <= overlapped.step_seconds <= 33
    # Backward takes 20 s, and then the next forward waits for the first parts of all jobs.
    weights_half, rest_half = machine.cpu_weights_first, machine.cpu_rest_later
    assert 20 + 20 * weights_half <= deferred.step_seconds <= 34
    assert deferred.busy_seconds["cpu"] == pytest.approx(20 * (weights_half + rest_half))


def test_second_parts_of_deferred_jobs_are_made_while_backward_needs_no_gradient_memory() -> None:
    """With jobs of 60 s and a backward of 20 s, a third of the units has two parts: the CPU is never idle."""
    model = make_model(10, parameters=600)
    machine = replace(FAST, cpu_step_rate=100.0)
    deferred = simulate(model, machine, plan_of(model, "host", "host", "keep", "keep", clip="deferred"))
    weights_half, rest_half = machine.cpu_weights_first, machine.cpu_rest_later
    share = 20 / (60 * rest_half)
    assert deferred.busy_seconds["cpu"] == pytest.approx(60 * (1 + share * (weights_half + rest_half - 1)), rel=0.03)
    assert deferred.busy_seconds["cpu"] <= deferred.step_seconds * (1 + 1e-9) < 60 + 20


def test_copies_slow_the_optimizer_by_sharing_host_memory() -> None:
    """Jobs of 20 s; copies of 10 units: 200 bytes of weights in, twice, 200 of gradients and 10 saved out, 10 in."""
    model = make_model(10, inputs=0)
    machine = replace(FAST, cpu_step_rate=50.0, host_memory_bandwidth=62.0)
    keep, swap = (simulate(model, machine, plan_of(model, "host", "host", "keep", how)) for how in ("keep", "host"))
    assert (keep.copied_bytes, swap.copied_bytes) == (6000, 6000 + 2 * 9 * 10 + 10)
    for prediction in (keep, swap):
        assert prediction.busy_seconds["cpu"] == pytest.approx(20 + prediction.copied_bytes / 62)


def test_a_small_window_stalls() -> None:
    """The GPU idles if weights are prefetched only when the previous unit is done."""
    model = make_model(10, parameters=100)
    machine = replace(FAST, copy_in=200.0, copy_in_both=200.0)
    plan = plan_of(model, "host", "host", "keep", "keep")
    wide, narrow = (simulate(model, machine, replace(plan, window_bytes=size)) for size in (10**9, 0))
    assert wide.stall_seconds < 2
    assert narrow.stall_seconds > wide.stall_seconds
    assert narrow.gpu_peak_bytes < wide.gpu_peak_bytes


def memory_of(model: ModelProfile, machine: HardwareProfile, plan: Plan) -> list[tuple[int, ...]]:
    """Returns the bytes of GPU memory, host memory and SSDs after each change in three steps."""
    steps = StepTasks(model, machine, plan)
    for step in range(3):
        steps.add_step(step)
    resident = resident_bytes(model, plan)
    return [
        tuple(own + used for own, used in zip(resident, sample[1:], strict=True))
        for sample in run(steps.tasks, machine).samples
    ]


def resident_gpu_bytes(model: ModelProfile, plan: Plan) -> int:
    parts = plan.parts(model)
    return sum(
        profile.weight_bytes + profile.state_bytes_read + max(profile.gradient_bytes, 4 * profile.parameters)
        for (_, profile), part in zip(model.parts, parts, strict=True)
        if part.states == "gpu"
    )


@settings(max_examples=50, deadline=None)
@given(st.data(), machines())
def test_busy_times_bytes_and_memory_are_consistent(data: st.DataObject, machine: HardwareProfile) -> None:
    """No resource is busy for longer than a step, all bytes are accounted for, and all memory is freed."""
    model = data.draw(models())
    plan = data.draw(plans(model))
    prediction = simulate(model, machine, plan)
    compute = model.micro_batches * (model.forward_seconds + model.backward_seconds)
    assert prediction.busy_seconds["compute"] >= compute * (1 - 1e-9)
    assert prediction.step_seconds >= max(prediction.busy_seconds.values())
    units = [(unit, plan.units[unit.name]) for unit in model.units]
    parts = list(zip(model.parts, plan.parts(model), strict=True))
    weights = sum(profile.weight_bytes for (_, profile), part in parts if part.weights == "ssd")
    states = sum(profile.state_bytes_read for (_, profile), part in parts if part.states == "ssd")
    swapped = sum(unit.input_bytes for unit, where in units if where.input == "ssd") + sum(
        item.saved_bytes for unit, where in units for item in unit.operators if where.operators[item.name] == "ssd"
    )
    read = prediction.ssd_read_bytes - model.micro_batches * 2 * weights - states
    written = prediction.ssd_written_bytes - states - weights
    # Bytes that backward needs before their eviction are neither written nor read, except beyond staging memory.
    assert 0 <= read <= written <= model.micro_batches * swapped
    memory = memory_of(model, machine, plan)
    assert memory[-1][0] == resident_gpu_bytes(model, plan)
    assert memory[-1][1:] == resident_bytes(model, plan)[1:]
    assert all(min(sample) >= 0 for sample in memory)


@settings(max_examples=50, deadline=None)
@given(*[st.integers(-100, 100)] * 4)
def test_excess_is_the_sum_over_all_tiers(gpu: int, host: int, ssd: int, written: int) -> None:
    """Unused bytes of one tier do not offset the excess of another."""
    model = make_model(4)
    peak = simulate(model, UNIT, plan_of(model, "ssd", "ssd", "ssd", "ssd"))
    machine = replace(
        UNIT,
        gpu_bytes=peak.gpu_peak_bytes - gpu,
        host_bytes=peak.host_peak_bytes - host,
        ssd_bytes=peak.ssd_peak_bytes - ssd,
        ssd_bytes_per_day=(peak.ssd_written_bytes - written) * 24 * 3600 / peak.step_seconds,
    )
    assert peak.ssd_written_bytes > 100 and peak.excess_bytes(replace(machine, ssd_bytes_per_day=None)) == sum(
        max(0, lacking) for lacking in (gpu, host, ssd)
    )
    assert peak.excess_written(machine) in (max(0, written), max(0, written) + 1)  # rounded up
    assert peak.excess_bytes(machine) == sum(max(0, one) for one in (gpu, host, ssd)) + peak.excess_written(machine)


def test_items_that_fit_into_a_window_do_not_wait() -> None:
    """A further item waits for the oldest items that make room; an item larger than the window waits for all."""
    window, (first, second, third) = BoundedFifo(10), (Task(COPY_OUT, 1, 0) for _ in range(3))
    assert window.allocate(4) == []
    window.free_after(4, first)
    assert window.allocate(6) == []
    window.free_after(6, second)
    assert window.allocate(1) == [first]
    window.free_after(1, third)
    assert window.allocate(3) == [first]  # it has room, but waits behind earlier items
    assert window.allocate(20) == [first, second, third]


@pytest.mark.parametrize("weights", ["gpu", "ssd"])
def test_few_optimizer_jobs_have_their_states_in_host_memory(weights: Any) -> None:
    """Host memory is for `JOBS_AHEAD` jobs: a job reads states once the job before these has written its own."""
    model = make_model(8, saved=0, inputs=0, forward=0.01)
    machine = replace(FAST, cpu_step_rate=1.0)  # all reads would be first
    builder = StepTasks(model, machine, plan_of(model, weights, "ssd", "keep", "keep"))
    for step in range(3):
        builder.add_step(step)
    run(builder.tasks, machine)
    read = [task for task in builder.tasks if task.resource == SSD and not task.write and task.priority != URGENT]
    ends = [task.end for task in builder.tasks if task.resource == SSD and task.write]
    assert len(read) == len(ends) == 3 * 8
    late = [index for index in range(JOBS_AHEAD, len(read)) if read[index].begin >= ends[index - JOBS_AHEAD]]
    assert len(late) == len(read) - JOBS_AHEAD
    assert any(task.begin < end for task, end in zip(read[1:], ends, strict=False)), "states are read ahead"


@settings(max_examples=50, deadline=None)
@given(st.data(), machines(), st.sampled_from([0.25, 2.0, 8.0]))
def test_units_of_time_do_not_matter(data: st.DataObject, machine: HardwareProfile, factor: float) -> None:
    """A machine that is `factor` times as fast in everything needs that much less time."""
    model = data.draw(models())
    plan = data.draw(plans(model))
    rates = {name: factor * getattr(machine, name) for name in (*RATES, "gpu_memory_bandwidth")}
    if machine.host_memory_bandwidth is not None:
        rates["host_memory_bandwidth"] = factor * machine.host_memory_bandwidth
    faster = replace(
        model,
        units=tuple(
            replace(
                unit,
                operators=tuple(
                    replace(
                        item,
                        forward_seconds=item.forward_seconds / factor,
                        backward_seconds=item.backward_seconds / factor,
                        recompute_seconds=None if item.recompute_seconds is None else item.recompute_seconds / factor,
                        launch_seconds=item.launch_seconds / factor,
                    )
                    for item in unit.operators
                ),
            )
            for unit in model.units
        ),
    )
    other = replace(machine, host_overhead=machine.host_overhead.times(1 / factor), **rates)
    before, after = simulate(model, machine, plan), simulate(faster, other, plan)
    assert after.step_seconds == pytest.approx(before.step_seconds / factor, rel=1e-6)


ROUNDED = 64
"""Bytes by which those of parts may differ from those of their units, because each part's are whole numbers."""


@settings(max_examples=30, deadline=None)
@given(st.data(), machines(), st.integers(2, 4))
def test_parts_that_are_placed_as_their_unit(data: st.DataObject, machine: HardwareProfile, count: int) -> None:
    """Work, traffic and memory of a unit's parts in one tier are those of the unit, except the staging of its jobs.

    Steps end at other times than those of whole units, so that more saved tensors may be in host memory at the peak.
    """
    divided = divide(data.draw(models()), count)
    whole = replace(divided, units=tuple(replace(unit, parts=()) for unit in divided.units))
    plan = data.draw(plans(whole))
    one, other = (simulate_every_micro_batch(model, machine, plan) for model in (whole, divided))
    for name in ("gpu_peak_bytes", "ssd_peak_bytes", "ssd_read_bytes", "ssd_written_bytes", "copied_bytes"):
        assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-6, abs=ROUNDED), name
    moved = 0
    for unit in whole.units:
        placed = plan.units[unit.name]
        moved += unit.input_bytes * (placed.input != "keep")
        moved += sum(each.saved_bytes for each in unit.operators if placed.operators.get(each.name) in ("host", "ssd"))
    assert other.host_peak_bytes <= one.host_peak_bytes + moved + ROUNDED


def test_transient_memory_counts_only_in_its_interval() -> None:
    """Before a tensor is saved, until the next is saved, when backward needs it, and while it is used."""
    first = OperatorProfile(
        "first", 1.0, 2.0, 0.0, 10, ("a",), 1.0, 5, forward_bytes=3, first_use_bytes=2, backward_bytes=8
    )
    second = OperatorProfile("second", 1.0, 2.0, 0.0, 20, ("b",), 1.0, 0, 1, 4, 6)
    unit = UnitProfile("unit", (first, second), 0, 0, 0, 0, 0, 0, forward_bytes=17, backward_bytes=1)
    model = ModelProfile("model", (unit,), 1, 1, 1)

    def peak(*choices: Any) -> int:
        operators = dict(zip(("first", "second"), choices, strict=True))
        return simulate(model, UNIT, Plan({"unit": UnitPlan("gpu", "gpu", "keep", operators)}, 10, 10)).gpu_peak_bytes

    assert peak("keep", "keep") == 10 + 20 + 6
    assert peak("keep", "recompute") == 10 + 20 + 6
    # Backward needs both at once, because the second is computed from the first, with its workspace.
    assert peak("recompute", "recompute") == 10 + 20 + 6
    assert peak("recompute", "keep") == max(17, 10 + 20 + 1, 20 + 6, 10 + max(2 + 5, 8))


@pytest.mark.parametrize("weights", ["gpu", "host", "ssd"])
@pytest.mark.parametrize("activation", ["keep", "host", "ssd"])
def test_many_micro_batches_are_like_few(weights: Any, activation: Any) -> None:
    """The prediction from a few micro-batches equals the simulation of all."""
    model = make_model(12, saved=GB, inputs=GB // 8, parameters=10**8, micro_batches=9)
    model = model.with_time(0.05)
    plan = plan_of(model, weights, weights, activation, activation)
    predicted, simulated = simulate(model, H100, plan), simulate_every_micro_batch(model, H100, plan)
    assert predicted.step_seconds == pytest.approx(simulated.step_seconds, rel=0.02)
    assert predicted.gpu_peak_bytes == pytest.approx(simulated.gpu_peak_bytes, rel=0.02)
    assert predicted.ssd_written_bytes == simulated.ssd_written_bytes
    assert predicted.ssd_read_bytes == simulated.ssd_read_bytes
