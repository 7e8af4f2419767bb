"""Simulates a step in which single tensors migrate: drives and link over time, and the operators that wait."""

from bisect import insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from lightning_ssd.planning import Bytes, Direction, Floats, Migration, MigrationMachine, sum_ranges
from lightning_ssd.replay.lifetime_profile import LifetimeProfile
from lightning_ssd.types import OffloadTierName

INTERVALS = 1000
"""Equal intervals of a step for which the prediction has the transferred bytes."""

STEPS = 2
"""Simulated steps: migrations that wrap round the step are in flight when the second begins."""


_Begun = tuple[OffloadTierName, int, int]
"""Tier, operator that waits (possibly one of the next step), and bytes of a transfer that begins in each step."""


@dataclass(frozen=True)
class MigrationPrediction:
    """The predicted step of a plan.

    Attributes:
        step_seconds: duration of a step in the steady state.
        stalls: (operator, seconds) of each wait of the GPU before an operator, for memory or for a tensor.
        gpu_bytes: bytes in GPU memory while each operator runs, with tensors that are in flight.
        excess_bytes: bytes by which the peaks exceed the capacities of the GPU and of host memory.
        host_peak_bytes: peak of host memory.
        ssd_written_bytes: bytes written to drives in a step.
        carried: bytes in each of `INTERVALS` equal intervals of the step, by direction: "copy out", "SSD write",
            "copy in" and "SSD read".
    """

    step_seconds: float
    stalls: tuple[tuple[int, float], ...]
    gpu_bytes: tuple[int, ...]
    excess_bytes: int
    host_peak_bytes: int
    ssd_written_bytes: int
    carried: Mapping[str, Sequence[float]] = field(repr=False)

    @property
    def stall_seconds(self) -> float:
        """Seconds in which the GPU waits."""
        return sum(seconds for _, seconds in self.stalls)

    @property
    def score(self) -> tuple[int, float]:
        """Order of plans, the smallest first: bytes that do not fit, then seconds."""
        return self.excess_bytes, self.step_seconds


def simulate_migrations(
    profile: LifetimeProfile, machine: MigrationMachine, migrations: Sequence[Migration]
) -> MigrationPrediction:
    """Returns the prediction for `migrations`.

    The GPU runs the operators in order. Before an operator it waits for offloads that make room for it, and then for
    tensors that the operator needs: prefetches into that room begin between the two. In each direction, the link
    carries one transfer at a time, and drives another one, those that an operator needs first. Both work on different
    pieces of a transfer at once, with staging memory in between: drives do not wait while the link carries other bytes.
    """
    count = len(profile.operators)
    out, into = _Transfers(machine, "out"), _Transfers(machine, "in")
    offloads, prefetches = defaultdict[int, list[_Begun]](list), defaultdict[int, list[_Begun]](list)
    for tensor, after, absent_from, absent_until, before, tier in migrations:
        nbytes = profile.tensors[tensor].nbytes
        step, operator = divmod(after + 1, count)
        offloads[operator].append((tier, absent_from - step * count, nbytes))
        step, operator = divmod(absent_until, count)
        prefetches[operator].append((tier, before - step * count, nbytes))
        # In the first step, the transfers run that the step before has begun and an operator of this one waits for.
        if after < count < absent_from:
            out.add(0.0, tier, absent_from - count, nbytes)
        if absent_until < count <= before:
            into.add(0.0, tier, before - count, nbytes)
    now = begin = 0.0
    stalls: list[tuple[int, float]] = []
    for first in range(0, STEPS * count, count):
        begin, stalls = now, []
        for operator, seconds in enumerate(profile.operator_seconds):
            index = first + operator
            for tier, due, nbytes in offloads[operator] if index else ():
                out.add(now, tier, first + due, nbytes)
            waited = out.wait(index, now)
            for tier, due, nbytes in prefetches[operator]:
                into.add(now + waited, tier, first + due, nbytes)
            waited += into.wait(index, now + waited)
            if waited:
                stalls.append((operator, waited))
            now += waited + seconds
    gpu = np.array(profile.total, np.int64) - _absent_bytes(profile, migrations)
    host = _host_bytes(profile, migrations)
    excess = max(0, int(gpu.max()) - machine.gpu_bytes) + max(0, int(host.max()) - machine.host_bytes)
    times = np.linspace(begin, now, INTERVALS + 1)
    carriers = {"copy out": out.link, "SSD write": out.ssd, "copy in": into.link, "SSD read": into.ssd}
    return MigrationPrediction(
        profile.step_seconds + sum(seconds for _, seconds in stalls),
        tuple(stalls),
        tuple(gpu.tolist()),
        excess,
        int(host.max()),
        sum(profile.tensors[one.tensor].nbytes for one in migrations if one.tier == "ssd"),
        {direction: carrier.carried(times).tolist() for direction, carrier in carriers.items()},
    )


