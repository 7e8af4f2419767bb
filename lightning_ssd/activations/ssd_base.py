"""The base of the two SSD tiers: scratch space that can be full temporarily."""

import logging
from collections import deque

from lightning_ssd.activations.tier import OffloadTier
from lightning_ssd.device import CopyEngine
from lightning_ssd.futures import Future
from lightning_ssd.sizes import format_bytes
from lightning_ssd.storage import Blob, BlobStore, IOStats, StorageFullError
from lightning_ssd.waits import wait_for

log = logging.getLogger(__name__)


class SSDTierBase(OffloadTier):
    """A tier in the scratch files of `store`. The tier owns the store."""

    name = "ssd"

    def __init__(self, store: BlobStore, copies: CopyEngine) -> None:
        self.blobs = store
        self.capacity = store.room
        self._copies = copies
        self._full: str | None = None
        # Copies that were freed while one of their writes ran: each future is done when the space can be reused.
        self._being_freed: deque[Future[None]] = deque()

    def io_stats(self) -> IOStats:
        return self.blobs.stats()

    def describe(self) -> str:
        return (self._full or f"{format_bytes(self.blobs.stats().allocated_bytes)} in use").rstrip(".")

    def _allocate(self, nbytes: int, *, may_wait: bool) -> Blob | None:
        """Allocates `nbytes`, or returns `None` if there is no room, so that another tier is used."""
        while True:
            try:
                return self.blobs.allocate(nbytes)
            except StorageFullError as error:
                full = str(error)  # not the error, whose frames hold tensors
            if not self._being_freed:
                break
            if not may_wait:
                return None
            # It depends on the SSD's progress only, so it can't deadlock.
            wait_for(self._being_freed.popleft(), "space on the drives")
        if self._full is None:
            log.warning("the SSD tier is full, and stores no tensors until backward frees space: %s", full)
        self._full = full
        return None
