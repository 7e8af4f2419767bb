"""What a tier is to the activation offloader: a place that takes the bytes of a storage and gives them back."""

from abc import ABC, abstractmethod

from torch import Tensor

from lightning_ssd.device import Mark
from lightning_ssd.storage import IOStats
from lightning_ssd.types import OffloadTierName


class Load(ABC):
    """Bytes on their way back to the device.

    The load owns `data` until `wait` has returned (then the caller does), or, if nobody waits, until `settled`.
    """

    __slots__ = ()

    data: Tensor
    """The device bytes that are being filled, one-dimensional `uint8`."""

    @property
    @abstractmethod
    def settled(self) -> bool:
        """Whether nothing is left for the host to do: `wait` would not block, and `data` may be given up after it."""

    @abstractmethod
    def wait(self) -> Mark:
        """Returns when the compute stream is ordered after the load; the host waits only for what it must issue.

        Returns:
            The mark that the stream waits for; `None` if it need not wait any more.

        Raises:
            StorageError: the bytes could not be read back, or are not the bytes that were written.
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
        """Starts to bring the bytes back, urgent ones first, then in the order of calls; never waits."""

    @abstractmethod
    def free(self) -> None:
        """Gives the place back; what is still queued is cancelled, what is in flight is let finish first.

        The caller has waited for every load of this copy.
        """


class OffloadTier(ABC):
    """A place for saved tensors outside the device."""

    name: OffloadTierName
    capacity: int
    """Bytes that it may hold, as far as that is known when it is made."""
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
            The copy, or `None` where the tier has no room for it (or would have to wait and may not).

        Raises:
            StorageError: the tier can't store any more (full disk, I/O error).
        """

    def io_stats(self) -> IOStats | None:
        """Returns what its I/O engine has done; `None` where it has none."""
        return None

    def peak_pinned_bytes(self) -> int:
        """Returns the most pinned memory that it ever used, in bytes."""
        return 0

    @abstractmethod
    def describe(self) -> str:
        """Returns, for a message, how much it holds and may hold."""

    @abstractmethod
    def close(self) -> None:
        """Gives back memory and files. No copy or load is used afterwards."""
