"""`IOTimeline`: the bytes that link and drives can carry while each operator of a step runs."""

from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from lightning_ssd.planning.migration import Direction, MigrationMachine, wrapped
from lightning_ssd.types import OFFLOAD_TIERS, OffloadTierName

CHUNK = 128
"""Operators whose room for a transfer is summed first: most transfers need no more."""

ROUNDING = 1e-9
"""Relative difference below which sums of seconds are equal: it is larger than their rounding errors."""

Floats = NDArray[np.float64]


class IOTimeline:
    """Room for transfers beside those that are planned, over the operators of one step that repeats.

    Args:
        machine: the machine.
        seconds: GPU seconds of each operator.

    Attributes:
        seconds: seconds of each operator, with the time by which the step was lengthened.
    """

    def __init__(self, machine: MigrationMachine, seconds: Sequence[float]) -> None:
        self.seconds: Floats = np.zeros(len(seconds))
        self._count = len(seconds)
        self._times: list[float] = []
        """Begin of each operator, for two steps, because periods reach into the next one."""
        self._out, self._into = _Room(machine, "out", len(seconds)), _Room(machine, "in", len(seconds))
        """Room for offloads by operator, and for prefetches, which use it from their end on, backwards in time."""
        self._rates = {tier: (machine.rate(tier, "out"), machine.rate(tier, "in")) for tier in machine.tiers}
        """Bytes/s from the GPU, and to it, of each tier."""
        self._add_time(np.array(seconds))

    def lengthen(self, factor: float) -> None:
        """Multiplies the times of operators by `factor`. Planned transfers do not use the time that is added."""
        self._add_time((factor - 1) * self.seconds)

    def _add_time(self, seconds: Floats) -> None:
        self.seconds += seconds
        self._times = np.concatenate([[0.0], np.cumsum(np.tile(self.seconds, 2))]).tolist()
        self._out.add_time(seconds)
        self._into.add_time(seconds[::-1])

    def transfer_seconds(self, size: float, tier: OffloadTierName) -> float:
        """Returns the seconds of offload and prefetch of `size` bytes on an idle machine."""
        out, back = self._rates[tier]
        return size / out + size / back

    def lay(self, after: int, before: int, size: int, tier: OffloadTierName) -> tuple[tuple[int, int] | None, float]:
        """Finds room for an offload as early as possible, and for the prefetch as late as possible.

        Args:
            after: operator after which the offload begins.
            before: operator before which the prefetch ends, possibly one of the next step.
            size: bytes of the tensor.
            tier: tier of the tensor.

        Returns:
            The range of operators without the tensor (None: there are none), and the larger factor by which earlier
            transfers make offload or prefetch take longer than on an idle machine.
        """
        times, count = self._times, self._count
        out, back = self._rates[tier]
        alone = size / out, size / back
        if times[before] - times[after + 1] < (1 - ROUNDING) * (alone[0] + alone[1]):
            return None, inf
        first = self._out.reach(tier, after + 1, before, size)
        last = None if first is None else self._into.reach(tier, 2 * count - before, 2 * count - 1 - after, size)
        if first is None or last is None:
            return None, inf
        start, stop = first + 1, 2 * count - 1 - last
        if start >= stop:
            return None, inf
        # Transfers end with an operator: one operator more is no sign of saturation.
        slack = self.seconds.item((start - 1) % count), self.seconds.item(stop % count)
        offload, prefetch = times[start] - times[after + 1] - slack[0], times[before] - times[stop] - slack[1]
        return (start, stop), max(offload / alone[0], prefetch / alone[1])

    def carry(self, after: int, before: int, size: float, tier: OffloadTierName, *, in_time: bool) -> None:
        """Plans the transfers of a migration: their bytes are no room for later ones.

        Args:
            after: operator after which the offload begins.
            before: operator before which the prefetch ends, possibly one of the next step.
            size: bytes of the tensor.
            tier: tier of the tensor.
            in_time: whether the offload ends before the operator `before`.
        """
        count = self._count
        self._out.carry(tier, after + 1, before if in_time else count + after, size)
        self._into.carry(tier, 2 * count - before, 2 * count - 1 - after, size)


