"""Teraio's planner: which tensors to migrate in which inactive periods (Algorithm 1), and a search beyond the paper.

The benefit of a migration is the integral over time of the reduction of critical memory pressure (memory beyond the
GPU's capacity); its cost is the time of its offload and prefetch. The candidate of the best ratio is chosen, its
transfers are laid on the I/O timeline, and the search repeats until memory fits. If the I/O timeline has no room for
that, the GPU has to wait: the step is lengthened, and the search continues. Earlier choices remain, so that as many
transfers as possible fit into the step as it is.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np

from lightning_ssd.garbage import no_collections
from lightning_ssd.planning.evictions import IN_FLIGHT, EvictionPlanner, Period
from lightning_ssd.planning.io_timeline import Floats, IOTimeline
from lightning_ssd.planning.lifetimes import InactivePeriod, LifetimeProfile
from lightning_ssd.planning.migration import HOST, GPUSteps, Migration, MigrationMachine, MigrationPlan, wrapped
from lightning_ssd.planning.migration_simulator import MigrationPrediction, simulate_better, simulate_migrations
from lightning_ssd.planning.transfer_bounds import least_score

SATURATED = 2.0
"""A drive is saturated for a migration if earlier ones make its transfers take longer by this factor."""

MIN_BYTES = 2**20
"""Bytes of the smallest tensor that is migrated."""

CLOSE = 0.75
"""Share of the best possible ratio at which a candidate is chosen: to find the very best takes many times longer."""

LONGER, LONGEST = 2.0, 256.0
"""Factor by which the step is lengthened until transfers have room, and the most by which it is in all."""

STUCK = 0.9
"""Share of the pressure that remains in a longer step, from which on operators wait for transfers right away."""

PRICES = (2.0, 1.0, 0.5)
"""Seconds of transfers that a second of recomputation has to save, which the search beyond the paper tries."""

SHARES = (0.75, 0.5)
"""Shares of the recomputations at the best price that are tried."""

LESS_IN_FLIGHT = 0.02
"""Smaller share of the GPU's capacity for prefetches that have begun, which is tried for the best plan."""

MIN_GAIN = 0.002
"""Least gain, as a share of the step, for which a plan is simulated."""

_Candidate = tuple[float, int, int, int, int]
"""Ratio of benefit and cost, and `absent_from`, `absent_until`, `before` and `drive` of a `Migration`."""


@no_collections()
def plan_teraio(profile: LifetimeProfile, machine: MigrationMachine, min_bytes: int = MIN_BYTES) -> MigrationPlan:
    """Returns the plan of Teraio's algorithm.

    Tensors migrate to drives, and to host memory where drives are saturated. Transfers that have no room in a step are
    planned for a longer one, in which operators wait for them; `simulate_migrations` says where. Migrations that others
    have made unnecessary are removed in the end.

    Args:
        profile: lifetimes of all tensors.
        machine: the machine.
        min_bytes: bytes of the smallest tensor that is migrated.
    """
    search = _Search(profile, machine, min_bytes)
    # All bytes beyond the capacity have to leave in a step.
    least = float(search.pressure.max()) / search.most_out if search.most_out else LONGEST
    factor, before = min(LONGEST, max(1.0, least)), inf
    search.io.lengthen(factor)
    while True:
        search.choose(in_time=True)
        left = float(search.pressure.sum())
        if left >= STUCK * before or (left and factor >= LONGEST):
            # Operators right before or after the use of a tensor need its memory, however long the step is.
            search.choose(in_time=False)
            left = 0.0
        if not left:
            return MigrationPlan(tuple(search.necessary()))
        before = left
        factor *= LONGER
        search.io.lengthen(LONGER)


@no_collections()
def plan_in_time(profile: LifetimeProfile, machine: MigrationMachine, min_bytes: int = MIN_BYTES) -> MigrationPlan:
    """Returns the plan of one search: migrations that have no room in a step are chosen by their benefit alone.

    Args:
        profile: as in `plan_teraio`.
        machine: as in `plan_teraio`.
        min_bytes: as in `plan_teraio`.
    """
    search = _Search(profile, machine, min_bytes)
    search.choose(in_time=True)
    search.choose(in_time=False)
    return MigrationPlan(tuple(search.necessary()))


