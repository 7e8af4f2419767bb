"""Plans that migrate single tensors out of GPU memory and back within a step."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_ssd.planning.hardware import HardwareProfile
from lightning_ssd.planning.lifetimes import LifetimeProfile
from lightning_ssd.planning.validation import check_not_negative, check_positive
from lightning_ssd.types import OffloadTierName

COPY_SLACK, STAGING_SLACK = 2.0, 1.5
"""Planned time / time on an idle machine, of the copies of gradients, and of the transfers of staged states."""

Direction = Literal["out", "in"]

Bytes = NDArray[np.int64]


@dataclass(frozen=True)
class MigrationMachine:
    """Capacities and bandwidths of the memories between which tensors migrate.

    Tensors are striped over all drives, as `BlobStore` stripes them, so that the drives are one tier of their joint
    bandwidth.

    Attributes:
        gpu_bytes: capacity of the GPU.
        host_bytes: host memory for migrated tensors and for optimizer steps on the CPU.
        link_out: bytes/s from the GPU over PCIe, to host memory and drives together.
        link_in: bytes/s to the GPU over PCIe.
        drives: (read, write) bytes/s of each drive. Both directions run at once.
        cpu_step_rate: parameters/s of the optimizer on the CPU.
    """

    gpu_bytes: int
    host_bytes: int
    link_out: float
    link_in: float
    drives: tuple[tuple[float, float], ...]
    cpu_step_rate: float = 1e9

    def __post_init__(self) -> None:
        check_not_negative("gpu_bytes", self.gpu_bytes)
        check_not_negative("host_bytes", self.host_bytes)
        for name in ("link_out", "link_in", "cpu_step_rate"):
            check_positive(name, getattr(self, name))
        for read, write in self.drives:
            check_positive("read", read)
            check_positive("write", write)

    @classmethod
    def of(cls, hardware: HardwareProfile) -> "MigrationMachine":
        """Returns the machine of a profile, with one drive that has the bandwidth of all SSDs together, if any."""
        drive = (hardware.ssd_read, hardware.ssd_write)
        return cls(
            hardware.gpu_bytes,
            hardware.host_bytes,
            hardware.copy_out_both,
            hardware.copy_in_both,
            (drive,) if hardware.ssd_bytes else (),
            hardware.cpu_step_rate,
        )

    @property
    def tiers(self) -> tuple[OffloadTierName, ...]:
        """The tiers to which tensors migrate, whatever the capacity of host memory is."""
        return ("ssd", "host") if self.drives else ("host",)

    @cached_property
    def ssd(self) -> tuple[float, float]:
        """(read, write) bytes/s of all drives together; 0: there are none.

        The bytes of a drive are in proportion to its bandwidth with equal bytes read and written (`Calibration.weights`
        of the storage), so that unequal drives have less bandwidth than the sum if their ratios of both rates differ.
        """
        weights = [2 / (1 / read + 1 / write) for read, write in self.drives]
        read, write = (
            min(
                (drive[way] * (sum(weights) / weight) for drive, weight in zip(self.drives, weights, strict=True)),
                default=0.0,
            )
            for way in range(2)
        )
        return read, write

    def rate(self, tier: OffloadTierName, direction: Direction) -> float:
        """Returns the bytes/s between the GPU and a tier while nothing else migrates."""
        link = self.link_out if direction == "out" else self.link_in
        return link if tier == "host" else min(link, self.ssd[direction == "out"])


class Migration(NamedTuple):
    """A tensor that is out of GPU memory in an inactive period, or is dropped and recomputed.

    Operators are indices in the step; those of the next step are larger than the last index of this one. An operator
    begins when it no longer waits. A tensor that migrates to host memory has room there from the end of `after` until
    `before` has ended, because `before` may wait for its prefetch. Weights with masters (`MigrationPlan.cpu_units`) are
    not offloaded: their GPU memory is freed when `after` has ended.

    Attributes:
        tensor: index of the tensor in the profile.
        after: last operator that uses it before the period: its offload begins when that has ended.
        absent_from: operator at whose begin its GPU memory must be free.
        absent_until: operator at whose begin its prefetch may begin; its GPU memory is allocated from here on.
        before: operator that needs it.
        tier: memory that stores it; None: it is recomputed before `before`.
    """

    tensor: int
    after: int
    absent_from: int
    absent_until: int
    before: int
    tier: OffloadTierName | None


@dataclass(frozen=True)
class MigrationPlan:
    """Migrations of a step.

    Attributes:
        migrations: migrations, in the order in which they were chosen.
        cpu_units: units whose optimizer steps on the CPU. Their optimizer states and master weights are always in host
            memory, but for `staged_units`. Their gradients are offloaded to host memory when backward has computed
            them, and are there until the next operator that uses the unit's weights, for which the new weights are
            copied to the GPU. A migration of such a weight drops the copy on the GPU, and has the tier of the masters.
        staged_units: those of `cpu_units` whose optimizer states and master weights are on drives. They are read into
            host memory before the step, and written after it: gradients are in host memory until then. New weights
            are copied from host memory by then, or read from drives later.
    """

    migrations: tuple[Migration, ...]
    cpu_units: frozenset[str] = frozenset()
    staged_units: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not self.staged_units <= self.cpu_units:
            names = ", ".join(sorted(self.staged_units - self.cpu_units))
            raise ValueError(f"`staged_units` has units that are not in `cpu_units`: {names}. Add them there.")


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


def wrapped(start: int, stop: int, count: int) -> Iterator[tuple[int, int]]:
    """Yields the parts, within one step of `count` operators, of a range of operators that may reach the next step."""
    start, stop = start % count, stop - start + start % count
    if start < min(stop, count):
        yield start, min(stop, count)
    if stop > count:
        yield 0, min(stop - count, start)


def spread(count: int) -> list[int]:
    """Returns the ranks of `count` numbers, of which the first ones, however many, are at about equal distances."""
    width = max(1, (count - 1).bit_length())
    order = sorted(range(count), key=lambda number: int(f"{number:0{width}b}"[::-1], 2))
    ranks = [0] * count
    for rank, number in enumerate(order):
        ranks[number] = rank
    return ranks


class ByteChanges:
    """Changes of bytes over ranges of operators, which are added up once."""

    def __init__(self, count: int) -> None:
        self._changes: Bytes = np.zeros(count + 1, np.int64)

    def add(self, starts: ArrayLike, stops: ArrayLike, nbytes: ArrayLike) -> None:
        """Changes the bytes while the operators from each start to before its stop run; operators as in `Migration`."""
        starts, stops, nbytes = (np.array(one, np.int64, ndmin=1) for one in (starts, stops, nbytes))
        count = len(self._changes) - 1
        first = starts % count
        last = first + stops - starts
        np.add.at(self._changes, first, nbytes)
        np.subtract.at(self._changes, np.minimum(last, count), nbytes)
        wraps = last > count
        self._changes[0] += nbytes[wraps].sum()
        np.subtract.at(self._changes, np.minimum(last - count, first)[wraps], nbytes[wraps])

    def sums(self) -> Bytes:
        """Returns the bytes while each operator runs."""
        return self._changes[:-1].cumsum()


@dataclass
class CPUStep:
    """The optimizer step of a unit on the CPU. Operators as in `Migration`.

    Attributes:
        unit: name of the unit.
        ready: the last operator of backward that uses the unit's gradients.
        absent_from: operator at whose begin the GPU memory of the gradients must be free.
        before: the next operator that uses the unit's weights.
        until: operator that waits for the step: at its begin the new weights are on the GPU, unless they are copied
            later, and when it has begun, host memory has no more gradients and staged states of the unit.
        gradients: bytes that are offloaded.
        weights: the weights that are copied back, each with the period in which the GPU uses neither old nor new ones.
        parameters: parameters that are stepped.
        staged: bytes of master weights and optimizer states that are read from drives before the step, until the
            operator after `ready`, and written after it, until `until`; 0: they are always in host memory.
        staged_from: operator with which they begin to be read.
    """

    unit: str
    ready: int
    absent_from: int
    before: int
    until: int
    gradients: int = 0
    weights: list[Period] = field(default_factory=list)
    parameters: int = 0
    staged: int = 0
    staged_from: int = 0


@dataclass
class GPUStep:
    """A step without the units that the CPU steps: seconds of its operators, and bytes while each runs.

    Attributes:
        seconds: GPU seconds of each operator.
        nbytes: bytes of all tensors in GPU memory while each operator runs.
        cpu_units: units that the CPU steps.
        host_bytes: bytes in host memory for CPU steps while each operator waits and runs.
        jobs: optimizer steps on the CPU.
        absent: indices of tensors that are never migrated: gradients and optimizer states of the units that the CPU
            steps.
        kept: (tensor, `after`) of periods in which a weight that the CPU steps is not migrated, as in `Migration`.
        with_masters: indices of the weights that have masters in host memory or on drives: they need no offload.
        staged: the steps of the weights whose masters are on drives, by index.
    """

    seconds: list[float]
    nbytes: Bytes
    cpu_units: frozenset[str]
    staged_units: frozenset[str]
    host_bytes: Bytes
    jobs: list[CPUStep] = field(default_factory=list)
    absent: set[int] = field(default_factory=set)
    kept: set[tuple[int, int]] = field(default_factory=set)
    with_masters: set[int] = field(default_factory=set)
    staged: dict[int, CPUStep] = field(default_factory=dict)

    def tier_of_master(self, tensor: int, after: int, absent_until: int) -> OffloadTierName:
        """Returns the tier from which a weight with masters is copied; arguments as in `Migration`.

        Staged masters are in host memory when the CPU has stepped them, until they are written.
        """
        job = self.staged.get(tensor)
        if job is None:
            return "host"
        is_new = any((one.tensor, one.after) == (tensor, after) for one in job.weights)
        return "host" if is_new and absent_until <= job.until else "ssd"

    @property
    def renewed(self) -> list[Period]:
        """Weights that the CPU steps, each with its period from the last use in backward until the next forward."""
        return [one for job in self.jobs for one in job.weights]


class GPUSteps:
    """The steps of a profile in which the CPU steps some units, or none.

    Args:
        profile: lifetimes of all tensors.
        machine: the machine.
    """

    def __init__(self, profile: LifetimeProfile, machine: MigrationMachine) -> None:
        self._profile = profile
        self._machine = machine
        self._seconds = profile.operator_seconds
        self._nbytes: Bytes = np.array(profile.total, np.int64)
        self._optimizer_bytes = defaultdict[int, int](int)
        """Bytes of the tensors of all units that an operator of the optimizer uses."""
        for uses in profile.optimizer_bytes.values():
            for use, nbytes in uses.items():
                self._optimizer_bytes[use] += nbytes
        self._moved: dict[tuple[str, bool], _MovedUnit] = {}
        """Units that the CPU steps in any step so far, and whether their states are staged."""

    def without(self, cpu_units: frozenset[str] = frozenset(), staged_units: frozenset[str] = frozenset()) -> GPUStep:
        """Returns the step in which the CPU steps `cpu_units`; arguments as in `MigrationPlan`."""
        if staged_units and not self._machine.drives:
            raise ValueError("`staged_units` has units, and the machine has no `drives` for their states. Give one.")
        count = len(self._seconds)
        in_memory: Bytes = np.zeros(count, np.int64)
        step = GPUStep(self._seconds.copy(), self._nbytes.copy(), cpu_units, staged_units, in_memory)
        stepped = defaultdict[int, int](int)
        freed: list[tuple[int, int, int]] = []
        in_host: list[tuple[int, int, int]] = []
        for unit in self._profile.by_unit if cpu_units else ():
            if unit not in cpu_units:
                continue
            moved = self._unit(unit, is_staged=unit in staged_units)
            for use, nbytes in self._profile.optimizer_bytes[unit].items():
                stepped[use] += nbytes
            freed += moved.freed
            in_host += moved.in_host
            step.absent.update(moved.absent)
            step.kept.update(moved.kept)
            if moved.job is not None:
                step.jobs.append(moved.job)
                weights = [one.tensor for one in moved.job.weights]
                step.with_masters.update(weights)
                if moved.job.staged:
                    step.staged.update(dict.fromkeys(weights, moved.job))
        for use, nbytes in stepped.items():
            if nbytes:  # tensors of empty parameters have none
                step.seconds[use] *= 1 - nbytes / self._optimizer_bytes[use]
        for nbytes_of, changed, sign in ((step.nbytes, freed, -1), (step.host_bytes, in_host, 1)):
            if changed:
                changes = ByteChanges(count)
                changes.add(*zip(*changed, strict=True))
                nbytes_of += sign * changes.sums()
        return step

    def with_room(self, units: Sequence[str]) -> tuple[list[str], list[frozenset[str]]]:
        """Returns the units that the CPU may step, in order, and those of them whose states have to be staged.

        Host memory has room for the CPU steps of the first units, whatever their number, if the states of the units are
        staged that the second list has at this index: as few as possible, at equal distances. Units that have no room
        beside those before are left out.
        """
        found: list[str] = []
        staged = [frozenset[str]()]
        in_host: Bytes = np.zeros(len(self._seconds), np.int64)
        ranks = spread(len(units))
        ranked = [unit for _, unit in sorted(zip(ranks, units, strict=True))]
        rank_of = dict(zip(units, ranks, strict=True))
        least = 0  # rank of the first unit whose states stay in host memory
        for unit in units:
            among = {*found, unit}
            host_bytes = in_host + self._host_bytes(unit, is_staged=rank_of[unit] < least)
            following = least
            while host_bytes.max() > self._machine.host_bytes and following < len(units) and self._machine.drives:
                if (one := ranked[following]) in among:
                    host_bytes += self._host_bytes(one, is_staged=True) - self._host_bytes(one, is_staged=False)
                following += 1
            if host_bytes.max() <= self._machine.host_bytes:
                found.append(unit)
                least, in_host = following, host_bytes
                staged.append(frozenset(one for one in found if rank_of[one] < least))
        return found, staged

    def _host_bytes(self, unit: str, *, is_staged: bool) -> Bytes:
        changes = ByteChanges(len(self._seconds))
        changes.add(*zip(*self._unit(unit, is_staged=is_staged).in_host, strict=True))
        return changes.sums()

    def _unit(self, unit: str, *, is_staged: bool) -> "_MovedUnit":
        key = unit, is_staged
        if key not in self._moved:
            self._moved[key] = self._move(unit, is_staged=is_staged)
        return self._moved[key]

    def _move(self, unit: str, *, is_staged: bool) -> "_MovedUnit":
        profile = self._profile
        count = len(profile.operators)
        job = CPUStep(unit, ready=0, absent_from=0, before=count, until=count)
        stepped = profile.optimizer_bytes[unit]
        moved = _MovedUnit()
        gradients = []
        state_bytes = 0
        for index in profile.by_unit[unit]:
            tensor = profile.tensors[index]
            uses = [use for use in tensor.uses if use not in stepped]
            if tensor.kind == "optimizer state":
                moved.absent.append(index)
                state_bytes += tensor.nbytes
                moved.freed.append((0, count, tensor.nbytes))
            elif tensor.kind == "gradient" and uses:
                gradients.append(tensor)
                moved.absent.append(index)
                job.ready = max(job.ready, uses[-1])
                job.gradients += tensor.nbytes
            elif tensor.kind == "weight" and 0 < len(uses) < len(tensor.uses):  # frozen weights are not stepped
                after, before = uses[-1], uses[0]
                seconds = profile.step_seconds - profile.operators[after].end + profile.operators[before].start
                last = before + (count if after + 1 < count else 0)
                job.weights.append(Period(index, tensor.nbytes, after, before + count, seconds, last))
                job.parameters += tensor.nbytes // tensor.itemsize
                job.before = min(job.before, uses[0])
        state_bytes += sum(one.nbytes for one in job.weights)
        for one in job.weights:
            # Backward uses the weights that the masters are before the CPU steps them.
            uses = [*profile.tensors[one.tensor].uses, one.before]
            moved.kept += [
                (one.tensor, use) for use, following in pairwise(uses) if use >= one.after or following > job.ready
            ]
        if not gradients:
            moved.in_host.append((0, count, state_bytes))
            return moved
        moved.job = job
        job.until = job.before + count
        # The copy has more time than it takes on an idle link, before an operator waits for it.
        end = profile.operators[job.ready].end
        copied = end + COPY_SLACK * job.gradients / self._machine.link_out
        job.absent_from = min(count, max(job.ready + 1, self._first_from(copied)))
        if is_staged:
            self._stage(job, state_bytes, copied)
            moved.in_host.append((job.staged_from, job.until + 1, state_bytes))
        else:
            moved.in_host.append((0, count, state_bytes))
        held_until = min(job.until + 1, job.ready + 1 + count)
        moved.in_host.append((job.ready + 1, held_until, job.gradients))
        for tensor in gradients:
            last = count if tensor.freed is None else tensor.freed + 1
            moved.freed.append((min(job.absent_from, last), last, tensor.nbytes))
        return moved

    def _stage(self, job: CPUStep, nbytes: int, copied: float) -> None:
        """Stages the states of a CPU step. Its transfers have more time than they take on idle drives.

        Args:
            job: the step.
            nbytes: bytes of states and master weights.
            copied: when the gradients are in host memory.
        """
        count = len(self._seconds)
        read, write = self._machine.ssd
        job.staged = nbytes
        begin = self._profile.operators[job.ready].end - STAGING_SLACK * nbytes / read
        written = copied + job.parameters / self._machine.cpu_step_rate + STAGING_SLACK * nbytes / write
        # All of it ends before the states are read for the next step, and when backward has used the weights.
        latest = min(job.before, job.ready - 1) + count
        used = max((one.after + 1 for one in job.weights), default=0)
        job.until = max(job.absent_from, used, min(self._first_from(written), latest))
        job.staged_from = max(0, min(job.ready, self._first_from(begin)), job.until + 1 - count)

    def _first_from(self, seconds: float) -> int:
        """Returns the first operator that begins at a time, or later, in a step without waits; as in `Migration`."""
        operators = self._profile.operators
        found = bisect_left(operators, seconds, key=lambda one: one.start)
        if found < len(operators):
            return found
        in_next = bisect_left(operators, seconds - self._profile.step_seconds, key=lambda one: one.start)
        return len(operators) + in_next


@dataclass
class _MovedUnit:
    """A unit that the CPU steps.

    Attributes:
        job: its optimizer step on the CPU; None: no gradient is computed.
        absent: as in `GPUStep`.
        kept: as in `GPUStep`.
        in_host: (start, stop, bytes) in host memory.
        freed: (start, stop, bytes) of tensors that are not in GPU memory; operators as in `Migration`.
    """

    job: CPUStep | None = None
    absent: list[int] = field(default_factory=list)
    kept: list[tuple[int, int]] = field(default_factory=list)
    in_host: list[tuple[int, int, int]] = field(default_factory=list)
    freed: list[tuple[int, int, int]] = field(default_factory=list)
