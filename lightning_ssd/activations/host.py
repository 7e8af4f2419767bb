"""The host tier: saved tensors in pinned memory.

All work is ordered by streams, and the host never waits. A buffer may be reused at once when its copy is freed: the d2h
copy into it runs on the same stream as the next owner's d2h copy; and the compute stream has waited for every load from
it (the contract of `StoredCopy.free`) before the next owner's d2h copy, which follows the compute stream.
"""

from torch import Tensor

from lightning_ssd.activations.tier import Load, OffloadTier, StoredCopy
from lightning_ssd.device import CopyEngine, Mark
from lightning_ssd.sizes import format_bytes
from lightning_ssd.storage import PinnedBuffer, PinnedPool


class HostTier(OffloadTier):
    """Pinned host memory as a tier, within the budget of `pool`, which it owns."""

    name = "host"

    def __init__(self, pool: PinnedPool, copies: CopyEngine) -> None:
        self.pool = pool
        self.capacity = pool.budget
        self._copies = copies

    def store(self, data: Tensor, *, may_wait: bool) -> StoredCopy | None:
        # Never waits for room: memory is freed by backward, which runs later on the same thread.
        nbytes = data.numel()
        if nbytes > self.pool.largest:
            return None
        buffer = self.pool.try_acquire(nbytes)
        if buffer is None:
            return None
        copied = self._copies.d2h(data, buffer.tensor, after=None)
        self.bytes_out += nbytes
        return _HostCopy(self, buffer, copied)

    @property
    def host_bytes(self) -> int:
        return self.pool.slab_total

    @property
    def host_limit(self) -> int:
        return self.pool.budget

    def peak_pinned_bytes(self) -> int:
        return self.pool.peak_bytes

    def reset_peak(self) -> None:
        self.pool.reset_peak()

    def trim(self) -> None:
        self.pool.trim()

    def describe(self) -> str:
        return f"{format_bytes(self.pool.used_bytes)} of {format_bytes(self.pool.budget)} in use"

    def close(self) -> None:
        try:
            self._copies.drain()
        finally:
            self.pool.close(in_use=True)  # graphs that are still alive own buffers, which no copy uses any more


class _HostCopy(StoredCopy):
    __slots__ = ("_buffer", "_copied", "_tier")

    def __init__(self, tier: HostTier, buffer: PinnedBuffer, copied: Mark) -> None:
        self._tier = tier
        self._buffer = buffer
        self._copied = copied

    def wait_copied(self) -> Mark:
        self._tier._copies.wait(self._copied)
        return self._copied

    def load(self, *, urgent: bool) -> Load:
        tier, copies, buffer = self._tier, self._tier._copies, self._buffer
        data = copies.empty(buffer.nbytes)
        arrived = copies.h2d(buffer.tensor, data, after=None)
        tier.bytes_in += buffer.nbytes
        return _HostLoad(data, arrived, copies)

    def free(self) -> None:
        self._buffer.release()


class _HostLoad(Load):
    __slots__ = ("_arrived", "_copies", "data")

    issued = True  # the copy was issued when the load was made

    def __init__(self, data: Tensor, arrived: Mark, copies: CopyEngine) -> None:
        self.data = data
        self._arrived = arrived
        self._copies = copies

    def wait(self) -> Mark:
        self._copies.wait(self._arrived)
        return self._arrived