@no_collections()
def plan_migrations(
    profile: LifetimeProfile, machine: MigrationMachine, min_bytes: int = MIN_BYTES
) -> tuple[MigrationPlan, MigrationPrediction]:
    """Returns the best plan that also recomputes saved tensors, and steps units on the CPU, and its prediction.

    The plan of `plan_teraio` is made, too, unless no plan without recomputation and CPU steps can be better. So the
    result is never predicted to be slower.

    Args:
        profile: as in `plan_teraio`.
        machine: as in `plan_teraio`.
        min_bytes: as in `plan_teraio`.
    """
    found = _BestPlan(profile, machine, min_bytes).find()
    excess, seconds = least_score(profile, machine)
    if found[1].score > (excess, seconds * (1 + 1e-9)):  # additions round
        teraio = plan_teraio(profile, machine, min_bytes)
        found = min(found, (teraio, simulate_migrations(profile, machine, teraio)), key=lambda one: one[1].score)
    return found


@dataclass(frozen=True)
class _Choice:
    """Arguments of `EvictionPlanner.plan`, with the number of units that the CPU steps."""

    cpu_units: int = 0
    recomputed: tuple[Period, ...] = ()
    in_flight: float = IN_FLIGHT


class _BestPlan:
    """The search for the number of units that the CPU steps, and the tensors that are recomputed.

    Args:
        profile: as in `plan_teraio`.
        machine: as in `plan_teraio`.
        min_bytes: as in `plan_teraio`.
    """

    def __init__(self, profile: LifetimeProfile, machine: MigrationMachine, min_bytes: int) -> None:
        self.profile = profile
        self.machine = machine
        self.planner = EvictionPlanner(profile, machine, min_bytes)
        self.steps = GPUSteps(profile, machine)
        # Units whose gradients are complete first have the most time for a CPU step.
        jobs = sorted(self.steps.without(frozenset(profile.by_unit)).jobs, key=lambda job: job.ready)
        self.units = [job.unit for job in jobs]
        self.cpu_seconds = [0.0]
        """Seconds of a step by the work of the CPU, by the number of units that it steps."""
        free_at = 0.0
        for job in jobs:
            arrived = profile.operators[job.ready].end + job.gradients / machine.link_out
            free_at = max(free_at, arrived) + job.parameters / machine.cpu_step_rate
            needed = profile.operators[job.before].start if job.before < len(profile.operators) else inf
            self.cpu_seconds.append(max(self.cpu_seconds[-1], free_at + job.weights / machine.link_in - needed))
        self.chosen = _Choice()
        plan = self.planner.plan(self.steps.without())
        self.tried = {self.chosen}
        self.plans = {plan}
        """All plans that were simulated."""
        self.best = plan, simulate_migrations(profile, machine, plan)

    def find(self) -> tuple[MigrationPlan, MigrationPrediction]:
        """Returns the best plan, and its prediction."""
        if not (self.best[1].stalls or self.best[1].excess_bytes):
            return self.best
        # The CPU steps as many units as it can without making the GPU wait; then more or fewer are tried.
        hidden = bisect_right(self.cpu_seconds, self.profile.step_seconds) - 1
        is_better = self._try(_Choice(hidden))
        for price in PRICES:
            recomputed = self.planner.recomputed(price)
            if not self._try(replace(self.chosen, recomputed=recomputed)) and self.chosen.recomputed:
                break
        amount = len(self.units) // (8 if is_better else 4)
        while amount:
            counts = self.chosen.cpu_units + amount, self.chosen.cpu_units - amount
            if not any(self._try(replace(self.chosen, cpu_units=count)) for count in counts):
                amount //= 2
        at_price = self.chosen.recomputed
        for share in SHARES if at_price else ():
            if not self._try(replace(self.chosen, recomputed=_cheapest(at_price, share))):
                break
        if self._try(replace(self.chosen, in_flight=LESS_IN_FLIGHT)):
            # The step waits less for transfers, and may wait for the CPU now.
            self._try(replace(self.chosen, cpu_units=self.chosen.cpu_units - 1))
        return self.best

    def _try(self, choice: _Choice) -> bool:
        """Simulates a plan, if it can be better than the best one, and returns whether it is."""
        best = self.best[1]
        if choice in self.tried or not 0 <= choice.cpu_units <= len(self.units):
            return False
        if not best.excess_bytes and self.cpu_seconds[choice.cpu_units] > (1 - MIN_GAIN) * best.step_seconds:
            return False
        self.tried.add(choice)
        step = self.steps.without(frozenset(self.units[: choice.cpu_units]))
        plan = self.planner.plan(step, choice.recomputed, choice.in_flight)
        if plan in self.plans:
            return False
        self.plans.add(plan)
        found = simulate_better(self.profile, self.machine, plan, step, best)
        if found is None:
            return False
        self.best, self.chosen = (plan, found), choice
        return True


