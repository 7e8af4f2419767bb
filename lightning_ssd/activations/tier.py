"""The interface of tiers, which store the bytes of saved tensors and load them back to the device."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from lightning_ssd.device import Mark
from lightning_ssd.storage import IOStats
from lightning_ssd.types import OffloadTierName

TRIM_EVERY = 5
"""Micro-batches after which pinned memory that none of them needed is freed."""


class Load(ABC):
    """A running load of bytes to the device.

    The load owns `data` until `wait` has returned (then the caller does), or, without a wait, until `issued`.
    """

    __slots__ = ()

    data: Tensor
    """Destination of the load on the device, one-dimensional `uint8`."""

    @property
    @abstractmethod
    def issued(self) -> bool:
        """True if the host has issued the whole load: `wait` would not block, and `data` may be freed after it."""

    @abstractmethod
    def wait(self) -> Mark:
        """Orders the compute stream after the load. Blocks the host only until all work of the load is issued.

        Returns:
            The mark that the stream waits for; `None` if the load is done.

        Raises:
            StorageError: the bytes could not be read, or differ from the written ones.
        """


class StoredCopy(ABC):
    """A tier's copy of the bytes of one storage."""

    __slots__ = ()

    @abstractmethod
    def wait_copied(self) -> Mark:
        """Orders the compute stream after the copy's last read of the source, which may then be dropped.

        Returns:
            As for `Load.wait`.
        """

    @abstractmethod
    def load(self, *, urgent: bool) -> Load:
        """Starts a load of the bytes to the device without blocking. Urgent loads run first, others in call order until
        `Load.wait`.
        """

    @abstractmethod
    def free(self) -> None:
        """Frees the copy's memory in the tier, after queued transfers are cancelled and running ones have ended.

        The caller has waited for every load of this copy.
        """


class OffloadTier(ABC):
    """Memory for saved tensors outside of the device."""

    name: OffloadTierName
    capacity: int
    """Bytes that fit into the tier, as estimated when it is made."""
    bytes_out: int = 0
    """Bytes stored since the start."""
    bytes_in: int = 0
    """Bytes loaded since the start."""

    @abstractmethod
    def store(self, data: Tensor, *, may_wait: bool) -> StoredCopy | None:
        """Starts to store `data`, device bytes that the caller keeps until `StoredCopy.wait_copied`.

        Args:
            data: one-dimensional `uint8` on the device.
            may_wait: whether the host may wait for staging memory.

        Returns:
            The copy, or `None` if the tier has no room for it, or would have to wait and may not.

        Raises:
            StorageError: a drive or filesystem failed.
        """

    def io_stats(self) -> IOStats | None:
        """Returns the statistics of the tier's I/O engine, or `None` if it has none."""
        return None

    @property
    def host_bytes(self) -> int:
        """Allocated bytes of host memory, in use or not."""
        return 0

    @property
    def host_limit(self) -> int:
        """Most bytes of host memory."""
        return 0

    def peak_pinned_bytes(self) -> int:
        """Returns the peak of pinned memory in use since the last `reset_peak`, in bytes."""
        return 0

    def reset_peak(self) -> None:
        """Begins a new peak of pinned memory."""
        return None

    def trim(self) -> None:
        """Frees pinned memory that was not needed since the last call, which may wait for the device."""
        return None

    @abstractmethod
    def describe(self) -> str:
        """Returns the used and available bytes, for a message."""

    @abstractmethod
    def close(self) -> None:
        """Frees memory and removes files. No copy or load may be used afterwards."""


class TierTrimmer:
    """Frees pinned memory of tiers that no micro-batch has needed for a while.

    Micro-batches that offload all of their saved tensors, as profiled ones and second attempts do, would otherwise
    determine it until training ends. Where freed memory is needed again, because few micro-batches are large, it is
    freed after twice as many micro-batches the next time.
    """

    def __init__(self, tiers: Sequence[OffloadTier]) -> None:
        self._tiers = tiers
        self._every = TRIM_EVERY
        self._num_batches = 0
        self._left: int | None = None
        """Bytes of pinned memory after the tiers were last trimmed, if that has freed some."""

    def begin_micro_batch(self) -> None:
        self._num_batches += 1
        if self._num_batches < self._every:
            return
        self._num_batches = 0
        before = self._allocated()
        if self._left is not None and before > self._left:
            self._every *= 2
        for tier in self._tiers:
            tier.trim()
        after = self._allocated()
        self._left = after if after < before else None

    def _allocated(self) -> int:
        return sum(tier.host_bytes for tier in self._tiers)
