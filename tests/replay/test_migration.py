"""Migrations of single tensors: memory fits while each operator runs, transfers fit their drives, none is in vain."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ssd.planning import Migration, MigrationMachine, sum_ranges, wrapped
from lightning_ssd.replay import (
    LifetimeProfile,
    MigrationPrediction,
    OperatorSpan,
    TensorLifetime,
    plan_teraio,
    simulate_migrations,
)
from lightning_ssd.replay.migration_simulator import INTERVALS
from tests.support.lifetimes import profiles
from tests.support.slow_migrations import slow_bytes, slow_step


@st.composite
def machines(draw: st.DrawFn, profile: LifetimeProfile) -> MigrationMachine:
    speed = st.floats(0.5, 50.0)
    ssd = draw(st.one_of(st.just((0.0, 0.0)), st.tuples(speed, speed)))
    capacity = draw(st.integers(max(profile.active), max(max(profile.total), max(profile.active))))
    host = draw(st.one_of(st.sampled_from([0, 20, 60, 1000]), st.integers(60, 400)))
    return MigrationMachine(capacity, host, draw(speed), draw(speed), ssd)


@st.composite
def planned(draw: st.DrawFn, profile: LifetimeProfile) -> tuple[MigrationMachine, list[Migration]]:
    """Any migrations, with a machine whose memories have room for them and no more: no search needs to find them."""
    speed = st.floats(0.5, 50.0)
    ssd = draw(st.one_of(st.just((0.0, 0.0)), st.tuples(speed, speed)))
    roomy = MigrationMachine(0, 0, draw(speed), draw(speed), ssd)
    longest = draw(st.booleans())
    tier = draw(st.sampled_from([None, *roomy.tiers]))  # of most tensors
    migrations = []
    for tensor, after, before, _ in profile.periods:
        if after + 1 == before or (not longest and draw(st.booleans())):
            continue
        start = after + 1 if longest else draw(st.integers(after + 1, before - 1))
        stop = before if longest else draw(st.integers(start + 1, before))
        migrations.append(Migration(tensor, after, start, stop, before, tier or draw(st.sampled_from(roomy.tiers))))
    found = simulate_migrations(profile, roomy, migrations)
    return replace(roomy, gpu_bytes=max(found.gpu_bytes), host_bytes=found.host_peak_bytes), migrations


def check_physics(
    profile: LifetimeProfile, machine: MigrationMachine, migrations: Sequence[Migration], found: MigrationPrediction
) -> None:
    """In each part of the step, neither drives nor link carry more than their bandwidth.

    In all, they carry the bytes of the migrations, as those of a step that follows each tensor, and no memory has more
    than its capacity at any time.
    """
    slow = slow_step(profile, machine, migrations)
    assert found.step_seconds == pytest.approx(slow.seconds)
    # The step is the operators and the stalls.
    assert found.step_seconds == pytest.approx(profile.step_seconds + found.stall_seconds)
    if not found.excess_bytes:
        assert slow.gpu_peak <= machine.gpu_bytes
    assert slow.host_peak <= found.host_peak_bytes
    held = [
        (one.after + 1, one.before + 1, profile.tensors[one.tensor].nbytes) for one in migrations if one.tier == "host"
    ]
    assert found.host_peak_bytes == max(slow_bytes(held, len(profile.operators)))
    written = sum(profile.tensors[one.tensor].nbytes for one in migrations if one.tier == "ssd")
    assert found.ssd_written_bytes == written
    rates = {"copy out": machine.link_out, "copy in": machine.link_in}
    rates |= {"SSD write": machine.ssd[1], "SSD read": machine.ssd[0]}
    ways = {"copy out": ("out", "link"), "SSD write": ("out", "ssd")}
    ways |= {"copy in": ("in", "link"), "SSD read": ("in", "ssd")}
    for direction, row in found.carried.items():
        assert sum(row) == pytest.approx(slow.carried[ways[direction]], abs=1e-6)
        most = rates[direction] * found.step_seconds / INTERVALS
        assert -1e-6 <= min(row) and max(row) <= most * (1 + 1e-6) + 1e-6


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_memory_fits_or_the_plan_says_so(data: st.DataObject) -> None:
    profile = data.draw(profiles())
    machine = data.draw(machines(profile))
    plan = plan_teraio(profile, machine, min_bytes=1)
    found = simulate_migrations(profile, machine, plan)
    check_physics(profile, machine, plan, found)
    assert found.excess_bytes == max(0, max(found.gpu_bytes) - machine.gpu_bytes)
    if "ssd" in machine.tiers:  # each period of a tensor is long enough for a step that waits
        assert not found.excess_bytes
    for one in plan:
        tensor = profile.tensors[one.tensor]
        count = len(profile.operators)
        assert one.after < one.absent_from < one.absent_until <= one.before
        absent = {index for part in wrapped(one.absent_from, one.absent_until, count) for index in range(*part)}
        assert not absent.intersection(tensor.uses)
        for index in absent:  # it is allocated then
            assert tensor.is_global or (tensor.allocated or 0) <= index <= (tensor.freed or count)


@given(st.data())
@settings(deadline=None, max_examples=40)
def test_each_migration_is_needed(data: st.DataObject) -> None:
    """Without any one, memory exceeds the capacity by more."""
    profile = data.draw(profiles())
    machine = data.draw(machines(profile))
    plan = plan_teraio(profile, machine, 1)

    def beyond(migrations: Sequence[Migration]) -> int:
        found = simulate_migrations(profile, machine, migrations)
        return sum(max(0, nbytes - machine.gpu_bytes) for nbytes in found.gpu_bytes)

    for index in range(len(plan)):
        assert beyond(plan[:index] + plan[index + 1 :]) > beyond(plan)


def test_a_step_that_takes_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="Measure them again"):
        LifetimeProfile("model", (OperatorSpan("view", "forward", 0.0, 0.0),), ())


@given(profiles())
@settings(deadline=None, max_examples=20)
def test_empty_tensors_need_no_migration(profile: LifetimeProfile) -> None:
    """Parameters may be empty."""
    empty = replace(profile, tensors=tuple(replace(tensor, nbytes=0) for tensor in profile.tensors))
    machine = MigrationMachine(0, 100, 1.0, 1.0, (1.0, 1.0))
    assert not plan_teraio(empty, machine, min_bytes=1)
    assert simulate_migrations(empty, machine, []).score == (0, profile.step_seconds)


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_any_migrations_obey_physics(data: st.DataObject) -> None:
    """Also those that no search makes, on a machine with no more memory than they need."""
    profile = data.draw(profiles())
    machine, migrations = data.draw(planned(profile))
    found = simulate_migrations(profile, machine, migrations)
    assert not found.excess_bytes
    check_physics(profile, machine, migrations, found)


@given(st.integers(1, 12), st.data())
def test_sums_of_ranges_repeat_with_the_step(count: int, data: st.DataObject) -> None:
    start = st.integers(0, 2 * count)
    ranges = data.draw(st.lists(st.tuples(start, st.integers(0, count), st.integers(-50, 50)), min_size=1))
    ranges = [(first, first + length, nbytes) for first, length, nbytes in ranges]
    assert sum_ranges(*zip(*ranges, strict=True), count).tolist() == slow_bytes(ranges, count)


def one_saved_tensor(size: int) -> LifetimeProfile:
    """Ten operators of a second: a tensor that the first and the last use, and one that the fifth uses alone."""
    operators = tuple(
        OperatorSpan("work", "forward" if index < 5 else "backward", float(index), index + 1.0) for index in range(10)
    )
    saved = TensorLifetime(0, "saved", "saved tensor", size, (0, 9), 0, 9)
    workspace = TensorLifetime(1, "workspace", "transient", 10, (4, 5), 4, 5)
    return LifetimeProfile("model", operators, (saved, workspace))


def test_a_tensor_is_absent_for_as_long_as_the_drive_allows() -> None:
    """10 bytes at 5 bytes/s out and 10 in: absent from the fourth operator to the ninth."""
    machine = MigrationMachine(10, 0, 100.0, 100.0, (10.0, 5.0))
    plan = plan_teraio(one_saved_tensor(10), machine, min_bytes=1)
    assert plan == [Migration(0, 0, 3, 8, 9, "ssd")]
    found = simulate_migrations(one_saved_tensor(10), machine, plan)
    assert (found.step_seconds, found.stalls, found.excess_bytes) == (pytest.approx(10.0), (), 0)
    assert (found.ssd_written_bytes, found.host_peak_bytes) == (10, 0)
    for row in found.carried.values():
        assert sum(row) == pytest.approx(10.0)


def test_a_slow_drive_stalls_the_operator_that_needs_the_memory() -> None:
    machine = MigrationMachine(10, 0, 100.0, 100.0, (10.0, 1.0))
    found = simulate_migrations(one_saved_tensor(10), machine, plan_teraio(one_saved_tensor(10), machine, min_bytes=1))
    assert found.excess_bytes == 0
    assert found.stalls and all(4 <= operator <= 9 for operator, _ in found.stalls)
    assert found.step_seconds > 10


def test_host_memory_is_taken_where_the_drive_is_saturated_within_its_limit() -> None:
    slow = MigrationMachine(10, 10, 100.0, 100.0, (10.0, 1.0))
    assert [one.tier for one in plan_teraio(one_saved_tensor(10), slow, min_bytes=1)] == ["host"]
    fast = replace(slow, ssd=(10.0, 5.0))
    assert [one.tier for one in plan_teraio(one_saved_tensor(10), fast, min_bytes=1)] == ["ssd"]
    little = replace(slow, host_bytes=9)
    assert [one.tier for one in plan_teraio(one_saved_tensor(10), little, min_bytes=1)] == ["ssd"]


@pytest.mark.parametrize(("host_bytes", "fits"), [(10, False), (20, True)])
def test_a_tensor_is_in_host_memory_while_an_operator_waits_for_it(host_bytes: int, fits: bool) -> None:
    """The fifth operator waits for a tensor, and before for its memory, which one has that the fourth has used."""
    operators = tuple(OperatorSpan("work", "forward", float(index), index + 1.0) for index in range(9))
    tensors = (
        TensorLifetime(0, "a", "saved tensor", 10, (0, 4), 0, 4),
        TensorLifetime(1, "b", "saved tensor", 10, (3, 8), 3, 8),
        TensorLifetime(2, "workspace", "transient", 10, (2,), 2, 2),
        TensorLifetime(3, "workspace", "transient", 10, (6,), 6, 6),
    )
    profile = LifetimeProfile("model", operators, tensors)
    machine = MigrationMachine(10, host_bytes, 100.0, 100.0)
    plan = plan_teraio(profile, machine, 1)
    found = simulate_migrations(profile, machine, plan)
    assert found.host_peak_bytes == host_bytes
    assert bool(found.excess_bytes) != fits
    # The simulator says so if a plan needs more.
    both = simulate_migrations(profile, replace(machine, host_bytes=9), plan)
    assert both.excess_bytes == (0 if fits else 10) + host_bytes - 9


def test_transfers_that_have_room_in_a_step_are_not_late() -> None:
    """A drive carries 5 bytes/s, and half of 320 bytes have no room on the GPU: few operators wait."""
    count = 32
    operators = tuple(
        OperatorSpan("work", "forward" if index < count else "backward", float(index), index + 1.0)
        for index in range(2 * count)
    )
    last = 2 * count - 1
    tensors = (TensorLifetime(one, "a", "saved tensor", 10, (one, last - one), one, last - one) for one in range(count))
    profile = LifetimeProfile("model", operators, tuple(tensors))
    machine = MigrationMachine(160, 0, 100.0, 100.0, (5.0, 5.0))
    found = simulate_migrations(profile, machine, plan_teraio(profile, machine, min_bytes=1))
    assert not found.excess_bytes
    # All transfers for a step of twice the time would take 96 seconds.
    assert found.step_seconds < 85


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_no_plan_is_slower_with_faster_drives(data: st.DataObject) -> None:
    """But for a little: a step is what the second simulated one adds to the first, which may end sooner, too."""
    profile = data.draw(profiles())
    machine = data.draw(machines(profile).filter(lambda one: "ssd" in one.tiers))
    factor = data.draw(st.floats(1.0, 4.0))
    better = replace(machine, ssd=(factor * machine.ssd[0], factor * machine.ssd[1]))
    plan = plan_teraio(profile, machine, 1)
    before, after = (simulate_migrations(profile, one, plan) for one in (machine, better))
    assert after.excess_bytes == before.excess_bytes
    assert after.step_seconds <= 1.01 * before.step_seconds


def test_the_link_carries_first_what_is_needed_first_whichever_tier_stores_it() -> None:
    """Drives as fast as the link do not delay a copy to host memory that an operator needs before their transfers."""
    operators = tuple(OperatorSpan("work", "forward", float(index), index + 1.0) for index in range(6))
    tensors = tuple(TensorLifetime(number, "saved", "saved tensor", 10, (number, 5), number, 5) for number in range(2))
    machine = MigrationMachine(10, 10, 5.0, 100.0, (100.0, 5.0))
    later, sooner = Migration(0, 0, 5, 5, 5, "ssd"), Migration(1, 1, 4, 5, 5, "host")
    found = simulate_migrations(LifetimeProfile("model", operators, tensors), machine, [later, sooner])
    assert not [stall for stall in found.stalls if stall[0] == 4]


def test_urgent_transfers_overtake_others() -> None:
    """Both tensors leave at once; the one whose memory is needed first goes first, although it was queued last."""
    operators = tuple(OperatorSpan("work", "forward", float(index), index + 1.0) for index in range(6))
    tensors = tuple(TensorLifetime(number, "saved", "saved tensor", 10, (number, 5), number, 5) for number in range(2))
    profile = LifetimeProfile("model", operators, tensors)
    machine = MigrationMachine(10, 0, 100.0, 100.0, (100.0, 5.0))
    later, sooner = Migration(0, 0, 5, 5, 5, "ssd"), Migration(1, 1, 4, 5, 5, "ssd")
    found = simulate_migrations(profile, machine, [later, sooner])
    assert not [stall for stall in found.stalls if stall[0] == 4]