def _cheapest(periods: Sequence[Period], share: float) -> tuple[Period, ...]:
    """Returns the first periods, whose tensors have at least a share of the bytes of all."""
    left = share * sum(period.nbytes for period in periods)
    for number, period in enumerate(periods):
        if left <= 0:
            return tuple(periods[:number])
        left -= period.nbytes
    return tuple(periods)


class _Search:
    """The search, over the operators of one step that repeats.

    Args:
        profile: lifetimes of all tensors.
        machine: the machine.
        min_bytes: bytes of the smallest tensor that is migrated.
    """

    def __init__(self, profile: LifetimeProfile, machine: MigrationMachine, min_bytes: int) -> None:
        self.profile = profile
        self.machine = machine
        self.count = len(profile.operators)
        seconds = [one.end - one.start for one in profile.operators]
        self.nbytes = np.array(profile.total, dtype=np.float64)
        self.pressure: Floats = np.maximum(0.0, self.nbytes - machine.gpu_bytes)
        self.reduced: Floats = np.empty(self.count)
        """Memory for results: to allocate it for each candidate takes longer than to compute them."""
        self.pressed_at = int(self.pressure.argmax())
        """An operator under pressure, if there is any."""
        self.host: Floats = np.zeros(self.count)
        self.host_peak_at = 0
        """The operator during which host memory has the most bytes."""
        self.io = IOTimeline(machine, seconds)
        writes = inf if machine.host_bytes else sum(write for _, write in machine.drives)
        self.most_out = min(machine.link_out, writes) * float(np.sum(seconds))
        """Bytes that can leave the GPU in a step that is not lengthened."""
        self.planned = [0.0] * len(machine.drives)
        """Seconds of transfers that are planned for each drive."""
        self.chosen: dict[tuple[int, int], Migration] = {}
        """The migration of each tensor and operator after which it begins, in the order of choice."""
        self.periods = [period for period in profile.periods if profile.tensors[period.tensor].nbytes >= min_bytes]

    def choose(self, *, in_time: bool) -> None:
        """Chooses candidates of the best ratio until memory fits, or no candidate reduces the pressure.

        Tensors that migrate already may be absent for longer.

        Args:
            in_time: whether transfers have to fit into the I/O timeline; else operators may wait for them.
        """
        heap = self._candidates()
        heapify(heap)
        while heap and self._is_pressed():
            _, number = heappop(heap)
            period = self.periods[number]
            found = self._migrate(period, in_time=in_time)
            if found is None:
                continue
            ratio, start, stop, before, drive = found
            # A ratio only falls as others are chosen: those in the heap are bounds of the present ones.
            if not heap or ratio >= CLOSE * -heap[0][0]:
                migration = Migration(period.tensor, period.after, start, stop, before, drive)
                self._add_migration(migration, drive, in_time=in_time)
            else:
                heappush(heap, (-ratio, number))

    def _is_pressed(self) -> bool:
        if not self.pressure.item(self.pressed_at):
            self.pressed_at = int(self.pressure.argmax())
        return self.pressure.item(self.pressed_at) > 0

    def _candidates(self) -> list[tuple[float, int]]:
        """Returns a bound of the ratio (negative), and the period, of each candidate."""
        if not self.periods:
            return []
        bounds = np.array([self._bounds(period) for period in self.periods])
        sizes = np.array([float(self.profile.tensors[period.tensor].nbytes) for period in self.periods])
        tiers = [*range(len(self.planned)), *([HOST] if self.machine.host_bytes > 0 else [])]
        if not tiers:
            costs = np.full(len(sizes), np.inf)
        else:
            costs = sizes * min(self.io.transfer_seconds(1.0, tier) for tier in tiers)
        # Seconds under pressure up to each operator, for two steps, because periods reach into the next one.
        under = np.cumsum(np.tile(np.where(self.pressure > 0, self.io.seconds, 0.0), 2))
        under = np.concatenate([[0.0], under])
        pressed = under[bounds[:, 1]] - under[bounds[:, 0] + 1]
        ratios = sizes * pressed / costs
        return [(-float(ratios[number]), number) for number in np.flatnonzero(pressed > 0).tolist()]

    def _bounds(self, period: InactivePeriod) -> tuple[int, int]:
        """Returns the operators between which a tensor is not needed, the second one possibly of the next step."""
        return period.after, period.before if period.before > period.after else period.before + self.count

    def _migrate(self, period: InactivePeriod, *, in_time: bool) -> _Candidate | None:
        """Returns the migration of a candidate, or None if it would reduce no pressure."""
        drives = [self.planned.index(min(self.planned))] if self.planned else []
        size = self.profile.tensors[period.tensor].nbytes
        after, before = self._bounds(period)
        if (old := self.chosen.get((period.tensor, period.after))) is not None:
            assert old.drive is not None  # nothing is recomputed
            span = self.io.lay(after, before, size, old.drive)[0] if in_time else self._pressed(after + 1, before)
            if span is None or (old.absent_from <= span[0] and span[1] <= old.absent_until):
                return None
            span = min(span[0], old.absent_from), max(span[1], old.absent_until)
            return self._rated(period, before, *span, old.drive)
        if not in_time:
            span = self._pressed(after + 1, before)
            if span is None:
                return None
            where = HOST if self._fits_host(after + 1, before, size) else next(iter(drives), None)
            return None if where is None else self._rated(period, before, *span, where)
        for drive in drives:
            span, factor = self.io.lay(after, before, size, drive)
            if span is not None and (factor < SATURATED or not self._fits_host(after + 1, before, size)):
                return self._rated(period, before, *span, drive)
        if not self._fits_host(after + 1, before, size):
            return None
        span, _ = self.io.lay(after, before, size, HOST)
        return None if span is None else self._rated(period, before, *span, HOST)

    def _rated(self, period: InactivePeriod, before: int, start: int, stop: int, drive: int) -> _Candidate | None:
        tensor = self.profile.tensors[period.tensor]
        benefit = 0.0
        for first, last in ((start, stop),) if stop <= self.count else wrapped(start, stop, self.count):
            reduced = np.minimum(self.pressure[first:last], tensor.nbytes, out=self.reduced[first:last])
            reduced *= self.io.seconds[first:last]
            benefit += float(reduced.sum())  # `dot` would run on threads that spin on a busy machine
        if benefit <= 0:
            return None
        return benefit / self.io.transfer_seconds(tensor.nbytes, drive), start, stop, before, drive

    def _pressed(self, start: int, stop: int) -> tuple[int, int] | None:
        """Returns the shortest range that has all operators under pressure of a range."""
        parts = [self.pressure[first:last] for first, last in wrapped(start, stop, self.count)]
        (found,) = np.nonzero(np.concatenate([self.pressure[:0], *parts]))
        return (start + int(found[0]), start + int(found[-1]) + 1) if len(found) else None

    def _fits_host(self, start: int, stop: int, size: int) -> bool:
        most = self.machine.host_bytes - size
        if most < 0 or self.host.item(self.host_peak_at) <= most:
            return most >= 0
        ranges = list(wrapped(start, stop, self.count))
        if any(first <= self.host_peak_at < last for first, last in ranges):
            return False
        return all(float(self.host[first:last].max(initial=0.0)) <= most for first, last in ranges)

    def _add_migration(self, migration: Migration, drive: int, *, in_time: bool) -> None:
        """Chooses a migration: memory, I/O timeline and host memory follow."""
        size = self.profile.tensors[migration.tensor].nbytes
        old = self.chosen.get((migration.tensor, migration.after))
        self.chosen[migration.tensor, migration.after] = migration
        if old is not None:
            self._change(old, size)
        self._change(migration, -size)
        if old is not None:
            return
        if drive == HOST:
            for first, last in wrapped(migration.after + 1, migration.before, self.count):
                self.host[first:last] += size
            self.host_peak_at = int(self.host.argmax())
        else:
            self.planned[drive] += self.io.transfer_seconds(size, drive)
        stop = migration.before if in_time else self.count + migration.after
        self.io.carry("out", drive, migration.after + 1, stop, size)
        self.io.carry("in", drive, migration.before - 1, migration.after, size)

    def _change(self, migration: Migration, nbytes: int) -> None:
        """Changes the memory of the operators without the tensor."""
        for first, last in wrapped(migration.absent_from, migration.absent_until, self.count):
            self.nbytes[first:last] += nbytes
            pressure = np.subtract(self.nbytes[first:last], self.machine.gpu_bytes, out=self.pressure[first:last])
            np.maximum(0.0, pressure, out=pressure)

    def necessary(self) -> list[Migration]:
        """Returns the chosen migrations without those that memory does not need, the least beneficial ones first."""
        kept: list[Migration] = []
        for migration in reversed(self.chosen.values()):
            size = self.profile.tensors[migration.tensor].nbytes
            ranges = list(wrapped(migration.absent_from, migration.absent_until, self.count))
            most = max(float(self.nbytes[first:last].max()) for first, last in ranges)
            if most + size <= self.machine.gpu_bytes:
                for first, last in ranges:
                    self.nbytes[first:last] += size
            else:
                kept.append(migration)
        return kept[::-1]
