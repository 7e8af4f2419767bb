"""What the two SSD tiers share: scratch space that can be full for a while."""

import logging
from collections import deque
from concurrent.futures import Future

from lightning_ssd.activations.tier import OffloadTier
from lightning_ssd.device import CopyEngine
from lightning_ssd.sizes import format_bytes
from lightning_ssd.storage import Blob, BlobStore, IOStats, StorageFullError

log = logging.getLogger(__name__)


class SSDTierBase(OffloadTier):
    """A tier in the scratch files of `store`, which it owns."""

    name = "ssd"

    def __init__(self, store: BlobStore, copies: CopyEngine) -> None:
        self.blobs = store
        self.capacity = store.room
        self._copies = copies
        self._full: str | None = None
        # Room of stores that were freed while a write of theirs ran: one future each, done when it can be used again.
        self._leaving: deque[Future[None]] = deque()

    def io_stats(self) -> IOStats:
        return self.blobs.stats()

    def describe(self) -> str:
        return (self._full or f"{format_bytes(self.blobs.stats().allocated_bytes)} in use").rstrip(".")

    def _allocate(self, nbytes: int, *, may_wait: bool) -> Blob | None:
        """Returns room for `nbytes`, or `None` where there is none: another tier may have some."""
        while True:
            try:
                return self.blobs.allocate(nbytes)
            except StorageFullError as error:
                full = str(error)  # not the error, whose frames hold tensors
            if not self._leaving:
                break
            if not may_wait:
                return None
            self._leaving.popleft().result()  # by the SSD's progress alone
        if self._full is None:
            log.warning("the SSD tier is full, and takes no more until backward frees some of it: %s", full)
        self._full = full
        return None
