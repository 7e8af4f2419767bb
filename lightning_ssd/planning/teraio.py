"""Teraio's planner: which tensors to migrate in which inactive periods (Algorithm 1), and a search beyond the paper.

The benefit of a migration is the integral over time of the reduction of critical memory pressure (memory beyond the
GPU's capacity); its cost is the time of its offload and prefetch. The candidate of the best ratio is chosen, its
transfers are laid on the I/O timeline, and the search repeats until memory fits. If the I/O timeline has no room for
that, the GPU has to wait: the step is lengthened, and the search continues. Earlier choices remain, so that as many
transfers as possible fit into the step as it is.
"""

from heapq import heapify, heappop, heappush
from math import inf

import numpy as np

from lightning_ssd.planning.io_timeline import Floats, IOTimeline
from lightning_ssd.planning.lifetimes import InactivePeriod, LifetimeProfile
from lightning_ssd.planning.migration import HOST, GPUStep, Migration, MigrationMachine, MigrationPlan, wrapped
from lightning_ssd.planning.migration_simulator import MigrationPrediction, simulate_migrations

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

PRICES = (8.0, 2.0, 1.0)
"""Costs of a second of recomputation, in seconds of I/O, that the search beyond the paper tries: recomputation always
lengthens the step, transfers only where they are late."""

_Candidate = tuple[float, int, int, int, int | None]
"""Ratio of benefit and cost, and `absent_from`, `absent_until`, `before` and `drive` of a `Migration`."""


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
    return _search(profile, machine, min_bytes)


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


def plan_migrations(
    profile: LifetimeProfile, machine: MigrationMachine, min_bytes: int = MIN_BYTES
) -> tuple[MigrationPlan, MigrationPrediction]:
    """Returns the best plan that also recomputes saved tensors, and steps units on the CPU, and its prediction.

    The plan of `plan_teraio` is a candidate, so the result is never predicted to be slower.

    Args:
        profile: as in `plan_teraio`.
        machine: as in `plan_teraio`.
        min_bytes: as in `plan_teraio`.
    """

    def consider(cpu_units: frozenset[str], price: float | None) -> tuple[MigrationPlan, MigrationPrediction]:
        plan = _search(profile, machine, min_bytes, cpu_units, price)
        return plan, simulate_migrations(profile, machine, plan)

    best = consider(frozenset(), None)
    price: float | None = None
    for other in PRICES:
        if not best[1].stalls and not best[1].excess_bytes:
            return best
        if (found := consider(frozenset(), other))[1].score < best[1].score:
            best, price = found, other
    # Units in the order of backward: those whose gradients are complete first have the most time for a CPU step.
    units = list(dict.fromkeys(tensor.unit for tensor in profile.tensors if tensor.unit))[::-1]
    amount = len(units)
    count = 0
    tried = {count}
    while amount and (best[1].stalls or best[1].excess_bytes):
        others = {one for one in (count + amount, count - amount) if 0 <= one <= len(units)} - tried
        tried |= others
        found = min((consider(frozenset(units[:one]), price) for one in others), key=lambda item: item[1].score,
                    default=best)  # fmt: skip
        better = found[1].score < best[1].score
        if better:
            best, count = found, len(found[0].cpu_units)
        if amount > 1 or not better:
            amount //= 2
    return best


def _search(
    profile: LifetimeProfile,
    machine: MigrationMachine,
    min_bytes: int,
    cpu_units: frozenset[str] = frozenset(),
    price: float | None = None,
) -> MigrationPlan:
    """Returns the plan; arguments as in `_Search`. The step is lengthened until all transfers have room."""
    search = _Search(profile, machine, min_bytes, cpu_units, price)
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
            return MigrationPlan(tuple(search.necessary()), cpu_units)
        before = left
        factor *= LONGER
        search.io.lengthen(LONGER)


