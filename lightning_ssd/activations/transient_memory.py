"""Transient memory of one forward and backward: without weights, their gradients, and saved tensors."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from lightning_ssd.activations.unit_dispatch_mode import UnitCall

Interval = tuple[UnitCall, int | None]
"""Part of a unit call that begins, in forward, when a saved buffer is made, or, in backward, when it is first read; it
ends when the next one is made or read. The number is the buffer's; None: the part before the first buffer."""


class TransientMemory:
    """Records allocations and frees of storages, which are alive as long as their Python objects, or `outlive` says.

    A storage is named by the number of its buffer in the `ForwardGraph`. It may be freed on any thread; each event is
    one `append`, which is atomic.

    Attributes:
        largest: bytes of the largest allocation so far, saved tensors included.
    """

    def __init__(self) -> None:
        self.largest = 0
        self._events: list[tuple[UnitCall, bool, int, int | None]] = []
        """(unit call, whether in its backward, buffer, change of bytes; None: the backward reads the buffer)."""
        self._now = (UnitCall(0, 0), False)
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._saved_by: dict[int, UnitCall] = {}
        self._excluded: set[int] = set()

    def enter(self, unit_call: UnitCall, *, backward: bool) -> None:
        """Assigns the following events to this unit call."""
        self._now = (unit_call, backward)

    def alloc(self, storage: torch.UntypedStorage, buffer: int) -> None:
        """Records the allocation of a storage."""
        nbytes = storage.nbytes()
        self.largest = max(self.largest, nbytes)
        self._events.append((*self._now, buffer, nbytes))
        self._alive[buffer] = weakref.ref(storage, lambda _: self._free(buffer, nbytes))

    def mark_saved(self, unit_call: UnitCall, buffer: int) -> None:
        """Excludes a storage, which `unit_call` saves."""
        self._saved_by[buffer] = unit_call

    def outlive(self, buffer: int, owner: object) -> None:
        """Counts a storage as alive until its first `owner` is freed: in an ordinary call it would be."""
        storage = self._alive.get(buffer, lambda: None)()
        if isinstance(storage, torch.UntypedStorage):
            nbytes = storage.nbytes()
            self._alive[buffer] = weakref.ref(owner, lambda _: self._free(buffer, nbytes))

    def is_alive(self, buffer: int) -> bool:
        """Returns whether a storage counts as alive."""
        return buffer in self._alive

    def first_use(self, unit_call: UnitCall, buffer: int) -> None:
        """Records that the backward of `unit_call` reads the saved `buffer`."""
        self._events.append((unit_call, True, buffer, None))

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
        for unit_call, backward, buffer, nbytes in self._events:
            if nbytes is None:
                if buffer in needed:
                    continue
                needed[buffer] = now
                current[unit_call, backward] = buffer
            elif (saved_by := self._saved_by.get(buffer)) is not None:
                if nbytes < 0 or saved_by != unit_call:
                    continue
                current[unit_call, backward] = buffer
            elif buffer in self._excluded:
                continue
            else:
                now += nbytes
            interval = unit_call, current.get((unit_call, backward))
            most[backward][interval] = max(most[backward].get(interval, 0), now)
        return most[False], needed, most[True]

    def _free(self, buffer: int, nbytes: int) -> None:
        if self._alive.pop(buffer, None) is not None:
            self._events.append((*self._now, buffer, -nbytes))
