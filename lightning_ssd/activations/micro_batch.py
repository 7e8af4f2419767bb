"""One micro-batch as the tensor cache sees it: what was saved in which order, and in which order backward wanted it."""

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from lightning_ssd.activations.clock import Clock, Stopwatch
from lightning_ssd.activations.record import Record, State
from lightning_ssd.activations.tier import TierName


@dataclass(frozen=True)
class Pattern:
    """The shape of a finished micro-batch: what the next one like it will do.

    Attributes:
        sizes: bytes of each saved storage, in the order of saving.
        order: indices into `sizes`, in the order in which backward first wanted them.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]

    @cached_property
    def _bytes_before(self) -> dict[int, int]:
        sizes = [self.sizes[index] for index in self.order]
        return dict(zip(self.order, accumulate(sizes, initial=0), strict=False))

    def bytes_before(self, index: int) -> int | None:
        """Returns the bytes that backward wants before storage `index`; `None` if it never wanted that one."""
        return self._bytes_before.get(index)


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
    """

    def __init__(self, patterns: Sequence[Pattern], clock: Clock, plan: int) -> None:
        self.sizes: list[int] = []
        self.saved_bytes = 0
        self.stalls: dict[TierName, tuple[Stopwatch, Stopwatch]] = {
            tier: (Stopwatch(clock), Stopwatch(clock)) for tier in ("host", "ssd")
        }
        self._records: list[weakref.ref[Record]] = []
        self._wanted: dict[int, None] = {}  # a set that keeps its order
        self._candidates = list(patterns)
        self._expected: Sequence[int] = ()
        self._position: dict[int, int] = {}
        self._cursor = 0
        self._ahead: deque[tuple[weakref.ref[Record], int]] = deque()  # on their way back, not yet wanted
        self._bytes_ahead = 0
        self._settled = 0  # storages that `_expected` speaks of
        self._clock = clock
        self._plan = plan
        self._begun: Any = clock.now()
        self._turned: Any = None
        self._ended: Any = None

    @property
    def in_backward(self) -> bool:
        """Whether backward has wanted something."""
        return self._turned is not None

    def add(self, record: Record) -> None:
        """Takes the next saved storage; `record.index` is `len(sizes)`."""
        index = len(self.sizes)
        self.sizes.append(record.nbytes)
        self.saved_bytes += record.nbytes
        self._records.append(weakref.ref(record))
        self._candidates = [
            pattern
            for pattern in self._candidates
            if index < len(pattern.sizes) and pattern.sizes[index] == record.nbytes
        ]

    def bytes_before(self, index: int) -> int | None:
        """Returns how many bytes backward is expected to want before storage `index`; `None` if unknown."""
        return self._candidates[0].bytes_before(index) if self._candidates else None

    def want(self, record: Record) -> None:
        """Notes that backward wants `record` now."""
        if self._turned is None:
            self._turned = self._clock.now()
        if record.index >= self._settled:
            self._settle_order()
        self._wanted.setdefault(record.index)
        position = self._position.get(record.index)
        if position is not None:
            self._cursor = max(self._cursor, position + 1)

    def next_to_fetch(self, window_bytes: int, window_depth: int | None) -> Record | None:
        """Returns the next record to bring back ahead of its use, if the window has room for it, and steps past it."""
        self._forget_arrived()
        while self._cursor < len(self._expected):
            record = self._records[self._expected[self._cursor]]()
            if record is not None and record.state is State.AWAY:
                full = self._bytes_ahead + record.nbytes > window_bytes or len(self._ahead) == window_depth
                if self._ahead and full:
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
        return Pattern(tuple(self.sizes), tuple(self._wanted))

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
