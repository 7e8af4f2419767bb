"""Storages between the issue of their copy to a tier and their eviction from the device."""

import weakref
from collections import deque

from torch import Tensor

from lightning_ssd.activations.micro_batch import MicroBatch, MicroBatchProfile
from lightning_ssd.activations.policy import OffloadPolicy
from lightning_ssd.activations.record import SavedStorage, UnpackOrder
from lightning_ssd.activations.tier import StoredCopy
from lightning_ssd.device import CopyEngine
from lightning_ssd.types import EVICT_MARGIN

OUT, IN = 0, 1
"""Directions of transfers, as indices: to a tier, and from one."""


class InFlight:
    """Owns the device memory of storages whose copies to a tier were issued, in that order, until it evicts them.

    The host is far ahead of the device, so the end of a copy is predicted instead of queried. An early prediction costs
    the compute stream a short wait, a late one costs memory.

    Threads: those of the `ActivationOffloader`, which owns this object, under its lock; outside of forward
    and backward the training thread, without it.

    Args:
        policy: rules of the offloader; assigned anew when they change.
    """

    #: Least bytes of copies over which their bandwidth is averaged: single copies may have shared the link with others.
    MIN_AVERAGED_BYTES = 2**28

    def __init__(self, copies: CopyEngine, policy: OffloadPolicy) -> None:
        self.queue: deque[_Storage] = deque()
        self.policy = policy
        self._copies = copies
        self._batch: MicroBatch | None = None
        self._nbytes = 0
        self._copied_at = 0.0
        """Progress of the forward at which the last copy should be done."""
        self._copy_seconds_per_byte: float | None = None
        self._saved_bytes_per_second: float | None = None
        self._busy_before = copies.busy()[OUT]

    def begin_micro_batch(self, batch: MicroBatch) -> None:
        """Begins a forward: progress starts at 0, and copies are predicted by the bandwidth of the last ones."""
        self._batch = batch
        self._copied_at = 0.0
        busy = self._copies.busy()[OUT]
        recent = busy.since(self._busy_before)
        if recent.seconds and (recent.amount >= self.MIN_AVERAGED_BYTES or self._copy_seconds_per_byte is None):
            self._copy_seconds_per_byte = recent.seconds / recent.amount
            self._busy_before = busy

    def observe(self, profile: MicroBatchProfile) -> None:
        """Learns how many bytes a forward saves in a second."""
        if profile.forward_seconds and profile.saved_bytes:
            self._saved_bytes_per_second = profile.saved_bytes / profile.forward_seconds

    def has_room(self, nbytes: int) -> bool:
        """Returns whether a storage of `nbytes` fits into the window. An empty window has room for any."""
        return self._nbytes + nbytes <= self.policy.window_bytes or not self.queue

    def add(self, record: SavedStorage, data: Tensor, copy: StoredCopy) -> None:
        """Adds a storage whose copy has been issued; `data`, its bytes on the device, are kept until it is evicted."""
        now, copying = self._progress(record.nbytes)
        self._copied_at = max(self._copied_at, now) + (copying or 0.0)
        # Without profiled seconds, progress is measured in saved bytes, which needs a larger margin.
        margin = EVICT_MARGIN * self._copied_at if self._elapsed is not None else record.nbytes
        self.queue.append(_Storage(record, data, copy, self._copied_at + margin))
        self._nbytes += record.nbytes

    def evict_copied(self) -> None:
        """Evicts storages whose copies should be done, and the oldest ones if the window is full."""
        if not self.queue:
            return
        if self._copies.device.type == "cpu":  # its copies are done when they are issued
            self.evict_all()
            return
        now, copying = self._progress(0)
        while self.queue:
            due = copying is not None and self.queue[0].due_at <= now
            # The newest storage is in flight even if it is larger than the window.
            full = self._nbytes > self.policy.window_bytes and len(self.queue) > 1
            if not (due or full):
                break
            self._evict_oldest()

    def evict_all(self) -> None:
        """Evicts all storages."""
        while self.queue:
            self._evict_oldest()

    def evict_others(self, batch: UnpackOrder) -> None:
        """Evicts all storages but those of `batch`, whose backward begins."""
        for _ in range(len(self.queue)):
            record = self.queue[0].record()
            if record is not None and record.batch is batch:
                self.queue.rotate(-1)
            else:
                self._evict_oldest()

    def _evict_oldest(self) -> None:
        """Evicts the oldest storage, ordered on the device: the compute stream waits for its copy."""
        assert self._batch is not None
        oldest = self.queue.popleft()
        self._nbytes -= oldest.nbytes
        stall = self._batch.stalls[oldest.tier][OUT]
        start = stall.now()
        stall.add(start, oldest.copy.wait_copied())
        record = oldest.record()
        if record is not None:
            record.evict()

    def _progress(self, nbytes: int) -> tuple[float, float | None]:
        """Returns the progress of the forward, and its progress while `nbytes` are copied (None: unknown).

        Both are in seconds if the policy's dispatch mode knows the elapsed seconds, else in saved bytes.
        """
        assert self._batch is not None
        copying = None if self._copy_seconds_per_byte is None else nbytes * self._copy_seconds_per_byte
        elapsed = self._elapsed
        if elapsed is not None:
            return elapsed, copying
        if copying is not None:
            copying = None if self._saved_bytes_per_second is None else copying * self._saved_bytes_per_second
        return self._batch.saved_bytes, copying

    @property
    def _elapsed(self) -> float | None:
        """Profiled seconds of the forward up to the present operation, or None if unknown."""
        return None if self.policy.mode is None else self.policy.mode.elapsed


class _Storage:
    """A storage that is being offloaded. Owns the device's bytes until the compute stream is ordered after their copy.

    Args:
        record: record of the storage, which may be freed before.
        due_at: progress of the forward (see `InFlight._progress`) at which the copy should be done.
    """

    __slots__ = ("copy", "data", "due_at", "nbytes", "record", "tier")

    def __init__(self, record: SavedStorage, data: Tensor, copy: StoredCopy, due_at: float) -> None:
        assert record.tier is not None
        self.record = weakref.ref(record)
        self.data = data
        self.nbytes = record.nbytes
        self.copy = copy
        self.tier = record.tier
        self.due_at = due_at
