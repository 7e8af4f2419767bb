"""Simulates a step in which single tensors migrate: drives, link and CPU over time, and the operators that wait."""

import sys
from bisect import insort
from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from lightning_ssd.planning.lifetimes import LifetimeProfile
from lightning_ssd.planning.migration import (
    ByteChanges,
    Bytes,
    CPUStep,
    Direction,
    GPUStep,
    GPUSteps,
    Migration,
    MigrationMachine,
    MigrationPlan,
)
from lightning_ssd.sizes import format_bytes, format_seconds
from lightning_ssd.types import OffloadTierName

RESOLUTION = 1000
"""Least number of parts of a step in each of which the transfers and the CPU's work are followed."""

STEPS = 2
"""Simulated steps: migrations that wrap round the step are in flight when the second begins."""


class Carried(NamedTuple):
    """Bytes that are transferred in one direction.

    Attributes:
        link: bytes that the link carries, of host memory and drives together.
        ssd: bytes that drives read or write.
    """

    link: float
    ssd: float


class IntervalTraffic(NamedTuple):
    """A time in which the set of running work does not change: operators between two events, or a stall before one.

    Attributes:
        start: begin in the step, seconds.
        seconds: duration.
        out: bytes from the GPU.
        into: bytes to the GPU.
    """

    start: float
    seconds: float
    out: Carried
    into: Carried


@dataclass(frozen=True)
class MigrationPrediction:
    """The predicted step of a plan.

    Attributes:
        step_seconds: duration of a step in the steady state.
        stalls: (operator, seconds) of each wait of the GPU before an operator, for memory or for a tensor.
        recompute_seconds: GPU seconds of recomputation.
        gpu_bytes: bytes in GPU memory while each operator runs, with tensors that are in flight.
        excess_bytes: bytes by which the peak exceeds the GPU's capacity.
        host_peak_bytes: peak of host memory.
        ssd_written_bytes: bytes written to drives in a step.
        traffic: bytes that link and drives carry over the step.
    """

    step_seconds: float
    stalls: tuple[tuple[int, float], ...]
    recompute_seconds: float
    gpu_bytes: tuple[int, ...]
    excess_bytes: int
    host_peak_bytes: int
    ssd_written_bytes: int
    traffic: tuple[IntervalTraffic, ...] = field(repr=False)

    @property
    def stall_seconds(self) -> float:
        """Seconds in which the GPU waits."""
        return sum(seconds for _, seconds in self.stalls)

    @property
    def score(self) -> tuple[int, float]:
        """Order of plans, the smallest first: bytes that do not fit, then seconds."""
        return self.excess_bytes, self.step_seconds

    def describe(self) -> str:
        """Returns a summary of two lines."""
        over = f", {format_bytes(self.excess_bytes)} more than there is" if self.excess_bytes else ""
        return (
            f"step {format_seconds(self.step_seconds)}, of which the GPU waits {format_seconds(self.stall_seconds)} "
            f"before {len(self.stalls)} operators and recomputes {format_seconds(self.recompute_seconds)}\n"
            f"peak GPU {format_bytes(max(self.gpu_bytes))}{over}, host {format_bytes(self.host_peak_bytes)}; "
            f"{format_bytes(self.ssd_written_bytes)} written to drives"
        )


def simulate_migrations(
    profile: LifetimeProfile, machine: MigrationMachine, plan: MigrationPlan
) -> MigrationPrediction:
    """Returns the prediction for `plan`.

    The GPU runs the operators in order. Before an operator it waits for tensors that the operator needs, and for
    offloads that make room for it. In each direction, the link carries one transfer at a time, and drives another one,
    those that an operator needs first. Both work on different pieces of a transfer at once, with staging memory in
    between: drives do not wait while the link carries other bytes.
    """
    step = GPUSteps(profile, machine).without(plan.cpu_units)
    found = _Simulation(profile, machine, plan, step).run()
    assert found is not None
    return found


