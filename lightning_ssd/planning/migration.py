"""Migrations of tensors out of GPU memory and back within a step, and the machine that makes them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_ssd.planning.hardware import HardwareProfile
from lightning_ssd.planning.validation import check_not_negative, check_positive
from lightning_ssd.types import OffloadTierName

Direction = Literal["out", "in"]

Bytes = NDArray[np.int64]


@dataclass(frozen=True)
class MigrationMachine:
    """Capacities and bandwidths of the memories between which tensors migrate.

    Tensors are striped over all drives, so that the drives are one tier of their joint bandwidth.

    Attributes:
        gpu_bytes: capacity of the GPU.
        host_bytes: host memory for migrated tensors.
        link_out: bytes/s from the GPU over PCIe, to host memory and drives together.
        link_in: bytes/s to the GPU over PCIe.
        ssd: (read, write) bytes/s of all drives together, which run at once; 0: there are no drives.
    """

    gpu_bytes: int
    host_bytes: int
    link_out: float
    link_in: float
    ssd: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        check_not_negative("gpu_bytes", self.gpu_bytes)
        check_not_negative("host_bytes", self.host_bytes)
        check_positive("link_out", self.link_out)
        check_positive("link_in", self.link_in)
        for rate in self.ssd:
            check_not_negative("ssd", rate)

    @classmethod
    def of(cls, hardware: HardwareProfile) -> "MigrationMachine":
        """Returns the machine of a profile, without drives if there is no space on SSDs."""
        return cls(
            hardware.gpu_bytes,
            hardware.host_bytes,
            hardware.copy_out_both,
            hardware.copy_in_both,
            (hardware.ssd_read, hardware.ssd_write) if hardware.ssd_bytes else (0.0, 0.0),
        )

    @property
    def tiers(self) -> tuple[OffloadTierName, ...]:
        """The tiers to which tensors migrate, whatever the capacity of host memory is."""
        return ("ssd", "host") if all(self.ssd) else ("host",)

    def rate(self, tier: OffloadTierName, direction: Direction) -> float:
        """Returns the bytes/s between the GPU and a tier while nothing else migrates."""
        link = self.link_out if direction == "out" else self.link_in
        return link if tier == "host" else min(link, self.ssd[direction == "out"])


class Migration(NamedTuple):
    """The absence of a tensor from GPU memory in an inactive period.

    Operators are indices in the step; those of the next step are larger than the last index of this one. An operator
    begins when it no longer waits. A tensor that migrates to host memory has room there from the end of `after` until
    `before` has ended, because `before` may wait for its prefetch.

    Attributes:
        tensor: index of the tensor.
        after: last operator that uses it before the period: its offload begins when that has ended.
        absent_from: operator at whose begin its GPU memory must be free.
        absent_until: operator at whose begin its prefetch may begin; its GPU memory is allocated from here on.
        before: operator that needs it.
        tier: memory that stores it.
    """

    tensor: int
    after: int
    absent_from: int
    absent_until: int
    before: int
    tier: OffloadTierName


class MigrationPeriod(NamedTuple):
    """An inactive period of a tensor that may migrate. Operators as in `Migration`.

    Attributes:
        tensor: index of the tensor.
        nbytes: bytes.
        after: last operator that uses the tensor before the period.
        before: operator that needs it.
    """

    tensor: int
    nbytes: int
    after: int
    before: int


@dataclass(frozen=True)
class StepMemory:
    """A step that repeats, and the tensors that are in GPU memory if nothing migrates.

    Attributes:
        seconds: seconds of each operator.
        nbytes: bytes of all tensors while each operator runs.
        candidates: inactive periods of the tensors that may migrate.
    """

    seconds: Sequence[float]
    nbytes: Bytes
    candidates: Sequence[MigrationPeriod]


def inactive_periods(uses: Sequence[int], count: int, *, is_global: bool) -> Iterator[tuple[int, int]]:
    """Yields the operator before, and after, each period in which no operator uses a tensor; as in `Migration`.

    Args:
        uses: operators that use the tensor, in order.
        count: operators of a step.
        is_global: whether the tensor exists in every step from begin to end: its last period ends in the next step.
    """
    for after, before in pairwise(uses):
        if before > after + 1:
            yield after, before
    if is_global and uses and count > 1:
        yield uses[-1], uses[0] + count


def wrapped(start: int, stop: int, count: int) -> Iterator[tuple[int, int]]:
    """Yields the parts, within one step of `count` operators, of a range of operators that may reach the next step."""
    start, stop = start % count, stop - start + start % count
    if start < min(stop, count):
        yield start, min(stop, count)
    if stop > count:
        yield 0, min(stop - count, start)


def sum_ranges(starts: ArrayLike, stops: ArrayLike, nbytes: ArrayLike, count: int) -> Bytes:
    """Returns the bytes of all ranges while each operator runs; operators as in `Migration`.

    Args:
        starts: first operator of each range.
        stops: operator after the last one of each range, at most `count` after its start.
        nbytes: bytes of each range.
        count: operators of a step.
    """
    starts, stops, nbytes = (np.array(one, np.int64, ndmin=1) for one in (starts, stops, nbytes))
    changes: Bytes = np.zeros(count + 1, np.int64)
    first = starts % count
    last = first + stops - starts
    np.add.at(changes, first, nbytes)
    np.subtract.at(changes, np.minimum(last, count), nbytes)
    wraps = last > count
    changes[0] += nbytes[wraps].sum()
    np.subtract.at(changes, np.minimum(last - count, first)[wraps], nbytes[wraps])
    return changes[:-1].cumsum()