class _Search:
    """The search, over the operators of one step that repeats.

    Args:
        profile: lifetimes of all tensors.
        machine: the machine.
        min_bytes: bytes of the smallest tensor that is migrated.
        cpu_units: units whose optimizer steps on the CPU.
        price: cost of a second of recomputation, seconds of I/O; None: nothing is recomputed.
    """

    def __init__(
        self,
        profile: LifetimeProfile,
        machine: MigrationMachine,
        min_bytes: int,
        cpu_units: frozenset[str] = frozenset(),
        price: float | None = None,
    ) -> None:
        self.profile = profile
        self.machine = machine
        self.price = price
        step = GPUStep(profile, machine, cpu_units)
        self.count = len(profile.operators)
        self.nbytes = np.array(step.nbytes, dtype=np.float64)
        self.pressure: Floats = np.maximum(0.0, self.nbytes - machine.gpu_bytes)
        self.pressed = bool(self.pressure.any())
        self.host: Floats = np.full(self.count, float(step.host_bytes))
        self.host_peak = float(step.host_bytes)
        self.io = IOTimeline(machine, step.seconds)
        writes = inf if machine.host_bytes > self.host[0] else sum(write for _, write in machine.drives)
        self.most_out = min(machine.link_out, writes) * float(np.sum(step.seconds))
        """Bytes that can leave the GPU in a step that is not lengthened."""
        self.planned = [0.0] * len(machine.drives)
        """Seconds of transfers that are planned for each drive."""
        self.needed: dict[int, list[int]] = {}
        """Operators before which a tensor is needed for the recomputation of others."""
        self.chosen: dict[tuple[int, int], Migration] = {}
        """The migration of each tensor and operator after which it begins, in the order of choice."""
        ids = {tensor.id: index for index, tensor in enumerate(profile.tensors)}
        self.sources = [tuple(ids[source] for source in tensor.sources) for tensor in profile.tensors]
        self.periods = [
            period
            for period in profile.periods
            if profile.tensors[period.tensor].nbytes >= min_bytes and period.tensor not in step.absent
        ]

    def choose(self, *, in_time: bool) -> None:
        """Chooses candidates of the best ratio until memory fits, or no candidate reduces the pressure.

        Tensors that migrate already may be absent for longer.

        Args:
            in_time: whether transfers have to fit into the I/O timeline; else operators may wait for them.
        """
        heap = self._candidates()
        heapify(heap)
        while heap and self.pressed:
            _, number, recomputed = heappop(heap)
            period = self.periods[number]
            found = self._recompute(period) if recomputed else self._migrate(period, in_time=in_time)
            if found is None:
                continue
            ratio, start, stop, before, drive = found
            # A ratio only falls as others are chosen: those in the heap are bounds of the present ones.
            if not heap or ratio >= CLOSE * -heap[0][0]:
                self._add_migration(Migration(period.tensor, period.after, start, stop, before, drive), in_time=in_time)
            else:
                heappush(heap, (-ratio, number, recomputed))

    def _candidates(self) -> list[tuple[float, int, bool]]:
        """Returns a bound of the ratio (negative), the period, and whether it is recomputed, for each candidate."""
        if not self.periods:
            return []
        bounds = np.array([self._bounds(period) for period in self.periods])
        sizes = np.array([float(self.profile.tensors[period.tensor].nbytes) for period in self.periods])
        recompute_seconds = [self.profile.tensors[period.tensor].recompute_seconds for period in self.periods]
        tiers = [*range(len(self.planned)), *([HOST] if self.machine.host_bytes > 0 else [])]
        if not tiers:
            costs = np.full(len(sizes), np.inf)
        else:
            costs = sizes * min(self.io.transfer_seconds(1.0, tier) for tier in tiers)
        # Seconds under pressure up to each operator, for two steps, because periods reach into the next one.
        under = np.cumsum(np.tile(np.where(self.pressure > 0, self.io.seconds, 0.0), 2))
        under = np.concatenate([[0.0], under])
        pressed = under[bounds[:, 1]] - under[bounds[:, 0] + 1]
        heap = []
        for number in np.flatnonzero(pressed > 0).tolist():
            benefit = float(sizes[number] * pressed[number])
            heap.append((-benefit / float(costs[number]), number, False))
            seconds = recompute_seconds[number]
            if self.price is not None and seconds is not None and not self._is_forward(int(bounds[number, 1])):
                heap.append((-benefit / max(1e-9, self.price * seconds), number, True))
        return heap

    def _bounds(self, period: InactivePeriod) -> tuple[int, int]:
        """Returns the operators between which a tensor is not needed, the second one possibly of the next step."""
        before = period.before if period.before > period.after else period.before + self.count
        if uses := self.needed.get(period.tensor):
            before = min((use for use in uses if period.after < use < before), default=before)
        return period.after, before

    def _is_forward(self, operator: int) -> bool:
        return self.profile.operators[operator % self.count].phase == "forward"

    def _migrate(self, period: InactivePeriod, *, in_time: bool) -> _Candidate | None:
        """Returns the migration of a candidate, or None if it would reduce no pressure."""
        drives = [self.planned.index(min(self.planned))] if self.planned else []
        size = self.profile.tensors[period.tensor].nbytes
        after, before = self._bounds(period)
        if (old := self.chosen.get((period.tensor, period.after))) is not None:
            if old.drive is None:
                return None
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

    def _recompute(self, period: InactivePeriod) -> _Candidate | None:
        """Returns the recomputation of a candidate, or None if its sources are absent then."""
        after, before = self._bounds(period)
        migrates = period.tensor in self.needed or (period.tensor, period.after) in self.chosen
        if migrates or any(self._is_away(source, before) for source in self.sources[period.tensor]):
            return None
        return self._rated(period, before, after + 1, before, None)

    def _is_away(self, tensor: int, operator: int) -> bool:
        """Returns whether a tensor is absent, or in flight, at the begin of an operator."""
        migrations = (self.chosen.get((tensor, after)) for after in self.profile.tensors[tensor].uses)
        return any(
            first <= operator % self.count < last
            for one in migrations
            if one is not None
            for first, last in wrapped(one.after + 1, one.before, self.count)
        )

    def _rated(
        self, period: InactivePeriod, before: int, start: int, stop: int, drive: int | None
    ) -> _Candidate | None:
        tensor = self.profile.tensors[period.tensor]
        benefit = 0.0
        for first, last in ((start, stop),) if stop <= self.count else wrapped(start, stop, self.count):
            benefit += float(np.minimum(self.pressure[first:last], tensor.nbytes).dot(self.io.seconds[first:last]))
        if benefit <= 0:
            return None
        cost = self.io.transfer_seconds(tensor.nbytes, drive) if drive is not None else (
            max(1e-9, (self.price or 0.0) * (tensor.recompute_seconds or 0.0))
        )  # fmt: skip
        return benefit / float(cost), start, stop, before, drive

    def _pressed(self, start: int, stop: int) -> tuple[int, int] | None:
        """Returns the shortest range that has all operators under pressure of a range."""
        parts = [self.pressure[first:last] for first, last in wrapped(start, stop, self.count)]
        (found,) = np.nonzero(np.concatenate([self.pressure[:0], *parts]))
        return (start + int(found[0]), start + int(found[-1]) + 1) if len(found) else None

    def _fits_host(self, start: int, stop: int, size: int) -> bool:
        if size > self.machine.host_bytes or self.host_peak + size <= self.machine.host_bytes:
            return size <= self.machine.host_bytes
        return all(
            float(self.host[first:last].max(initial=0.0)) + size <= self.machine.host_bytes
            for first, last in wrapped(start, stop, self.count)
        )

    def _add_migration(self, migration: Migration, *, in_time: bool) -> None:
        """Chooses a migration: memory, I/O timeline and host memory follow."""
        size = self.profile.tensors[migration.tensor].nbytes
        old = self.chosen.get((migration.tensor, migration.after))
        self.chosen[migration.tensor, migration.after] = migration
        if old is not None:
            self._change(old, size)
        self._change(migration, -size)
        if old is not None:
            return
        if migration.drive is None:
            for source in self.sources[migration.tensor]:
                self.needed.setdefault(source, []).append(migration.before)
            return
        if migration.drive == HOST:
            for first, last in wrapped(migration.after + 1, migration.before, self.count):
                self.host[first:last] += size
            self.host_peak = float(self.host.max())
        else:
            self.planned[migration.drive] += self.io.transfer_seconds(size, migration.drive)
        stop = migration.before if in_time else self.count + migration.after
        self.io.carry("out", migration.drive, migration.after + 1, stop, size)
        self.io.carry("in", migration.drive, migration.before - 1, migration.after, size)

    def _change(self, migration: Migration, nbytes: int) -> None:
        """Changes the memory of the operators without the tensor."""
        for first, last in wrapped(migration.absent_from, migration.absent_until, self.count):
            self.nbytes[first:last] += nbytes
            self.pressure[first:last] = np.maximum(0.0, self.nbytes[first:last] - self.machine.gpu_bytes)
        self.pressed = bool(self.pressure.any())

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
