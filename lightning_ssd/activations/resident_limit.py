"""Bytes of saved storages that may stay on the device, so that a training step does not run out of its memory."""

from typing import Protocol

__all__ = ["AllocatorMeter", "ResidentLimit"]


class AllocatorMeter(Protocol):
    """The allocator of a device; all numbers are bytes."""

    def limit(self) -> float:
        """Returns what this process may allocate."""

    def allocated(self) -> int:
        """Returns what is allocated now."""

    def peak(self) -> int:
        """Returns the most that was allocated since `reset_peak`, or ever."""

    def reset_peak(self) -> None:
        """Begins a new peak."""


class ResidentLimit:
    """Learns from the allocator's peaks how many bytes of saved storages fit beside everything else of a step.

    As long as the peak of a micro-batch leaves room for another one's saved storages, nothing is limited. Else the next
    micro-batch is measured: all saved storages that can are offloaded, and copies are waited for. Its peak is what
    everything else takes: weights, gradients, optimizer states, transient tensors, and the copies in flight. Saved
    storages may stay in the rest of the memory. A micro-batch is measured again if more is allocated before it than
    before the measured one: optimizer states are made in the first step, gradients in the first micro-batch of an
    accumulation. A peak that exceeds the limit nevertheless lowers the number of bytes by the excess.

    The allocator's peak is reset before each measured micro-batch, and after one that exceeded the limit.

    Args:
        meter: the device's allocator.
    """

    #: Growth of the allocated bytes, as a share of the limit, that asks for another measured micro-batch.
    GROWTH = 0.005
    #: How many more bytes than the last one a micro-batch may save.
    SPARE = 1.1
    #: Share of the limit from which on the first micro-batch waits for copies: its backward's memory is not known yet.
    UNKNOWN = 0.5

    def __init__(self, meter: AllocatorMeter) -> None:
        self.measuring = False
        """Whether the present micro-batch is measured: all its saved storages that can are offloaded."""
        self.scarce = False
        """Whether the present micro-batch may save more than there is room for."""
        self._meter = meter
        self._micro_batches = 0
        self._measured = False
        """Whether `_others` was measured, else it has saved storages in it."""
        self._others = 0.0
        """What a micro-batch takes without the saved storages that stay by `keep`."""
        self._base = 0
        """The bytes that were allocated before the micro-batch that showed `_others`."""
        self._room = float("inf")
        """Bytes of saved storages that may still stay in the present micro-batch."""

    def begin(self, expected_bytes: int) -> None:
        """A micro-batch begins.

        Args:
            expected_bytes: of the saved storages that may be offloaded, in the last micro-batch; 0: unknown.
        """
        limit, allocated, peak = self._meter.limit(), self._meter.allocated(), self._meter.peak()
        self._micro_batches += 1
        if self._micro_batches == 1:
            self._base = allocated
            return
        if self._micro_batches == 2 or self.measuring:
            self._others, self._measured = peak, self.measuring
        elif peak > limit:
            self._others += peak - limit
            self._meter.reset_peak()
        growth = max(0, allocated - self._base)
        self._room = max(0.0, limit - self._others - growth)
        unknown = not self._measured or growth > self.GROWTH * limit
        self.scarce = self._room < self.SPARE * expected_bytes
        self.measuring = unknown and self.scarce
        if self.measuring:
            self._meter.reset_peak()
            self._base, self._room = allocated, 0.0

    def waits(self) -> bool:
        """Whether copies out are to be waited for, so that their storages leave the device now."""
        first = self._micro_batches == 1
        return self.scarce or (first and self._meter.allocated() > self.UNKNOWN * self._meter.limit())

    def excess(self, nbytes: float) -> float:
        """Returns the share of `nbytes`, of storages that would stay, for which there is no room."""
        return max(0.0, 1.0 - self._room / nbytes) if nbytes else 0.0

    def keep(self, nbytes: int) -> bool:
        """Whether a saved storage may stay on the device; if so, it takes up that room."""
        if nbytes > self._room:
            return False
        self._room -= nbytes
        return True
