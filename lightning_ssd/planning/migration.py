"""Plans that migrate single tensors out of GPU memory and back within a step."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from lightning_ssd.planning.hardware import HardwareProfile
from lightning_ssd.planning.lifetimes import LifetimeProfile
from lightning_ssd.planning.validation import check_not_negative, check_positive

HOST = -1
"""Number that stands for host memory among the drives."""

Direction = Literal["out", "in"]


@dataclass(frozen=True)
class MigrationMachine:
    """Capacities and bandwidths of the memories between which tensors migrate.

    Attributes:
        gpu_bytes: capacity of the GPU.
        host_bytes: host memory for migrated tensors.
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
    def of(cls, hardware: HardwareProfile, drives: int = 1) -> "MigrationMachine":
        """Returns the machine of a profile, whose SSD bandwidth is that of `drives` equal drives together."""
        one = hardware.ssd_read / drives, hardware.ssd_write / drives
        return cls(
            hardware.gpu_bytes,
            hardware.host_bytes,
            hardware.copy_out_both,
            hardware.copy_in_both,
            (one,) * drives,
            hardware.cpu_step_rate,
        )

    def rate(self, drive: int, direction: Direction) -> float:
        """Returns the bytes/s between the GPU and a drive, or host memory (`HOST`), while nothing else migrates."""
        link = self.link_out if direction == "out" else self.link_in
        return link if drive == HOST else min(link, self.drives[drive][direction == "out"])


@dataclass(frozen=True)
class Migration:
    """A tensor that is out of GPU memory in an inactive period, or is dropped and recomputed.

    Operators are indices in the step; those of the next step are larger than the last index of this one.

    Attributes:
        tensor: index of the tensor in the profile.
        after: last operator that uses it before the period: its offload begins when that has ended.
        absent_from: operator at whose begin its GPU memory must be free.
        absent_until: operator at whose begin its prefetch may begin; its GPU memory is allocated from here on.
        before: operator that needs it.
        drive: number of the drive that stores it, or `HOST`; None: it is recomputed before `before`.
    """

    tensor: int
    after: int
    absent_from: int
    absent_until: int
    before: int
    drive: int | None


@dataclass(frozen=True)
class MigrationPlan:
    """Migrations of a step.

    Attributes:
        migrations: migrations, in the order in which they were chosen.
        cpu_units: units whose optimizer steps on the CPU: their states are in host memory, their gradients are
            offloaded when backward has computed them, and their new weights are copied to the GPU.
    """

    migrations: tuple[Migration, ...]
    cpu_units: frozenset[str] = frozenset()


def wrapped(start: int, stop: int, count: int) -> Iterator[tuple[int, int]]:
    """Yields the parts, within one step of `count` operators, of a range of operators that may reach the next step."""
    start, stop = start % count, stop - start + start % count
    if start < min(stop, count):
        yield start, min(stop, count)
    if stop > count:
        yield 0, min(stop - count, start)


class ByteChanges:
    """Changes of bytes over ranges of operators, which are added up once."""

    def __init__(self, count: int) -> None:
        self._changes = [0] * (count + 1)

    def add(self, start: int, stop: int, nbytes: int) -> None:
        """Changes the bytes while the operators from `start` to before `stop` run; operators as in `Migration`."""
        for first, last in wrapped(start, stop, len(self._changes) - 1):
            self._changes[first] += nbytes
            self._changes[last] -= nbytes

    def sums(self) -> list[int]:
        """Returns the bytes while each operator runs."""
        return list(accumulate(self._changes[:-1]))


@dataclass
class CPUStep:
    """The optimizer step of a unit on the CPU. Operators as in `Migration`.

    Attributes:
        unit: name of the unit.
        ready: the last operator of backward that uses the unit's gradients.
        absent_from: operator at whose begin the GPU memory of the gradients must be free.
        before: the next operator that uses the unit's weights.
        gradients: bytes that are offloaded.
        weights: bytes that are copied back.
        parameters: parameters that are stepped.
    """

    unit: str
    ready: int
    absent_from: int
    before: int
    gradients: int = 0
    weights: int = 0
    parameters: int = 0


class GPUStep:
    """A step without the units that the CPU steps: seconds of its operators, and bytes while each runs.

    Attributes:
        seconds: GPU seconds of each operator.
        nbytes: bytes of all tensors in GPU memory while each operator runs.
        host_bytes: optimizer states and gradients in host memory.
        jobs: optimizer steps on the CPU.
        absent: indices of tensors that are not migrated on their own.
    """

    def __init__(self, profile: LifetimeProfile, machine: MigrationMachine, cpu_units: frozenset[str]) -> None:
        self.seconds = [one.end - one.start for one in profile.operators]
        self.nbytes = list(profile.total)
        self.host_bytes = 0
        self.absent: set[int] = set()
        self.jobs: list[CPUStep] = []
        if cpu_units:
            changes = ByteChanges(len(profile.operators))
            self._move(profile, machine, cpu_units, changes)
            self.nbytes = [one + change for one, change in zip(self.nbytes, changes.sums(), strict=True)]

    def _move(
        self, profile: LifetimeProfile, machine: MigrationMachine, cpu_units: frozenset[str], changes: ByteChanges
    ) -> None:
        moved, whole = defaultdict[int, int](int), defaultdict[int, int](int)
        for unit, stepped in profile.optimizer_bytes.items():
            for use, nbytes in stepped.items():
                whole[use] += nbytes
                moved[use] += nbytes if unit in cpu_units else 0
        for use, nbytes in moved.items():
            self.seconds[use] *= 1 - nbytes / whole[use]
        for unit, members in profile.by_unit.items():
            if unit in cpu_units:
                self._move_unit(profile, machine, unit, members, changes)

    def _move_unit(
        self,
        profile: LifetimeProfile,
        machine: MigrationMachine,
        unit: str,
        members: Sequence[int],
        changes: ByteChanges,
    ) -> None:
        count = len(profile.operators)
        job = CPUStep(unit, ready=0, absent_from=0, before=count)
        stepped = profile.optimizer_bytes[unit]
        gradients = []
        for index in members:
            tensor = profile.tensors[index]
            uses = [use for use in tensor.uses if use not in stepped]
            if tensor.kind == "optimizer state":
                self.absent.add(index)
                self.host_bytes += tensor.nbytes
                changes.add(0, count, -tensor.nbytes)
            elif tensor.kind == "gradient" and uses:
                gradients.append(tensor)
                self.absent.add(index)
                job.ready = max(job.ready, uses[-1])
                job.gradients += tensor.nbytes
            elif tensor.kind == "weight" and 0 < len(uses) < len(tensor.uses):  # frozen weights are not stepped
                job.weights += tensor.nbytes
                job.parameters += tensor.nbytes // tensor.itemsize
                job.before = min(job.before, uses[0])
        self.host_bytes += job.gradients
        if not gradients:
            return
        # The copy has twice the time that it takes on an idle link, before an operator waits for it.
        done = profile.operators[job.ready].end + 2 * job.gradients / machine.link_out
        job.absent_from = max(job.ready + 1, bisect_left(profile.operators, done, key=lambda one: one.start))
        for tensor in gradients:
            last = count if tensor.freed is None else tensor.freed + 1
            changes.add(min(job.absent_from, last), last, -tensor.nbytes)
        self.jobs.append(job)