class _Room:
    """Bytes that link and drives can carry in one direction beside planned transfers, while each operator runs.

    Operators are numbered in the direction in which transfers use their room, over two equal steps. Transfers of drives
    use the room of both, those of host memory the link alone: the room of host memory itself is unlimited.

    Args:
        machine: the machine.
        direction: from the GPU, or to it.
        count: operators of a step.
    """

    def __init__(self, machine: MigrationMachine, direction: Direction, count: int) -> None:
        self._count = count
        self._link_rate = machine.link_out if direction == "out" else machine.link_in
        self._ssd_rate = machine.ssd[direction == "out"]
        self._link: Floats = np.zeros(count)
        self._tiers: Floats = np.full((len(OFFLOAD_TIERS), count), inf)
        """Bytes that each of `OFFLOAD_TIERS` can carry."""
        self._ssd = self._tiers[OFFLOAD_TIERS.index("ssd")]
        self._ssd[:] = 0.0
        self._both: Floats = np.zeros((len(OFFLOAD_TIERS), 2, count))
        """Bytes that a tier and the link can carry, for two steps."""
        self._rooms: dict[OffloadTierName, Floats] = dict(
            zip(OFFLOAD_TIERS, self._both.reshape(len(OFFLOAD_TIERS), 2 * count), strict=True)
        )
        """The same memory, by tier."""
        self._free = np.zeros((len(OFFLOAD_TIERS), 2 * count + 1), np.int64)
        """For each tier and operator, an operator up to the next one with room; itself if it has room."""
        self._free_by_tier = dict(zip(OFFLOAD_TIERS, self._free, strict=True))

    def add_time(self, seconds: Floats) -> None:
        """Adds the room of `seconds` for each operator."""
        self._link += self._link_rate * seconds
        self._ssd += self._ssd_rate * seconds
        np.minimum(self._link, self._tiers[:, None], out=self._both)
        self._free[:] = np.arange(2 * self._count + 1)

    def _first(self, tier: OffloadTierName, operator: int) -> int:
        """Returns the first operator with room for transfers of a tier, from `operator` on; the last one: none has."""
        free = self._free_by_tier[tier]
        while (following := free.item(operator)) != operator:
            free[operator] = operator = free.item(following)  # path halving
        return operator

    def reach(self, tier: OffloadTierName, start: int, stop: int, size: float) -> int | None:
        """Returns the operator while which a transfer ends that begins with `start`; None: not before `stop`."""
        room = self._rooms[tier]
        done, count = 0.0, CHUNK
        while (start := self._first(tier, start)) < stop:
            if done + room.item(start) >= size:
                return start
            total = room[start : min(start + count, stop)].cumsum()
            most = done + total.item(-1)
            if most >= size:
                return start + int(total.searchsorted(size - done))
            done, start, count = most, min(start + count, stop), 4 * count
        return None

    def carry(self, tier: OffloadTierName, start: int, stop: int, size: float) -> None:
        """Uses the first room from `start` on and before `stop` for a transfer."""
        start = self._first(tier, start)
        if start >= stop:
            return
        most, count = stop - start, CHUNK
        while True:
            room = self._rooms[tier][start : start + min(count, most)]
            total = room.cumsum()
            if total[-1] >= size or count >= most:
                break
            count *= 4
        used = min(len(room), int(total.searchsorted(size)) + 1)
        carried = room[:used].copy()
        if total[used - 1] > size:
            carried[-1] -= total[used - 1] - size
        done = 0
        for first, last in wrapped(start, start + used, self._count):
            part = carried[done : done + last - first]
            self._link[first:last] -= part
            if tier == "ssd":
                self._ssd[first:last] -= part
            left = np.minimum(self._link[first:last], self._tiers[:, first:last])
            self._both[:, :, first:last] = left[:, None]
            with_room = np.where(left > 0, np.arange(first, last), last)
            following = np.minimum.accumulate(with_room[:, ::-1], axis=1)[:, ::-1]
            self._free[:, first:last] = following
            self._free[:, self._count + first : self._count + last] = self._count + following
            done += last - first
