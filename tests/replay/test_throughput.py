"""Replays of a profiled step: throughput over bandwidth, host memory and drives."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ssd.planning import (
    HardwareProfile,
    MigrationMachine,
    ModelProfile,
    Plan,
    Prediction,
    UnitPlan,
    make_plan,
    simulate,
)
from lightning_ssd.replay import (
    LifetimeProfile,
    OperatorSpan,
    TensorLifetime,
    by_hardware,
    plan_roofline,
    roofline,
)
from lightning_ssd.replay.throughput import MIN_BYTES
from tests.support.lifetimes import profiles
from tests.support.profiles import GB, H100, make_model


def step(layers: int = 8) -> LifetimeProfile:
    """A step in which each layer saves 10 GB for backward, with room for three of them."""
    spans, tensors = [], []
    for index in range(2 * layers):
        phase = "forward" if index < layers else "backward"
        spans.append(OperatorSpan("work", phase, float(index), index + 1.0))
    for layer in range(layers):
        made, read = layer, 2 * layers - 1 - layer
        tensors.append(TensorLifetime(layer, "work", "saved tensor", 10 * GB, (made, read), made, read))
    return LifetimeProfile("model", tuple(spans), tuple(tensors))


def saving_to_ssds(model: ModelProfile) -> Plan:
    """Returns the plan with all saved tensors on SSDs, and model states on the GPU."""
    unit = UnitPlan("gpu", "gpu", "ssd", {"work": "ssd"})
    return Plan({one.name: unit for one in model.units}, 10**9, 10**9)


MACHINE = MigrationMachine(30 * GB, 0, 64e9, 64e9, (4e9, 4e9))


def test_throughput_rises_with_bandwidth_to_that_without_waiting() -> None:
    points = roofline(step(), MACHINE, [1e9, 4e9, 16e9, 64e9, 256e9])
    found = [throughput for _, throughput in points]
    assert found == sorted(found)
    assert 0 < found[0] < 0.5 and found[-1] > 0.95


@given(st.data())
@settings(deadline=None, max_examples=20)
def test_more_drives_and_host_memory_never_hurt(data: st.DataObject) -> None:
    profile = data.draw(profiles())
    scaled = replace(
        profile, tensors=tuple(replace(one, nbytes=one.nbytes * MIN_BYTES) for one in profile.tensors)
    )  # smaller tensors do not migrate
    speed, capacity = st.floats(0.5 * MIN_BYTES, 50.0 * MIN_BYTES), max(scaled.active)
    machine = MigrationMachine(capacity, 0, data.draw(speed), data.draw(speed), (data.draw(speed), data.draw(speed)))
    grid = by_hardware(scaled, machine, [0, 20 * MIN_BYTES, 1000 * MIN_BYTES], [1, 2, 3, 5])
    for rows in (grid, zip(*grid, strict=True)):
        for row in rows:
            assert all(0 < one <= other * (1 + 1e-9) <= 1 + 2e-9 for one, other in pairwise(row))


def test_more_drives_and_host_memory_help_where_the_gpu_waits() -> None:
    grid = by_hardware(step(), MACHINE, [0, 20 * GB, 80 * GB], [1, 2, 4])
    assert grid[0][0] < grid[0][2] and grid[0][0] < grid[2][0]


def test_replay_over_bandwidth() -> None:
    """Teraio's figure 3: throughput rises with the bandwidth of migration, up to the throughput without waits."""
    model = make_model(20, saved=GB, parameters=10**6)
    plan = saving_to_ssds(model)
    points = plan_roofline(model, H100, plan, [0.1e9, 0.3e9, 1e9, 10e9, 48e9])
    assert [bandwidth for bandwidth, _ in points] == [0.1e9, 0.3e9, 1e9, 10e9, 48e9]
    throughputs = [throughput for _, throughput in points]
    assert throughputs == sorted(throughputs)
    assert throughputs[0] < 0.2
    assert throughputs[-1] == pytest.approx(1, abs=0.02)  # copies have a share of the GPU's memory bandwidth


def test_a_replay_has_no_throughput_of_a_plan_that_does_not_fit() -> None:
    model = make_model(20, saved=GB, parameters=10**6)
    plan = saving_to_ssds(model)
    needed = simulate(model, H100, plan).gpu_peak_bytes
    for gpu_bytes, fits in ((needed, True), (needed - 1, False)):
        ((_, throughput),) = plan_roofline(model, replace(H100, gpu_bytes=gpu_bytes, ssd_bytes_per_day=0), plan, [48e9])
        assert bool(throughput) == fits


def test_replay_changes_every_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both directions, alone and together."""
    model = make_model()
    plan = make_plan(model, H100)
    names = ("copy_out", "copy_in", "copy_out_both", "copy_in_both", "ssd_read", "ssd_write", "ssd_mixed")
    found: list[set[float]] = []

    def told(model: ModelProfile, machine: HardwareProfile, plan: Plan) -> Prediction:
        found.append({getattr(machine, name) for name in names})
        return simulate(model, H100, plan)

    monkeypatch.setattr("lightning_ssd.replay.throughput.simulate", told)
    plan_roofline(model, H100, plan, [1e9, 2e9])
    assert found[1:] == [{1e9}, {2e9}]  # after the ideal step, which has no transfers


def test_a_machine_without_ssd_space_has_no_drives() -> None:
    """Its profile has bandwidths, too, which nothing was measured for."""
    without = MigrationMachine.of(replace(H100, ssd_bytes=0, gpu_bytes=30 * GB, host_bytes=20 * GB))
    assert by_hardware(step(), without, [0, 100 * GB], [1, 4]) == [[0.0, 0.0], [1.0, 1.0]]
