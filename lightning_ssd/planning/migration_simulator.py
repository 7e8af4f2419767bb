"""Simulates a step in which single tensors migrate: drives, link and CPU over time, and the operators that wait."""

from bisect import insort
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf

from lightning_ssd.planning.lifetimes import LifetimeProfile
from lightning_ssd.planning.migration import (
    HOST,
    ByteChanges,
    CPUStep,
    Direction,
    GPUStep,
    Migration,
    MigrationMachine,
    MigrationPlan,
)
from lightning_ssd.sizes import format_bytes, format_seconds

RESOLUTION = 1000
"""Least number of parts of a step in each of which the transfers and the CPU's work are followed."""

STEPS = 2
"""Simulated steps: migrations that wrap round the step are in flight when the second begins."""


@dataclass(frozen=True)
class IntervalTraffic:
    """A time in which the set of running work does not change: operators between two events, or a stall before one.

    Attributes:
        start: begin in the step, seconds.
        seconds: duration.
        out: bytes from the GPU to each drive.
        into: bytes to the GPU from each drive.
    """

    start: float
    seconds: float
    out: dict[int, float]
    into: dict[int, float]


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
        traffic: bytes that each drive carries over the step.
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
    offloads that make room for it. Of each drive and direction one transfer runs at a time, the one that an operator
    needs first; so urgent transfers overtake others. All transfers of one direction share the link: host memory has the
    bandwidth that drives leave, which are slower and would be idle otherwise.
    """
    return _Simulation(profile, machine, plan).run()


class _Transfers:
    """The transfers of one direction.

    Args:
        machine: the machine.
        direction: from the GPU, or to it.
    """

    def __init__(self, machine: MigrationMachine, direction: Direction) -> None:
        self._link = machine.link_out if direction == "out" else machine.link_in
        self._rates = {drive: machine.rate(drive, direction) for drive in (*range(len(machine.drives)), HOST)}
        self._queues: dict[int, list[list[float]]] = {drive: [] for drive in self._rates}
        """[operator that needs it, number, bytes left] of each transfer of a drive, in this order."""
        self._count = 0
        self._first_due = inf
        """The first operator that waits for a transfer."""
        self.left: dict[float, float] = {}
        """Bytes left of each unfinished transfer, by number."""

    def add(self, drive: int, due: int, nbytes: float) -> float:
        """Queues a transfer that the operator `due` waits for. Returns its number."""
        self._count += 1
        insort(self._queues[drive], [due, self._count, nbytes])
        self._first_due = min(self._first_due, due)
        self.left[self._count] = nbytes
        return self._count

    def seconds_until(self, due: int) -> float:
        """Returns the time until all transfers have ended that operators up to `due` wait for."""
        total = longest = 0.0
        if due < self._first_due:
            return total
        for drive, queue in self._queues.items():
            needed = 0.0
            for when, _, nbytes in queue:
                if when > due:
                    break
                needed += nbytes
            total += needed
            longest = max(longest, needed / self._rates[drive])
        return max(longest, total / self._link)

    def advance(self, seconds: float, due: int) -> dict[int, float]:
        """Transfers for `seconds`, first tensors that operators up to `due` need. Returns the bytes of each drive."""
        carried: dict[int, float] = {}
        if not self.left:
            return carried
        link = self._link * seconds
        ended = False
        for last in (due, inf) if due >= self._first_due else (inf,):
            for drive, queue in self._queues.items():
                if not queue or queue[0][0] > last:
                    continue
                room = limit = min(self._rates[drive] * seconds - carried.get(drive, 0.0), link)
                while room > 0 and queue and queue[0][0] <= last:
                    entry = queue[0]
                    if entry[2] > room:
                        entry[2] -= room
                        room = 0.0
                    else:
                        room -= entry[2]
                        del self.left[entry[1]]
                        queue.pop(0)
                        ended = True
                if limit > 0:
                    carried[drive] = carried.get(drive, 0.0) + limit - room
                    link -= limit - room
        if ended:
            self._first_due = self._find_first_due()
        return carried

    def _find_first_due(self) -> float:
        return min((queue[0][0] for queue in self._queues.values() if queue), default=inf)

    def finish(self, due: int) -> None:
        """Ends the transfers that operators up to `due` wait for: rounding may have left a part of a byte."""
        for queue in self._queues.values():
            while queue and queue[0][0] <= due:
                del self.left[queue.pop(0)[1]]
        self._first_due = self._find_first_due()


class _Simulation:
    def __init__(self, profile: LifetimeProfile, machine: MigrationMachine, plan: MigrationPlan) -> None:
        self.profile = profile
        self.machine = machine
        self.plan = plan
        self.count = len(profile.operators)
        self.step = GPUStep(profile, machine, plan.cpu_units)
        self.seconds = list(self.step.seconds)
        self.out, self.into = _Transfers(machine, "out"), _Transfers(machine, "in")
        self.traffic: list[IntervalTraffic] = []
        self.now = 0.0
        self.prefetches: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        """(operator that waits, bytes, drive) of the prefetches that begin with an operator of each step."""
        self.offloads: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        """(operator that waits, bytes, drive) of the offloads that begin at the end of an operator of each step."""
        self.running: tuple[list[tuple[int, int, int]], ...] = [], []
        """(operator that waits, bytes, drive) of offloads and of prefetches that the step before has begun."""
        self.recomputed = 0.0
        for migration in plan.migrations:
            self._add(migration)

    def _add(self, migration: Migration) -> None:
        tensor = self.profile.tensors[migration.tensor]
        if migration.drive is None:
            recompute_seconds = tensor.recompute_seconds or 0.0
            self.seconds[migration.before % self.count] += recompute_seconds
            self.recomputed += recompute_seconds
            return
        for transfers, running, begin, due, first in (
            (self.offloads, self.running[0], migration.after, migration.absent_from, 1),
            (self.prefetches, self.running[1], migration.absent_until, migration.before, 0),
        ):
            before = begin // self.count * self.count  # operators of the steps before the one in which it begins
            transfers[begin - before].append((due - before, tensor.nbytes, migration.drive))
            if begin < self.count <= due - first:  # an operator of the next step waits for it, from the `first` one on
                running.append((due - self.count, tensor.nbytes, migration.drive))

    def run(self) -> MigrationPrediction:
        stalls: list[tuple[int, float]] = []
        jobs = deque(
            sorted(
                ((cycle * self.count + job.ready, job) for cycle in range(STEPS) for job in self.step.jobs),
                key=lambda item: item[0],
            )
        )
        waiting: list[tuple[float, CPUStep, int]] = []  # transfer of the gradients, job, operator that needs weights
        computed: list[tuple[float, int, int]] = []  # when the CPU has made new weights, their bytes, that operator
        free_at = begun = 0.0
        first_part = 0
        times = list(accumulate(self.seconds, initial=0.0))
        for transfers, running in zip((self.out, self.into), self.running, strict=True):
            for due, nbytes, drive in running:
                transfers.add(drive, due, nbytes)
        for index, following in pairwise(self._events()):
            if index:
                self._add_all(self.out, self.offloads, index - 1)
            while jobs and jobs[0][0] < index:
                ready, job = jobs.popleft()
                base = ready - job.ready
                number = self.out.add(HOST, base + job.absent_from, job.gradients)
                waiting.append((number, job, base + self.count + job.before))
            if index == (STEPS - 1) * self.count:
                begun, first_part = self.now, len(self.traffic)
                stalls.clear()
            self._add_all(self.into, self.prefetches, index)
            wait = 0.0
            while True:
                if waiting:
                    free_at = self._start_jobs(waiting, computed, free_at)
                if computed:
                    self._return_weights(computed)
                seconds = max(self.out.seconds_until(index), self.into.seconds_until(index))
                late = [ready for ready, due, _ in computed if due <= index]  # when the CPU has made new weights
                if seconds:
                    self._advance(seconds, index)
                    self.out.finish(index)
                    self.into.finish(index)
                elif late:
                    seconds = max(0.0, late[0] - self.now)
                    self._advance(seconds, index)
                    self.now = max(self.now, late[0])
                else:
                    break
                wait += seconds
            if wait > 0:
                stalls.append((index % self.count, wait))
            first = index % self.count
            self._advance(times[first + following - index] - times[first], index)
        return self._prediction(times[-1] + sum(wait for _, wait in stalls), stalls, begun, first_part)

    def _events(self) -> list[int]:
        """Returns the operators at whose begin a transfer may begin or be due, and some between them, in order."""
        events = {part * self.count // RESOLUTION for part in range(RESOLUTION)}
        events.update(index + 1 for index in self.offloads)
        events.update(self.prefetches)
        for migration in self.plan.migrations:
            events.update((migration.absent_from, migration.before))
        for job in self.step.jobs:
            events.update((job.ready + 1, job.absent_from, job.before))
        inside = sorted({index % self.count for index in events})
        return [cycle * self.count + index for cycle in range(STEPS) for index in inside] + [STEPS * self.count]

    def _start_jobs(
        self, waiting: list[tuple[float, CPUStep, int]], computed: list[tuple[float, int, int]], free_at: float
    ) -> float:
        """Starts the CPU steps whose gradients have arrived. Returns when the CPU has no more work."""
        for entry in [one for one in waiting if one[0] not in self.out.left]:
            waiting.remove(entry)
            free_at = max(free_at, self.now) + entry[1].parameters / self.machine.cpu_step_rate
            computed.append((free_at, entry[2], entry[1].weights))
        return free_at

    def _return_weights(self, computed: list[tuple[float, int, int]]) -> None:
        """Begins the copies of the weights that the CPU has computed by now."""
        while computed and computed[0][0] <= self.now:
            _, due, nbytes = computed.pop(0)
            self.into.add(HOST, due, nbytes)

    def _add_all(
        self, transfers: _Transfers, of_step: Mapping[int, Sequence[tuple[int, int, int]]], index: int
    ) -> None:
        """Queues the transfers that begin at operator `index`; `of_step`: those of each step."""
        operator = index % self.count
        for due, nbytes, drive in of_step.get(operator, ()):
            transfers.add(drive, index - operator + due, nbytes)

    def _advance(self, seconds: float, due: int) -> None:
        out, into = self.out.advance(seconds, due), self.into.advance(seconds, due)
        if out or into:
            self.traffic.append(IntervalTraffic(self.now, seconds, out, into))
        self.now += seconds

    def _prediction(
        self, seconds: float, stalls: Sequence[tuple[int, float]], begun: float, first: int
    ) -> MigrationPrediction:
        nbytes, host = ByteChanges(self.count), ByteChanges(self.count)
        written = 0
        for migration in self.plan.migrations:
            size = self.profile.tensors[migration.tensor].nbytes
            nbytes.add(migration.absent_from, migration.absent_until, -size)
            if migration.drive == HOST:
                host.add(migration.after + 1, migration.before, size)
            elif migration.drive is not None:
                written += size
        on_gpu = tuple(one + change for one, change in zip(self.step.nbytes, nbytes.sums(), strict=True))
        traffic = tuple(
            IntervalTraffic(one.start - begun, one.seconds, one.out, one.into) for one in self.traffic[first:]
        )
        return MigrationPrediction(
            seconds,
            tuple(stalls),
            self.recomputed,
            on_gpu,
            max(0, max(on_gpu) - self.machine.gpu_bytes),
            self.step.host_bytes + max(host.sums()),
            written,
            traffic,
        )
