"""One micro-batch of the activation offloader: the orders in which storages are saved and unpacked."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_ssd.activations.record import SavedStorage, State
from lightning_ssd.device import Clock, Stopwatch
from lightning_ssd.types import OffloadTierName


@dataclass(frozen=True)
class Pattern:
    """The shape of a finished micro-batch: what the next one like it will do.

    Attributes:
        sizes: bytes of each saved storage, in the order of saving.
        order: indices into `sizes`, in the order in which backward first wanted them.
        complete: whether `order` speaks of all storages: none was saved without a record.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    complete: bool = True

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest storage that may leave: what backward wants first does not."""
        return max((size for index, size in enumerate(self.sizes) if index not in self.order[:1]), default=0)

    def bytes_that_may_leave(self, window_bytes: int) -> int:
        """Bytes of the storages that are not `wanted_early`, which stay on the device."""
        return sum(self.sizes) - sum(self.sizes[index] for index in self.wanted_early(window_bytes))

    def has(self, index: int, nbytes: int) -> bool:
        """Whether storage `index` had `nbytes` bytes."""
        return index < len(self.sizes) and self.sizes[index] == nbytes

    def begins_with(self, sizes: Sequence[int]) -> bool:
        """Whether its first storages had `sizes` bytes."""
        return self.sizes[: len(sizes)] == tuple(sizes)

    def wanted_early(self, window_bytes: int) -> frozenset[int]:
        """Returns the indices of the storage that backward wanted first, and of those in the `window_bytes` after."""
        early = set()
        left = window_bytes
        for position, index in enumerate(self.order):
            if position > 0:
                if left <= 0:
                    break
                left -= self.sizes[index]
            early.add(index)
        return frozenset(early)


@dataclass(frozen=True)
class MicroBatchProfile:
    """What one micro-batch took, on the device's clock.

    Attributes:
        forward_seconds: from the start of the training step to the first saved tensor that backward wanted.
        backward_seconds: from there to the end of backward.
        stall_seconds: of each tier, how long the compute stream waited for it, to store and to load.
        saved_bytes: bytes of all saved storages that were large enough to offload.
        plan: the number of the plan that was in force.
    """

    forward_seconds: float
    backward_seconds: float
    stall_seconds: dict[OffloadTierName, tuple[float, float]]
    saved_bytes: int
    plan: int


class MicroBatch:
    """The records of one forward and backward.

    Args:
        patterns: what earlier micro-batches did; those that this one departs from are dropped as it goes.
        clock: the device's clock.
        plan: the number of the plan in force.
        window_bytes: what backward wants first, and so many bytes after that, stays on the device.
    """

    def __init__(self, patterns: Sequence[Pattern], clock: Clock, plan: int, window_bytes: int) -> None:
        self.sizes: list[int] = []
        self.saved_bytes = 0
        self._repeated = patterns[0] if patterns and patterns[0].complete else None
        """The last micro-batch, as long as this one saves storages of the same sizes."""
        self.in_backward = False
        """Whether backward has wanted something."""
        self.stalls: dict[OffloadTierName, tuple[Stopwatch, Stopwatch]] = {
            tier: (Stopwatch(clock), Stopwatch(clock)) for tier in ("host", "ssd")
        }
        self._records: list[Callable[[], SavedStorage | None]] = []
        self._wanted: dict[int, None] = {}  # a set that keeps its order
        self._candidates = list(dict.fromkeys(patterns))
        """Earlier micro-batches that this one may repeat, the newest first; the first one is known to match so far."""
        self._wanted_early: frozenset[int]
        """Indices of storages of the first candidate."""
        self.set_window(window_bytes)
        self._expected: Sequence[int] = ()
        self._position: dict[int, int] = {}
        self._cursor = 0
        self._ahead: deque[tuple[weakref.ref[SavedStorage], int]] = deque()  # on their way back, not yet wanted
        self._bytes_ahead = 0
        self._early: dict[int, int] = {}  # what `keeps` kept and backward has not wanted yet, index to bytes
        self._early_bytes = 0
        self._settled = 0  # storages that `_expected` speaks of
        self._clock = clock
        self._plan = plan
        self._begun: Any = clock.now()
        self._turned: Any = None
        self._ended: Any = None

    def set_window(self, window_bytes: int) -> None:
        """Has storages that backward wants in its first `window_bytes` stay on the device from now on."""
        self._window_bytes = window_bytes
        self._wanted_early = self._candidates[0].wanted_early(window_bytes) if self._candidates else frozenset()

    def stays_again(self, nbytes: int) -> bool:
        """Whether the next saved storage may stay on the device without a record, if the placement leaves it there.

        A record takes the host some microseconds. It shows where in the order of backward its storage comes, which is
        known for a storage that is saved as in the last micro-batch. Storages that backward wants within its first
        `window_bytes` are always recorded.
        """
        index, repeated = len(self.sizes), self._repeated
        return repeated is not None and index not in self._wanted_early and repeated.has(index, nbytes)

    def add_without_record(self, nbytes: int) -> None:
        """Counts the next saved storage, which `stays_again` allows to have no record."""
        self._count(nbytes, _no_record)

    @property
    def ended(self) -> bool:
        """Whether its backward has run, and is over."""
        return self.in_backward and self._ended is not None

    def add(self, record: SavedStorage) -> None:
        """Takes the next saved storage; `record.index` is `len(sizes)`."""
        self._count(record.nbytes, weakref.ref(record))

    def _count(self, nbytes: int, record: Callable[[], SavedStorage | None]) -> None:
        index = len(self.sizes)
        self.sizes.append(nbytes)
        self.saved_bytes += nbytes
        self._records.append(record)
        if self._candidates and not self._candidates[0].has(index, nbytes):
            self._candidates = [pattern for pattern in self._candidates[1:] if pattern.begins_with(self.sizes)]
            self._repeated = None
            self.set_window(self._window_bytes)

    def keeps(self, record: SavedStorage) -> bool:
        """Whether backward will want `record` so early that it would be fetched back at once: it never leaves."""
        if record.index not in self._wanted_early:
            return False
        self._early[record.index] = record.nbytes
        self._early_bytes += record.nbytes
        return True

    def begin_backward(self) -> None:
        """Backward wants something for the first time, of what was saved so far."""
        self.in_backward = True
        self._turned = self._clock.now()
        self._settle_order()

    def want(self, record: SavedStorage) -> None:
        """Notes that backward wants `record` now."""
        if not self.in_backward:
            self.begin_backward()
        if record.index >= self._settled:
            self._settle_order()
        self._wanted.setdefault(record.index)
        self._early_bytes -= self._early.pop(record.index, 0)
        self._cursor = max(self._cursor, self._position.get(record.index, -1) + 1)

    def to_fetch(self, window_bytes: int, window_depth: int | None) -> Iterator[SavedStorage]:
        """Yields the records to bring back ahead of their use now, as far as the window has room, and steps past them.

        What was kept for an early use takes up room in the window until it was used: fetching more at the turn from
        forward to backward would raise the peak of memory, which is there.
        """
        self._forget_arrived()
        early = self._early_bytes
        while self._cursor < len(self._expected):
            record = self._records[self._expected[self._cursor]]()
            if record is not None and record.state is State.OFFLOADED:
                full = early + self._bytes_ahead + record.nbytes > window_bytes or len(self._ahead) == window_depth
                # One that is larger than the window comes alone.
                if full and (self._ahead or early or not window_bytes):
                    return
                self._ahead.append((weakref.ref(record), record.nbytes))
                self._bytes_ahead += record.nbytes
                self._cursor += 1
                yield record
            else:
                self._cursor += 1

    def resident_bytes(self) -> int:
        """Returns the bytes of the saved storages that are on the device, or on their way to or from it."""
        total = 0
        for nbytes, reference in zip(self.sizes, self._records, strict=True):
            record = reference()
            kept = record is not None and record.state is not State.OFFLOADED
            total += nbytes if kept or reference is _no_record else 0
        return total

    def end(self) -> None:
        """Backward is over."""
        if self._ended is None:
            self._ended = self._clock.now()

    def pattern(self) -> Pattern:
        """Returns what this micro-batch did."""
        wanted = tuple(self._wanted)
        recorded = [record is not _no_record for record in self._records]
        if all(recorded):
            return Pattern(tuple(self.sizes), wanted)
        repeated = self._repeated
        if repeated is not None and len(recorded) == len(repeated.sizes):
            if wanted == tuple(index for index in repeated.order if recorded[index]):
                return repeated  # which knows the order of storages without a record, too
        return Pattern(tuple(self.sizes), wanted, complete=False)

    def profile(self) -> MicroBatchProfile | None:
        """Returns what it took, or `None` while the device is not through with it (or it had no backward)."""
        if self._turned is None or self._ended is None:
            return None
        backward = self._clock.elapsed(self._turned, self._ended)
        forward = self._clock.elapsed(self._begun, self._turned)
        if forward is None or backward is None:
            return None
        stalls = {tier: (out.seconds, into.seconds) for tier, (out, into) in self.stalls.items()}
        return MicroBatchProfile(forward, backward, stalls, self.saved_bytes, self._plan)

    def _forget_arrived(self) -> None:
        """Drops from the front of the window what has been wanted, or died."""
        while self._ahead:
            reference, nbytes = self._ahead[0]
            record = reference()
            if record is not None and record.state is State.PREFETCHING:
                return
            self._ahead.popleft()
            self._bytes_ahead -= nbytes

    def _settle_order(self) -> None:
        """A backward begins over what was saved so far: settle on the order in which it will want things."""
        self._settled = len(self.sizes)
        known = next((each.order for each in self._candidates if each.order and each.begins_with(self.sizes)), ())
        # Never seen before: backward mostly goes in the reverse of saving.
        order = known or range(self._settled - 1, -1, -1)
        self._expected = [index for index in order if index < self._settled]
        self._position = {index: position for position, index in enumerate(self._expected)}
        self._cursor = 0


def _no_record() -> None:
    """Stands for the record of a storage that stays on the device."""
    return None