def simulate_better(
    profile: LifetimeProfile,
    machine: MigrationMachine,
    plan: MigrationPlan,
    step: GPUStep,
    best: MigrationPrediction,
) -> MigrationPrediction | None:
    """Returns the prediction of `simulate_migrations`, or None as soon as it has no better score than `best`.

    Args:
        profile: lifetimes of all tensors.
        machine: the machine.
        plan: the plan.
        step: the step without the units that the CPU steps.
        best: prediction of another plan.
    """
    return _Simulation(profile, machine, plan, step).run(best.score)


class _Transfers:
    """The transfers of one direction.

    The link carries the bytes of all transfers, and drives those of their own: a transfer ends when both have carried
    it. Each of the two carries first what an operator needs first, so that urgent transfers overtake others, and faster
    drives delay none on the link.

    Args:
        machine: the machine.
        direction: from the GPU, or to it.

    Attributes:
        first_due: the first operator that waits for a transfer.
    """

    def __init__(self, machine: MigrationMachine, direction: Direction) -> None:
        self._link: list[list[float]] = []
        """[operator that needs it, number, bytes left] of each transfer that the link has to carry, in this order."""
        self._ssd: list[list[float]] = []
        """The same for drives."""
        self._link_rate = machine.link_out if direction == "out" else machine.link_in
        self._ssd_rate = machine.ssd[direction == "out"]
        self._queues = ((self._link_rate, self._link), (self._ssd_rate, self._ssd))
        """Bytes/s and transfers of the link and of drives."""
        self._count = 0
        self.first_due: float = inf

    def add(self, tier: OffloadTierName, due: int, nbytes: float) -> int:
        """Queues a transfer that the operator `due` waits for. Returns its number."""
        self._count += 1
        insort(self._link, [due, self._count, nbytes])
        if tier == "ssd":
            insort(self._ssd, [due, self._count, nbytes])
        if due < self.first_due:
            self.first_due = due
        return self._count

    def is_on_link(self, number: int) -> bool:
        """Returns whether the link has not carried all of a transfer."""
        return any(entry[1] == number for entry in self._link)

    def seconds_until(self, due: int) -> float:
        """Returns the time until all transfers have ended that operators up to `due` wait for."""
        longest = 0.0
        if due < self.first_due:
            return longest
        for rate, queue in self._queues:
            needed = 0.0
            for when, _, nbytes in queue:
                if when > due:
                    break
                needed += nbytes
            if needed:
                longest = max(longest, needed / rate)
        return longest

    def advance(self, seconds: float) -> tuple[float, float]:
        """Transfers for `seconds`. Returns the fields of `Carried`."""
        link = ssd = 0.0
        # Most transfers take longer than an interval.
        if queue := self._link:
            link = self._link_rate * seconds
            if queue[0][2] > link:
                queue[0][2] -= link
            else:
                link -= self._end_transfers(queue, link)
        if queue := self._ssd:
            ssd = self._ssd_rate * seconds
            if queue[0][2] > ssd:
                queue[0][2] -= ssd
            else:
                ssd -= self._end_transfers(queue, ssd)
        return link, ssd

    def _end_transfers(self, queue: list[list[float]], room: float) -> float:
        """Carries the first transfers of a queue, of which at least one ends. Returns the bytes of unused room."""
        num_ended = 0
        for entry in queue:
            if entry[2] > room:
                entry[2] -= room
                room = 0.0
                break
            room -= entry[2]
            num_ended += 1
        del queue[:num_ended]
        self._find_first_due()
        return room

    def finish(self, due: int) -> None:
        """Ends the transfers that operators up to `due` wait for: rounding may have left a part of a byte."""
        for _, queue in self._queues:
            while queue and queue[0][0] <= due:
                del queue[0]
        self._find_first_due()

    def _find_first_due(self) -> None:
        self.first_due = min((queue[0][0] for _, queue in self._queues if queue), default=inf)


_Begun = tuple[OffloadTierName, int, int]
"""Tier, operator that waits (possibly one of the next step), and bytes of a transfer that begins in each step."""


