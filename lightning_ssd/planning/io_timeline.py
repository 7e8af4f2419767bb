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
    """

    def __init__(self, machine: MigrationMachine, direction: Direction, count: int) -> None:
        self._count = count
        self._link_rate = machine.link_out if direction == "out" else machine.link_in
        self._ssd_rate = machine.ssd[direction == "out"]
        self._link: Floats = np.zeros(count)
        self._ssd: Floats = np.zeros(count)
        self._rooms: dict[OffloadTierName, Floats] = {tier: np.zeros(2 * count) for tier in OFFLOAD_TIERS}
        """By tier, bytes that the tier and the link can carry while each operator runs."""
        self._until: dict[OffloadTierName, Floats] = {}
        """By tier, sums of these bytes before each operator, since they have changed last."""

    def add_time(self, seconds: Floats) -> None:
        """Adds the room of `seconds` for each operator."""
        self._link += self._link_rate * seconds
        self._ssd += self._ssd_rate * seconds
        self._update(0, self._count)

    def reach(self, tier: OffloadTierName, start: int, stop: int, size: float) -> int | None:
        """Returns the operator while which a transfer ends that begins with `start`; None: not before `stop`."""
        if (until := self._until.get(tier)) is None:
            until = self._until[tier] = np.concatenate([[0.0], self._rooms[tier].cumsum()])
        last = start + int(until[start + 1 : stop + 1].searchsorted(until.item(start) + size))
        return last if last < stop else None

    def carry(self, tier: OffloadTierName, start: int, stop: int, size: float) -> None:
        """Uses the first room from `start` on and before `stop` for a transfer."""
        total = self._sums(tier, start, stop, size)
        used = min(len(total), int(total.searchsorted(size)) + 1)
        carried = np.diff(np.minimum(total[:used], size), prepend=0.0)
        done = 0
        for first, last in wrapped(start, start + used, self._count):
            part = carried[done : done + last - first]
            self._link[first:last] -= part
            if tier == "ssd":
                self._ssd[first:last] -= part
            self._update(first, last)
            done += last - first

    def _sums(self, tier: OffloadTierName, start: int, stop: int, size: float) -> Floats:
        """Returns the room of the operators from `start` up to each one, as far as a transfer needs it."""
        room, count = self._rooms[tier][start:stop], CHUNK
        while True:
            total: Floats = room[:count].cumsum()
            if count >= len(room) or total[-1] >= size:
                return total
            count *= 4

    def _update(self, first: int, last: int) -> None:
        """Updates the room of operators from `first` to before `last`, in both steps."""
        self._until.clear()
        link = np.maximum(0.0, self._link[first:last])  # differences of sums may be rounded below 0
        for tier, room in self._rooms.items():
            left = link if tier == "host" else np.minimum(link, np.maximum(0.0, self._ssd[first:last]))
            room.reshape(2, -1)[:, first:last] = left
