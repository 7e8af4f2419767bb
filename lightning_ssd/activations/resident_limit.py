"""The limit of saved bytes that are kept on the device, so that a training step does not run out of its memory."""

from collections.abc import Callable
from typing import Protocol


class AllocatorMeter(Protocol):
    """Statistics of a device's allocator; see `CUDAMemory` of `device`."""

    def limit(self) -> float: ...
    def allocated(self) -> int: ...
    def unreserved(self) -> int: ...
    def peak(self) -> int: ...
    def reset_peak(self) -> None: ...


class ResidentLimit:
    """Learns from the allocator's peaks how many bytes of saved storages can be kept on the device.

    As long as a micro-batch's peak plus its saved bytes fit into memory, there is no limit. Otherwise the next
    micro-batch is measured: it offloads all saved storages that can be offloaded, one at a time, and the training waits
    for their copies. Its peak is the memory of everything else: weights, gradients, optimizer states, and transient
    tensors. The rest of the memory is the limit of kept storages and of the window. A micro-batch is also measured if
    it begins with another number of allocated bytes than the measured ones: optimizer states are allocated in the first
    step, gradients in the first micro-batch of an accumulation, and batches grow. If a peak exceeds the memory
    nevertheless, the limit is lowered by the excess. After a micro-batch that keeps all storages, the limit is lowered
    by the difference between its peak and the expected one.

    The allocator's peak is reset before each measured micro-batch, after one that exceeded the memory, and, while
    memory is scarce, after a higher peak of an optimizer step, a validation or user code.
    """

    #: Difference of allocated bytes / memory of the process, up to which two micro-batches begin alike.
    TOLERANCE = 0.005
    #: Most micro-batches that are measured because they begin with another number of allocated bytes.
    MOST_LEVELS = 8
    #: Saved bytes of a micro-batch / saved bytes of the last one, up to which no new measurement is made.
    SPARE = 1.1
    #: Share of the limit above which the first micro-batch waits for copies: its backward's memory is not known yet.
    UNKNOWN = 0.5
    #: Share of the limit up to which a micro-batch with `keeps_unknown` keeps its saved storages. The rest is for the
    #: backward, whose memory is not known yet.
    ASSUMED = 0.8
    #: Share of the limit by which it is lowered when a micro-batch with a known limit has run out of memory.
    WITHHELD = 0.05

    def __init__(self, meter: AllocatorMeter) -> None:
        self.measuring = False
        """True if the present micro-batch is measured: it offloads all saved storages that can be offloaded, unless
        `keeps_unknown`."""
        self.scarce = False
        """True if the present micro-batch may save more bytes than there is room for."""
        self.meter = meter
        """The device's allocator."""
        self.expected_bytes = 0
        """Expected saved bytes of the present micro-batch."""
        self.unsaved_bytes = 0
        """Bytes that the present micro-batch would have saved besides, had its units not been checkpointed: the next
        one is expected to save them, too. `UnplannedCheckpoints` adds them."""
        self.placed_bytes = 0
        """`expected_bytes` without the storages within the window, which are kept without asking the placement."""
        self._limit = float("inf")
        """Bytes that this process could allocate when the present micro-batch began."""
        self._peak_before = 0
        """The allocator's peak when the present micro-batch began."""
        self._level = 0
        """Bytes that were allocated before the present micro-batch."""
        self._peak = 0
        """The allocator's peak at the end of the present micro-batch's backward; 0: none has ended."""
        self._without_hooks = False
        """Whether that backward had no saved-tensor hooks, so that unexpected saved storages were kept, too."""
        self._withheld = 0.0
        """Bytes of the meter's limit that are not used: micro-batches have run out of memory below it."""
        self._room = float("inf")
        """Bytes of saved storages that may still be kept in the present micro-batch."""
        self.room_bytes = float("inf")
        """Bytes of saved storages for which the present micro-batch had room when it began."""
        self._others = 0.0
        """Peak bytes of a micro-batch without the storages that are kept by `keep`; 0: none has ended."""
        self._levels: list[int] = []
        """Bytes that were allocated before the last measured micro-batches. If empty, `_others` includes saved
        storages."""
        self._measured_bytes = 0
        """Expected saved bytes of the last measured micro-batch."""
        self._largest_bytes = 0
        """The most saved bytes of a micro-batch."""
        self._lowest = 2**63
        """The least bytes that were allocated before a micro-batch."""
        self.keeps_unknown = False
        """Whether a micro-batch that is measured, or whose memory is not known, keeps storages while there is memory.
        Otherwise it offloads those that can be. False when it begins; `UnplannedCheckpoints` sets it."""
        self._kept_unknown = 0
        """Bytes that the present micro-batch has kept so."""
        self._unfinished = False
        """Whether the last micro-batch was to be measured, and had no backward."""

    def begin(self, expected_bytes: int) -> None:
        """Called when a micro-batch begins.

        Args:
            expected_bytes: bytes of saved storages that could be offloaded in the last micro-batch, without a window;
                0: unknown.
        """
        limit, allocated = self.meter.limit() - self._withheld, self.meter.allocated()
        # Growth beyond the expected peak would be noticed only when memory has run out.
        most = limit
        if self._without_hooks:
            most = min(limit, self.needed_bytes or limit)
        elif self.known and not self.scarce:
            most = min(limit, self._limit - self.room_bytes + expected_bytes)
        self._limit = limit
        if self._peak and self.unsaved_bytes:  # kept bytes include the storage that backward needs first
            expected_bytes = max(expected_bytes, self._kept_unknown) + self.unsaved_bytes
        self.keeps_unknown, self.unsaved_bytes = False, 0
        self._largest_bytes = max(self._largest_bytes, expected_bytes)
        # A measured micro-batch without a backward has no peak: the next one is measured instead.
        self._unfinished = self.measuring and not self._peak
        if self._peak and self.measuring:
            self._others = max(1.0, self._others if self._levels else 0.0, self._peak - self._kept_unknown)
            self._levels = [*self._levels, self._level][-self.MOST_LEVELS :]
            self._measured_bytes = expected_bytes
        elif self._peak and not self._others:
            # Storages that were kept count as allocated at the peak: a micro-batch that keeps no more bytes needs no
            # more memory.
            self._others = max(1.0, self._peak - self._kept_unknown)
        elif self._peak > max(most, self._peak_before):
            self._others += self._peak - most
            if self._peak > limit:
                self.meter.reset_peak()
        if self.scarce and self.meter.peak() > self._peak:  # by an optimizer step, a validation or user code
            self.meter.reset_peak()
        self._level, self._kept_unknown = allocated, 0
        self.expected_bytes = self.placed_bytes = expected_bytes
        self._limit_room()
        self._peak = 0
        self._without_hooks = False
        self._peak_before = self.meter.peak()

    def _limit_room(self) -> None:
        limit = self._limit
        self._lowest = min(self._lowest, self._level)
        if not self._others:
            return
        like_a_measured_one = any([abs(self._level - level) <= self.TOLERANCE * limit for level in self._levels])
        growth = 0 if like_a_measured_one else self._level - self._lowest
        self._room = self.room_bytes = max(0.0, limit - self._others - growth)
        self.scarce = self._room < self.SPARE * self.expected_bytes
        unknown = not like_a_measured_one and len(self._levels) < self.MOST_LEVELS
        larger = self.expected_bytes > self.SPARE * self._measured_bytes
        self.measuring = self.scarce and (unknown or larger or self._unfinished)
        if self.measuring:
            self.meter.reset_peak()
            self._room = 0.0

    def measure(self) -> None:
        """Measures the present micro-batch, which has begun and saved nothing yet."""
        self.measuring = self.scarce = True
        self.keeps_unknown, self.unsaved_bytes = False, 0
        self._room = 0.0
        self.meter.reset_peak()

    def begin_anew(self) -> None:
        """Forgets measured micro-batches, because later storages are fewer: units are checkpointed from now on."""
        if not self.measuring:
            self._lowest = 2**63 if self._peak else self._level  # of the micro-batches from now on
            self._others, self._peak, self._largest_bytes = 0.0, 0, 0
            self._levels.clear()
            self.scarce = False
        self.unsaved_bytes = 0

    def lower(self) -> None:
        """Called when the present micro-batch has run out of memory, before it is run again and measured."""
        if self.known:
            self._withheld += self.WITHHELD * self.meter.limit()

    @property
    def known(self) -> bool:
        """Whether a micro-batch has shown how many bytes of saved storages the present one may keep."""
        return bool(self._others) and not self.measuring

    @property
    def measured(self) -> bool:
        """Whether a micro-batch was measured, so that the memory of everything else is known and not only bounded."""
        return bool(self._levels)

    @property
    def fits(self) -> bool:
        """Whether the present micro-batch may keep all its saved storages, and a tenth more bytes."""
        return self.known and self._room >= self.SPARE * self._largest_bytes

    @property
    def needed_bytes(self) -> float:
        """Upper bound of the peak of a micro-batch that keeps all its saved storages, bytes; 0: not known."""
        return self._limit - self._room + self._largest_bytes if self.known else 0.0

    def fits_grown(self, ratio: float) -> bool:
        """Returns whether the present micro-batch may keep all its saved storages although its batch is larger.

        Args:
            ratio: size of the batch / size of the largest earlier one. Memory may grow with the square of the ratio,
                as the memory of attention does with the length of a sample.
        """
        grown = self._level + (self.needed_bytes - self._level) * max(1.0, ratio) ** 2
        return self.fits and grown <= self._limit

    def end(self, *, hooks: bool = True) -> None:
        """Called at the end of the backward. The peak is read now, since later peaks are not the micro-batch's.

        Args:
            hooks: whether saved-tensor hooks were enabled, so that `keep` has counted the kept storages.
        """
        self._peak = max(self._peak, self.meter.peak())
        self._without_hooks = not hooks

    def waits(self) -> bool:
        """Returns True if the training should wait for d2h copies, so that device memory is freed now."""
        return self.scarce or (not self._others and self.meter.allocated() > self.UNKNOWN * self.meter.limit())

    def excess(self, nbytes: float) -> float:
        """Returns the share of `nbytes` bytes of storages to keep for which there is no room."""
        return max(0.0, 1.0 - self._room / nbytes) if nbytes else 0.0

    def reserve(self, nbytes: int) -> None:
        """Reduces the room of the present micro-batch by `nbytes`, or to nothing."""
        self._room = max(0.0, self._room - nbytes)

    def use_window(self, window_bytes: int, early_bytes: Callable[[int], int]) -> int:
        """Makes room for the window of the present micro-batch, which has begun and saved nothing yet.

        A measured micro-batch has no window, and needs the least memory. If storages of another one have no room, its
        window reduces the room: by the bytes in flight, and by storages that are kept because backward needs them soon.

        Args:
            early_bytes: returns the bytes of storages that are kept because backward needs them within a window,
                besides the very first one.

        Returns:
            The window, or a smaller one for which there is room.
        """
        if self.measuring:
            return 0
        if not self.known or self._room >= self.SPARE * self.expected_bytes:
            return window_bytes
        window_bytes = self.fitting_window(window_bytes, early_bytes)
        early = early_bytes(window_bytes)
        self.reserve(window_bytes + early)
        self.placed_bytes = max(0, self.expected_bytes - early)
        return window_bytes

    def fitting_window(self, window_bytes: int, early_bytes: Callable[[int], int]) -> int:
        """Returns the window, or a smaller one for which the last micro-batch that has begun had room."""
        while window_bytes and window_bytes + early_bytes(window_bytes) > self.room_bytes:
            window_bytes //= 2
        return window_bytes

    def keep(self, nbytes: int) -> bool:
        """Returns whether a saved storage of `nbytes` may be kept on the device, and if so, counts it as kept."""
        if nbytes > self._room:
            return False
        self._room -= nbytes
        return True

    def keep_unknown(self, nbytes: int) -> bool:
        """Returns what `keep` does, for a micro-batch that is measured, or whose memory is not known."""
        if not self.keeps_unknown or self.meter.allocated() > self.ASSUMED * self._limit:
            return False
        self._kept_unknown += nbytes
        return True
