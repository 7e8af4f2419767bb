"""One micro-batch as the tensor cache sees it: what was saved in which order, and in which order backward wanted it."""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from lightning_ssd.activations.clock import Clock, Stopwatch
from lightning_ssd.activations.record import Record, State
from lightning_ssd.activations.tier import TierName

Placed = tuple[TierName, ...]
"""Tiers to try for a storage, in this order; none: it stays on the device."""


@dataclass(frozen=True)
class Pattern:
    """The shape of a finished micro-batch: what the next one like it will do.

    Attributes:
        sizes: bytes of each saved storage, in the order of saving.
        order: indices into `sizes`, in the order in which backward first wanted them.
        placed: of each storage, the tiers that the placement named for it; none: it stayed on the device; `None`: the
            placement was not asked.
        plan: number of the placement's plan that was in force.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    placed: tuple[Placed | None, ...] = ()
    plan: int | None = None

    @cached_property
    def _bytes_before(self) -> dict[int, int]:
        sizes = [self.sizes[index] for index in self.order]
        return dict(zip(self.order, accumulate(sizes, initial=0), strict=False))

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest storage that may leave: what backward wants first does not."""
        return max((size for index, size in enumerate(self.sizes) if index not in self.order[:1]), default=0)

    def bytes_that_may_leave(self, window_bytes: int) -> int:
        """Bytes of the storages that `is_wanted_early` does not keep on the device."""
        return sum(size for index, size in enumerate(self.sizes) if not self.is_wanted_early(index, window_bytes))

    def stays(self, window_bytes: int) -> frozenset[int]:
        """Returns the storages that the placement left on the device, without those that `is_wanted_early` keeps."""
        return frozenset(
            index
            for index, placed in enumerate(self.placed)
            if placed == () and not self.is_wanted_early(index, window_bytes)
        )

    def is_wanted_early(self, index: int, window_bytes: int) -> bool:
        """Whether storage `index` is what backward wanted first, or in the `window_bytes` after that."""
        before = self._bytes_before.get(index)
        return before is not None and before < self.sizes[self.order[0]] + window_bytes


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
    stall_seconds: dict[TierName, tuple[float, float]]
    saved_bytes: int
    plan: int


