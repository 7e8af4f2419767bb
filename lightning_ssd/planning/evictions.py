"""`EvictionPlanner`: evicts the tensors that are needed last, in one pass over a step.

If an operator needs more memory than there is, the tensor with the latest next use is evicted (Belady's rule): if all
tensors have the same size, no other choice transfers fewer bytes. A second pass, backwards in time, begins each
prefetch as early as memory allows; the tensor that is needed first has priority.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from lightning_ssd.planning.lifetimes import LifetimeProfile
from lightning_ssd.planning.migration import (
    ByteChanges,
    Bytes,
    GPUStep,
    Migration,
    MigrationMachine,
    MigrationPlan,
    Period,
    wrapped,
)
from lightning_ssd.types import OffloadTierName

IN_FLIGHT = 0.05
"""Share of the GPU's capacity for prefetches in flight: without it, operators would wait for each prefetch."""

PARTS = 256
"""Parts of a step; the bytes that drives transfer are summed in each."""


@dataclass(slots=True)
class _Absence:
    """A period in which the tensor is not in GPU memory.

    Attributes:
        period: the period.
        start: operator at whose begin its memory must be free.
        stop: operator from which on its memory is allocated.
        recomputed: whether the tensor is recomputed, and does not migrate.
    """

    period: Period
    start: int
    stop: int
    recomputed: bool = False


