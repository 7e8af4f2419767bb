"""Slow and simple versions of the planners' and the simulator's algorithms, whose results have to be the same."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from lightning_ssd.planning.evictions import IN_FLIGHT, EvictionPlanner, Period
from lightning_ssd.planning.io_timeline import ROUNDING
from lightning_ssd.planning.lifetimes import LifetimeProfile
from lightning_ssd.planning.migration import Direction, GPUStep, GPUSteps, MigrationMachine, MigrationPlan
from lightning_ssd.planning.migration_simulator import MigrationPrediction, simulate_migrations
from lightning_ssd.planning.teraio import LESS_IN_FLIGHT, MIN_GAIN, PRICES, SHARES, plan_teraio
from lightning_ssd.types import OffloadTierName


def slow_bytes(changes: list[tuple[int, int, int]], count: int) -> list[int]:
    """Adds (start, stop, bytes) operator by operator; operators as in `Migration`."""
    nbytes = [0] * count
    for start, stop, change in changes:
        for operator in range(start, stop):
            nbytes[operator % count] += change
    return nbytes


def slow_evictions(
    profile: LifetimeProfile, machine: MigrationMachine, step: GPUStep, recomputed: Sequence[Period], in_flight: float
) -> list[tuple[int, ...]]:
    """Returns the migrations of `EvictionPlanner.plan` without their tiers: examines all tensors at each operator."""
    count = len(profile.operators)
    ids = {tensor.id: index for index, tensor in enumerate(profile.tensors)}
    sizes = [tensor.nbytes for tensor in profile.tensors]
    dropped = [[one.tensor, one.after, one.after + 1, one.before, one.before] for one in recomputed]
    candidates = []
    for tensor, after, before, _ in profile.periods if machine.drives or machine.host_bytes else ():
        before += count if before <= after else 0
        if tensor in step.absent or [tensor, after] in [one[:2] for one in dropped]:
            continue
        for other, _, _, _, use in dropped:
            if tensor in [ids[source] for source in profile.tensors[other].sources]:
                uses = [one for one in (use, use + count) if after < one < before]
                before = min(uses, default=before)
        if after + 1 < before:
            candidates.append((tensor, after, before))

    def changed(nbytes: list[int], *absences: list[int], sign: int = -1) -> list[int]:
        changes = slow_bytes([(one[2], one[3], sign * sizes[one[0]]) for one in absences], count)
        return [one + change for one, change in zip(nbytes, changes, strict=True)]

    def necessary(nbytes: list[int], absences: list[list[int]], limit: int) -> tuple[list[int], list[list[int]]]:
        kept: list[list[int]] = []
        for one in absences[::-1]:
            present = changed(nbytes, one, sign=1)
            if any(present[index % count] > limit for index in range(one[2], one[3])):
                kept.insert(0, one)
            else:
                nbytes = present
        return nbytes, kept

    limit = int((1 - in_flight) * machine.gpu_bytes)
    nbytes = changed(step.nbytes.tolist(), *dropped)
    # Eviction: `orders` has the next use of each tensor that may be evicted, inf if it is absent when the step begins.
    host = [step.host_bytes] * count
    firsts = [(after + 1) % count for _, after, _ in candidates]
    lasts = [first + one[2] - one[1] - 1 for first, one in zip(firsts, candidates, strict=True)]
    orders: dict[int, float] = {number: last - count for number, last in enumerate(lasts) if last > count}
    starts: dict[int, int] = {}
    away: list[tuple[int, int]] = []  # operator before which it is back, bytes
    for operator in range(count):
        for number in range(len(candidates)):
            if firsts[number] == operator:
                orders[number] = inf if number in starts else lasts[number]
        while orders and sum(size for stop, size in away if stop > operator) < nbytes[operator] - limit:
            number = max(orders, key=lambda number: (orders[number], -number))
            tensor, after, before = candidates[number]
            order = orders.pop(number)
            if order <= operator:
                continue
            if number not in starts and not machine.drives:
                held = [one + other for one, other in zip(
                    host, slow_bytes([(after + 1, before, sizes[tensor])], count), strict=True
                )]  # fmt: skip
                if any(held[index % count] > machine.host_bytes for index in range(after + 1, before)):
                    continue
                host = held
            early = order < lasts[number]
            starts[number] = operator + count if early else operator
            away.append((lasts[number] - count if early else lasts[number], sizes[tensor]))
    evicted = []
    for number, start in starts.items():
        tensor, after, before = candidates[number]
        evicted.append([tensor, after, before - lasts[number] + start, before, before])
    nbytes = changed(nbytes, *evicted)
    nbytes, dropped = necessary(nbytes, dropped, limit)
    # Prefetches, backwards: `early` are those that have begun before the operator.
    early_ones: set[int] = set()
    ends = [(one[4] - 1) % count for one in evicted]
    for operator in range(count - 1, -1, -1):
        late = [n for n in early_ones if ends[n] - (evicted[n][4] - evicted[n][2]) == operator]
        early_ones.update(n for n, end in enumerate(ends) if end == operator)
        while True:
            begun = [n for n in early_ones if n not in late]
            if not begun or nbytes[operator] + sum(sizes[evicted[n][0]] for n in begun) <= machine.gpu_bytes:
                break
            late.append(max(begun, key=lambda n: (ends[n], -n)))
        for number in late:
            early_ones.remove(number)
            evicted[number][3] -= ends[number] - operator
    for number in early_ones:
        evicted[number][3] -= ends[number] + 1
    nbytes = changed(nbytes, *([one[0], one[1], one[3], one[4]] for one in evicted), sign=1)
    absent = [one for one in evicted if one[2] < one[3]] + dropped
    return [tuple(one) for one in necessary(nbytes, absent, machine.gpu_bytes)[1]]


class _SlowTransfers:
    """Unfinished transfers of one direction, on the link and on drives."""

    def __init__(self, machine: MigrationMachine, direction: Direction) -> None:
        self.rates = {"link": machine.link_out if direction == "out" else machine.link_in}
        self.rates["ssd"] = machine.ssd[direction == "out"]
        self.queue: list[_SlowTransfer] = []

    def add(self, tier: OffloadTierName, due: int, nbytes: int) -> None:
        for carrier in ("link", "ssd") if tier == "ssd" else ("link",):
            self.queue.append(_SlowTransfer(due, carrier, nbytes))
        self.queue.sort(key=lambda one: one.due)

    def seconds_until(self, due: int) -> float:
        return max(
            sum(one.left / rate for one in self.queue if one.carrier == carrier and one.due <= due)
            for carrier, rate in self.rates.items()
        )

    def advance(self, seconds: float) -> None:
        for carrier, rate in self.rates.items():
            room = rate * seconds
            for one in self.queue:
                if one.carrier == carrier:
                    carried = min(one.left, room)
                    one.left -= carried
                    room -= carried
        self.queue = [one for one in self.queue if one.left > 0]

    def finish(self, due: int) -> None:
        self.queue = [one for one in self.queue if one.due > due]


@dataclass
class _SlowTransfer:
    """A transfer that the operator `due` waits for, and bytes left for the link or for drives."""

    due: int
    carrier: str
    left: float


def slow_step_seconds(profile: LifetimeProfile, machine: MigrationMachine, plan: MigrationPlan) -> float:
    """Returns the seconds of `simulate_migrations` for a plan without CPU steps, with each operator as an event."""
    count = len(profile.operators)
    seconds = [one.end - one.start for one in profile.operators]
    out, into = _SlowTransfers(machine, "out"), _SlowTransfers(machine, "in")
    for one in plan.migrations:
        tensor = profile.tensors[one.tensor]
        if one.tier is None:
            seconds[one.before % count] += tensor.recompute_seconds or 0.0
            continue
        if one.absent_from > count:
            out.add(one.tier, one.absent_from - count, tensor.nbytes)
        if one.absent_until < count <= one.before:
            into.add(one.tier, one.before - count, tensor.nbytes)
    waited = 0.0
    for index in range(2 * count):
        waited = 0.0 if index == count else waited
        for one in plan.migrations:
            nbytes = profile.tensors[one.tensor].nbytes
            for transfers, begin, due in (
                (out, one.after + 1, one.absent_from), (into, one.absent_until, one.before)
            ):  # fmt: skip
                # The first step has only the transfers that an operator of it needs or that it has begun.
                if one.tier is not None and begin % count == index % count and (index or transfers is into):
                    transfers.add(one.tier, index + due - begin, nbytes)
        while wait := max(out.seconds_until(index), into.seconds_until(index)):
            for transfers in (out, into):
                transfers.advance(wait)
                transfers.finish(index)
            waited += wait
        for transfers in (out, into):
            transfers.advance(seconds[index % count])
    return sum(seconds) + waited


class SlowSearch:
    """The search of `plan_migrations`, which simulates each plan to its end, and Teraio's plan always."""

    def __init__(self, profile: LifetimeProfile, machine: MigrationMachine, min_bytes: int) -> None:
        self.profile, self.machine, self.min_bytes = profile, machine, min_bytes
        self.planner = EvictionPlanner(profile, machine, min_bytes)
        jobs = GPUSteps(profile, machine).without(frozenset(profile.by_unit)).jobs
        jobs.sort(key=lambda job: job.ready)
        self.units = [job.unit for job in jobs]
        self.cpu_seconds, free_at = [0.0], 0.0
        for job in jobs:
            arrived = profile.operators[job.ready].end + job.gradients / machine.link_out
            free_at = max(free_at, arrived) + job.parameters / machine.cpu_step_rate
            needed = profile.operators[job.before].start if job.before < len(profile.operators) else inf
            self.cpu_seconds.append(max(self.cpu_seconds[-1], free_at + job.weights / machine.link_in - needed))
        self.start(0)

    def start(self, units: int) -> None:
        self.choice: tuple[int, float | None, float, bool, float] = (units, None, 1.0, False, IN_FLIGHT)
        self.best = self.simulate(*self.choice)

    def simulate(
        self, units: int, price: float | None, share: float, prefers_host: bool, in_flight: float
    ) -> tuple[MigrationPlan, MigrationPrediction]:
        recomputed: list[Period] = []
        if price is not None:
            periods = self.planner.recomputed(price)
            left = share * sum(one.nbytes for one in periods)
            for one in periods:
                if left > 0:
                    recomputed.append(one)
                left -= one.nbytes
        step = GPUSteps(self.profile, self.machine).without(frozenset(self.units[:units]))
        plan = self.planner.plan(step, tuple(recomputed), in_flight, prefers_host=prefers_host)
        return plan, simulate_migrations(self.profile, self.machine, plan)

    def attempt(self, *choice: int | float | None) -> bool:
        units = choice[0]
        if not 0 <= units <= len(self.units):
            return False
        best = self.best[1]
        if not best.excess_bytes and self.cpu_seconds[units] > (1 - MIN_GAIN) * best.step_seconds:
            return False
        found = self.simulate(*choice)
        if found[1].score >= (best.excess_bytes, best.step_seconds * (1 - ROUNDING)):
            return False
        self.best, self.choice = found, choice
        return True

    def find(self) -> tuple[MigrationPlan, MigrationPrediction]:
        found = self.found()
        teraio = plan_teraio(self.profile, self.machine, self.min_bytes)
        found.append((teraio, simulate_migrations(self.profile, self.machine, teraio)))
        if self.machine.drives and self.machine.host_bytes:
            found += SlowSearch(self.profile, replace(self.machine, drives=()), self.min_bytes).found()
        return min(found, key=lambda one: one[1].score)

    def found(self) -> list[tuple[MigrationPlan, MigrationPrediction]]:
        found = []
        hidden = max(n for n, seconds in enumerate(self.cpu_seconds) if seconds <= self.profile.step_seconds)
        is_better = self.attempt(hidden, *self.choice[1:])
        self.improve(len(self.units) // (8 if is_better else 4))
        if not is_better and self.best[1].stalls:
            found.append(self.best)
            self.start(hidden)
            self.improve(0)
        return [*found, self.best]

    def improve(self, amount: int) -> None:
        for price in PRICES:
            units, chosen, *others = self.choice
            if not self.attempt(units, price, *others) and chosen is not None:
                break
        while amount:
            units, *others = self.choice
            # The second number is relative to the choice of the first.
            if not self.attempt(units + amount, *others) and not self.attempt(units - amount, *others):
                amount //= 2
        for share in SHARES:
            units, price, _, *others = self.choice
            if price is None or not self.attempt(units, price, share, *others):
                break
        units, price, share, _, in_flight = self.choice
        if self.machine.drives:
            self.attempt(units, price, share, True, in_flight)
        if self.attempt(*self.choice[:-1], LESS_IN_FLIGHT):
            units, *others = self.choice
            self.attempt(units - 1, *others)
        for share in SHARES if self.choice[1] is None else ():
            units, _, _, *others = self.choice
            self.attempt(units, PRICES[0], share, *others)
