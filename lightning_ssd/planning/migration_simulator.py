"""Simulates a step in which single tensors migrate: drives, link and CPU over time, and the operators that wait."""

import sys
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from lightning_ssd.planning.io_timeline import ROUNDING, Floats
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
from lightning_ssd.planning.transfer_bounds import least_stall_seconds
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
        excess_bytes: bytes by which the peaks exceed the capacities of the GPU and of host memory.
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
        over = f" ({format_bytes(self.excess_bytes)} more than there is)" if self.excess_bytes else ""
        return (
            f"step {format_seconds(self.step_seconds)}, of which the GPU waits {format_seconds(self.stall_seconds)} "
            f"before {len(self.stalls)} operators and recomputes {format_seconds(self.recompute_seconds)}\n"
            f"peak GPU {format_bytes(max(self.gpu_bytes))}, host {format_bytes(self.host_peak_bytes)}{over}; "
            f"{format_bytes(self.ssd_written_bytes)} written to drives"
        )


def simulate_migrations(
    profile: LifetimeProfile, machine: MigrationMachine, plan: MigrationPlan
) -> MigrationPrediction:
    """Returns the prediction for `plan`.

    The GPU runs the operators in order. Before an operator it waits for offloads that make room for it, and then for
    tensors that the operator needs: prefetches into that room begin between the two. In each direction, the link
    carries one transfer at a time, and drives another one, those that an operator needs first. Both work on different
    pieces of a transfer at once, with staging memory in between: drives do not wait while the link carries other bytes.

    The CPU steps a unit when its gradients have arrived in host memory and its staged states, if any, have been read.
    An operator waits until the states are written whose host memory must be free when it runs (`CPUStep.until`).
    """
    step = GPUSteps(profile, machine).without(plan.cpu_units, plan.staged_units)
    simulation = Simulation(profile, machine, plan, step)
    simulation.run()
    return simulation.prediction()


def simulate_better(
    profile: LifetimeProfile,
    machine: MigrationMachine,
    plan: MigrationPlan,
    step: GPUStep,
    best: tuple[int, float],
) -> "Simulation | None":
    """Returns the simulation of `simulate_migrations`, or None as soon as it has no better score than `best`.

    Args:
        profile: lifetimes of all tensors.
        machine: the machine.
        plan: the plan.
        step: the step without the units that the CPU steps.
        best: score of another plan.
    """
    simulation = Simulation(profile, machine, plan, step)
    return simulation if simulation.run(best) else None


