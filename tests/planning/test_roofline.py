"""Replays of a profiled step: throughput over bandwidth, host memory and drives, and what the machines cost."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ssd.planning.lifetimes import LifetimeProfile, OperatorSpan, TensorLifetime
from lightning_ssd.planning.migration import MigrationMachine
from lightning_ssd.planning.roofline import Prices, best_throughput, by_hardware, cost_table, roofline
from lightning_ssd.planning.teraio import MIN_BYTES, plan_migrations
from tests.support.lifetimes import profiles
from tests.support.profiles import H100

GB = 10**9


def step(layers: int = 8) -> LifetimeProfile:
    """A step in which each layer saves 10 GB for backward, with room for three of them."""
    spans, tensors = [], []
    for index in range(2 * layers):
        phase = "forward" if index < layers else "backward"
        spans.append(OperatorSpan("work", phase, float(index), index + 1.0))
    for layer in range(layers):
        made, read = layer, 2 * layers - 1 - layer
        again = None if layer % 2 else 0.25
        tensors.append(
            TensorLifetime(layer, "work", "saved tensor", 10 * GB, (made, read), made, read, recompute_seconds=again)
        )
    return LifetimeProfile("model", tuple(spans), tuple(tensors))


MACHINE = MigrationMachine(30 * GB, 0, 64e9, 64e9, ((4e9, 4e9),))


def test_throughput_rises_with_bandwidth_to_that_without_waiting() -> None:
    points = roofline(step(), MACHINE, [1e9, 4e9, 16e9, 64e9, 256e9])
    found = [throughput for _, throughput in points]
    assert found == sorted(found)
    assert 0 < found[0] < 0.5 and found[-1] > 0.95


def test_recomputation_helps_where_drives_are_slow() -> None:
    slow = [4e8]
    ((_, teraio),) = roofline(step(), MACHINE, slow)
    ((_, best),) = roofline(step(), MACHINE, slow, best_throughput)
    assert best > 1.2 * teraio


@given(st.data())
@settings(deadline=None, max_examples=40)
def test_more_drives_and_host_memory_never_hurt(data: st.DataObject) -> None:
    profile = data.draw(profiles())
    scaled = replace(
        profile, tensors=tuple(replace(one, nbytes=one.nbytes * MIN_BYTES) for one in profile.tensors)
    )  # smaller tensors do not migrate
    speed, capacity = st.floats(0.5 * MIN_BYTES, 50.0 * MIN_BYTES), max(scaled.active)
    machine = MigrationMachine(capacity, 0, data.draw(speed), data.draw(speed), ((data.draw(speed), data.draw(speed)),))
    grid = by_hardware(scaled, machine, [0, 20 * MIN_BYTES, 1000 * MIN_BYTES], [1, 2, 3, 5])
    for rows in (grid, zip(*grid, strict=True)):
        for row in rows:
            assert all(0 < one <= other * (1 + 1e-9) <= 1 + 2e-9 for one, other in pairwise(row))


def test_more_drives_and_host_memory_help_where_the_gpu_waits() -> None:
    grid = by_hardware(step(), MACHINE, [0, 20 * GB, 80 * GB], [1, 2, 4])
    assert grid[0][0] < grid[0][2] and grid[0][0] < grid[2][0]


@pytest.mark.parametrize("host_bytes", [0, 20 * GB, 80 * GB])
def test_the_best_plan_is_never_slower_with_another_drive(host_bytes: int) -> None:
    for layers in range(4, 12):
        machines = [replace(MACHINE, host_bytes=host_bytes, drives=MACHINE.drives * count) for count in range(1, 9)]
        found = [best_throughput(step(layers), one) for one in machines]
        assert all(one <= other * (1 + 1e-9) for one, other in pairwise(found))


@given(st.data())
@settings(deadline=None, max_examples=40)
def test_the_cpu_steps_units_also_where_the_gpu_waits_for_nothing(data: st.DataObject) -> None:
    """So a GPU with room for everything has no slower plan than one that has to migrate, if the CPU takes no time."""
    profile = data.draw(profiles())
    most = max(profile.total)
    speed = data.draw(st.floats(0.5, 50.0))
    machine = MigrationMachine(max(profile.active), most, 1e9, 1e9, ((speed, speed),), cpu_step_rate=1e9)
    less = plan_migrations(profile, machine, min_bytes=1)[1]
    more = plan_migrations(profile, replace(machine, gpu_bytes=most), min_bytes=1)[1]
    assert more.score <= (less.excess_bytes, less.step_seconds * (1 + 1e-6))


def test_the_cost_table_has_prices_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("server: 1000\ngpu: 30000\nhost_gb: 4\nssd: 200\n")
    prices = Prices.load(path)
    assert prices.of(1, 10.0, 2) == 31440
    printed = cost_table(step(), MACHINE, prices)
    assert "31,200" in printed  # the server, a GPU and a drive
    assert "3 GPUs" in printed and "91,000" in printed  # 80 GB of tensors
    assert "\n1 GPU  " in cost_table(step(), replace(MACHINE, gpu_bytes=100 * GB), prices)


@pytest.mark.parametrize(
    "text", ["server: 1\n", "- 1\n", "server: x\n", "{", "server: -1\ngpu: 1\nhost_gb: 1\nssd: 1\n"]
)
def test_wrong_prices_are_one_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=str(path)):
        Prices.load(path)


def test_a_machine_without_ssd_space_has_no_drives() -> None:
    """Its profile has bandwidths, too, which nothing was measured for."""
    without = MigrationMachine.of(replace(H100, ssd_bytes=0, gpu_bytes=30 * GB, host_bytes=20 * GB))
    assert by_hardware(step(), without, [0, 100 * GB], [1, 4]) == [[0.0, 0.0], [1.0, 1.0]]
    assert best_throughput(step(), without) == best_throughput(step(), replace(without, drives=()))
