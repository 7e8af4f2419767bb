"""The pinned pool: host buffers under one declared budget, with waiting instead of growth."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch

from lightning_ssd.sizes import format_bytes_exactly
from lightning_ssd.storage.errors import StorageError
from lightning_ssd.storage.slab import Slab
from lightning_ssd.storage.slots import PAGE, SlotAllocator, align_down, align_up

__all__ = ["PinnedBuffer", "PinnedPool"]


class PinnedPool:
    """Page-aligned host buffers of exact sizes, never more than `budget` bytes of them.

    Requests are served in the order in which they began to wait, so a large one is not starved by small ones:
    while somebody waits, nobody else takes memory. A request within the budget is served at the latest when
    every buffer is back, because empty slabs make room for a larger one.

    Thread-safe. Not to be called from a finaliser (``__del__``): those run anywhere, also inside the pool's
    lock.

    Args:
        budget: bytes that the pool may hold.
        pin: page-lock the memory for the GPU.
        slab_bytes: None takes the whole budget now, as one slab; else slabs of this size (or of what one
            request needs, if that is more) are taken when they are needed.
        name: what messages call the pool.

    Raises:
        ValueError: the budget is smaller than a page, or `slab_bytes` is not positive.
        StorageError: the memory cannot be had, or cannot be page-locked.
    """

    def __init__(self, budget: int, *, pin: bool, slab_bytes: int | None = None, name: str = "pinned") -> None:
        if budget < PAGE:
            raise ValueError(f"budget of the {name} pool must be at least {PAGE} bytes, not {budget}")
        if slab_bytes is not None and slab_bytes <= 0:
            raise ValueError(f"slab_bytes of the {name} pool must be positive, not {slab_bytes}")
        self._budget = budget
        self._capacity = align_down(budget)
        self._pin = pin
        self._slab_bytes = None if slab_bytes is None else align_up(slab_bytes)
        self._name = name
        self._lock = threading.RLock()
        """Guards everything below and every buffer's count."""
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[object] = deque()
        self._slabs: list[_SlabSlots] = []
        self._idle: dict[int, list[_Span]] = {}
        """Spans of released buffers, by size: training steps repeat their requests, which then need no search."""
        self._taken = 0  # bytes of all slabs, until their memory is given back
        self._used = 0
        self._peak = 0
        self._closed = False
        if self._slab_bytes is None:
            self._add_slab(self._capacity)

    @property
    def budget(self) -> int:
        """Bytes that the pool may hold."""
        return self._budget

    @property
    def largest(self) -> int:
        """Bytes of the largest buffer that can ever be had."""
        return self._capacity

    @property
    def used_bytes(self) -> int:
        """Bytes in buffers that somebody holds now."""
        return self._used

    @property
    def peak_bytes(self) -> int:
        """Most bytes ever held at once."""
        return self._peak

    def acquire(self, nbytes: int) -> PinnedBuffer:
        """Takes a buffer, waiting while there is no room. The caller owns one reference and releases it.

        Args:
            nbytes: bytes wanted.

        Raises:
            ValueError: so many bytes can never be had, or `nbytes` is not positive.
            StorageError: the pool is closed, or was while this waited.
        """
        need = self._checked(nbytes)
        with self._changed:
            ticket = object()
            self._waiting.append(ticket)
            try:
                while True:
                    self._check_open()
                    if self._waiting[0] is ticket:
                        buffer = self._take(nbytes, need)
                        if buffer is not None:
                            return buffer
                        if self._make_room(need):
                            continue
                    self._changed.wait()
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()  # the next in line may find room

    def try_acquire(self, nbytes: int) -> PinnedBuffer | None:
        """Takes a buffer if that needs no waiting, else returns None.

        Raises:
            ValueError: so many bytes can never be had, or `nbytes` is not positive.
            StorageError: the pool is closed.
        """
        need = self._checked(nbytes)
        with self._lock:
            self._check_open()
            if self._waiting:
                return None
            buffer = self._take(nbytes, need)
            if buffer is None and self._make_room(need) and not self._waiting:
                buffer = self._take(nbytes, need)
            return buffer

    def close(self) -> None:
        """Ends the pool: waiting requests get a StorageError, and memory is given back with its last buffer."""
        with self._changed:
            self._closed = True
            self._close_empty_slabs()

    def _checked(self, nbytes: int) -> int:
        if nbytes <= 0:
            raise ValueError(f"a buffer needs a positive number of bytes, not {nbytes}")
        need = align_up(nbytes)
        if need > self._capacity:
            raise ValueError(
                f"{format_bytes_exactly(nbytes)} can never fit in the {self._name} pool with its budget of "
                f"{format_bytes_exactly(self._budget)}. Raise the budget to {need} bytes, or ask for less at once."
            )
        return need

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"the {self._name} pool is closed: it hands out no more buffers")

    def _take(self, nbytes: int, need: int) -> PinnedBuffer | None:
        if spans := self._idle.get(need):
            return self._hand_out(spans.pop(), nbytes)
        span = self._find(need)
        if span is None and self._idle:
            self._merge_idle()
            span = self._find(need)
        if span is None:
            span = self._grow(need)
        return None if span is None else self._hand_out(span, nbytes)

    def _find(self, need: int) -> _Span | None:
        """Takes a span out of a slab that has one."""
        for slab in self._slabs:
            offset = slab.slots.allocate(need)
            if offset is not None:
                return _Span(slab, offset, slab.memory.tensor[offset : offset + need])
        return None

    def _grow(self, need: int) -> _Span | None:
        """Takes a span out of a new slab, if the budget has room for one."""
        room = self._capacity - self._taken
        if self._slab_bytes is None or room < need:
            return None
        # Under the lock on purpose: page-locking takes milliseconds, happens a few times in a run, and the next
        # request would wait for this memory anyway.
        self._add_slab(min(max(self._slab_bytes, need), room))
        return self._find(need)

    def _hand_out(self, span: _Span, nbytes: int) -> PinnedBuffer:
        self._used += span.tensor.numel()
        self._peak = max(self._peak, self._used)
        return PinnedBuffer(self, span, nbytes)

    def _merge_idle(self) -> None:
        """Gives idle spans back to their slabs, where neighbours merge to larger ones."""
        for spans in self._idle.values():
            for span in spans:
                span.slab.slots.free(span.offset)
        self._idle.clear()

    def _add_slab(self, nbytes: int) -> None:
        self._slabs.append(_SlabSlots(Slab(nbytes, pin=self._pin), SlotAllocator(nbytes)))
        self._taken += nbytes

    def _make_room(self, need: int) -> bool:
        """Gives empty slabs back if a larger one fits in their place then; returns whether it did.

        Called when `_take` has found nothing, and has merged the idle spans.
        """
        empty = sum(slab.slots.capacity for slab in self._slabs if not slab.slots.used)
        if self._slab_bytes is None or need > self._capacity - self._taken + empty:
            return False
        self._close_empty_slabs()
        return True

    def _close_empty_slabs(self) -> None:
        """Gives the memory of empty slabs back; the lock is released meanwhile, since that synchronizes the device."""
        self._merge_idle()
        empty = [slab for slab in self._slabs if not slab.slots.used]
        self._slabs = [slab for slab in self._slabs if slab.slots.used]  # nobody is handed out of the others any more
        self._changed.release()
        try:
            for slab in empty:
                slab.memory.close()
        finally:
            self._changed.acquire()
            self._taken -= sum(slab.slots.capacity for slab in empty)
            self._changed.notify_all()

    def _retain(self, buffer: PinnedBuffer) -> bool:
        with self._lock:
            if buffer._count == 0:
                return False
            buffer._count += 1
            return True

    def _release(self, buffer: PinnedBuffer) -> None:
        with self._lock:
            if buffer._count == 0:
                raise ValueError(f"a buffer of the {self._name} pool was released more often than retained")
            buffer._count -= 1
            if buffer._count:
                return
            nbytes = buffer.tensor.numel()
            self._used -= nbytes
            self._idle.setdefault(nbytes, []).append(buffer._span)
            if self._closed:
                self._close_empty_slabs()
            elif self._waiting:
                self._changed.notify_all()


