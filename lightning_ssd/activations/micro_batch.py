"""One micro-batch of the activation offloader: the orders in which storages are saved and unpacked."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_ssd.activations.record import SavedStorage, State
from lightning_ssd.device import Clock, Stopwatch
from lightning_ssd.types import OFFLOAD_TIERS, OffloadTierName


@dataclass(frozen=True)
class Pattern:
    """The saved storages of a finished micro-batch, by which similar later ones are predicted.

    Attributes:
        sizes: bytes of each saved storage, in the order of saving.
        order: indices into `sizes`, in the order in which backward first unpacked them.
        complete: whether `order` has all storages, because none was saved without a record.
        parts: micro-batches of a pipeline schedule that it consists of; 1 without a pipeline.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    complete: bool = True
    parts: int = 1

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest storage except the one that backward unpacks first, which is never offloaded."""
        return max((size for index, size in enumerate(self.sizes) if index not in self.order[:1]), default=0)

    def offloadable_bytes(self, window_bytes: int) -> int:
        """Returns the bytes of the storages that may be offloaded: all but the `needed_early` ones."""
        return sum(self.sizes) - sum(self.sizes[index] for index in self.needed_early(window_bytes))

    def has(self, index: int, nbytes: int) -> bool:
        """Returns whether storage `index` had `nbytes` bytes."""
        return index < len(self.sizes) and self.sizes[index] == nbytes

    def needed_early(self, window_bytes: int) -> frozenset[int]:
        """Returns the indices of the storage that backward needed first, and of the next `window_bytes` bytes."""
        early, left = set(self.order[:1]), window_bytes
        for index in self.order[1:]:
            if left <= 0:
                break
            left -= self.sizes[index]
            early.add(index)
        return frozenset(early)


@dataclass(frozen=True)
class MicroBatchProfile:
    """Times of one micro-batch on the device's clock, and its saved bytes.

    Attributes:
        forward_seconds: seconds from the start of the training step until backward unpacks the first saved tensor.
        backward_seconds: seconds from then until the end of backward.
        stall_seconds: seconds for which the compute stream waited for each tier, (to store, to load).
        saved_bytes: bytes of all saved storages that were large enough to offload.
        revision: revision of the placement that the micro-batch had.
    """

    forward_seconds: float
    backward_seconds: float
    stall_seconds: dict[OffloadTierName, tuple[float, float]]
    saved_bytes: int
    revision: int


class MicroBatch:
    """The records of one forward and backward.

    Args:
        pattern: pattern of the last micro-batch, dropped as soon as this one differs from it; `None`: there is none.
        window_bytes: bytes that are kept on the device because backward needs them first.
    """

    def __init__(self, pattern: Pattern | None, clock: Clock, revision: int, window_bytes: int) -> None:
        self.sizes: list[int] = []
        self.saved_bytes = 0
        self.kept_bytes = 0
        """Bytes of storages that are kept on the device and not in `sizes`, because none can be offloaded."""
        self._pattern = pattern
        """Pattern of the last micro-batch, while this one saves storages of the same sizes; None afterwards."""
        self.in_backward = False
        """True once backward has unpacked a tensor."""
        self.stalls: dict[OffloadTierName, tuple[Stopwatch, Stopwatch]] = {
            tier: (Stopwatch(clock), Stopwatch(clock)) for tier in OFFLOAD_TIERS
        }
        self._records: list[Callable[[], SavedStorage | None]] = []
        self._unpacked: dict[int, None] = {}  # a set that keeps its order
        self.parts: list[MicroBatch] = []
        """Micro-batches of a pipeline schedule in this one whose backward has begun, in the order of backwards."""
        self.following: MicroBatch | None = None
        """The part whose backward begins right after that of this one, if that is known."""
        self._whole: MicroBatch | None = None
        """The micro-batch of the Trainer that this one is a part of, until this one ends."""
        self._needed_early: frozenset[int]
        """Indices of the storages of the pattern that backward needs first."""
        self.set_window(window_bytes)
        self._expected: Sequence[int] = ()
        self._position: dict[int, int] = {}
        self._cursor = 0
        self._ahead = _Ahead()
        self._kept_early: dict[int, int] = {}
        """Bytes of the kept early storages by index, until backward unpacks them."""
        self._early_bytes = 0  # sum of `_kept_early`
        self._expected_until = 0  # number of storages that `_expected` covers
        self._clock = clock
        self._revision = revision
        self._begun: Any = clock.now()
        self._forward_ended: Any = None
        self._backward_began: Any = None
        self._ended: Any = None

    def begin_part(self, pattern: Pattern | None, window_bytes: int, *, keeps_early: bool) -> "MicroBatch":
        """Returns a micro-batch of a pipeline schedule within this one, whose forward begins.

        Its bytes and stalls count for this one, and both prefetch in one window.

        Args:
            pattern: its pattern in an earlier step.
            keeps_early: whether storages that backward needs first are kept, because it is near.
        """
        part = MicroBatch(pattern, self._clock, self._revision, window_bytes)
        part._whole, part._ahead = self, self._ahead
        if not keeps_early:
            part._needed_early = frozenset()
        return part

    def set_window(self, window_bytes: int) -> None:
        """Sets the bytes that are kept on the device, from now on, because backward needs them first."""
        self._window_bytes = window_bytes
        self._needed_early = frozenset() if self._pattern is None else self._pattern.needed_early(window_bytes)

    def needs_no_record(self, nbytes: int) -> bool:
        """Returns whether the next saved storage needs no record if the placement keeps it on the device.

        A record costs some microseconds of the host. Its use is to learn when backward unpacks the storage, which is
        known already if the storages are saved as in the last micro-batch. Storages within the first `window_bytes` of
        backward are always recorded.
        """
        index, pattern = len(self.sizes), self._pattern
        if pattern is None or not pattern.complete:
            return False
        return index not in self._needed_early and pattern.has(index, nbytes)

    def add_without_record(self, nbytes: int) -> None:
        """Counts the next saved storage, which `needs_no_record` allows to have no record."""
        self._count(nbytes, _no_record)

    @property
    def ended(self) -> bool:
        """True after the backward. False without a backward."""
        return self.in_backward and self._ended is not None

    def add(self, record: SavedStorage) -> None:
        """Adds the record of the next saved storage. `record.index` must be `len(sizes)`."""
        self._count(record.nbytes, weakref.ref(record))

    def _count(self, nbytes: int, record: Callable[[], SavedStorage | None]) -> None:
        self._match(nbytes)
        self.sizes.append(nbytes)
        self.saved_bytes += nbytes
        if self._whole is not None:
            self._whole.saved_bytes += nbytes
        self._records.append(record)

    def _match(self, nbytes: int) -> None:
        """Drops the pattern if its next saved storage has other bytes."""
        if self._pattern is not None and not self._pattern.has(len(self.sizes), nbytes):
            self._pattern = None
            self.set_window(self._window_bytes)

    def is_early(self, nbytes: int) -> bool:
        """Returns True if backward needs the next saved storage so early that it is not offloaded.

        The storage, of `nbytes`, counts as kept then, and the caller adds its record.
        """
        self._match(nbytes)
        index = len(self.sizes)
        if index not in self._needed_early:
            return False
        self._kept_early[index] = nbytes
        self._early_bytes += nbytes
        return True

    def end_forward(self) -> None:
        """Called when the forward of a part has ended. Without a call, it ends when backward begins."""
        self._forward_ended = self._clock.now()

    def expect_backward(self) -> None:
        """Called when the backward of a part follows, before its records are prefetched."""
        self._predict_order()

    def begin_backward(self, following: "MicroBatch | None" = None) -> None:
        """Called when backward first unpacks a tensor of the micro-batch, or before that if it is a part.

        Args:
            following: the part whose backward begins right after that of this part, if that is known.
        """
        self.in_backward = True
        self._backward_began = self._clock.now()
        self._predict_order()
        if following is not None:
            following.expect_backward()
            self.following = following
        if self._whole is not None:
            self._whole.parts.append(self)
            if not self._whole.in_backward:
                self._whole.begin_backward()

    def touch(self, record: SavedStorage) -> None:
        """Called when backward unpacks a tensor of `record`."""
        if not self.in_backward:
            self.begin_backward()
        if record.index >= self._expected_until:
            self._predict_order()
        # It was released when it was unpacked before: another backward of the same graph needs it, and those after it.
        released = record.index in self._unpacked and record.state is State.OFFLOADED
        self._unpacked.setdefault(record.index)
        self._early_bytes -= self._kept_early.pop(record.index, 0)
        after = self._position.get(record.index, -1) + 1
        self._cursor = after if released else max(self._cursor, after)

    def to_prefetch(self, window_bytes: int, window_depth: int | None) -> Iterator[SavedStorage]:
        """Yields the records to prefetch now, within the room of the window, and counts them as prefetched.

        Records that are kept because backward needs them early count in the window until they are unpacked: memory
        peaks at the begin of backward, and prefetching more there would raise the peak.
        """
        ahead = self._ahead
        ahead.drop_arrived()
        early = self._early_bytes
        while self._cursor < len(self._expected):
            record = self._records[self._expected[self._cursor]]()
            if record is not None and record.state is State.OFFLOADED:
                full = early + ahead.nbytes + record.nbytes > window_bytes or len(ahead.records) == window_depth
                # A record that is larger than the window is prefetched alone.
                if full and (ahead.records or early or not window_bytes):
                    return
                ahead.add(record)
                self._cursor += 1
                yield record
            else:
                self._cursor += 1
        if self.following is not None:
            yield from self.following.to_prefetch(window_bytes, window_depth)

    def resident_bytes(self) -> int:
        """Returns the bytes of the saved storages that have device memory, including those in flight."""
        total = self.kept_bytes
        for nbytes, reference in zip(self.sizes, self._records, strict=True):
            record = reference()
            kept = record is not None and record.state is not State.OFFLOADED
            total += nbytes if kept or reference is _no_record else 0
        return total

    def end(self) -> None:
        """Called when backward has ended."""
        if self._ended is None:
            self._ended = self._clock.now()
            self._whole = self.following = None  # so that no cycle of references is left
            for part in self.parts:  # an error may have ended its backward
                part.end()

    def pattern(self) -> Pattern:
        """Returns the pattern of this micro-batch, with those of its parts one after the other."""
        own = self._own_pattern()
        if not self.parts:
            return own
        sizes, order = list(own.sizes), list(own.order)
        for pattern in [part.pattern() for part in self.parts]:
            order += [len(sizes) + index for index in pattern.order]
            sizes += pattern.sizes
        return Pattern(tuple(sizes), tuple(order), complete=False, parts=len(self.parts))

    def _own_pattern(self) -> Pattern:
        unpacked = tuple(self._unpacked)
        recorded = [record is not _no_record for record in self._records]
        if all(recorded):
            return Pattern(tuple(self.sizes), unpacked)
        repeated = self._pattern
        if repeated is not None and len(recorded) == len(repeated.sizes):
            if unpacked == tuple(index for index in repeated.order if recorded[index]):
                return repeated  # its order includes storages that had no record in this micro-batch
        return Pattern(tuple(self.sizes), unpacked, complete=False)

    def profile(self) -> MicroBatchProfile | None:
        """Returns the profile, or `None` if the device has not executed the micro-batch yet or it had no backward.

        A micro-batch with parts has the sums of their seconds: the device waits for other stages between them.
        """
        seconds = [part._seconds() for part in self.parts or [self]]
        forward, backward = 0.0, 0.0
        for one in seconds:
            if one is None:
                return None
            forward, backward = forward + one[0], backward + one[1]
        stalls = {tier: (out.seconds, into.seconds) for tier, (out, into) in self.stalls.items()}
        return MicroBatchProfile(forward, backward, stalls, self.saved_bytes, self._revision)

    def _seconds(self) -> tuple[float, float] | None:
        """Returns the seconds of forward and backward, or None if the device has not executed them."""
        if self._backward_began is None or self._ended is None:
            return None
        forward_ended = self._backward_began if self._forward_ended is None else self._forward_ended
        forward = self._clock.elapsed(self._begun, forward_ended)
        backward = self._clock.elapsed(self._backward_began, self._ended)
        return None if forward is None or backward is None else (forward, backward)

    def _predict_order(self) -> None:
        """Predicts the order of unpacking of the storages saved so far."""
        self._expected_until = len(self.sizes)
        known = () if self._pattern is None else self._pattern.order
        # Without a matching pattern, the reverse order of saving is the best guess.
        order = known or range(self._expected_until - 1, -1, -1)
        self._expected = [index for index in order if index < self._expected_until]
        self._position = {index: position for position, index in enumerate(self._expected)}
        self._cursor = 0


class _Ahead:
    """Records that were prefetched and not yet unpacked, in this order, of a micro-batch and its parts."""

    def __init__(self) -> None:
        self.records: deque[tuple[weakref.ref[SavedStorage], int]] = deque()
        self.nbytes = 0

    def add(self, record: SavedStorage) -> None:
        """Adds a record, which the caller prefetches."""
        self.records.append((weakref.ref(record), record.nbytes))
        self.nbytes += record.nbytes

    def drop_arrived(self) -> None:
        """Drops records from the front that were unpacked or freed."""
        while self.records:
            reference, nbytes = self.records[0]
            record = reference()
            if record is not None and record.state is State.PREFETCHING:
                return
            self.records.popleft()
            self.nbytes -= nbytes


def _no_record() -> None:
    """Replaces the weak reference to the record of a storage that has none, because it is kept on the device."""
    return None
