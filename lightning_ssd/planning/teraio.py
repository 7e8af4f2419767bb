"""Teraio's planner: which tensors to migrate in which inactive periods (Algorithm 1), and a search beyond the paper.

The benefit of a migration is the reduction of memory pressure (bytes beyond the GPU's capacity), integrated over time;
its cost is the time of its offload and prefetch. The candidate of the best ratio is chosen, its transfers are placed on
the I/O timeline, and the search repeats until memory fits. If the I/O timeline has no room for more transfers, the GPU
has to wait: the step is lengthened, and the search continues. Earlier choices remain, so that as many transfers as
possible fit into the original step.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

import numpy as np

from lightning_ssd.planning.evictions import IN_FLIGHT, EvictionPlanner
from lightning_ssd.planning.io_timeline import ROUNDING, Floats, IOTimeline
from lightning_ssd.planning.lifetimes import LifetimeProfile
from lightning_ssd.planning.migration import (
    GPUStep,
    GPUSteps,
    Migration,
    MigrationMachine,
    MigrationPlan,
    Period,
    wrapped,
)
from lightning_ssd.planning.migration_simulator import MigrationPrediction, Simulation, simulate_better
from lightning_ssd.planning.transfer_bounds import ANY, IN_HOST, ON_SSD, TransferBounds
from lightning_ssd.types import OffloadTierName

SATURATED = 2.0
"""Drives are saturated for a migration if earlier ones make its transfers take longer by this factor."""

MIN_BYTES = 2**20
"""Bytes of the smallest tensor that is migrated."""

CLOSE_ENOUGH = 0.75
"""Share of the best possible ratio at which a candidate is chosen: to find the very best takes many times longer."""

LENGTHENING, MAX_LENGTHENING = 2.0, 256.0
"""Factor by which the step is lengthened each time that transfers have no room, and the largest factor in all."""

STUCK = 0.9
"""If more than this share of the pressure remains after the step was lengthened, operators wait for transfers."""

PRICES = (2.0, 1.0, 0.5)
"""Tried prices of a second of recomputation: seconds of transfers that it has to save."""

SHARES = (0.75, 0.5)
"""Tried shares of the recomputations at the best price."""

LESS_IN_FLIGHT = 0.02
"""A smaller share of the GPU's capacity for prefetches in flight than `IN_FLIGHT`, which is tried for the best plan."""

EXAMINED = 128
"""Migrations that Teraio's search chooses between two estimates of whether its plan can be the best one."""

MIN_GAIN = 0.002
"""Least gain, as a share of the step, for which a plan is simulated."""


def plan_teraio(profile: LifetimeProfile, machine: MigrationMachine, min_bytes: int = MIN_BYTES) -> MigrationPlan:
    """Returns the plan of Teraio's algorithm.

    Tensors migrate to drives, and to host memory if drives are saturated. Transfers that have no room in a step are
    planned for a longer one, in which operators wait for them; `simulate_migrations` finds the operators. Migrations
    that later ones have made unnecessary are removed in the end.

    Args:
        profile: lifetimes of all tensors.
        machine: the machine.
        min_bytes: bytes of the smallest tensor that is migrated.
    """
    found = _Search(profile, machine, min_bytes).find()
    assert found is not None
    return found


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
    """Returns the best plan that may also recompute saved tensors and step units on the CPU, and its prediction.

    The result is never predicted to be slower than the plan of `plan_teraio`, which is made unless bounds show that it
    can't be better, or than the best plan without drives.

    Args:
        profile: as in `plan_teraio`.
        machine: as in `plan_teraio`.
        min_bytes: as in `plan_teraio`.
    """
    search = _BestPlan(profile, machine, min_bytes)
    found = search.find()
    excess, seconds = search.bounds.least_score(search.steps.without())
    if found.score > (excess, seconds * (1 + ROUNDING)):
        plan = _Search(profile, machine, min_bytes).find(_Limit(search.bounds, found.score))
        better = None if plan is None else simulate_better(profile, machine, plan, search.steps.without(), found.score)
        found = better or found
    if machine.drives and machine.host_bytes:
        # Drives free more memory for prefetches, but the search may fill them with too much.
        in_host = _BestPlan(profile, replace(machine, drives=()), min_bytes)
        if in_host.may_improve(found.score):
            found = min(found, in_host.find(), key=lambda one: one.score)
    return found.plan, found.prediction()


