"""The pinned pool: host buffers within one fixed budget. A request that does not fit waits; the pool does not grow."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch

from lightning_ssd.sizes import format_bytes_exactly
from lightning_ssd.storage.errors import StorageError
from lightning_ssd.storage.slab import Slab, device_setter
from lightning_ssd.storage.slots import PAGE, SlotAllocator, align_down, align_up
from lightning_ssd.waits import watch


class PinnedPool:
    """Allocates page-aligned host buffers, at most `budget` bytes at any time.

    Requests are served in the order in which they began to wait, so small requests do not starve a large one:
    while a request waits, later ones wait behind it. A request within the budget is served at the latest when
    all buffers have been released, because empty slabs are replaced by a larger one.

    Thread-safe. Not to be called from a finaliser (``__del__``): finalisers run at any point of any thread, also
    where that thread holds the pool's lock.

    Args:
        budget: most bytes of all slabs.
        pin: page-lock the memory for the GPU.
        slab_bytes: bytes of a slab, which is allocated when the others have no room (larger if one request needs
            more). None: one slab of the whole budget is allocated now.
        name: name of the pool in error messages.

    Attributes:
        budget: most bytes of all slabs.
        largest: bytes of the largest buffer that the pool can allocate.
        slab_total: bytes of all slabs, also of those that are being freed.
        used_bytes: bytes of buffers that are not released yet.
        peak_bytes: peak of `used_bytes`, since the last `reset_peak`.

    Raises:
        ValueError: the budget is smaller than a page, or `slab_bytes` is not positive.
        StorageError: the memory cannot be allocated or page-locked.
    """

    def __init__(self, budget: int, *, pin: bool, slab_bytes: int | None = None, name: str = "pinned") -> None:
        if budget < PAGE:
            raise ValueError(f"budget of the {name} pool must be at least {PAGE} bytes, not {budget}")
        if slab_bytes is not None and slab_bytes <= 0:
            raise ValueError(f"slab_bytes of the {name} pool must be positive, not {slab_bytes}")
        self.budget = budget
        self.largest = align_down(budget)
        self._pin = pin
        self._slab_bytes = None if slab_bytes is None else align_up(slab_bytes)
        self._name = name
        self._lock = threading.RLock()
        """Guards all attributes below, and the reference count of every buffer."""
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[object] = deque()
        self._slabs: list[_SlabSlots] = []
        self._idle: dict[int, list[_Span]] = {}
        """Spans of released buffers, by size: training steps repeat their requests, which then need no search."""
        self.slab_total = 0
        self.used_bytes = 0
        self.peak_bytes = 0
        self._refused = False
        self._closed = False
        self._use_device = device_setter()
        """Slabs are added by any thread, for the device of the one that has made the pool."""
        if self._slab_bytes is None:
            self._add_slab(self.largest)
        watch(self)

    def acquire(self, nbytes: int) -> PinnedBuffer:
        """Allocates a buffer, and blocks until there is room. The caller owns one reference and releases it.

        Raises:
            ValueError: `nbytes` is more than the budget, or not positive.
            StorageError: the pool is closed, or was closed while the request waited.
        """
        need = self._checked(nbytes)
        with self._changed:
            ticket = object()
            self._waiting.append(ticket)
            try:
                while True:
                    self._check_open()
                    if self._waiting[0] is ticket:
                        buffer = self._allocate(nbytes, need)
                        if buffer is not None:
                            return buffer
                        if self._make_room(need):
                            continue
                    self._changed.wait()
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()  # the next in line may find room

    def try_acquire(self, nbytes: int) -> PinnedBuffer | None:
        """Allocates a buffer if there is room now and no request waits, else returns None.

        Raises:
            ValueError: `nbytes` is more than the budget, or not positive.
            StorageError: the pool is closed.
        """
        need = self._checked(nbytes)
        with self._lock:
            self._check_open()
            if self._waiting:
                return None
            buffer = self._allocate(nbytes, need)
            if buffer is None and self._make_room(need) and not self._waiting:
                buffer = self._allocate(nbytes, need)
            return buffer

    def reset_peak(self) -> None:
        """Begins a new peak of used bytes."""
        with self._lock:
            self.peak_bytes = self.used_bytes

    def trim(self) -> None:
        """Frees empty slabs of which no buffer was allocated since the last call. A pool of one slab keeps it.

        Freeing page-locked memory waits for the device.
        """
        with self._changed:
            if self._slab_bytes is not None:
                self._close_empty_slabs(idle=True)
                for slab in self._slabs:
                    slab.idle = True

    def refuse(self) -> None:
        """Makes waiting and later requests raise a StorageError. The memory belongs to its buffers until `close`."""
        with self._changed:
            self._refused = True
            self._changed.notify_all()

    def close(self, *, in_use: bool = False) -> None:
        """Closes the pool: waiting requests raise a StorageError, and each slab is freed with its last buffer.

        Args:
            in_use: whether slabs with buffers are unlocked now, too, because no transfer uses them any more: a buffer
                that is never released would keep its slab page-locked until the process ends. The bytes stay mapped
                until the last tensor on them is dropped.
        """
        with self._changed:
            self._refused = self._closed = True
            self._close_empty_slabs()
            if in_use:
                slabs, self._slabs = self._slabs, []
                for slab in slabs:
                    slab.memory.close()
                self.slab_total = 0

    def progress(self) -> tuple[int, ...]:
        """Returns the bytes in use, which change when a request is served or a buffer is released (`waits.Watched`)."""
        return (self.used_bytes,)

    def pending(self) -> str:
        """Returns the requests that wait, and the bytes in use (`waits.Watched`)."""
        used = f"{format_bytes_exactly(self.used_bytes)} of {format_bytes_exactly(self.budget)} in use"
        return f"{self._name} pool: {len(self._waiting)} requests wait, {used}" if self._waiting else ""

    def _checked(self, nbytes: int) -> int:
        if nbytes <= 0:
            raise ValueError(f"a buffer needs a positive number of bytes, not {nbytes}")
        need = align_up(nbytes)
        if need > self.largest:
            raise ValueError(
                f"{format_bytes_exactly(nbytes)} can never fit in the {self._name} pool with its budget of "
                f"{format_bytes_exactly(self.budget)}. Raise the budget to {need} bytes, or ask for less at once."
            )
        return need

    def _check_open(self) -> None:
        if self._refused:
            raise StorageError(f"the {self._name} pool is closed: it hands out no more buffers")

    def _allocate(self, nbytes: int, need: int) -> PinnedBuffer | None:
        if spans := self._idle.get(need):
            return self._hand_out(spans.pop(), nbytes)
        span = self._find(need)
        if span is None and self._idle:
            self._merge_idle()
            span = self._find(need)
        if span is None:
            span = self._grow(need) or self._find(need, anywhere=True)
        return None if span is None else self._hand_out(span, nbytes)

    def _find(self, need: int, *, anywhere: bool = False) -> _Span | None:
        """Allocates a span in an existing slab.

        Only large requests use large slabs, unless `anywhere`: small ones would keep `trim` from freeing them.
        """
        for slab in self._slabs:
            if not anywhere and self._is_large(slab.slots.capacity) != self._is_large(need):
                continue
            offset = slab.slots.allocate(need)
            if offset is not None:
                return _Span(slab, offset, slab.memory.tensor[offset : offset + need])
        return None

    def _is_large(self, nbytes: int) -> bool:
        """Returns whether a request has, or has made, a slab of more than `slab_bytes`."""
        return self._slab_bytes is not None and nbytes > self._slab_bytes

    def _grow(self, need: int) -> _Span | None:
        """Allocates a span in a new slab, if the budget has room for one."""
        room = self.largest - self.slab_total
        if self._slab_bytes is None or room < need:
            return None
        # Under the lock on purpose: page-locking takes milliseconds, happens a few times in a run, and the next
        # request would wait for this memory anyway.
        self._add_slab(min(max(self._slab_bytes, need), room))
        return self._find(need)

    def _hand_out(self, span: _Span, nbytes: int) -> PinnedBuffer:
        self.used_bytes += span.tensor.numel()
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        span.slab.idle = False
        return PinnedBuffer(self, span, nbytes)

    def _merge_idle(self) -> None:
        """Frees idle spans in their slabs, where neighbours merge to larger ones."""
        for spans in self._idle.values():
            for span in spans:
                span.slab.slots.free(span.offset)
        self._idle.clear()

    def _add_slab(self, nbytes: int) -> None:
        self._use_device()
        self._slabs.append(_SlabSlots(Slab(nbytes, pin=self._pin), SlotAllocator(nbytes)))
        self._slabs.sort(key=lambda slab: slab.slots.capacity)  # large requests use the smallest slab with room
        self.slab_total += nbytes

    def _make_room(self, need: int) -> bool:
        """Frees empty slabs if a larger slab fits in their place; returns whether it did.

        Called when `_allocate` has found nothing, and has merged the idle spans.
        """
        empty = sum(slab.slots.capacity for slab in self._slabs if not slab.slots.used)
        if self._slab_bytes is None or need > self.largest - self.slab_total + empty:
            return False
        self._close_empty_slabs()
        return True

    def _close_empty_slabs(self, *, idle: bool = False) -> None:
        """Frees empty slabs; `idle`: only those that are idle.

        The lock is released meanwhile, because freeing pinned memory synchronizes the device.
        """
        self._merge_idle()
        empty = [slab for slab in self._slabs if not slab.slots.used and (slab.idle or not idle)]
        self._slabs = [slab for slab in self._slabs if slab not in empty]  # no request allocates in them any more
        self._changed.release()
        try:
            for slab in empty:
                slab.memory.close()
        finally:
            self._changed.acquire()
            self.slab_total -= sum(slab.slots.capacity for slab in empty)
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
            self.used_bytes -= nbytes
            self._idle.setdefault(nbytes, []).append(buffer._span)
            if self._closed:
                self._close_empty_slabs()
            elif self._waiting:
                self._changed.notify_all()


class PinnedBuffer:
    """A reference-counted buffer of a PinnedPool. The last release returns its memory to the pool.

    Attributes:
        tensor: the memory, uint8, page-aligned, `nbytes` rounded up to a page. Not to be used after the last
            release: the pool reuses the bytes.
        nbytes: bytes that were requested.
    """

    __slots__ = ("_count", "_pool", "_span", "nbytes", "tensor")

    def __init__(self, pool: PinnedPool, span: _Span, nbytes: int) -> None:
        self.tensor = span.tensor
        self.nbytes = nbytes
        self._pool = pool
        self._span = span
        self._count = 1

    def try_retain(self) -> bool:
        """Adds a reference. Returns False, and adds none, if the last reference was released already."""
        return self._pool._retain(self)

    def release(self) -> None:
        """Removes a reference; the last one returns the memory to the pool. Thread-safe.

        Raises:
            ValueError: the last reference was released already.
        """
        self._pool._release(self)


@dataclass(eq=False, slots=True)
class _SlabSlots:
    memory: Slab
    slots: SlotAllocator
    idle: bool = True
    """Whether no buffer of it was allocated since the last `trim`."""


@dataclass(eq=False, slots=True)
class _Span:
    """A slot of a slab, and the tensor of its bytes. The buffer owns it until its last release, then the pool."""

    slab: _SlabSlots
    offset: int
    tensor: torch.Tensor
