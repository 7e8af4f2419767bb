"""`EvictionPlanner`: evicts the tensors that are needed last, in one pass over a step.

Where an operator needs more memory than there is, the tensor is evicted whose next use is the last one: no other choice
transfers fewer bytes, if all tensors have the same size (Belady's rule). A second pass, backwards in time, begins each
prefetch as early as memory allows, the one that is needed first before others.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_ssd.planning.io_timeline import Floats
from lightning_ssd.planning.lifetimes import LifetimeProfile
from lightning_ssd.planning.migration import (
    ByteChanges,
    Bytes,
    GPUStep,
    Migration,
    MigrationMachine,
    MigrationPlan,
    wrapped,
)
from lightning_ssd.types import OffloadTierName

IN_FLIGHT = 0.05
"""Share of the GPU's capacity that is left for prefetches that have begun: without it, operators wait for each one."""

PARTS = 256
"""Parts of a step, in each of which the transfers of drives are added up."""


class Period(NamedTuple):
    """An inactive period. Operators as in `Migration`.

    Attributes:
        tensor: index in the profile.
        nbytes: bytes.
        after: last operator that uses the tensor before the period.
        before: operator that needs it.
        seconds: duration of the period in a step without waits.
        last: `before`, counted from the step in which the operator after `after` is.
    """

    tensor: int
    nbytes: int
    after: int
    before: int
    seconds: float
    last: int


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

    def recomputed(self, price: float) -> tuple[Period, ...]:
        """Returns the periods after which tensors are recomputed instead of migrated, the cheapest ones first.

        No tensor is among them from which another one is recomputed; the one that saves more time is chosen.

        Args:
            price: seconds of transfers that a second of recomputation has to save.
        """
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
        recomputed: Sequence[Period] = (),
        in_flight: float = IN_FLIGHT,
        *,
        prefers_host: bool = False,
    ) -> MigrationPlan:
        """Returns a plan.

        Args:
            step: the step without the units that the CPU steps.
            recomputed: periods after which tensors may be recomputed.
            in_flight: share of the GPU's capacity that is left for prefetches that have begun.
            prefers_host: whether tensors migrate to drives only where host memory has no room for them.
        """
        memory = _Memory(step.nbytes)
        host = _HostMemory(step.host_bytes, self._machine.host_bytes, self._count)
        dropped = [_Absence(one, one.after + 1, one.before, recomputed=True) for one in recomputed]
        memory.add([(one.start, one.stop, -one.period.nbytes) for one in dropped])
        capacity = self._machine.gpu_bytes
        limit = int((1 - in_flight) * capacity)
        evicted = self._evict(memory.beyond(limit), self._candidates(step, recomputed), host)
        memory.add([(one.start, one.stop, -one.period.nbytes) for one in evicted])
        dropped = memory.necessary(dropped, limit)
        self._prefetch(memory.beyond(capacity), evicted)
        memory.add([(one.stop, one.period.before, one.period.nbytes) for one in evicted])
        absent = memory.necessary([one for one in evicted if one.start < one.stop] + dropped, capacity)
        tiers = self._assign([one for one in absent if not one.recomputed], host, prefers_host=prefers_host)
        migrations = (
            Migration(one.period.tensor, one.period.after, one.start, one.stop, one.period.before, tier)
            for one, tier in zip(absent, [*tiers, *[None] * (len(absent) - len(tiers))], strict=True)
        )
        return MigrationPlan(tuple(migrations), step.cpu_units)

    def _candidates(self, step: GPUStep, recomputed: Sequence[Period]) -> list[Period | None]:
        """Returns the periods of tensors that may be evicted, until they are needed to recompute others, by number."""
        if not self._machine.drives and not self._machine.host_bytes:
            return [None] * len(self._periods)
        needed: dict[int, list[int]] = defaultdict(list)
        for one in recomputed:
            for source in self._sources[one.tensor]:
                needed[source] += one.before, one.before + self._count
        found: list[Period | None] = list(self._periods)
        for tensor in step.absent:
            for number in self._numbers.get(tensor, ()):
                found[number] = None
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

    def _evict(self, pressure: Sequence[int], periods: Sequence[Period | None], host: "_HostMemory") -> list[_Absence]:
        """Returns the evicted tensors, absent from the operator on that needs their memory until their next use.

        Args:
            pressure: bytes that have no room while each operator runs.
            periods: candidates.
            host: host memory, whose room limits evictions if there are no drives.
        """
        count = self._count
        heap: list[tuple[float, int]] = []  # (-operator of the next use, candidate)
        for number in self._across:
            if (period := periods[number]) is not None and period.last > count:
                heap.append((count - period.last, number))
        heapify(heap)
        starts: dict[int, int] = {}
        ends = [0] * (2 * count)
        absent = 0
        for operator, beyond in enumerate(pressure):
            absent -= ends[operator]
            for number in self._begins[operator]:
                if (period := periods[number]) is not None:
                    # Tensors that are absent when the step begins are the first ones that are evicted before it ends.
                    heappush(heap, (-inf if number in starts else -period.last, number))
            while absent < beyond and heap:
                order, number = heappop(heap)
                if -order <= operator:
                    continue
                period = periods[number]
                assert period is not None
                if number not in starts and not self._machine.drives:
                    if not host.fits(period):
                        continue
                    host.add(period)
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
            evicted: evicted tensors.
        """
        begins: dict[int, list[int]] = defaultdict(list)
        ends: dict[int, list[int]] = defaultdict(list)
        lasts = []
        for number, one in enumerate(evicted):
            last = (one.period.before - 1) % self._count
            lasts.append(last)
            begins[last].append(number)
            ends[last - (one.period.before - one.start)].append(number)
        heap: list[tuple[int, int]] = []  # (-last operator without the tensor, number)
        early: set[int] = set()
        prefetched = 0
        for operator in range(self._count - 1, -1, -1):
            late = [number for number in ends[operator] if number in early] if operator in ends else []
            for number in begins[operator] if operator in begins else ():
                heappush(heap, (-operator, number))
                early.add(number)
                prefetched += evicted[number].period.nbytes
            if not late and prefetched + beyond[operator] <= 0:
                continue
            # Without room for all prefetches that have begun, the ones that are needed last begin later.
            for number in late:
                prefetched -= evicted[number].period.nbytes
            while heap and prefetched + beyond[operator] > 0:
                number = heappop(heap)[1]
                if number in early and number not in late:
                    late.append(number)
                    prefetched -= evicted[number].period.nbytes
            for number in late:
                early.remove(number)
                evicted[number].stop -= lasts[number] - operator
        for number in early:
            evicted[number].stop -= lasts[number] + 1

    def _assign(
        self, migrated: Sequence[_Absence], host: "_HostMemory", *, prefers_host: bool
    ) -> list[OffloadTierName]:
        """Returns the tier of each migration: host memory, where there is room, if drives are too busy for it.

        Args:
            migrated: migrations.
            host: host memory.
            prefers_host: whether drives count as too busy for each one.
        """
        machine = self._machine
        if not machine.drives:
            return ["host"] * len(migrated)
        tiers: list[OffloadTierName] = ["ssd"] * len(migrated)
        if machine.host_bytes:
            timeline = _SSDTimeline(self._profile, machine)
            for number in sorted(range(len(migrated)), key=lambda number: migrated[number].period.seconds):
                if (prefers_host or not timeline.carry(migrated[number])) and host.fits(migrated[number].period):
                    host.add(migrated[number].period)
                    tiers[number] = "host"
        return tiers


class _SSDTimeline:
    """Bytes that drives can carry beside planned transfers, in equal parts of a step without waits."""

    def __init__(self, profile: LifetimeProfile, machine: MigrationMachine) -> None:
        seconds = profile.step_seconds / PARTS
        self._out = np.full(PARTS, seconds * machine.rate("ssd", "out"))
        self._into = np.full(PARTS, seconds * machine.rate("ssd", "in"))
        segments = [int(one.start / seconds) for one in profile.operators]
        self._segments = [*segments, *(PARTS + one for one in segments)]
        """The part in which each operator begins, for two steps, because periods reach into the next one."""

    def carry(self, one: _Absence) -> bool:
        """Plans offload and prefetch of a tensor, and returns True, if both have room."""
        nbytes = one.period.nbytes
        after, start = self._segments[one.period.after + 1], self._segments[one.start]
        stop, before = self._segments[one.stop], self._segments[one.period.before]
        changes: list[tuple[Floats, int | NDArray[np.int64], float | Floats]] = []
        for room, first, last, way in ((self._out, after, start, 1), (self._into, before, stop, -1)):
            unused = room.item(first % PARTS) - nbytes
            if unused > 1:  # most transfers need one part; another byte is more than rounding
                changes.append((room, first % PARTS, unused))
                continue
            parts = np.arange(first, last + way, way)[:PARTS] % PARTS
            left = room[parts]
            total = left.cumsum()
            if total.item(-1) < nbytes:
                return False
            changes.append((room, parts, np.minimum(np.maximum(total - nbytes, 0), left)))
        for room, changed, rest in changes:
            room[changed] = rest
        return True


class _HostMemory:
    """Bytes in host memory while each operator of a step runs.

    Args:
        nbytes: bytes that are always there.
        limit: most bytes.
        count: operators.
    """

    def __init__(self, nbytes: int, limit: int, count: int) -> None:
        self._nbytes = np.full(count, nbytes)
        self._limit = limit

    def fits(self, period: Period) -> bool:
        """Returns whether there is room for a tensor in its whole period."""
        return period.nbytes <= self._limit and all(
            self._nbytes[first:last].max() + period.nbytes <= self._limit
            for first, last in wrapped(period.after + 1, period.before, len(self._nbytes))
        )

    def add(self, period: Period) -> None:
        """Adds a tensor."""
        for first, last in wrapped(period.after + 1, period.before, len(self._nbytes)):
            self._nbytes[first:last] += period.nbytes


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
            ranges = list(wrapped(one.start, one.stop, count))
            # Most absences are necessary where they begin or end.
            if (
                self._nbytes.item(one.start % count) > most
                or self._nbytes.item((one.stop - 1) % count) > most
                or any(self._nbytes[first:last].max() > most for first, last in ranges)
            ):
                kept.append(one)
            else:
                for first, last in ranges:
                    self._nbytes[first:last] += one.period.nbytes
        return kept[::-1]