@dataclass(frozen=True)
class _Choice:
    """Arguments of `EvictionPlanner.plan`, with the number of units that the CPU steps.

    Attributes:
        cpu_units: number of units that the CPU steps.
        staged: whether the states of all of them are staged; else of as many as host memory has no room for.
    """

    cpu_units: int = 0
    staged: bool = False
    recomputed: tuple[Period, ...] = ()
    in_flight: float = IN_FLIGHT
    prefers_host: bool = False


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
        self.bounds = TransferBounds(profile, machine)
        self.steps = GPUSteps(profile, machine)
        # Units whose gradients are complete first have the most time for a CPU step.
        jobs = sorted(self.steps.without(frozenset(profile.by_unit)).jobs, key=lambda job: job.ready)
        self.units, self.staged = self.steps.with_room([job.unit for job in jobs])
        """Units that the CPU may step, and those of the first ones that have to be staged, by their number."""
        self.cpu_seconds = [0.0]
        """Seconds of a step by the work of the CPU, by the number of units that it steps."""
        free_at = 0.0
        fitting = set(self.units)
        for job in (one for one in jobs if one.unit in fitting):
            arrived = profile.operators[job.ready].end + job.gradients / machine.link_out
            free_at = max(free_at, arrived) + job.parameters / machine.cpu_step_rate
            seconds, copied = self.cpu_seconds[-1], free_at
            for one in sorted(job.weights, key=lambda one: one.before):
                copied += one.nbytes / machine.link_in
                seconds = max(seconds, copied - profile.operators[one.before % len(profile.operators)].start)
            self.cpu_seconds.append(seconds)
        self._steps: dict[tuple[int, frozenset[str]], GPUStep] = {}
        """Steps by the number of units that the CPU steps, and those whose states are staged."""
        self.best: Simulation

    def find(self) -> Simulation:
        """Returns the simulation of the best plan."""
        self.chosen = _Choice()
        self.tried = {self.chosen}
        plan = self._plan(self.chosen)
        self.plans: set[MigrationPlan] = {plan}
        """All plans that were simulated."""
        self.best = Simulation(self.profile, self.machine, plan, self._step(self.chosen))
        self.best.run()
        # The CPU steps as many units as it can without making the GPU wait; then more or fewer are tried.
        hidden = bisect_right(self.cpu_seconds, self.profile.step_seconds) - 1
        is_better = self._try(_Choice(hidden))
        # Without staged states, drives carry less.
        if (in_host := bisect_right(self.staged, 0, key=len) - 1) < hidden:
            is_better |= self._try(_Choice(in_host))
        self._improve(max(1, len(self.units) // (8 if is_better else 2)))
        return self.best

    def may_improve(self, score: tuple[int, float]) -> bool:
        """Returns whether the best plan without drives may have a better score, if the GPU never waits."""
        periods = [(one.tensor, one.after) for one in self._every_recomputed()]
        # A CPU step uses as many bytes of host memory as it frees on the GPU, or more.
        none, every = self._step(_Choice()), self._step(_Choice(len(self.units)))
        least = self.bounds.excess(none, periods), sum(every.seconds)
        return least < (score[0], score[1] * (1 - ROUNDING))

    def _every_recomputed(self) -> frozenset[Period]:
        return frozenset(period for price in PRICES for period in self.planner.recomputed(price))

    def _may_be_better(self, choice: _Choice) -> bool:
        """Returns whether the plan of a choice may be better than the best one, by its transfers."""
        periods = [(one.tensor, one.after) for one in choice.recomputed]
        excess, seconds = self.bounds.least_score(self._step(choice), periods)
        return (excess, seconds) < (self.best.score[0], self.best.score[1] * (1 + ROUNDING))

    def _step(self, choice: _Choice) -> GPUStep:
        """Returns the step without the first units, as many as the CPU steps."""
        count = choice.cpu_units
        units = frozenset(self.units[:count])
        staged = units if choice.staged else self.staged[count]
        if (count, staged) not in self._steps:
            self._steps[count, staged] = self.steps.without(units, staged)
        return self._steps[count, staged]

    def _plan(self, choice: _Choice) -> MigrationPlan:
        step = self._step(choice)
        return self.planner.plan(step, choice.recomputed, choice.in_flight, prefers_host=choice.prefers_host)

    def _improve(self, amount: int) -> None:
        """Changes the choice as long as plans become better.

        Args:
            amount: the most units by which their number is changed at once.
        """
        for price in PRICES if not self.best.is_ideal else ():
            recomputed = self.planner.recomputed(price)
            if not self._try(replace(self.chosen, recomputed=recomputed)) and self.chosen.recomputed:
                break
        while amount:
            counts = self.chosen.cpu_units + amount, self.chosen.cpu_units - amount
            if not any(self._try(replace(self.chosen, cpu_units=count)) for count in counts):
                amount //= 2
        if self.best.is_ideal:
            return
        at_price = self.chosen.recomputed
        for share in SHARES if at_price else ():
            if not self._try(replace(self.chosen, recomputed=_cheapest(at_price, share))):
                break
        if self.machine.drives and self.machine.host_bytes:
            self._try(replace(self.chosen, prefers_host=True))
            self._try(replace(self.chosen, staged=True))
        if self._try(replace(self.chosen, in_flight=LESS_IN_FLIGHT)):
            # The step waits less for transfers, and may wait for the CPU now.
            self._try(replace(self.chosen, cpu_units=self.chosen.cpu_units - 1))
        # A few recomputations may be worth it even if all at the best price are not.
        for share in SHARES if not self.chosen.recomputed else ():
            self._try(replace(self.chosen, recomputed=_cheapest(self.planner.recomputed(PRICES[0]), share)))

    def _try(self, choice: _Choice) -> bool:
        """Simulates a plan, if it can be better than the best one, and returns whether it is."""
        excess, seconds = self.best.score
        if choice in self.tried or not 0 <= choice.cpu_units <= len(self.units):
            return False
        if not excess and self.cpu_seconds[choice.cpu_units] > (1 - MIN_GAIN) * seconds:
            return False
        self.tried.add(choice)
        if not self._may_be_better(choice):
            return False
        plan = self._plan(choice)
        if plan in self.plans:
            return False
        self.plans.add(plan)
        best = excess, seconds * (1 - ROUNDING)
        found = simulate_better(self.profile, self.machine, plan, self._step(choice), best)
        if found is None:
            return False
        self.best, self.chosen = found, choice
        return True


def _cheapest(periods: Sequence[Period], share: float) -> tuple[Period, ...]:
    """Returns the first periods, whose tensors have at least a share of the bytes of all."""
    left = share * sum(period.nbytes for period in periods)
    for number, period in enumerate(periods):
        if left <= 0:
            return tuple(periods[:number])
        left -= period.nbytes
    return tuple(periods)


class _Candidate(NamedTuple):
    """An inactive period of a tensor that may migrate. Operators as in `Migration`.

    Attributes:
        tensor: index in the profile.
        nbytes: bytes.
        after: last operator that uses the tensor before the period.
        before: operator that needs it.
    """

    tensor: int
    nbytes: int
    after: int
    before: int


class _Rated(NamedTuple):
    """A migration of a candidate.

    Attributes:
        ratio: benefit divided by cost.
        start: `absent_from` of the migration.
        stop: its `absent_until`.
        tier: its tier.
    """

    ratio: float
    start: int
    stop: int
    tier: OffloadTierName


class _Limit:
    """Ends the search for a plan that can't be better than another one.

    Migrations that were chosen keep their tier, or are removed in the end, and then the tensor stays in GPU memory.

    Args:
        bounds: bounds of a step by its transfers.
        best: score of the other plan.
    """

    def __init__(self, bounds: TransferBounds, best: tuple[int, float]) -> None:
        self._bounds = bounds
        self._best = best
        self._examined = 0
        """Number of chosen migrations that were last examined."""

    def is_reached(self, chosen: Mapping[int, Migration], host: Floats) -> bool:
        """Returns whether no search can be better that has chosen these migrations, if there are enough new ones.

        Args:
            chosen: migrations.
            host: bytes in host memory while each operator of two steps runs.
        """
        if len(chosen) < self._examined + EXAMINED or self._best[0]:
            return False
        self._examined = len(chosen)
        tiers = np.full(len(self._bounds.periods) + 1, ANY)
        for one in chosen.values():
            tiers[self._bounds.periods[one.tensor, one.after]] = IN_HOST if one.tier == "host" else ON_SSD
        least = self._bounds.least_seconds(tiers, host[: len(host) // 2].astype(np.int64))
        return least >= self._best[1] * (1 + ROUNDING)


class _Search:
    """The search, over the operators of one step that repeats.

    Args:
        profile: lifetimes of all tensors.
        machine: the machine.
        min_bytes: bytes of the smallest tensor that is migrated.
    """

    def __init__(self, profile: LifetimeProfile, machine: MigrationMachine, min_bytes: int) -> None:
        self.machine = machine
        self.count = len(profile.operators)
        # Views take no time, and memory has to fit while they run, too: the bytes beyond it count a little.
        least = ROUNDING * profile.step_seconds / self.count
        seconds = [max(least, one) for one in profile.operator_seconds]
        self.beyond = np.array(profile.total, dtype=np.float64) - machine.gpu_bytes
        """Bytes beyond the GPU's capacity while each operator runs (negative: room)."""
        self.pressure: Floats = np.maximum(0.0, self.beyond)
        self.reduced: Floats = np.empty(self.count)
        """Memory for results: to allocate it for each candidate takes longer than to compute them."""
        self.pressed_at = int(self.pressure.argmax())
        """An operator under pressure, if there is any."""
        self.host: Floats = np.zeros(2 * self.count)
        """Bytes in host memory, for two steps."""
        self.host_peak_at = 0
        """The operator during which host memory has the most bytes."""
        self.io = IOTimeline(machine, seconds)
        self.most_out = machine.rate("host" if machine.host_bytes else "ssd", "out") * float(np.sum(seconds))
        """Bytes that can leave the GPU in a step that is not lengthened."""
        self.candidates: list[_Candidate] = []
        for period in profile.periods:
            if (nbytes := profile.tensors[period.tensor].nbytes) >= min_bytes:
                before = period.before if period.before > period.after else period.before + self.count
                self.candidates.append(_Candidate(period.tensor, nbytes, period.after, before))
        self.chosen: dict[int, Migration] = {}
        """The migrations of candidates, by their numbers, in the order of choice."""

    def find(self, limit: "_Limit | None" = None) -> MigrationPlan | None:
        """Returns the plan of `plan_teraio`, or None as soon as `limit` shows that another one is better."""
        # All bytes beyond the capacity have to leave in a step.
        least = float(self.pressure.max()) / self.most_out if self.most_out else MAX_LENGTHENING
        factor, before = min(MAX_LENGTHENING, max(1.0, least)), inf
        self.io.lengthen(factor)
        while self.choose(in_time=True, limit=limit):
            left = float(self.pressure.sum())
            if left >= STUCK * before or (left and factor >= MAX_LENGTHENING):
                # Operators right before or after the use of a tensor need its memory, however long the step is.
                self.choose(in_time=False)
                left = 0.0
            if not left:
                return MigrationPlan(tuple(self.necessary()))
            before = left
            factor *= LENGTHENING
            self.io.lengthen(LENGTHENING)
        return None

    def choose(self, *, in_time: bool, limit: "_Limit | None" = None) -> bool:
        """Chooses candidates of the best ratio until memory fits, or no candidate reduces the pressure.

        Tensors that migrate already may be absent for longer.

        Args:
            in_time: whether transfers have to fit into the I/O timeline; else operators may wait for them.
            limit: another plan; None: there is none.

        Returns:
            False as soon as `limit` shows that the other plan is better.
        """
        heap = self._bounds()
        heapify(heap)
        while heap and self._is_pressed():
            if limit is not None and limit.is_reached(self.chosen, self.host):
                return False
            _, number = heappop(heap)
            found = self._migrate(number, in_time=in_time)
            if found is None:
                continue
            # A ratio only falls as others are chosen: those in the heap are bounds of the present ones.
            if not heap or found.ratio >= CLOSE_ENOUGH * -heap[0][0]:
                self._add_migration(number, found, in_time=in_time)
            else:
                heappush(heap, (-found.ratio, number))
        return True

    def _is_pressed(self) -> bool:
        if not self.pressure.item(self.pressed_at):
            self.pressed_at = int(self.pressure.argmax())
        return self.pressure.item(self.pressed_at) > 0

    def _bounds(self) -> list[tuple[float, int]]:
        """Returns a bound of the ratio (negative), and the number, of each candidate."""
        if not self.candidates:
            return []
        _, sizes, after, before = np.array(self.candidates).T
        tiers = [tier for tier in self.machine.tiers if tier == "ssd" or self.machine.host_bytes]
        if not tiers:
            costs = np.full(len(sizes), np.inf)
        else:
            costs = sizes * min(self.io.transfer_seconds(1.0, tier) for tier in tiers)
        # Seconds under pressure up to each operator, for two steps, because periods reach into the next one.
        under = np.cumsum(np.tile(np.where(self.pressure > 0, self.io.seconds, 0.0), 2))
        under = np.concatenate([[0.0], under])
        pressed = under[before] - under[after + 1]
        (numbers,) = np.nonzero(pressed > 0)
        ratios = -(sizes * pressed / costs)[numbers]
        return list(zip(ratios.tolist(), numbers.tolist(), strict=True))

    def _migrate(self, number: int, *, in_time: bool) -> _Rated | None:
        """Returns the migration of a candidate, or None if it would reduce no pressure."""
        _, nbytes, after, before = self.candidates[number]
        if (old := self.chosen.get(number)) is not None:
            assert old.tier is not None  # nothing is recomputed
            span = self.io.lay(after, before, nbytes, old.tier)[0] if in_time else self._pressed(after + 1, before)
            if span is None or (old.absent_from <= span[0] and span[1] <= old.absent_until):
                return None
            span = min(span[0], old.absent_from), max(span[1], old.absent_until)
            return self._rated(nbytes, span, old.tier)
        tier: OffloadTierName | None = "ssd" if self.machine.drives else None
        if not in_time:
            span = self._pressed(after + 1, before)
            if span is None:
                return None
            tier = "host" if self._fits_host(after + 1, before + 1, nbytes) else tier
            return None if tier is None else self._rated(nbytes, span, tier)
        span, factor = (None, inf) if tier is None else self.io.lay(after, before, nbytes, tier)
        if factor >= SATURATED and self._fits_host(after + 1, before + 1, nbytes):
            tier, span = "host", self.io.lay(after, before, nbytes, "host")[0]
        return None if tier is None or span is None else self._rated(nbytes, span, tier)

    def _rated(self, nbytes: int, span: tuple[int, int], tier: OffloadTierName) -> _Rated | None:
        start, stop = span
        benefit = 0.0
        for first, last in (span,) if stop <= self.count else wrapped(start, stop, self.count):
            reduced = np.minimum(self.pressure[first:last], nbytes, out=self.reduced[first:last])
            reduced *= self.io.seconds[first:last]
            benefit += float(np.add.reduce(reduced))  # `dot` would run on threads that spin on a busy machine
        if benefit <= 0:
            return None
        return _Rated(benefit / self.io.transfer_seconds(nbytes, tier), start, stop, tier)

    def _pressed(self, start: int, stop: int) -> tuple[int, int] | None:
        """Returns the shortest range that has all operators under pressure of a range."""
        parts = [self.pressure[first:last] for first, last in wrapped(start, stop, self.count)]
        (found,) = np.nonzero(np.concatenate([self.pressure[:0], *parts]))
        return (start + int(found[0]), start + int(found[-1]) + 1) if len(found) else None

    def _fits_host(self, start: int, stop: int, size: int) -> bool:
        most = self.machine.host_bytes - size
        if most < 0 or self.host.item(self.host_peak_at) <= most:
            return most >= 0
        peak = self.host_peak_at
        if start <= peak < stop or start <= peak + self.count < stop:
            return False
        return float(np.maximum.reduce(self.host[start:stop], initial=0.0)) <= most

    def _add_migration(self, number: int, found: _Rated, *, in_time: bool) -> None:
        """Chooses a migration: memory, I/O timeline and host memory follow."""
        tensor, nbytes, after, before = self.candidates[number]
        _, start, stop, tier = found
        old = self.chosen.get(number)
        self.chosen[number] = Migration(tensor, after, start, stop, before, tier)
        if old is not None:
            self._free(start, old.absent_from, nbytes)
            self._free(old.absent_until, stop, nbytes)
            return
        self._free(start, stop, nbytes)
        if tier == "host":
            for first, last in wrapped(after + 1, before + 1, self.count):
                self.host.reshape(2, -1)[:, first:last] += nbytes
            self.host_peak_at = int(self.host[: self.count].argmax())
        self.io.carry(after, before, nbytes, tier, in_time=in_time)

    def _free(self, start: int, stop: int, nbytes: int) -> None:
        """Frees bytes from `start` to before `stop`."""
        for first, last in wrapped(start, stop, self.count):
            self.beyond[first:last] -= nbytes
            np.maximum(0.0, self.beyond[first:last], out=self.pressure[first:last])

    def necessary(self) -> list[Migration]:
        """Returns the chosen migrations without those that memory does not need, the least beneficial ones first."""
        kept: list[Migration] = []
        for number, migration in reversed(self.chosen.items()):
            size = self.candidates[number].nbytes
            ranges = list(wrapped(migration.absent_from, migration.absent_until, self.count))
            if max(float(self.beyond[first:last].max()) for first, last in ranges) + size <= 0:
                for first, last in ranges:
                    self.beyond[first:last] += size
            else:
                kept.append(migration)
        return kept[::-1]