class _Simulation:
    """Two steps, of which the second one is that of the steady state.

    Args:
        profile: lifetimes of all tensors.
        machine: the machine.
        plan: the plan.
        step: the step without the units that the CPU steps.
    """

    def __init__(self, profile: LifetimeProfile, machine: MigrationMachine, plan: MigrationPlan, step: GPUStep) -> None:
        self.profile = profile
        self.machine = machine
        self.plan = plan
        self.count = len(profile.operators)
        self.step = step
        self.seconds = step.seconds.copy()
        self.out, self.into = _Transfers(machine, "out"), _Transfers(machine, "in")
        self.now = self.begun = 0.0
        """Time, and begin of the simulated step, since the begin of the first one."""
        self.is_steady = False
        """Whether the last step is simulated."""
        self.traffic: list[IntervalTraffic] = []
        """Transfers of the last step."""
        self.prefetches: dict[int, list[_Begun]] = defaultdict(list)
        """Prefetches that begin with an operator of each step."""
        self.offloads: dict[int, list[_Begun]] = defaultdict(list)
        """Offloads that begin when the operator before has ended."""
        self.jobs = deque(
            sorted(
                ((cycle * self.count + job.ready, job) for cycle in range(STEPS) for job in step.jobs),
                key=lambda item: item[0],
            )
        )
        """CPU steps, with the last operator of backward that uses their gradients."""
        self.waiting: list[tuple[int, CPUStep, int]] = []
        """CPU steps whose gradients are offloaded: number of the transfer, job, operator that needs the weights."""
        self.computed: list[tuple[float, int, int]] = []
        """New weights: when the CPU has made them, operator that needs them, bytes."""
        self.cpu_free_at = 0.0
        self.recomputed = 0.0
        for migration in plan.migrations:
            self._add(migration)

    def _add(self, migration: Migration) -> None:
        tensor = self.profile.tensors[migration.tensor]
        if migration.tier is None:
            recompute_seconds = tensor.recompute_seconds or 0.0
            self.seconds[migration.before % self.count] += recompute_seconds
            self.recomputed += recompute_seconds
            return
        count, tier, nbytes = self.count, migration.tier, tensor.nbytes
        step, operator = divmod(migration.after + 1, count)
        self.offloads[operator].append((tier, migration.absent_from - step * count, nbytes))
        step, operator = divmod(migration.absent_until, count)
        self.prefetches[operator].append((tier, migration.before - step * count, nbytes))
        # In the first step, the transfers run that the step before has begun and an operator of this one waits for.
        if migration.after < count < migration.absent_from:
            self.out.add(tier, migration.absent_from - count, nbytes)
        if migration.absent_until < count <= migration.before:
            self.into.add(tier, migration.before - count, nbytes)

    def run(self, best: tuple[int, float] = (sys.maxsize, inf)) -> MigrationPrediction | None:
        """Returns the prediction, or None as soon as its score can't be better than `best`."""
        gpu_bytes, host_peak, written = self._memory()
        excess = max(0, int(gpu_bytes.max()) - self.machine.gpu_bytes)
        times = list(accumulate(self.seconds, initial=0.0))
        if (excess, times[-1]) >= best:
            return None
        out, into = self.out, self.into
        intervals = self._intervals(times)
        for cycle in range(STEPS):
            base = cycle * self.count
            stalls: list[tuple[int, float]] = []
            waited = 0.0
            self.begun = self.now
            self.is_steady = cycle == STEPS - 1
            for operator, seconds, offloads, prefetches in intervals:
                index = base + operator
                for tier, due, nbytes in offloads if index else ():
                    out.add(tier, base + due, nbytes)
                while self.jobs and self.jobs[0][0] < index:
                    self._offload_gradients(*self.jobs.popleft())
                for tier, due, nbytes in prefetches:
                    into.add(tier, base + due, nbytes)
                if self.waiting:
                    self._start_jobs()
                if self.computed:
                    self._return_weights()
                if index >= out.first_due or index >= into.first_due or self._late_weights(index):
                    wait = self._wait(index)
                    if wait > 0:
                        stalls.append((operator, wait))
                        waited += wait
                        if self.is_steady and (excess, times[-1] + waited) >= best:
                            return None
                self._advance(seconds)
        return MigrationPrediction(
            times[-1] + waited,
            tuple(stalls),
            self.recomputed,
            tuple(gpu_bytes.tolist()),
            excess,
            host_peak,
            written,
            tuple(self.traffic),
        )

    def _memory(self) -> tuple[Bytes, int, int]:
        """Returns the bytes in GPU memory while each operator runs, the peak of host memory, and the bytes written."""
        migrations = self.plan.migrations
        sizes = [self.profile.tensors[one.tensor].nbytes for one in migrations]
        gpu, host = ByteChanges(self.count), ByteChanges(self.count)
        gpu.add([one.absent_from for one in migrations], [one.absent_until for one in migrations], sizes)
        in_host = [
            (one.after + 1, one.before, size) for one, size in zip(migrations, sizes, strict=True) if one.tier == "host"
        ]
        if in_host:
            host.add(*zip(*in_host, strict=True))
        written = sum(size for one, size in zip(migrations, sizes, strict=True) if one.tier == "ssd")
        return self.step.nbytes - gpu.sums(), self.step.host_bytes + int(host.sums().max()), written

    def _intervals(self, times: list[float]) -> list[tuple[int, float, list[_Begun], list[_Begun]]]:
        """Returns the first operator of each part of a step, the part's seconds, and the transfers that begin with it.

        Parts begin with operators at whose begin a transfer may begin or be due, and some between them.

        Args:
            times: begin of each operator, and the end of the step, if the GPU never waits.
        """
        migrations = self.plan.migrations
        events = [part * self.count // RESOLUTION for part in range(RESOLUTION)]
        events += self.offloads
        events += self.prefetches
        events += [one.absent_from for one in migrations]
        events += [one.before for one in migrations]
        for job in self.step.jobs:
            events += job.ready + 1, job.absent_from, job.before
        inside: list[int] = np.unique(np.array(events) % self.count).tolist()
        return [
            (one, times[following] - times[one], self.offloads.get(one, []), self.prefetches.get(one, []))
            for one, following in pairwise([*inside, self.count])
        ]

    def _offload_gradients(self, ready: int, job: CPUStep) -> None:
        """Begins the offload of the gradients of a CPU step, which the operator `ready` has used last."""
        base = ready - job.ready
        number = self.out.add("host", base + job.absent_from, job.gradients)
        self.waiting.append((number, job, base + self.count + job.before))

    def _late_weights(self, index: int) -> list[float]:
        """Returns when the CPU has computed the weights that operator `index` lacks."""
        return [ready for ready, due, _ in self.computed if due <= index]

    def _wait(self, index: int) -> float:
        """Lets operator `index` wait for transfers and the CPU. Returns the seconds."""
        wait = 0.0
        while True:
            seconds = max(self.out.seconds_until(index), self.into.seconds_until(index))
            late = self._late_weights(index)
            if seconds:
                self._advance(seconds)
                self.out.finish(index)
                self.into.finish(index)
            elif late:
                seconds = max(0.0, late[0] - self.now)
                self._advance(seconds)
                self.now = max(self.now, late[0])
            else:
                break
            wait += seconds
            self._start_jobs()
            self._return_weights()
        return wait

    def _start_jobs(self) -> None:
        """Starts the CPU steps whose gradients have arrived."""
        for entry in [one for one in self.waiting if not self.out.is_on_link(one[0])]:
            self.waiting.remove(entry)
            self.cpu_free_at = max(self.cpu_free_at, self.now) + entry[1].parameters / self.machine.cpu_step_rate
            self.computed.append((self.cpu_free_at, entry[2], entry[1].weights))

    def _return_weights(self) -> None:
        """Begins the copies of the weights that the CPU has computed by now."""
        while self.computed and self.computed[0][0] <= self.now:
            _, due, nbytes = self.computed.pop(0)
            self.into.add("host", due, nbytes)

    def _advance(self, seconds: float) -> None:
        out, into = self.out.advance(seconds), self.into.advance(seconds)
        if self.is_steady and (any(out) or any(into)):
            self.traffic.append(IntervalTraffic(self.now - self.begun, seconds, Carried(*out), Carried(*into)))
        self.now += seconds