def _absent_bytes(profile: LifetimeProfile, migrations: Sequence[Migration]) -> Bytes:
    """Returns the bytes that are not in GPU memory while each operator runs."""
    sizes = [profile.tensors[one.tensor].nbytes for one in migrations]
    starts, stops = [one.absent_from for one in migrations], [one.absent_until for one in migrations]
    return sum_ranges(starts, stops, sizes, len(profile.operators))


def _host_bytes(profile: LifetimeProfile, migrations: Sequence[Migration]) -> Bytes:
    """Returns the bytes in host memory while each operator waits and runs."""
    held = [one for one in migrations if one.tier == "host"]
    sizes = [profile.tensors[one.tensor].nbytes for one in held]
    starts, stops = [one.after + 1 for one in held], [one.before + 1 for one in held]
    return sum_ranges(starts, stops, sizes, len(profile.operators))


class _Carrier:
    """The link, or drives, in one direction. It carries one transfer at a time: the most urgent one.

    Time passes only where the queue is looked at or changes: most operators change none.

    Args:
        rate: bytes/s.

    Attributes:
        queue: [operator that needs it, number, bytes left] of each transfer, in this order.
        busy: begin and end of each time in which there are transfers, in turn.
    """

    __slots__ = ("_now", "_rate", "busy", "queue")

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._now = 0.0
        """Time up to which transfers are carried."""
        self.queue: list[list[float]] = []
        self.busy: list[float] = []

    def add(self, now: float, due: int, number: int, nbytes: float) -> None:
        """Queues a transfer at the time `now`."""
        if self.queue and now > self._now:
            self.advance(now)
        if not self.queue:
            self._now = now
            self.busy.append(now)
        insort(self.queue, [due, number, nbytes])

    def advance(self, now: float) -> None:
        """Carries transfers until the time `now`."""
        queue = self.queue
        if not queue:
            return
        room = self._rate * (now - self._now)
        self._now = now
        if queue[0][2] > room:  # most transfers take longer
            queue[0][2] -= room
            return
        num_ended = 0
        for entry in queue:
            if entry[2] > room:
                entry[2] -= room
                break
            room -= entry[2]
            num_ended += 1
        self._end(num_ended, now - room / self._rate)

    def finish(self, due: int, now: float) -> None:
        """Ends the transfers that operators up to `due` wait for: rounding may have left a part of a byte."""
        self.advance(now)
        num_ended = 0
        for entry in self.queue:
            if entry[0] > due:
                break
            num_ended += 1
        self._end(num_ended, now)

    def _end(self, num_ended: int, now: float) -> None:
        """Ends the first transfers."""
        if num_ended:
            del self.queue[:num_ended]
            if not self.queue:
                self.busy.append(now)

    def seconds_until(self, due: int, now: float) -> float:
        """Returns the time from `now` until all transfers have ended that operators up to `due` wait for."""
        self.advance(now)
        needed = 0.0
        for when, _, nbytes in self.queue:
            if when > due:
                break
            needed += nbytes
        return needed / self._rate if needed else 0.0

    def carried(self, times: Floats) -> Floats:
        """Returns the bytes that are carried between any two successive times, up to the last of which it advances."""
        end = times.item(-1)
        self.advance(end)
        busy = np.array([-inf, -inf, *self.busy, *([end] if self.queue else [])])
        begins, ends = busy[::2], busy[1::2]
        # Seconds of the busy times that have begun, without the rest of the last one.
        begun = np.searchsorted(begins, times, "right") - 1
        worked = np.cumsum(np.append(0.0, ends[1:] - begins[1:]))[begun] - np.maximum(0.0, ends[begun] - times)
        carried: Floats = self._rate * np.minimum(np.diff(worked), np.diff(times))
        return carried


class _Transfers:
    """The transfers of one direction.

    The link carries the bytes of all transfers, and drives those of their own: a transfer ends when both have carried
    it. Each of the two carries the most urgent transfer first, so that faster drives delay none on the link.
    """

    def __init__(self, machine: MigrationMachine, direction: Direction) -> None:
        self.link = _Carrier(machine.link_out if direction == "out" else machine.link_in)
        self.ssd = _Carrier(machine.ssd[direction == "out"])
        self._count = 0

    def add(self, now: float, tier: OffloadTierName, due: int, nbytes: float) -> None:
        """Queues a transfer that the operator `due` waits for."""
        self._count += 1
        self.link.add(now, due, self._count, nbytes)
        if tier == "ssd":
            self.ssd.add(now, due, self._count, nbytes)

    def wait(self, due: int, now: float) -> float:
        """Ends the transfers that operators up to `due` wait for. Returns the time from `now` until they have ended."""
        carriers = [one for one in (self.link, self.ssd) if one.queue and one.queue[0][0] <= due]
        longest = max((one.seconds_until(due, now) for one in carriers), default=0.0)
        for one in carriers:
            one.finish(due, now + longest)
        return longest
