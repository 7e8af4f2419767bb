"""Slow and simple versions of the planners' and the simulator's algorithms, whose results have to be the same."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import inf

from lightning_ssd.planning.evictions import IN_FLIGHT, EvictionPlanner, Period
from lightning_ssd.planning.io_timeline import ROUNDING
from lightning_ssd.planning.lifetimes import LifetimeProfile
from lightning_ssd.planning.migration import (
    COPY_SLACK,
    STAGING_SLACK,
    CPUStep,
    Direction,
    GPUStep,
    GPUSteps,
    MigrationMachine,
    MigrationPlan,
    spread,
)
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


def slow_renewed(profile: LifetimeProfile, cpu_units: Collection[str]) -> dict[int, tuple[int, int]]:
    """Returns the weights that the CPU steps: last use in backward, and first one in the next step; as in `Migration`.

    The optimizer's uses are not among them, because it makes none on the GPU.
    """
    found = {}
    for index, tensor in enumerate(profile.tensors):
        if tensor.kind == "weight" and tensor.unit in cpu_units:
            uses = [use for use in tensor.uses if profile.operators[use].phase != "optimizer"]
            if uses and len(uses) < len(tensor.uses):
                found[index] = uses[-1], uses[0] + len(profile.operators)
    return found


def slow_evictions(
    profile: LifetimeProfile,
    machine: MigrationMachine,
    min_bytes: int,
    step: GPUStep,
    recomputed: Sequence[Period],
    in_flight: float,
) -> list[tuple[int, ...]]:
    """Returns the migrations of `EvictionPlanner.plan` without their tiers: examines all tensors at each operator."""
    count = len(profile.operators)
    ids = {tensor.id: index for index, tensor in enumerate(profile.tensors)}
    sizes = [tensor.nbytes for tensor in profile.tensors]
    dropped = [[one.tensor, one.after, one.after + 1, one.before, one.before] for one in recomputed]
    masters = slow_renewed(profile, step.cpu_units)
    renewed = [
        [index, after, after + 1, before, before]
        for unit in profile.by_unit
        for index, (after, before) in masters.items()
        if profile.tensors[index].unit == unit and after + 1 < before and sizes[index] >= min_bytes
    ]
    candidates = []
    for tensor, after, before, _ in profile.periods if machine.drives or machine.host_bytes else ():
        before += count if before <= after else 0
        if tensor in step.absent or (tensor, after) in [*step.kept, *(tuple(one[:2]) for one in dropped)]:
            continue
        for other, _, _, _, use in dropped:
            if tensor in [ids[source] for source in profile.tensors[other].sources]:
                uses = [one for one in (use, use + count) if after < one < before]
                before = min(uses, default=before)
        if after + 1 < before and sizes[tensor] >= min_bytes:
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
    nbytes = changed(step.nbytes.tolist(), *renewed, *dropped)
    # Eviction: `orders` has the next use of each tensor that may be evicted, inf if it is absent when the step begins.
    host = step.host_bytes.tolist()
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
            if number not in starts and not machine.drives and tensor not in masters:
                held = [one + other for one, other in zip(
                    host, slow_bytes([(after + 1, before + 1, sizes[tensor])], count), strict=True
                )]  # fmt: skip
                if any(held[index % count] > machine.host_bytes for index in range(after + 1, before + 1)):
                    continue
                host = held
            early = order < lasts[number]
            starts[number] = operator + count if early else operator
            away.append((lasts[number] - count if early else lasts[number], sizes[tensor]))
    evicted = renewed.copy()
    for number, start in starts.items():
        tensor, after, before = candidates[number]
        evicted.append([tensor, after, before - lasts[number] + start, before, before])
    nbytes = changed(nbytes, *evicted[len(renewed) :])
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


@dataclass
class _SlowTransfer:
    """A transfer that the operator `due` waits for, and bytes left for the link and for drives."""

    due: int
    nbytes: int
    left: dict[str, float]


class _SlowTransfers:
    """Unfinished transfers of one direction, on the link and on drives.

    Attributes:
        carried: bytes that the link, and drives, have carried.
    """

    def __init__(self, machine: MigrationMachine, direction: Direction) -> None:
        self.rates = {"link": machine.link_out if direction == "out" else machine.link_in}
        self.rates["ssd"] = machine.ssd[direction == "out"]
        self.queue: list[_SlowTransfer] = []
        self.carried = dict.fromkeys(self.rates, 0.0)

    def add(self, tier: OffloadTierName, due: int, nbytes: int) -> _SlowTransfer:
        return self.queue_for(("link", "ssd") if tier == "ssd" else ("link",), due, nbytes)

    def queue_for(self, carriers: Sequence[str], due: int, nbytes: int) -> _SlowTransfer:
        self.queue.append(_SlowTransfer(due, nbytes, dict.fromkeys(carriers, float(nbytes))))
        found = self.queue[-1]
        self.queue.sort(key=lambda one: one.due)
        return found

    def seconds_until(self, due: int) -> float:
        return max(
            sum(one.left.get(carrier, 0.0) / rate for one in self.queue if one.due <= due) if rate else 0.0
            for carrier, rate in self.rates.items()
        )

    def advance(self, seconds: float) -> None:
        for carrier, rate in self.rates.items():
            room = rate * seconds
            for one in self.queue:
                carried = min(one.left.get(carrier, 0.0), room)
                if carried:
                    one.left[carrier] -= carried
                    self.carried[carrier] += carried
                    room -= carried
        self.queue = [one for one in self.queue if any(one.left.values())]

    def finish(self, due: int) -> None:
        """Ends transfers: rounding may have left a part of a byte."""
        for one in self.queue:
            if one.due <= due:
                for carrier, left in one.left.items():
                    assert left <= 1e-6 * one.nbytes
                    self.carried[carrier] += left
                    one.left[carrier] = 0.0
        self.queue = [one for one in self.queue if one.due > due]


@dataclass
class SlowStep:
    """The steady state of a plan, in which each tensor is followed.

    Attributes:
        seconds: seconds of a step.
        carried: bytes by direction and carrier ("link", "ssd").
        queued: bytes that a step leaves for the next one to carry, less those that it carries for the one before.
        gpu_peak: most bytes on the GPU at any time.
        host_peak: most bytes in host memory at any time.
    """

    seconds: float
    carried: dict[tuple[Direction, str], float]
    queued: dict[tuple[Direction, str], float]
    gpu_peak: int
    host_peak: int


class _SlowSimulation:
    """Follows where each tensor is: on the GPU until its offload has ended, in host memory until it has returned."""

    def __init__(self, profile: LifetimeProfile, machine: MigrationMachine, plan: MigrationPlan) -> None:
        self.profile, self.machine, self.plan = profile, machine, plan
        self.count = len(profile.operators)
        self.step = GPUSteps(profile, machine).without(plan.cpu_units, plan.staged_units)
        self.seconds = self.step.seconds.copy()
        self.ways: dict[Direction, _SlowTransfers] = {
            "out": _SlowTransfers(machine, "out"), "in": _SlowTransfers(machine, "in")
        }  # fmt: skip
        self.now, self.cpu_free_at = 0.0, 0.0
        self.began = inf  # the second step
        self.peaks = [0, 0]
        # What the CPU steps has no copy on the GPU, but for weights, which have one in host memory, too.
        tensors = {index: one for index, one in enumerate(profile.tensors) if one.unit in plan.cpu_units}
        self.is_stepped = {
            index for index, one in tensors.items() if one.kind == "optimizer state" or one.kind == "gradient"
        }
        self.by_step = {job.unit: job for job in self.step.jobs if job.unit in plan.staged_units}
        """CPU steps whose states are on drives, by unit."""
        self.state_bytes = slow_state_bytes(profile, plan.cpu_units)
        self.masters = sum(nbytes for unit, nbytes in self.state_bytes.items() if unit not in self.by_step)
        self.reading: dict[str, _SlowTransfer] = {}
        """Transfers that read the states of a unit, until the CPU begins its step."""
        self.in_staging: dict[str, int] = {}
        """Operator that waits until host memory is free of the states of each unit that are there."""
        self.writing: dict[str, _SlowTransfer] = {}
        self.renewed = slow_renewed(profile, plan.cpu_units)
        self.versions = dict.fromkeys(self.renewed, 0)
        """Number of the CPU's steps that have made each weight on the GPU."""
        self.master_versions = self.versions.copy()
        self.offloading: dict[int, _SlowTransfer] = {}
        """Offloads of tensors that are on the GPU until these have ended, by tensor."""
        self.away = {index for index, one in tensors.items() if one.kind == "optimizer state"}
        self.prefetching: dict[int, _SlowTransfer] = {}
        """Prefetches, by tensor."""
        self.in_host: dict[int, int] = {}
        """Bytes of each tensor in host memory."""
        self.jobs: list[tuple[CPUStep, list[int], _SlowTransfer, int]] = []
        """CPU steps without all gradients: gradients, their transfer, first operator of the step."""
        self.computed: list[tuple[float, CPUStep, list[int], int]] = []
        """CPU steps that have begun: end, job, gradients, first operator of the step."""
        self.pending: list[tuple[int, int]] = []
        """Operator with which the copy of a new weight may begin, and the weight, if the CPU has made it."""
        count = self.count
        self.begins = {index: after + 1 for index, (after, _) in self.renewed.items()}
        self.dues = {index: before for index, (_, before) in self.renewed.items()}
        for index in self.renewed:
            if (job := self.by_step.get(profile.tensors[index].unit)) is not None:
                self.dues[index] = min(self.dues[index], job.until)
        for one in plan.migrations:
            if self.renewed.get(one.tensor) == (one.after, one.before):
                if one.tier == "host":
                    self.begins[one.tensor] = one.absent_until
                    continue
                del self.begins[one.tensor]  # it is read from drives
                if one.absent_until < count <= one.before:
                    nbytes = profile.tensors[one.tensor].nbytes
                    self.prefetching[one.tensor] = self.ways["in"].add("ssd", one.before - count, nbytes)
        for one in plan.migrations:
            tensor = profile.tensors[one.tensor]
            if one.tensor in self.renewed:
                continue
            if one.tier is None:
                self.seconds[one.before % count] += tensor.recompute_seconds or 0.0
            if one.before >= count > one.after and one.tier is not None:
                # The step before has offloaded the tensor, or an operator of the first step waits for that.
                if one.absent_from > count:
                    self.offloading[one.tensor] = self.ways["out"].add(one.tier, one.absent_from - count, tensor.nbytes)
                else:
                    self.away.add(one.tensor)
                if one.tier == "host":
                    self.in_host[one.tensor] = tensor.nbytes
                if one.absent_until < count:
                    self.away.discard(one.tensor)
                    self.prefetching[one.tensor] = self.ways["in"].add(one.tier, one.before - count, tensor.nbytes)

    def sample(self, index: int, *, runs: bool) -> None:
        """Adds up the bytes of both memories, while operator `index` waits or runs."""
        operator = index % self.count
        for tensor, transfer in list(self.offloading.items()):
            if not any(transfer.left.values()):
                del self.offloading[tensor]
                self.away.add(tensor)
        for tensor, transfer in list(self.prefetching.items()):
            if not any(transfer.left.values()):
                del self.prefetching[tensor]
                self.in_host.pop(tensor, None)
        for unit, transfer in list(self.writing.items()):
            copied = [one for one in self.weights_of(self.by_step[unit]) if one in self.begins]
            waits = self.prefetching.keys() | {weight for _, weight in self.pending}
            if not any(transfer.left.values()) and waits.isdisjoint(copied):
                del self.writing[unit]
                del self.in_staging[unit]
        gpu = 0
        for number, one in enumerate(self.profile.tensors):
            begin = -1 if one.allocated is None else one.allocated
            end = self.count if one.freed is None else one.freed
            if begin <= (operator if runs else operator - 1) and operator <= end and number not in self.away:
                gpu += one.nbytes
        host = self.masters + sum(self.in_host.values()) + sum(self.state_bytes[unit] for unit in self.in_staging)
        if index >= self.count:
            self.peaks = [max(self.peaks[0], gpu), max(self.peaks[1], host)]

    def advance(self, index: int, seconds: float, *, runs: bool = False) -> None:
        """Passes time in pieces, at whose ends transfers end."""
        while seconds > 0:
            ends = [
                sum(other.left.get(carrier, 0.0) for other in way.queue[: number + 1]) / rate
                for way in self.ways.values()
                for carrier, rate in way.rates.items()
                for number, one in enumerate(way.queue)
                if one.left.get(carrier) and rate
            ]
            piece = min([seconds, *(end for end in ends if end > 1e-12)])
            self.sample(index, runs=runs)
            for way in self.ways.values():
                way.advance(piece)
            self.now += piece
            seconds -= piece
            for job in self.computed:
                if job[0] <= self.now:
                    for gradient in job[2]:
                        self.in_host.pop(gradient, None)
            self.sample(index, runs=runs)

    def weights_of(self, job: CPUStep) -> list[int]:
        return [index for index in self.renewed if self.profile.tensors[index].unit == job.unit]

    def follow_cpu(self, index: int) -> None:
        """Starts CPU steps whose gradients have arrived, and copies of the weights that are computed."""
        for entry in self.jobs.copy():
            job, gradients, transfer, begin = entry
            if transfer.left["link"] or (job.unit in self.reading and self.reading[job.unit].left["ssd"]):
                continue
            self.jobs.remove(entry)
            self.reading.pop(job.unit, None)
            self.cpu_free_at = max(self.cpu_free_at, self.now) + job.parameters / self.machine.cpu_step_rate
            self.computed.append((self.cpu_free_at, job, gradients, begin))
            for weight in self.weights_of(job):
                assert weight not in self.prefetching or not any(self.prefetching[weight].left.values())
                self.master_versions[weight] += 1
        while self.computed and self.computed[0][0] <= self.now:
            _, job, gradients, begin = self.computed.pop(0)
            for gradient in gradients:
                self.in_host.pop(gradient, None)
            self.pending += [(begin + self.begins[one], one) for one in self.weights_of(job) if one in self.begins]
            if job.unit in self.by_step:
                nbytes = self.state_bytes[job.unit]
                self.writing[job.unit] = self.ways["out"].queue_for(["ssd"], begin + job.until, nbytes)
        for entry in [one for one in self.pending if one[0] <= index]:
            self.pending.remove(entry)
            begin, weight = entry
            due = begin - self.begins[weight] + self.dues[weight]
            self.away.discard(weight)
            self.versions[weight] = self.master_versions[weight]
            self.prefetching[weight] = self.ways["in"].add("host", due, self.profile.tensors[weight].nbytes)

    def run(self) -> SlowStep:
        """Simulates two steps, and returns the second one."""
        count = self.count
        out, into = self.ways["out"], self.ways["in"]
        before, queued = {}, {}
        for index in range(2 * count):
            operator = index % count
            if index == count:
                self.began = self.now
                before = {(name, carrier): way.carried[carrier] for name, way in self.ways.items()
                          for carrier in way.rates}  # fmt: skip
                queued = self.queued()
            self.begin_offloads(index)
            self.sample(index, runs=False)
            self.advance(index, out.seconds_until(index))
            out.finish(index)
            self.sample(index, runs=False)
            self.begin_prefetches(index)
            self.follow_cpu(index)
            while True:
                seconds = max(into.seconds_until(index), out.seconds_until(index))
                late = [done for done, job, _, begin in self.computed if begin + job.until <= index]
                if not seconds and not late:
                    break
                self.advance(index, seconds or max(0.0, late[0] - self.now))
                if seconds:
                    into.finish(index)
                    out.finish(index)
                self.follow_cpu(index)
            self.sample(index, runs=False)
            self.use(index)
            self.sample(index, runs=True)
            self.advance(index, self.seconds[operator], runs=True)
        carried = {(name, carrier): way.carried[carrier] - before[name, carrier]
                   for name, way in self.ways.items() for carrier in way.rates}  # fmt: skip
        queued = {key: nbytes - queued[key] for key, nbytes in self.queued().items()}
        return SlowStep(self.now - self.began, carried, queued, *self.peaks)

    def queued(self) -> dict[tuple[Direction, str], float]:
        """Returns the bytes of transfers that have not ended, and of new weights whose copies have not begun."""
        found = {
            (name, carrier): sum(one.left.get(carrier, 0.0) for one in way.queue)
            for name, way in self.ways.items() for carrier in way.rates
        }  # fmt: skip
        weights = [weight for _, weight in self.pending]
        for job in [*(one[0] for one in self.jobs), *(one[1] for one in self.computed)]:
            weights += [weight for weight in self.weights_of(job) if weight in self.begins]
            found["out", "ssd"] += self.state_bytes[job.unit] if job.unit in self.by_step else 0
        found["in", "link"] += sum(self.profile.tensors[weight].nbytes for weight in weights)
        return found

    def begin_offloads(self, index: int) -> None:
        """The operator before `index` has ended. The first step has only offloads that it has begun itself."""
        count = self.count
        for one in self.plan.migrations:
            if (one.after + 1) % count == index % count and index:
                due, nbytes = index + one.absent_from - one.after - 1, self.profile.tensors[one.tensor].nbytes
                if one.tier is None or one.tensor in self.renewed:
                    self.away.add(one.tensor)
                    continue
                assert one.tensor not in self.prefetching and one.tensor not in self.away
                self.offloading[one.tensor] = self.ways["out"].add(one.tier, due, nbytes)
                if one.tier == "host":
                    self.in_host[one.tensor] = nbytes
        for job in self.step.jobs:
            if index and (job.ready + 1) % count == index % count:
                gradients = [
                    number for number in self.profile.by_unit[job.unit]
                    if self.profile.tensors[number].kind == "gradient"
                ]  # fmt: skip
                cycle = (index - job.ready - 1) // count * count
                transfer = self.ways["out"].add("host", cycle + job.absent_from, job.gradients)
                for number in gradients:
                    assert number not in self.in_host  # the step before has used it
                    self.offloading[number] = transfer
                    self.in_host[number] = self.profile.tensors[number].nbytes
                self.jobs.append((job, gradients, transfer, cycle))

    def begin_prefetches(self, index: int) -> None:
        for one in self.plan.migrations:
            if one.absent_until % self.count == index % self.count:
                is_new = self.renewed.get(one.tensor) == (one.after, one.before)
                if one.tier is None or (is_new and one.tier == "host"):
                    continue
                if one.tensor in self.renewed:
                    unit = self.profile.tensors[one.tensor].unit
                    assert (one.tier == "ssd") == (unit in self.by_step)
                    assert unit not in self.writing  # drives have the latest weights
                    self.versions[one.tensor] = self.master_versions[one.tensor]
                due, nbytes = index + one.before - one.absent_until, self.profile.tensors[one.tensor].nbytes
                if index >= self.count:
                    assert one.tensor in self.away
                self.away.discard(one.tensor)
                self.prefetching[one.tensor] = self.ways["in"].add(one.tier, due, nbytes)

        for unit, job in self.by_step.items():
            if job.staged_from == index % self.count:
                assert unit not in self.writing and unit not in self.in_staging
                begin = index - job.staged_from
                self.reading[unit] = self.ways["in"].queue_for(["ssd"], begin + job.ready + 1, self.state_bytes[unit])
                self.in_staging[unit] = begin + job.until

    def use(self, index: int) -> None:
        """Operator `index` begins: the tensors that it uses are on the GPU."""
        operator = index % self.count
        self.sample(index, runs=False)
        assert all(until > index for until in self.in_staging.values())
        for one in self.plan.migrations:
            if one.tier is None and one.before % self.count == operator:
                self.away.discard(one.tensor)
        for number, one in enumerate(self.profile.tensors):
            if one.allocated == operator:
                self.away.discard(number)
                self.offloading.pop(number, None)
            by_optimizer = self.profile.operators[operator].phase == "optimizer"
            is_cpu_step = by_optimizer and (number in self.is_stepped or number in self.renewed)
            if operator in one.uses and not is_cpu_step and index >= self.count:
                assert number not in self.away and number not in self.prefetching and number not in self.offloading
                assert self.versions.get(number, index // self.count) == index // self.count


def slow_step(profile: LifetimeProfile, machine: MigrationMachine, plan: MigrationPlan) -> SlowStep:
    """Returns the step of `simulate_migrations`, with each operator as an event, and each tensor followed."""
    return _SlowSimulation(profile, machine, plan).run()


def slow_state_bytes(profile: LifetimeProfile, units: Collection[str]) -> dict[str, int]:
    """Returns the bytes of optimizer states and master weights of each unit."""
    masters = slow_renewed(profile, units)
    found = dict.fromkeys(units, 0)
    for index, tensor in enumerate(profile.tensors):
        if tensor.unit in found and (tensor.kind == "optimizer state" or index in masters):
            found[tensor.unit] += tensor.nbytes
    return found


def slow_window(profile: LifetimeProfile, machine: MigrationMachine, unit: str) -> tuple[int, int]:
    """Returns the operator with which staged states begin to be read, and the one that waits until they are written.

    Transfers have more time than they take on an idle machine.
    """
    operators, count = profile.operators, len(profile.operators)
    of_unit = [index for index, tensor in enumerate(profile.tensors) if tensor.unit == unit]
    weights = [profile.tensors[index] for index in of_unit if index in slow_renewed(profile, [unit])]
    gradients = [profile.tensors[index] for index in of_unit if profile.tensors[index].kind == "gradient"]
    trained, summed = (
        [[use for use in one.uses if operators[use].phase != "optimizer"] for one in tensors]
        for tensors in (weights, gradients)
    )
    ready = max(use for uses in summed for use in uses)
    states = slow_state_bytes(profile, [unit])[unit]
    begins = [one.start + step * profile.step_seconds for step in range(2) for one in operators]

    def first_from(seconds: float) -> int:
        return next((index for index, begin in enumerate(begins) if begin >= seconds), 2 * count)

    end = operators[ready].end
    copied = end + COPY_SLACK * sum(one.nbytes for one in gradients) / machine.link_out
    read, write = machine.ssd
    written = copied + sum(one.nbytes // one.itemsize for one in weights) / machine.cpu_step_rate
    written += STAGING_SLACK * states / write
    last = min([count, *(one[0] for one in trained)])
    until = min(first_from(written), min(last, ready - 1) + count)
    until = max([until, ready + 1, min(count, first_from(copied)), *(one[-1] + 1 for one in trained)])
    first = first_from(end - STAGING_SLACK * states / read)
    return max(min(first, ready), until + 1 - count, 0), until


def slow_host_bytes(profile: LifetimeProfile, machine: MigrationMachine, plan: MigrationPlan) -> list[int]:
    """Returns the bytes in host memory while each operator waits and runs, from the uses of each tensor."""
    count = len(profile.operators)
    masters = slow_renewed(profile, plan.cpu_units)
    held = [
        (one.after + 1, one.before + 1, profile.tensors[one.tensor].nbytes)
        for one in plan.migrations
        if one.tier == "host" and one.tensor not in masters
    ]
    for unit in plan.cpu_units:
        gradients = []
        needed, ready = count, 0
        for index in profile.by_unit.get(unit, ()):
            tensor = profile.tensors[index]
            others = [use for use in tensor.uses if profile.operators[use].phase != "optimizer"]
            if index in masters:
                needed = min(needed, others[0])
            elif tensor.kind == "gradient" and others:
                gradients.append(tensor.nbytes)
                ready = max(ready, others[-1])
        first, until = 0, needed + count
        if unit in plan.staged_units and gradients:
            first, until = slow_window(profile, machine, unit)
            held.append((first, until + 1, slow_state_bytes(profile, [unit])[unit]))
        else:
            held.append((0, count, slow_state_bytes(profile, [unit])[unit]))
        # The optimizer reads gradients before the new weights are needed in the next step.
        held += [(ready + 1, min(until + 1, ready + 1 + count), nbytes) for nbytes in gradients]
    return slow_bytes(held, count)


def slow_with_room(
    profile: LifetimeProfile, machine: MigrationMachine, units: Sequence[str]
) -> tuple[list[str], list[frozenset[str]]]:
    """Returns the units, in order, that the CPU can step beside those before them, and those that are staged.

    As few units as possible are staged, in the order of `spread`.
    """
    found: list[str] = []
    staged = [frozenset[str]()]
    ranks = dict(zip(units, spread(len(units)), strict=True))
    for unit in units:
        among = [*found, unit]
        for least in range(len(units) + 1 if machine.drives else 1):
            chosen = frozenset(one for one in among if ranks[one] < least)
            if (
                max(slow_host_bytes(profile, machine, MigrationPlan((), frozenset(among), chosen)))
                <= machine.host_bytes
            ):
                found.append(unit)
                staged.append(chosen)
                break
    return found, staged


class SlowSearch:
    """The search of `plan_migrations`, which simulates each plan to its end, and Teraio's plan always."""

    def __init__(self, profile: LifetimeProfile, machine: MigrationMachine, min_bytes: int) -> None:
        self.profile, self.machine, self.min_bytes = profile, machine, min_bytes
        self.planner = EvictionPlanner(profile, machine, min_bytes)
        jobs = GPUSteps(profile, machine).without(frozenset(profile.by_unit)).jobs
        jobs.sort(key=lambda job: job.ready)
        self.units, self.staged = slow_with_room(profile, machine, [job.unit for job in jobs])
        self.cpu_seconds, free_at = [0.0], 0.0
        for job in (one for one in jobs if one.unit in self.units):
            arrived = profile.operators[job.ready].end + job.gradients / machine.link_out
            free_at = max(free_at, arrived) + job.parameters / machine.cpu_step_rate
            first = {index: before - len(profile.operators) for index, (_, before) in
                     slow_renewed(profile, [job.unit]).items()}  # fmt: skip
            self.cpu_seconds.append(self.cpu_seconds[-1])
            for use in first.values():
                nbytes = sum(profile.tensors[index].nbytes for index, other in first.items() if other <= use)
                late = free_at + nbytes / machine.link_in - profile.operators[use].start
                self.cpu_seconds[-1] = max(self.cpu_seconds[-1], late)
        self.choice: tuple[int, bool, float | None, float, bool, float] = (0, False, None, 1.0, False, IN_FLIGHT)
        self.best = self.simulate(*self.choice)

    def simulate(
        self, units: int, staged: bool, price: float | None, share: float, prefers_host: bool, in_flight: float
    ) -> tuple[MigrationPlan, MigrationPrediction]:
        recomputed: list[Period] = []
        if price is not None:
            periods = self.planner.recomputed(price)
            left = share * sum(one.nbytes for one in periods)
            for one in periods:
                if left > 0:
                    recomputed.append(one)
                left -= one.nbytes
        cpu_units = frozenset(self.units[:units])
        step = GPUSteps(self.profile, self.machine).without(cpu_units, cpu_units if staged else self.staged[units])
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
        found = [self.found()]
        teraio = plan_teraio(self.profile, self.machine, self.min_bytes)
        found.append((teraio, simulate_migrations(self.profile, self.machine, teraio)))
        if self.machine.drives and self.machine.host_bytes:
            found.append(SlowSearch(self.profile, replace(self.machine, drives=()), self.min_bytes).found())
        return min(found, key=lambda one: one[1].score)

    def found(self) -> tuple[MigrationPlan, MigrationPrediction]:
        hidden = max(n for n, seconds in enumerate(self.cpu_seconds) if seconds <= self.profile.step_seconds)
        is_better = self.attempt(hidden, *self.choice[1:])
        in_host = max(number for number, staged in enumerate(self.staged) if not staged)
        if in_host < hidden:
            is_better |= self.attempt(in_host, *self.choice[1:])
        self.improve(max(1, len(self.units) // (8 if is_better else 2)))
        return self.best

    def improve(self, amount: int) -> None:
        for price in PRICES:
            units, staged, chosen, *others = self.choice
            if not self.attempt(units, staged, price, *others) and chosen is not None:
                break
        while amount:
            units, *others = self.choice
            # The second number is relative to the choice of the first.
            if not self.attempt(units + amount, *others) and not self.attempt(units - amount, *others):
                amount //= 2
        for share in SHARES:
            units, staged, price, _, *others = self.choice
            if price is None or not self.attempt(units, staged, price, share, *others):
                break
        if self.machine.drives:
            *others, _, in_flight = self.choice
            self.attempt(*others, True, in_flight)
            units, _, *others = self.choice
            self.attempt(units, True, *others)
        if self.attempt(*self.choice[:-1], LESS_IN_FLIGHT):
            units, *others = self.choice
            self.attempt(units - 1, *others)
        for share in SHARES if self.choice[2] is None else ():
            units, staged, _, _, *others = self.choice
            self.attempt(units, staged, PRICES[0], share, *others)