class EvictionPlanner:
    """Makes plans for one profile and machine.

    Args:
        profile: lifetimes of all tensors.
        machine: the machine.
        min_bytes: bytes of the smallest tensor that is migrated or recomputed.
    """

    def __init__(self, profile: LifetimeProfile, machine: MigrationMachine, min_bytes: int) -> None:
        self._profile = profile
        self._machine = machine
        self._min_bytes = min_bytes
        self._count = len(profile.operators)
        ids = {tensor.id: index for index, tensor in enumerate(profile.tensors)}
        self._sources = [tuple(ids[source] for source in tensor.sources) for tensor in profile.tensors]
        self._periods: list[Period] = []
        for one in profile.periods:
            nbytes = profile.tensors[one.tensor].nbytes
            before = one.before if one.before > one.after else one.before + self._count
            if nbytes >= min_bytes and one.after + 1 < before:
                last = before if one.after + 1 < self._count else before - self._count
                self._periods.append(Period(one.tensor, nbytes, one.after, before, one.seconds, last))
        self._begins: list[list[int]] = [[] for _ in profile.operators]
        """Numbers of the periods that begin with each operator."""
        for number, period in enumerate(self._periods):
            self._begins[(period.after + 1) % self._count].append(number)
        self._numbers: dict[int, list[int]] = defaultdict(list)
        """Numbers of the periods of each tensor."""
        for number, period in enumerate(self._periods):
            self._numbers[period.tensor].append(number)
        self._across = [number for number, period in enumerate(self._periods) if period.last > self._count]
        """Numbers of the periods in which a step begins."""
        self._available: dict[tuple[Period, ...], list[Period | None]] = {}
        """Results of `_unless_recomputed`, which many plans share."""
        self._segments = _segments(profile)
        self._recomputed: dict[float, tuple[Period, ...]] = {}
        """Results of `recomputed`, by price."""

    def recomputed(self, price: float) -> tuple[Period, ...]:
        """Returns the periods after which tensors are recomputed instead of migrated, the cheapest ones first.

        If one tensor is recomputed from another, only one of the two is recomputed: that which saves more time.

        Args:
            price: seconds of transfers that a second of recomputation has to save.
        """
        if price not in self._recomputed:
            self._recomputed[price] = self._find_recomputed(price)
        return self._recomputed[price]

    def _find_recomputed(self, price: float) -> tuple[Period, ...]:
        machine = self._machine
        rate = price * machine.rate("ssd" if machine.drives else "host", "in")
        ranked = []
        for period in self._periods:
            seconds = self._profile.tensors[period.tensor].recompute_seconds
            if seconds is None or seconds * rate >= period.nbytes:
                continue
            if self._profile.operators[period.before % self._count].phase != "forward":
                order = seconds / period.nbytes, -period.seconds
                ranked.append((seconds * rate - period.nbytes, order, period))
        recomputed: set[int] = set()
        needed: set[int] = set()
        chosen = []
        for _, order, period in sorted(ranked):
            sources = self._sources[period.tensor]
            if period.tensor not in needed and recomputed.isdisjoint(sources):
                recomputed.add(period.tensor)
                needed.update(sources)
                chosen.append((order, period))
        return tuple(period for _, period in sorted(chosen))

    def plan(
        self,
        step: GPUStep,
        recomputed: tuple[Period, ...] = (),
        in_flight: float = IN_FLIGHT,
        *,
        prefers_host: bool = False,
    ) -> MigrationPlan:
        """Returns a plan.

        Tensors are evicted until memory suffices, with a share left for prefetches in flight. Then prefetches begin as
        early as memory allows, absences that memory does not need end, and each migration gets its tier.

        Args:
            step: the step without the units that the CPU steps.
            recomputed: periods after which tensors may be recomputed.
            in_flight: share of the GPU's capacity for prefetches in flight.
            prefers_host: whether tensors migrate to drives only where host memory has no room for them.
        """
        memory = _Memory(step.nbytes)
        host = _HostMemory(step.host_bytes, self._machine.host_bytes)
        dropped = [_Absence(one, one.after + 1, one.before, recomputed=True) for one in recomputed]
        renewed = [
            _Absence(one, one.after + 1, one.before)
            for one in step.renewed
            if one.nbytes >= self._min_bytes and one.after + 1 < one.before
        ]
        memory.add([(one.start, one.stop, -one.period.nbytes) for one in renewed + dropped])
        capacity = self._machine.gpu_bytes
        limit = int((1 - in_flight) * capacity)
        evicted = self._evict(memory.beyond(limit), self._candidates(step, recomputed), host, step.with_masters)
        memory.add([(one.start, one.stop, -one.period.nbytes) for one in evicted])
        dropped = memory.necessary(dropped, limit)
        prefetched = renewed + evicted
        self._prefetch(memory.beyond(capacity), prefetched)
        memory.add([(one.stop, one.period.before, one.period.nbytes) for one in prefetched])
        absent = memory.necessary([one for one in prefetched if one.start < one.stop] + dropped, capacity)
        of_masters: list[_Absence] = []
        offloaded: list[_Absence] = []
        for one in absent:
            if not one.recomputed:
                (of_masters if one.period.tensor in step.with_masters else offloaded).append(one)
        tiers = iter(self._assign(offloaded, host, self._timeline(step, of_masters), prefers_host=prefers_host))
        migrations = []
        for one in absent:
            tensor, _, after, before, *_ = one.period
            if one.recomputed:
                tier = None
            elif tensor in step.with_masters:
                tier = step.tier_of_master(tensor, after, one.stop)
            else:
                tier = next(tiers)
            migrations.append(Migration(tensor, after, one.start, one.stop, before, tier))
        return MigrationPlan(tuple(migrations), step.cpu_units, step.staged_units)

    def _candidates(self, step: GPUStep, recomputed: tuple[Period, ...]) -> list[Period | None]:
        """Returns the periods of tensors that may be evicted, until they are needed to recompute others, by number."""
        if not self._machine.drives and not self._machine.host_bytes:
            return [None] * len(self._periods)
        if recomputed not in self._available:
            self._available[recomputed] = self._unless_recomputed(recomputed)
        found = self._available[recomputed].copy()
        for tensor in step.absent:
            for number in self._numbers.get(tensor, ()):
                found[number] = None
        for tensor, after in step.kept:
            for number in self._numbers.get(tensor, ()):
                if self._periods[number].after == after:
                    found[number] = None
        return found

    def _unless_recomputed(self, recomputed: Sequence[Period]) -> list[Period | None]:
        """Returns the periods that remain if others are recomputed, until the tensor is needed for that, by number."""
        needed: dict[int, list[int]] = defaultdict(list)
        for one in recomputed:
            for source in self._sources[one.tensor]:
                needed[source] += one.before, one.before + self._count
        found: list[Period | None] = list(self._periods)
        for one in recomputed:
            for number in self._numbers[one.tensor]:
                if self._periods[number].after == one.after:
                    found[number] = None
        for tensor, uses in needed.items():
            for number in self._numbers.get(tensor, ()):
                if (period := found[number]) is not None:
                    before = min((use for use in uses if period.after < use < period.before), default=period.before)
                    last = period.last - period.before + before
                    found[number] = period._replace(before=before, last=last) if period.after + 1 < before else None
        return found

    def _evict(
        self, pressure: Sequence[int], periods: Sequence[Period | None], host: "_HostMemory", with_masters: set[int]
    ) -> list[_Absence]:
        """Returns the evicted tensors, absent from the operator on that needs their memory until their next use.

        Args:
            pressure: bytes that have no room while each operator runs.
            periods: candidates.
            host: host memory, whose room limits evictions if there are no drives.
            with_masters: indices of the tensors that need no room there.
        """
        count = self._count
        width = max(1, len(periods))
        first = -3 * count * width
        """Key of tensors that are evicted before all others."""
        has_drives = bool(self._machine.drives)
        heap: list[int] = []  # candidates, each with its key: -(operator of the next use) * width + number
        for number in self._across:
            if (period := periods[number]) is not None and period.last > count:
                heap.append((count - period.last) * width + number)
        heapify(heap)
        starts: dict[int, int] = {}
        ends = [0] * (2 * count)
        absent = 0
        for operator, (beyond, begins) in enumerate(zip(pressure, self._begins, strict=True)):
            absent -= ends[operator]
            for number in begins:
                if (period := periods[number]) is not None:
                    # Tensors that are absent when the step begins are the first ones that are evicted before it ends.
                    heappush(heap, (first if number in starts else -period.last * width) + number)
            while absent < beyond and heap:
                order, number = divmod(heappop(heap), width)
                if -order <= operator:
                    continue
                period = periods[number]
                assert period is not None
                if not (has_drives or number in starts or period.tensor in with_masters or host.add(period)):
                    continue
                is_early = -order < period.last
                starts[number] = operator + count if is_early else operator
                ends[period.last - count if is_early else period.last] += period.nbytes
                absent += period.nbytes
        return [
            _Absence(period, period.before - period.last + start, period.before)
            for number, start in starts.items()
            if (period := periods[number]) is not None
        ]

    def _prefetch(self, beyond: Sequence[int], evicted: Sequence[_Absence]) -> None:
        """Begins each prefetch as early as possible.

        Args:
            beyond: bytes beyond the capacity while each operator runs (negative: room) without the evicted tensors.
            evicted: tensors that are absent until they are prefetched.
        """
        begins: dict[int, list[int]] = defaultdict(list)
        ends: dict[int, list[int]] = defaultdict(list)
        lasts = []
        for number, one in enumerate(evicted):
            last = (one.period.before - 1) % self._count
            lasts.append(last)
            begins[last].append(number)
            ends[last - (one.period.before - one.start)].append(number)
        width = max(1, len(evicted))
        heap: list[int] = []  # -(last operator without the tensor) * width + number
        early: set[int] = set()
        prefetched = 0
        none: list[int] = []
        for operator in range(self._count - 1, -1, -1):
            late = [number for number in ends[operator] if number in early] if operator in ends else none
            for number in begins[operator] if operator in begins else none:
                heappush(heap, -operator * width + number)
                early.add(number)
                prefetched += evicted[number].period.nbytes
            if not late and prefetched + beyond[operator] <= 0:
                continue
            # Without room for all prefetches that have begun, the ones that are needed last begin later.
            late = late.copy()
            for number in late:
                prefetched -= evicted[number].period.nbytes
            while heap and prefetched + beyond[operator] > 0:
                number = heappop(heap) % width
                if number in early and number not in late:
                    late.append(number)
                    prefetched -= evicted[number].period.nbytes
            for number in late:
                early.remove(number)
                evicted[number].stop -= lasts[number] - operator
        for number in early:
            evicted[number].stop -= lasts[number] + 1

    def _timeline(self, step: GPUStep, of_masters: Sequence[_Absence]) -> "_SSDTimeline":
        """Returns the bytes that drives can carry beside CPU steps with staged states.

        Args:
            step: the step without the units that the CPU steps.
            of_masters: weights that have masters, and are dropped.
        """
        timeline = _SSDTimeline(self._profile.step_seconds, self._segments, self._machine)
        for job in step.jobs:
            timeline.read(job.staged_from, job.ready + 1, job.staged)
            timeline.write(job.ready + 1, job.until, job.staged)
        for one in of_masters:
            tensor, nbytes, after, before, *_ = one.period
            if step.tier_of_master(tensor, after, one.stop) == "ssd":
                timeline.read(one.stop, before, nbytes)
        return timeline

    def _assign(
        self, migrated: Sequence[_Absence], host: "_HostMemory", timeline: "_SSDTimeline", *, prefers_host: bool
    ) -> list[OffloadTierName]:
        """Returns the tier of each migration: host memory, where there is room, if drives are too busy for it.

        Args:
            migrated: migrations of tensors that have no masters.
            host: host memory.
            timeline: bytes that drives can carry.
            prefers_host: whether drives count as too busy for each one.
        """
        machine = self._machine
        if not machine.drives:
            return ["host"] * len(migrated)
        tiers: list[OffloadTierName] = ["ssd"] * len(migrated)
        if machine.host_bytes:
            seconds = [one.period.seconds for one in migrated]
            for number in sorted(range(len(migrated)), key=seconds.__getitem__):
                one = migrated[number]
                if (prefers_host or not timeline.carry(one)) and host.add(one.period):
                    tiers[number] = "host"
        return tiers


