"""Transient memory of one forward and backward: without weights, their gradients, and saved tensors."""

import weakref
from collections.abc import Mapping

import torch

from lightning_ssd.activations.unit_dispatch_mode import UnitCall
from lightning_ssd.storage_tags import TRANSIENT

Interval = tuple[UnitCall, int | None]
"""Part of a unit call that begins, in forward, when a saved buffer is made, or, in backward, when it is first read; it
ends when the next one is made or read. The number is the buffer's; None: the part before the first buffer."""


class TransientMemory:
    """Records allocations and frees of storages, which are alive as long as their Python objects.

    Storages may be freed on any thread; each event is one `append`, which is atomic.
    """

    def __init__(self) -> None:
        self._events: list[tuple[UnitCall, bool, int, int]] = []
        """(unit call, whether in its backward, number of the storage, change of bytes). The number of an event that a
        buffer is first read in backward is -1 - buffer."""
        self._now = (UnitCall(0, 0), False)
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._saved: dict[int, tuple[UnitCall, int]] = {}
        """The unit call that saves a storage, and the number of its buffer, by the storage's number."""
        self._excluded: set[int] = set()
        self._count = 0

    def enter(self, unit_call: UnitCall, *, backward: bool) -> None:
        """Assigns the following events to this unit call."""
        self._now = (unit_call, backward)

    def alloc(self, storage: torch.UntypedStorage) -> None:
        """Records the allocation of a storage, unless it is known already."""
        if (known := getattr(storage, TRANSIENT, None)) is not None and known[0] is self:
            return
        self._count += 1
        number, nbytes = self._count, storage.nbytes()
        setattr(storage, TRANSIENT, (self, number))
        self._events.append((*self._now, number, nbytes))
        self._alive[number] = weakref.ref(storage, lambda _: self._free(number, nbytes))

    def mark_saved(self, storage: torch.UntypedStorage, unit_call: UnitCall, buffer: int) -> None:
        """Excludes a storage, which `unit_call` saves as `buffer`."""
        known = getattr(storage, TRANSIENT, None)
        if known is not None and known[0] is self:
            self._saved[known[1]] = unit_call, buffer

    def first_use(self, unit_call: UnitCall, buffer: int) -> None:
        """Records that the backward of `unit_call` reads the saved `buffer`."""
        self._events.append((unit_call, True, -1 - buffer, 0))

    def close(self) -> None:
        """Ends the recording. Storages that are alive now are not transient, and are excluded."""
        self._excluded |= set(self._alive)
        self._alive.clear()

    def measure(self) -> tuple[Mapping[Interval, int], Mapping[int, int], Mapping[Interval, int]]:
        """Returns the peak bytes of each forward interval, the bytes when backward first reads each saved buffer, and
        the peak bytes of each backward interval."""
        most: dict[bool, dict[Interval, int]] = {False: {}, True: {}}
        current: dict[tuple[UnitCall, bool], int | None] = {}
        needed: dict[int, int] = {}
        now = 0
        for unit_call, backward, number, nbytes in self._events:
            if number < 0:
                if (buffer := -1 - number) in needed:
                    continue
                needed[buffer] = now
                current[unit_call, backward] = buffer
            elif number in self._saved:
                saved_by, buffer = self._saved[number]
                if nbytes < 0 or saved_by != unit_call:
                    continue
                current[unit_call, backward] = buffer
            elif number in self._excluded:
                continue
            else:
                now += nbytes
            interval = unit_call, current.get((unit_call, backward))
            most[backward][interval] = max(most[backward].get(interval, 0), now)
        return most[False], needed, most[True]

    def _free(self, number: int, nbytes: int) -> None:
        if self._alive.pop(number, None) is not None:
            self._events.append((*self._now, number, -nbytes))
