"""Memory of one forward and backward that neither weights, nor their gradients, nor what autograd saves take."""

import weakref
from collections.abc import Mapping

import torch

from lightning_ssd.activations.unit_dispatch_mode import UnitCall
from lightning_ssd.device.storage_tags import TRANSIENT

Interval = tuple[UnitCall, int | None]
"""Part of a visit: of its forward from when a saved buffer is made until the next one is, of its backward from when one
is wanted until the next one is; None: before the first."""


class TransientMemory:
    """What storages take while they live, which their Python objects do as long as they.

    Storages may die on any thread; each event is one `append`.
    """

    def __init__(self) -> None:
        self._events: list[tuple[UnitCall, bool, int, int]] = []
        """Visit, whether in its backward, number of the storage (of a buffer that is wanted: below 0), bytes."""
        self._now = (UnitCall(0, 0), False)
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._saved: dict[int, tuple[UnitCall, int]] = {}
        """Of storages that are saved, the visit that saves them and the number of the buffer."""
        self._left_out: set[int] = set()
        self._count = 0

    def at(self, visit: UnitCall, *, backward: bool) -> None:
        """What happens from here on belongs to this visit."""
        self._now = (visit, backward)

    def take(self, storage: torch.UntypedStorage) -> None:
        """A storage was made, unless it is known."""
        if (known := getattr(storage, TRANSIENT, None)) is not None and known[0] is self:
            return
        self._count += 1
        number, nbytes = self._count, storage.nbytes()
        setattr(storage, TRANSIENT, (self, number))
        self._events.append((*self._now, number, nbytes))
        self._alive[number] = weakref.ref(storage, lambda _: self._gone(number, nbytes))

    def save(self, storage: torch.UntypedStorage, visit: UnitCall, buffer: int) -> None:
        """A storage does not count: `visit` saves it, as `buffer`."""
        known = getattr(storage, TRANSIENT, None)
        if known is not None and known[0] is self:
            self._saved[known[1]] = visit, buffer

    def want(self, visit: UnitCall, buffer: int) -> None:
        """The backward of `visit` is given what it saved."""
        self._events.append((visit, True, -1 - buffer, 0))

    def close(self) -> None:
        """Nothing counts any more; what is alive now was there to stay, and did not count."""
        self._left_out |= set(self._alive)
        self._alive.clear()

    def measure(self) -> tuple[Mapping[Interval, int], Mapping[int, int], Mapping[Interval, int]]:
        """Returns bytes: the most in intervals of forward; when each buffer is wanted first; the most in backward."""
        most: dict[bool, dict[Interval, int]] = {False: {}, True: {}}
        current: dict[tuple[UnitCall, bool], int | None] = {}
        wanted: dict[int, int] = {}
        now = 0
        for visit, backward, number, nbytes in self._events:
            if number < 0:
                if (buffer := -1 - number) in wanted:
                    continue
                wanted[buffer] = now
                current[visit, backward] = buffer
            elif number in self._saved:
                saved_by, buffer = self._saved[number]
                if nbytes < 0 or saved_by != visit:
                    continue
                current[visit, backward] = buffer
            elif number in self._left_out:
                continue
            else:
                now += nbytes
            interval = visit, current.get((visit, backward))
            most[backward][interval] = max(most[backward].get(interval, 0), now)
        return most[False], wanted, most[True]

    def _gone(self, number: int, nbytes: int) -> None:
        if self._alive.pop(number, None) is not None:
            self._events.append((*self._now, number, -nbytes))