class PinnedBuffer:
    """Host memory lent by a PinnedPool, counted: it is lent until the last holder releases it.

    Attributes:
        tensor: the memory, uint8, page-aligned, `nbytes` rounded up to a page. Not to be used after the last
            release: the bytes are somebody else's then.
        nbytes: bytes as asked for.
    """

    __slots__ = ("_count", "_pool", "_span", "nbytes", "tensor")

    def __init__(self, pool: PinnedPool, span: _Span, nbytes: int) -> None:
        self.tensor = span.tensor
        self.nbytes = nbytes
        self._pool = pool
        self._span = span
        self._count = 1

    def try_retain(self) -> bool:
        """Adds a holder. Returns False, and adds none, when the last one has released the buffer already."""
        return self._pool._retain(self)

    def release(self) -> None:
        """Ends one holder's share; the last one gives the bytes back to the pool. Thread-safe.

        Raises:
            ValueError: nobody holds the buffer any more.
        """
        self._pool._release(self)


@dataclass(eq=False, slots=True)
class _SlabSlots:
    memory: Slab
    slots: SlotAllocator


@dataclass(eq=False, slots=True)
class _Span:
    """A slot of a slab, and the tensor of its bytes. A buffer owns it until its last release, then the pool does."""

    slab: _SlabSlots
    offset: int
    tensor: torch.Tensor