def _segments(profile: LifetimeProfile) -> list[int]:
    """Returns the part of a step in which each operator begins, for two steps: periods reach into the next one."""
    seconds = profile.step_seconds / PARTS
    segments = [int(one.start / seconds) for one in profile.operators]
    return [*segments, *(PARTS + one for one in segments)]


class _SSDTimeline:
    """Bytes that drives can carry beside planned transfers, in equal parts of a step without waits.

    Args:
        step_seconds: seconds of the step.
        segments: the part in which each operator begins, for two steps.
        machine: the machine.
    """

    def __init__(self, step_seconds: float, segments: Sequence[int], machine: MigrationMachine) -> None:
        self._out, self._into = (
            [step_seconds / PARTS * machine.rate("ssd", direction)] * PARTS for direction in ("out", "in")
        )
        self._segments = segments

    def read(self, start: int, stop: int, nbytes: int) -> None:
        """Plans a read between two operators, as late as possible, as far as drives have room."""
        self._use(self._into, range(self._segments[stop], self._segments[start] - 1, -1), nbytes)

    def write(self, start: int, stop: int, nbytes: int) -> None:
        """Plans a write between two operators, as early as possible, as far as drives have room."""
        self._use(self._out, range(self._segments[start], self._segments[stop] + 1), nbytes)

    def _use(self, room: list[float], parts: range, nbytes: float) -> None:
        for part in parts:
            if not nbytes:
                return
            used = min(nbytes, room[part % PARTS])
            room[part % PARTS] -= used
            nbytes -= used

    def carry(self, one: _Absence) -> bool:
        """Plans offload and prefetch of a tensor, and returns True, if both have room."""
        nbytes = one.period.nbytes
        after, before = self._segments[one.period.after + 1], self._segments[one.period.before]
        first, last = after % PARTS, before % PARTS
        if self._out[first] >= nbytes and self._into[last] >= nbytes:  # most transfers need one part
            self._out[first] -= nbytes
            self._into[last] -= nbytes
            return True
        start, stop = self._segments[one.start], self._segments[one.stop]
        offload = self._fill(self._out, range(after, min(start + 1, after + PARTS)), nbytes)
        prefetch = self._fill(self._into, range(before, max(stop - 1, before - PARTS), -1), nbytes)
        if offload is None or prefetch is None:
            return False
        for room, parts, left in ((self._out, *offload), (self._into, *prefetch)):
            for part in parts[:-1]:
                room[part % PARTS] = 0.0
            room[parts[-1] % PARTS] = left
        return True

    def _fill(self, room: Sequence[float], parts: range, nbytes: int) -> tuple[range, float] | None:
        """Returns the first parts that have room for a transfer, and the room that the last one has left, if any do."""
        total = 0.0
        for number, part in enumerate(parts):
            total += room[part % PARTS]
            if total >= nbytes:
                return parts[: number + 1], total - nbytes
        return None