class _Carrier:
    """The link, or drives, in one direction. It carries one transfer at a time, the one that is needed first.

    Time passes only where the queue is looked at or changes: most events change one of four queues.

    Args:
        rate: bytes/s.

    Attributes:
        queue: [operator that needs it, number, bytes left] of each transfer, in this order.
        busy: begin and end of each time in which there are transfers, in turn.
        num_ended: transfers that have ended.
    """

    __slots__ = ("_now", "_rate", "busy", "num_ended", "queue")

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._now = 0.0
        """Time up to which transfers are carried."""
        self.queue: list[list[float]] = []
        self.busy: list[float] = []
        self.num_ended = 0

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
            self.num_ended += num_ended
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

    The link carries the bytes of all transfers but those between drives and host memory, and drives those of their own:
    a transfer ends when both have carried it. Each of the two carries first what an operator needs first, so that
    urgent transfers overtake others, and faster drives delay none on the link.

    Args:
        machine: the machine.
        direction: from the GPU, or to it.

    Attributes:
        link: the link.
        ssd: all drives.
        first_due: the first operator that waits for a transfer, unless that has ended since it was looked at.
    """

    def __init__(self, machine: MigrationMachine, direction: Direction) -> None:
        self.link = _Carrier(machine.link_out if direction == "out" else machine.link_in)
        self.ssd = _Carrier(machine.ssd[direction == "out"])
        self._count = 0
        self.first_due: float = inf

    def add(self, now: float, tier: OffloadTierName, due: int, nbytes: float) -> int:
        """Queues a transfer that the operator `due` waits for. Returns its number."""
        self._count += 1
        self.link.add(now, due, self._count, nbytes)
        if tier == "ssd":
            self.ssd.add(now, due, self._count, nbytes)
        if due < self.first_due:
            self.first_due = due
        return self._count

    def stage(self, now: float, due: int, nbytes: float) -> int:
        """Queues a transfer between drives and host memory that the operator `due` waits for. Returns its number."""
        self._count += 1
        self.ssd.add(now, due, self._count, nbytes)
        self.first_due = min(self.first_due, due)
        return self._count

    def is_on_drives(self, number: int) -> bool:
        """Returns whether drives have not carried all of a transfer when their time last passed."""
        return any(entry[1] == number for entry in self.ssd.queue)

    def is_on_link(self, number: int) -> bool:
        """Returns whether the link has not carried all of a transfer when its time last passed."""
        return any(entry[1] == number for entry in self.link.queue)

    def seconds_until(self, due: int, now: float) -> float:
        """Returns the time from `now` until all transfers have ended that operators up to `due` wait for."""
        if due < self.first_due:
            return 0.0
        longest = max(self.link.seconds_until(due, now), self.ssd.seconds_until(due, now))
        self._find_first_due()
        return longest

    def finish(self, due: int, now: float) -> None:
        """Ends the transfers that operators up to `due` wait for."""
        if due >= self.first_due:
            self.link.finish(due, now)
            self.ssd.finish(due, now)
            self._find_first_due()

    def _find_first_due(self) -> None:
        link, ssd = self.link.queue, self.ssd.queue
        self.first_due = min(link[0][0] if link else inf, ssd[0][0] if ssd else inf)


_Begun = tuple[OffloadTierName, int, int]
"""Tier, operator that waits (possibly one of the next step), and bytes of a transfer that begins in each step."""


class Simulation:
    """Two steps, of which the second one is that of the steady state.

    Args:
        profile: lifetimes of all tensors.
        machine: the machine.
        plan: the plan.
        step: the step without the units that the CPU steps.

    Attributes:
        score: the prediction's score.
        stalls: the prediction's stalls.
    """

    def __init__(self, profile: LifetimeProfile, machine: MigrationMachine, plan: MigrationPlan, step: GPUStep) -> None:
        self.profile = profile
        self.machine = machine
        self.plan = plan
        self.count = len(profile.operators)
        self.step = step
        self.seconds = step.seconds.copy()
        columns = np.array([one[:5] for one in plan.migrations], np.int64).reshape(-1, 5).T
        self.tensors, self.after, self.absent_from, self.absent_until, self.before = columns
        """The fields of all migrations."""
        self.sizes: Bytes = np.array([profile.tensors[one.tensor].nbytes for one in plan.migrations], np.int64)
        self.is_offloaded = np.array([one.tensor not in step.with_masters for one in plan.migrations], bool)
        """Whether each migration has an offload."""
        self.out, self.into = _Transfers(machine, "out"), _Transfers(machine, "in")
        self.now = 0.0
        """Time since the begin of the first step."""
        self.times: list[float] = []
        """Begins of the intervals and stalls of the present step."""
        self.score = (sys.maxsize, inf)
        self.stalls: list[tuple[int, float]] = []
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
        """CPU steps whose gradients are offloaded: number of the transfer, job, first operator of the step."""
        self.reads: dict[int, list[CPUStep]] = defaultdict(list)
        """CPU steps whose states begin to be read from drives with an operator of each step."""
        for job in step.jobs:
            if job.staged:
                self.reads[job.staged_from].append(job)
        self.reading: dict[str, int] = {}
        """Numbers of the transfers that read the states of CPU steps that have not begun, by unit."""
        self.computed: list[tuple[float, CPUStep, int]] = []
        """CPU steps that have begun: when the CPU has made the new weights, job, first operator of the step."""
        self.renewed_from = {one.tensor: one.after + 1 for one in step.renewed}
        """Operator at whose begin the copy of each new weight from host memory may begin."""
        self.delayed: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """Copies of new weights that begin with an operator, if the CPU has made them: operator that waits, bytes."""
        self.num_arrived = 0
        """Transfers that had ended when CPU steps last began."""
        self.cpu_free_at = 0.0
        self.recomputed = 0.0
        renewed = {(one.tensor, one.after) for one in step.renewed}
        for migration, nbytes in zip(plan.migrations, self.sizes.tolist(), strict=True):
            if migration[:2] not in renewed:
                self._add(migration, nbytes)
            elif migration.tier == "host":
                self.renewed_from[migration.tensor] = migration.absent_until
            else:
                del self.renewed_from[migration.tensor]
                self._add(migration, nbytes)

    def _add(self, migration: Migration, nbytes: int) -> None:
        index, after, absent_from, absent_until, before, tier = migration
        count = self.count
        if tier is None:
            recompute_seconds = self.profile.tensors[index].recompute_seconds or 0.0
            self.seconds[before % count] += recompute_seconds
            self.recomputed += recompute_seconds
            return
        is_offloaded = index not in self.step.with_masters
        if is_offloaded:
            step, operator = divmod(after + 1, count)
            self.offloads[operator].append((tier, absent_from - step * count, nbytes))
        step, operator = divmod(absent_until, count)
        self.prefetches[operator].append((tier, before - step * count, nbytes))
        # In the first step, the transfers run that the step before has begun and an operator of this one waits for.
        if is_offloaded and after < count < absent_from:
            self.out.add(0.0, tier, absent_from - count, nbytes)
        if absent_until < count <= before:
            self.into.add(0.0, tier, before - count, nbytes)

    def run(self, best: tuple[int, float] = (sys.maxsize, inf)) -> bool:
        """Simulates both steps, or returns False as soon as the score can't be better than `best`."""
        excess = max(0, int(self._gpu_bytes().max()) - self.machine.gpu_bytes)
        excess += max(0, int(self._host_bytes().max()) - self.machine.host_bytes)
        times = list(accumulate(self.seconds, initial=0.0))
        if (excess, times[-1]) >= best:
            return False
        later = None
        if excess == best[0]:
            later = least_stall_seconds(self.machine, self.seconds, self.plan, self.sizes, self.is_offloaded).tolist()
            if times[-1] + later[0] >= best[1] * (1 + ROUNDING):
                return False
        out, into = self.out, self.into
        intervals = self._intervals(times)
        for cycle in range(STEPS):
            base = cycle * self.count
            self.stalls = []
            waited = 0.0
            is_steady = cycle == STEPS - 1
            self.times = []
            for operator, seconds, offloads, prefetches in intervals:
                index = base + operator
                for tier, due, nbytes in offloads if index else ():
                    out.add(self.now, tier, base + due, nbytes)
                while self.jobs and self.jobs[0][0] < index:
                    self._offload_gradients(*self.jobs.popleft())
                wait = self._wait_for_room(index) if index >= out.first_due else 0.0
                for tier, due, nbytes in prefetches:
                    into.add(self.now, tier, base + due, nbytes)
                for job in self.reads.get(operator, ()):
                    self.reading[job.unit] = into.stage(self.now, base + job.ready + 1, job.staged)
                for due, nbytes in self.delayed.pop(index, ()):
                    into.add(self.now, "host", due, nbytes)
                if self.waiting:
                    self._start_jobs()
                if self.computed:
                    self._return_weights(index)
                if index >= into.first_due or index >= out.first_due or (self.computed and self._late_steps(index)):
                    wait += self._wait_for_tensors(index)
                if wait > 0:
                    self.stalls.append((operator, wait))
                    waited += wait
                    if is_steady and (excess, times[-1] + waited) >= best:
                        return False
                    if is_steady and later and times[-1] + waited + later[operator] >= best[1] * (1 + ROUNDING):
                        return False
                self.times.append(self.now)
                self.now += seconds
        self.score = excess, times[-1] + waited
        return True

    @property
    def is_ideal(self) -> bool:
        """Whether the GPU neither waits nor recomputes, and memory fits."""
        return not (self.stalls or self.recomputed or self.score[0])

    def prediction(self) -> MigrationPrediction:
        """Returns the prediction of a simulation that has run."""
        written = np.array([one.tier == "ssd" for one in self.plan.migrations], bool) & self.is_offloaded
        return MigrationPrediction(
            self.score[1],
            tuple(self.stalls),
            self.recomputed,
            tuple(self._gpu_bytes().tolist()),
            self.score[0],
            int(self._host_bytes().max()),
            int(self.sizes[written].sum()) + sum(job.staged for job in self.step.jobs),
            tuple(self._traffic()),
        )

    def _traffic(self) -> Iterator[IntervalTraffic]:
        """Yields the transfers of the last step."""
        times = np.array([*self.times, self.now])
        starts, seconds = times[:-1] - times[0], np.diff(times)
        carriers = self.out.link, self.out.ssd, self.into.link, self.into.ssd
        carried = [one.carried(times) for one in carriers]
        columns = [starts, seconds, *carried]
        for start, duration, out, out_ssd, into, into_ssd in np.stack(columns)[:, np.any(carried, axis=0)].T.tolist():
            yield IntervalTraffic(start, duration, Carried(out, out_ssd), Carried(into, into_ssd))

    def _gpu_bytes(self) -> Bytes:
        """Returns the bytes in GPU memory while each operator runs."""
        changes = ByteChanges(self.count)
        changes.add(self.absent_from, self.absent_until, self.sizes)
        return self.step.nbytes - changes.sums()

    def _host_bytes(self) -> Bytes:
        """Returns the bytes in host memory while each operator waits and runs."""
        in_host = np.array([one.tier == "host" for one in self.plan.migrations], bool) & self.is_offloaded
        changes = ByteChanges(self.count)
        changes.add(self.after[in_host] + 1, self.before[in_host] + 1, self.sizes[in_host])
        return self.step.host_bytes + changes.sums()

    def _intervals(self, times: list[float]) -> list[tuple[int, float, list[_Begun], list[_Begun]]]:
        """Returns the first operator of each part of a step, the part's seconds, and the transfers that begin with it.

        Parts begin with operators at whose begin a transfer may begin or be due, and some between them.

        Args:
            times: begin of each operator, and the end of the step, if the GPU never waits.
        """
        is_event = np.zeros(self.count, bool)
        is_event[[part * self.count // RESOLUTION for part in range(RESOLUTION)]] = True
        for operators in ([*self.offloads], [*self.prefetches], self.absent_from, self.before):
            is_event[np.array(operators, np.int64) % self.count] = True
        for job in self.step.jobs:
            is_event[np.array((job.ready + 1, job.absent_from, job.until, job.staged_from)) % self.count] = True
            for one in job.weights:
                begin = self.renewed_from.get(one.tensor, one.before)
                is_event[one.before % self.count] = is_event[begin % self.count] = True
        inside: list[int] = np.flatnonzero(is_event).tolist()
        return [
            (one, times[following] - times[one], self.offloads.get(one, []), self.prefetches.get(one, []))
            for one, following in pairwise([*inside, self.count])
        ]

    def _offload_gradients(self, ready: int, job: CPUStep) -> None:
        """Begins the offload of the gradients of a CPU step, which the operator `ready` has used last."""
        base = ready - job.ready
        number = self.out.add(self.now, "host", base + job.absent_from, job.gradients)
        self.waiting.append((number, job, base))

    def _late_steps(self, index: int) -> list[float]:
        """Returns when the CPU steps end that operator `index` waits for."""
        return [ready for ready, job, base in self.computed if base + job.until <= index]

    def _wait_for_room(self, index: int) -> float:
        """Lets operator `index` wait for offloads. Returns the seconds."""
        wait = self.out.seconds_until(index, self.now)
        if wait:
            self.times.append(self.now)
            self.now += wait
            self.out.finish(index, self.now)
        return wait

    def _wait_for_tensors(self, index: int) -> float:
        """Lets operator `index` wait for prefetches, and for the CPU and its transfers. Returns the seconds."""
        begin = self.now
        wait = 0.0
        while True:
            seconds = max(one.seconds_until(index, self.now) for one in (self.into, self.out))
            late = self._late_steps(index) if self.computed else ()
            if seconds:
                self.now += seconds
                self.into.finish(index, self.now)
                self.out.finish(index, self.now)
            elif late:
                seconds = max(0.0, late[0] - self.now)
                self.now = max(self.now, late[0])
            else:
                break
            wait += seconds
            if not (self.waiting or self.computed):
                break
            self._start_jobs()
            self._return_weights(index)
        if wait > 0:
            self.times.append(begin)
        return wait

    def _start_jobs(self) -> None:
        """Starts the CPU steps whose gradients, and staged states, are in host memory."""
        carriers = (self.out.link, self.into.ssd) if self.reads else (self.out.link,)
        for one in carriers:
            one.advance(self.now)
        num_arrived = sum(one.num_ended for one in carriers)
        if self.num_arrived == num_arrived:
            return
        self.num_arrived = num_arrived
        for entry in self.waiting.copy():
            number, job, base = entry
            if self.out.is_on_link(number) or (job.staged and self.into.is_on_drives(self.reading[job.unit])):
                continue
            self.waiting.remove(entry)
            self.reading.pop(job.unit, None)
            self.cpu_free_at = max(self.cpu_free_at, self.now) + job.parameters / self.machine.cpu_step_rate
            self.computed.append((self.cpu_free_at, job, base))

    def _return_weights(self, index: int) -> None:
        """Begins the transfers of the weights and states that the CPU has computed by now.

        Copies of weights begin as far as operator `index` allows.
        """
        while self.computed and self.computed[0][0] <= self.now:
            _, job, base = self.computed.pop(0)
            if job.staged:
                self.out.stage(self.now, base + job.until, job.staged)
            for one in job.weights:
                if one.tensor not in self.renewed_from:
                    continue
                begin = base + self.renewed_from[one.tensor]
                due = base + (min(job.until, one.before) if job.staged else one.before)
                if begin <= index:
                    self.into.add(self.now, "host", due, one.nbytes)
                else:
                    self.delayed[begin].append((due, one.nbytes))
