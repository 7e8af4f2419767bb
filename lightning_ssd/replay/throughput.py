"""Replays a profiled step with other bandwidths, host memory and numbers of drives (Teraio, figures 3 and 9)."""

from collections.abc import Sequence
from dataclasses import replace

from lightning_ssd.planning import (
    HardwareProfile,
    Migration,
    MigrationMachine,
    ModelProfile,
    Plan,
    UnitPlan,
    plan_in_longer_step,
    simulate,
)
from lightning_ssd.replay.lifetime_profile import LifetimeProfile
from lightning_ssd.replay.migration_simulator import MigrationPrediction, simulate_migrations

BANDWIDTHS = (4e9, 16e9, 32e9, 48e9, 128e9)
"""Bytes/s of a roofline's points."""

MIN_BYTES = 2**20
"""Bytes of the smallest migrated tensor."""


def plan_teraio(profile: LifetimeProfile, machine: MigrationMachine, min_bytes: int = MIN_BYTES) -> list[Migration]:
    """Returns the migrations of Teraio's algorithm, in the order in which they were chosen.

    Tensors migrate to drives, and to host memory if drives are saturated. Transfers that have no room in a step are
    planned for a longer one, in which operators wait for them; `simulate_migrations` finds the operators.
    """
    return plan_in_longer_step(profile.step_memory(min_bytes), machine)


def roofline(
    profile: LifetimeProfile, machine: MigrationMachine, bandwidths: Sequence[float] = BANDWIDTHS
) -> list[tuple[float, float]]:
    """Returns (bandwidth, throughput) pairs of Teraio's plans: 1 if the GPU never waits, 0 if the step does not fit.

    Args:
        machine: capacities of the GPU and of host memory; bandwidths are replaced.
        bandwidths: bytes/s in each direction, of one drive and of the link to it.
    """
    points = []
    for bandwidth in bandwidths:
        at = replace(machine, link_out=bandwidth, link_in=bandwidth, ssd=(bandwidth, bandwidth))
        prediction = simulate_migrations(profile, at, plan_teraio(profile, at))
        points.append((bandwidth, _throughput(profile, prediction)))
    return points


def plan_roofline(
    model: ModelProfile, hardware: HardwareProfile, plan: Plan, bandwidths: Sequence[float] = BANDWIDTHS
) -> list[tuple[float, float]]:
    """Returns (bandwidth, throughput) pairs of a plan of units.

    All transfers run at the given bandwidth in each direction. Throughputs are relative to that of a GPU on which
    everything fits, which never waits, recomputes nothing and makes the optimizer steps; a plan with CPU steps may
    exceed 1. 0: the plan does not fit the machine.

    Args:
        hardware: profile of the machine. Its transfer bandwidths are replaced, its limit of daily writes is ignored.
    """
    units = {
        unit.name: UnitPlan("gpu", "gpu", "keep", {operator.name: "keep" for operator in unit.operators})
        for unit in model.units
    }
    ideal = simulate(model, hardware, Plan(units, 0, 0, plan.clip)).step_seconds
    points = []
    for bandwidth in bandwidths:
        machine = replace(
            hardware,
            copy_out=bandwidth,
            copy_in=bandwidth,
            copy_out_both=bandwidth,
            copy_in_both=bandwidth,
            ssd_read=bandwidth,
            ssd_write=bandwidth,
            ssd_mixed=bandwidth,
            ssd_bytes_per_day=None,
        )
        found = simulate(model, machine, plan)
        points.append((bandwidth, 0.0 if found.excess_bytes(machine) else ideal / found.step_seconds))
    return points


def by_hardware(
    profile: LifetimeProfile, machine: MigrationMachine, host_bytes: Sequence[int], num_drives: Sequence[int]
) -> list[list[float]]:
    """Returns the throughput of Teraio's plan for each host memory (rows) and number of drives (columns).

    Teraio's algorithm may find a better plan for less host memory or fewer drives: that plan is used, then.

    Args:
        machine: the machine with one drive, whose bandwidth is multiplied.
        host_bytes: bytes of host memory for migrated tensors, in rising order.
        num_drives: numbers of drives, in rising order.
    """
    plans: dict[tuple[int, int], list[Migration]] = {}
    throughput = [[0.0] * len(num_drives) for _ in host_bytes]
    for row, host in enumerate(host_bytes):
        for column, count in enumerate(num_drives):
            at = replace(machine, host_bytes=host, ssd=(count * machine.ssd[0], count * machine.ssd[1]))
            of_less = [plans[one] for one in ((row - 1, column), (row, column - 1)) if one in plans]
            found = [(plan, simulate_migrations(profile, at, plan)) for plan in (plan_teraio(profile, at), *of_less)]
            plans[row, column], best = min(found, key=lambda one: one[1].score)
            throughput[row][column] = _throughput(profile, best)
    return throughput


def _throughput(profile: LifetimeProfile, found: MigrationPrediction) -> float:
    return 0.0 if found.excess_bytes else profile.step_seconds / found.step_seconds
