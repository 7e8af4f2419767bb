"""Teraio's Algorithm 1: which tensors migrate in which inactive periods.

The benefit of a migration is the reduction of memory pressure (bytes beyond the GPU's capacity), integrated over time;
its cost is the time of its offload and prefetch. The candidate of the best ratio is chosen, its transfers are placed on
the I/O timeline, and the search repeats until memory fits. If the I/O timeline has no room for more transfers, the GPU
has to wait: the step is lengthened, and the search continues. Earlier choices remain, so that as many transfers as
possible fit into the original step.
"""

from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_ssd.planning.io_timeline import ROUNDING, Floats, IOTimeline
from lightning_ssd.planning.migration import Migration, MigrationMachine, StepMemory, wrapped
from lightning_ssd.types import OffloadTierName

SATURATED = 2.0
"""Drives are saturated for a migration if earlier ones make its transfers take longer by this factor."""

CLOSE_ENOUGH = 0.75
"""Share of the best possible ratio at which a candidate is chosen: to find the very best takes many times longer."""

LENGTHENING, MAX_LENGTHENING = 2.0, 256.0
"""Factor by which the step is lengthened each time that transfers have no room, and the largest factor in all."""

STUCK = 0.9
"""If more than this share of the pressure remains after the step was lengthened, operators wait for transfers."""


def plan_in_longer_step(step: StepMemory, machine: MigrationMachine) -> list[Migration]:
    """Returns the migrations of Teraio's algorithm: transfers without room are planned for a longer step.

    Tensors migrate to drives, and to host memory if drives are saturated. Operators wait for the transfers that the
    longer step has room for and the original one has not. Migrations that later ones have made unnecessary are removed.
    """
    return _Search(step, machine).find()


def plan_in_time(step: StepMemory, machine: MigrationMachine) -> list[Migration]:
    """Returns the migrations of one search: those without room in a step are chosen by their benefit alone."""
    search = _Search(step, machine)
    search.choose(in_time=True)
    search.choose(in_time=False)
    return search.necessary()


class _Rated(NamedTuple):
    """A migration of a candidate from `start` to `stop`, with the ratio of its benefit to its cost."""

    ratio: float
    start: int
    stop: int
    tier: OffloadTierName


class _Search:
    """The search, over the operators of one step that repeats."""

    def __init__(self, step: StepMemory, machine: MigrationMachine) -> None:
        self.machine = machine
        self.count = len(step.seconds)
        # Views take no time, and memory has to fit while they run, too: the bytes beyond it count a little.
        least = ROUNDING * sum(step.seconds) / self.count
        seconds = [max(least, one) for one in step.seconds]
        self.beyond = step.nbytes.astype(np.float64) - machine.gpu_bytes
        """Bytes beyond the GPU's capacity while each operator runs (negative: room)."""
        self.pressure: Floats = np.maximum(0.0, self.beyond)
        self.reduced: Floats = np.empty(self.count)
        """Memory for results: to allocate it for each candidate takes longer than to compute them."""
        self.pressed_at = int(self.pressure.argmax())
        """An operator under pressure, if there is any."""
        self.pressed: NDArray[np.int64] | None = None
        """All operators under pressure, of two steps; `None`: the pressure has changed since they were found."""
        self.host: Floats = np.zeros(2 * self.count)
        """Bytes in host memory, for two steps."""
        self.host_peak_at = 0
        """The operator during which host memory has the most bytes."""
        self.io = IOTimeline(machine, seconds)
        self.most_out = machine.rate("host" if machine.host_bytes else "ssd", "out") * float(np.sum(seconds))
        """Bytes that can be offloaded in a step of the original length."""
        self.candidates = step.candidates
        self.chosen: dict[int, Migration] = {}
        """The migrations of candidates, by their numbers, in the order of choice."""

    def find(self) -> list[Migration]:
        """Returns the migrations of `plan_in_longer_step`."""
        # All bytes beyond the capacity have to leave in a step.
        least = float(self.pressure.max()) / self.most_out if self.most_out else MAX_LENGTHENING
        factor, before = min(MAX_LENGTHENING, max(1.0, least)), inf
        self.io.lengthen(factor)
        while True:
            self.choose(in_time=True)
            left = float(self.pressure.sum())
            if left >= STUCK * before or (left and factor >= MAX_LENGTHENING):
                # Operators right before or after the use of a tensor need its memory, however long the step is.
                self.choose(in_time=False)
                left = 0.0
            if not left:
                return self.necessary()
            before = left
            factor *= LENGTHENING
            self.io.lengthen(LENGTHENING)

    def choose(self, *, in_time: bool) -> None:
        """Chooses candidates of the best ratio until memory fits, or no candidate reduces the pressure.

        Tensors that migrate already may be absent for longer. If not `in_time`, operators may wait for transfers.
        """
        heap = self._bounds()
        heapify(heap)
        while heap and self._is_pressed():
            _, number = heappop(heap)
            found = self._migrate(number, in_time=in_time)
            if found is None:
                continue
            # A ratio only falls as others are chosen: those in the heap are bounds of the present ones.
            if not heap or found.ratio >= CLOSE_ENOUGH * -heap[0][0]:
                self._add_migration(number, found, in_time=in_time)
            else:
                heappush(heap, (-found.ratio, number))

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
            span = self.io.lay(after, before, nbytes, old.tier)[0] if in_time else self._pressed(after + 1, before)
            if span is None or (old.absent_from <= span[0] and span[1] <= old.absent_until):
                return None
            span = min(span[0], old.absent_from), max(span[1], old.absent_until)
            return self._rated(nbytes, span, old.tier)
        tier: OffloadTierName | None = "ssd" if "ssd" in self.machine.tiers else None
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
        """Returns the range from the first to the last operator under pressure of a range, or None."""
        if self.pressed is None:
            (self.pressed,) = np.nonzero(np.tile(self.pressure, 2))
        first, end = self.pressed.searchsorted((start, stop)).tolist()
        return (self.pressed.item(first), self.pressed.item(end - 1) + 1) if first < end else None

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
        self.pressed = None

    def necessary(self) -> list[Migration]:
        """Removes the migrations that memory does not need, the last ones first, and returns the others."""
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