class MicroBatch:
    """The records of one forward and backward.

    Args:
        patterns: what earlier micro-batches did; those that this one departs from are dropped as it goes.
        clock: the device's clock.
        plan: the number of the plan in force.
        repeated: an earlier micro-batch whose placement holds again as long as this one saves storages of the same
            sizes. Storages that stayed on the device in it get no record.
        window_bytes: bytes that backward wants first, which are always recorded.
    """

    def __init__(
        self,
        patterns: Sequence[Pattern],
        clock: Clock,
        plan: int,
        repeated: Pattern | None = None,
        window_bytes: int = 0,
    ) -> None:
        self.sizes: list[int] = []
        self.saved_bytes = 0
        self._placed: list[Placed | None] = []
        self._repeated = repeated
        self._without_record = frozenset[int]() if repeated is None else repeated.stays(window_bytes)
        self.stalls: dict[TierName, tuple[Stopwatch, Stopwatch]] = {
            tier: (Stopwatch(clock), Stopwatch(clock)) for tier in ("host", "ssd")
        }
        self._records: list[Callable[[], Record | None]] = []
        self._wanted: dict[int, None] = {}  # a set that keeps its order
        self._candidates = list(dict.fromkeys(patterns))
        self._expected: Sequence[int] = ()
        self._position: dict[int, int] = {}
        self._cursor = 0
        self._ahead: deque[tuple[weakref.ref[Record], int]] = deque()  # on their way back, not yet wanted
        self._bytes_ahead = 0
        self._early: dict[int, int] = {}  # what `keeps` kept and backward has not wanted yet, index to bytes
        self._early_bytes = 0
        self._settled = 0  # storages that `_expected` speaks of
        self._clock = clock
        self._plan = plan
        self._begun: Any = clock.now()
        self._turned: Any = None
        self._ended: Any = None

    def repeats_stay(self, nbytes: int) -> bool:
        """Counts the next saved storage, and returns True, if it stays on the device as in the repeated micro-batch.

        Such a storage has no record: most storages of a training stay, and a record takes the host some 20 us.
        """
        index = len(self.sizes)
        if index not in self._without_record or not self._repeats(index, nbytes):
            return False
        self._count(nbytes, _no_record)
        self._placed[index] = ()
        return True

    def place(self, ask: Callable[[], Placed]) -> Placed:
        """Returns the tiers for the storage that was added last: those of the repeated micro-batch, or of `ask`."""
        index = len(self.sizes) - 1
        repeated = None if self._repeated is None else self._repeated.placed[index]
        placed = self._placed[index] = ask() if repeated is None else repeated
        return placed

    @property
    def in_backward(self) -> bool:
        """Whether backward has wanted something."""
        return self._turned is not None

    @property
    def ended(self) -> bool:
        """Whether its backward has run, and is over."""
        return self.in_backward and self._ended is not None

    def add(self, record: Record) -> None:
        """Takes the next saved storage; `record.index` is `len(sizes)`."""
        self._repeats(len(self.sizes), record.nbytes)
        self._count(record.nbytes, weakref.ref(record))

    def _repeats(self, index: int, nbytes: int) -> bool:
        """Whether storage `index` is the repeated micro-batch's; from the first that is not, nothing is repeated."""
        repeated = self._repeated
        if repeated is None or index >= len(repeated.sizes) or repeated.sizes[index] != nbytes:
            self._repeated, self._without_record = None, frozenset()
        return self._repeated is not None

    def _count(self, nbytes: int, record: Callable[[], Record | None]) -> None:
        index = len(self.sizes)
        self.sizes.append(nbytes)
        self.saved_bytes += nbytes
        self._records.append(record)
        self._placed.append(None)
        if len(self._candidates) == 1 and self._candidates[0] is self._repeated:
            return
        self._candidates = [
            pattern for pattern in self._candidates if index < len(pattern.sizes) and pattern.sizes[index] == nbytes
        ]

    def keeps(self, record: Record, window_bytes: int) -> bool:
        """Whether backward will want `record` so early that it would be fetched back at once: it never leaves."""
        early = any(pattern.is_wanted_early(record.index, window_bytes) for pattern in self._candidates[:1])
        if early:
            self._early[record.index] = record.nbytes
            self._early_bytes += record.nbytes
        return early

    def begin_backward(self) -> None:
        """Backward wants something for the first time, of what was saved so far."""
        self._turned = self._clock.now()
        self._settle_order()

    def want(self, record: Record) -> None:
        """Notes that backward wants `record` now."""
        if self._turned is None:
            self.begin_backward()
        if record.index >= self._settled:
            self._settle_order()
        self._wanted.setdefault(record.index)
        self._early_bytes -= self._early.pop(record.index, 0)
        position = self._position.get(record.index)
        if position is not None:
            self._cursor = max(self._cursor, position + 1)

    def next_to_fetch(self, window_bytes: int, window_depth: int | None) -> Record | None:
        """Returns the next record to bring back ahead of its use, if the window has room for it, and steps past it.

        What was kept for an early use takes up room in the window until it was used: fetching more at the turn from
        forward to backward would raise the peak of memory, which is there.
        """
        self._forget_arrived()
        early = self._early_bytes
        while self._cursor < len(self._expected):
            record = self._records[self._expected[self._cursor]]()
            if record is not None and record.state is State.AWAY:
                full = early + self._bytes_ahead + record.nbytes > window_bytes or len(self._ahead) == window_depth
                # One that is larger than the window comes alone.
                if full and (self._ahead or early or not window_bytes):
                    return None
                self._ahead.append((weakref.ref(record), record.nbytes))
                self._bytes_ahead += record.nbytes
                self._cursor += 1
                return record
            self._cursor += 1
        return None

    def end(self) -> None:
        """Backward is over."""
        if self._ended is None:
            self._ended = self._clock.now()

    def pattern(self) -> Pattern:
        """Returns what this micro-batch did."""
        repeated, wanted = self._repeated, tuple(self._wanted)
        if repeated is None or len(self.sizes) < len(repeated.sizes):
            return Pattern(tuple(self.sizes), wanted, tuple(self._placed), self._plan)
        if wanted == tuple(index for index in repeated.order if self._records[index] is not _no_record):
            return repeated  # which knows the order of storages without a record, too
        return Pattern(tuple(self.sizes), wanted)  # the next micro-batch records all storages

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
            if record is not None and record.state is State.COMING:
                return
            self._ahead.popleft()
            self._bytes_ahead -= nbytes

    def _settle_order(self) -> None:
        """A backward begins over what was saved so far: settle on the order in which it will want things."""
        self._settled = len(self.sizes)
        known = next((pattern.order for pattern in self._candidates if pattern.order), ())
        # Never seen before: backward mostly goes in the reverse of saving.
        order = known or range(self._settled - 1, -1, -1)
        self._expected = [index for index in order if index < self._settled]
        self._position = {index: position for position, index in enumerate(self._expected)}
        self._cursor = 0


def _no_record() -> None:
    """Stands for the record of a storage that stays on the device."""
    return None