class _HostMemory:
    """Bytes in host memory while each operator of a step runs.

    Args:
        nbytes: bytes before the first tensor.
        limit: most bytes.
    """

    def __init__(self, nbytes: Bytes, limit: int) -> None:
        self._nbytes = nbytes.copy()
        self._limit = limit
        self._full_at = 0
        """An operator at which there was no room for the last tensor that did not fit."""

    def add(self, period: Period) -> bool:
        """Adds a tensor, and returns True, if there is room for it until the operator has ended that needs it."""
        most = self._limit - period.nbytes
        if most < 0:
            return False
        held = self._nbytes
        start, count = (period.after + 1) % len(held), period.before - period.after
        if (self._full_at - start) % len(held) < count and held.item(self._full_at) > most:
            return False
        ranges = list(wrapped(start, start + count, len(held)))
        for first, last in ranges:
            if np.maximum.reduce(held[first:last]) > most:
                self._full_at = first + int(held[first:last].argmax())
                return False
        for first, last in ranges:
            held[first:last] += period.nbytes
        return True


class _Memory:
    """Bytes in GPU memory while each operator of a step runs.

    Args:
        nbytes: bytes before the first change.
    """

    def __init__(self, nbytes: Bytes) -> None:
        self._nbytes = nbytes.copy()

    def beyond(self, limit: int) -> list[int]:
        """Returns the bytes beyond a limit (negative: below it) while each operator runs."""
        beyond: list[int] = (self._nbytes - limit).tolist()
        return beyond

    def add(self, changes: Sequence[tuple[int, int, int]]) -> None:
        """Adds bytes, each from a start to a stop; operators as in `Migration`."""
        if changes:
            total = ByteChanges(len(self._nbytes))
            total.add(*zip(*changes, strict=True))
            self._nbytes += total.sums()

    def necessary(self, absences: Sequence[_Absence], limit: int) -> list[_Absence]:
        """Returns the absences without which bytes exceed a limit, and ends the others, the last ones first."""
        kept = []
        count = len(self._nbytes)
        for one in reversed(absences):
            most = limit - one.period.nbytes
            # Most absences are necessary where they begin or end.
            if self._nbytes.item(one.start % count) > most or self._nbytes.item((one.stop - 1) % count) > most:
                kept.append(one)
                continue
            ranges = list(wrapped(one.start, one.stop, count))
            if any(self._nbytes[first:last].max() > most for first, last in ranges):
                kept.append(one)
                continue
            for first, last in ranges:
                self._nbytes[first:last] += one.period.nbytes
        return kept[::-1]
