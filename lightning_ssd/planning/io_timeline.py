"""`IOTimeline`: the bytes that link and drives can carry while each operator of a step runs."""

from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from lightning_ssd.planning.migration import HOST, Direction, MigrationMachine, wrapped

CHUNK = 128
"""Operators whose room for a transfer is added up at first: most transfers need no more."""

WAYS: dict[Direction, int] = {"out": 1, "in": -1}
"""1 for offloads, which use room from their begin on, and -1 for prefetches, which use it from their end backwards."""

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
        self._machine = machine
        self._count = len(seconds)
        self._times: list[float] = []
        """Begin of each operator, for two steps, because periods reach into the next one."""
        self._links = self._no_bytes()
        self._drives = [self._no_bytes() for _ in machine.drives]
        """Bytes that the link, and each drive, can carry beside planned transfers while each operator runs."""
        self._rooms: dict[tuple[Direction, int], Floats] = {}
        """Bytes that both can carry, for two steps, by direction and drive."""
        self._free: dict[tuple[Direction, int], _FreeOperators] = {}
        """Operators that have room, by direction and drive."""
        tiers = range(HOST, len(machine.drives))
        self._rates = {tier: (machine.rate(tier, "out"), machine.rate(tier, "in")) for tier in tiers}
        """Bytes/s from the GPU, and to it, of each drive and of host memory."""
        self._add_time(np.array(seconds))

    def _no_bytes(self) -> dict[Direction, Floats]:
        return {"out": np.zeros(self._count), "in": np.zeros(self._count)}

    def lengthen(self, factor: float) -> None:
        """Multiplies the times of operators by `factor`. Planned transfers do not use the time that is added."""
        self._add_time((factor - 1) * self.seconds)

    def _add_time(self, seconds: Floats) -> None:
        self.seconds += seconds
        self._times = np.concatenate([[0.0], np.cumsum(np.tile(self.seconds, 2))]).tolist()
        self._links["out"] += self._machine.link_out * seconds
        self._links["in"] += self._machine.link_in * seconds
        for drive, (read, write) in zip(self._drives, self._machine.drives, strict=True):
            drive["out"] += write * seconds
            drive["in"] += read * seconds
        for direction, link in self._links.items():
            self._rooms[direction, HOST] = np.tile(link, 2)
            for number, drive in enumerate(self._drives):
                self._rooms[direction, number] = np.tile(np.minimum(link, drive[direction]), 2)
        self._free = {key: _FreeOperators(self._count, WAYS[key[0]]) for key in self._rooms}

    def transfer_seconds(self, size: float, drive: int) -> float:
        """Returns the seconds of offload and prefetch of `size` bytes, on an idle drive (or `HOST`) and link."""
        out, back = self._rates[drive]
        return size / out + size / back

    def lay(self, after: int, before: int, size: int, drive: int) -> tuple[tuple[int, int] | None, float]:
        """Finds room for an offload as early as possible, and for the prefetch as late as possible.

        Args:
            after: operator after which the offload begins.
            before: operator before which the prefetch ends, possibly one of the next step.
            size: bytes of the tensor.
            drive: number of the drive, or `HOST`.

        Returns:
            The range of operators without the tensor (None: there are none), and the larger factor by which earlier
            transfers make offload or prefetch take longer than on an idle machine.
        """
        first = self._reach("out", drive, after + 1, before, size)
        last = None if first is None else self._reach("in", drive, before - 1, after, size)
        if first is None or last is None:
            return None, inf
        start, stop = first + 1, last
        if start >= stop:
            return None, inf
        elapsed = self._times[start] - self._times[after + 1], self._times[before] - self._times[stop]
        # Transfers end with an operator: one operator more is no sign of saturation.
        slack = self.seconds.item((start - 1) % self._count), self.seconds.item(stop % self._count)
        out, back = self._rates[drive]
        return (start, stop), max((elapsed[0] - slack[0]) / (size / out), (elapsed[1] - slack[1]) / (size / back))

    def _reach(self, direction: Direction, drive: int, start: int, stop: int, size: int) -> int | None:
        """Returns the operator while which a transfer ends that begins with `start`, in the way of its direction.

        None: it does not end before `stop`.
        """
        way = WAYS[direction]
        room, free = self._rooms[direction, drive], self._free[direction, drive]
        done, count = 0.0, CHUNK
        while (stop - (start := free.first(start))) * way > 0:
            if done + room.item(start) >= size:
                return start
            end = start + way * min(count, abs(stop - start))
            total = _ordered(room, start, end).cumsum()
            most = done + total.item(-1)
            if most >= size:
                return start + way * int(total.searchsorted(size - done))
            done, start, count = most, end, 4 * count
        return None

    def carry(self, direction: Direction, drive: int, start: int, stop: int, size: float) -> None:
        """Plans a transfer: its bytes are no room for later ones.

        Args:
            direction: from the GPU, or to it.
            drive: number of the drive, or `HOST`.
            start: first operator whose room is used.
            stop: operator before which room is used, backwards in time for a prefetch.
            size: bytes.
        """
        way = WAYS[direction]
        start = self._free[direction, drive].first(start)
        if (stop - start) * way <= 0:
            return
        most, count = abs(stop - start), CHUNK
        while True:
            room = _ordered(self._rooms[direction, drive], start, start + way * min(count, most))
            total = room.cumsum()
            if total[-1] >= size or count >= most:
                break
            count *= 4
        used = min(len(room), int(total.searchsorted(size)) + 1)
        carried = room[:used].copy()
        if total[used - 1] > size:
            carried[-1] -= total[used - 1] - size
        low = start if way > 0 else start - used + 1
        carried = carried[::way]
        done = 0
        for first, last in wrapped(low, low + used, self._count):
            part = carried[done : done + last - first]
            link = self._links[direction][first:last]
            link -= part
            if drive != HOST:
                self._drives[drive][direction][first:last] -= part
            for other in range(HOST, len(self._drives)):
                rates = self._links if other == HOST else self._drives[other]
                left = np.minimum(link, rates[direction][first:last])
                rooms = self._rooms[direction, other]
                if other in (HOST, drive):  # operators without room on the link have none for any drive
                    self._exhaust(direction, other, first + np.flatnonzero((left <= 0) & (rooms[first:last] > 0)))
                for step in (0, self._count):
                    rooms[step + first : step + last] = left
            done += last - first

    def _exhaust(self, direction: Direction, drive: int, operators: NDArray[np.int64]) -> None:
        """Removes operators that have no room left on a drive, or on the link (`HOST`)."""
        for tier in range(HOST, len(self._drives)) if drive == HOST else (drive,):
            self._free[direction, tier].remove(operators.tolist())


class _FreeOperators:
    """The operators that have room for transfers, of two equal steps: finds the first one from an operator on.

    Args:
        count: operators of a step.
        way: 1 or -1, towards later or earlier operators.
    """

    def __init__(self, count: int, way: int) -> None:
        self._count = count
        self._way = way
        self._next = [*range(2 * count + 1), -1]  # the last entry is that of -1
        """Of each operator: itself if it has room, or another one on the way to the first that has (path halving)."""

    def first(self, operator: int) -> int:
        """Returns the first operator with room; -1 or the number of operators if there is none."""
        links = self._next
        while (following := links[operator]) != operator:
            links[operator] = operator = links[following]
        return operator

    def remove(self, operators: Sequence[int]) -> None:
        """Removes operators from both steps."""
        links, count, way = self._next, self._count, self._way
        for operator in operators:
            if links[operator] == operator:
                links[operator] = operator + way
            if links[operator + count] == operator + count:
                links[operator + count] = operator + count + way


def _ordered(values: Floats, start: int, stop: int) -> Floats:
    """Returns the values from `start` to before `stop`, backwards if `stop` is before `start`."""
    return values[start:stop] if start <= stop else values[stop + 1 : start + 1][::-1]
