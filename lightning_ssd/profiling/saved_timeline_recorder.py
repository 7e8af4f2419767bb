"""`SavedTimelineRecorder`: the times at which a micro-batch saves and uses its storages, recorded by hooks alone."""

from typing import Any

import torch

from lightning_ssd.activations import SavedStorage, State
from lightning_ssd.device import Clock
from lightning_ssd.planning import SavedTimeline

__all__ = ["SavedTimelineRecorder"]


class SavedTimelineRecorder:
    """Records one micro-batch, in which all movable storages are offloaded, by the hooks of an `OffloadPolicy`.

    A compiled region saves its tensors when its forward ends, and unpacks them when its backward begins. So the times
    of saved storages are the times of regions, and no dispatch mode is needed, under which Dynamo would not compile.
    Stalls are recorded with them, and subtracted. Points in time are marks of the device's clock, which `timeline`
    reads later without a wait.

    `on_saved` is called on the training thread and `on_unpacked` on autograd's, never at once: the offloader's lock
    serializes them.

    Args:
        clock: clock of the device.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._batch: object = None
        self._sizes: list[int] = []
        self._points: list[tuple[Any, int | None]] = []
        """Marks of saving, then of first use, with the storage's index; the last one is the end of backward."""
        self._stalls: list[tuple[int, Any, Any]] = []
        """Spans in which the compute stream may have waited, with the number of points before."""
        self._used: dict[int, bool] = {}
        """Whether each storage was offloaded, in the order of first use."""
        self._begun: Any = None
        self._ended = False

    def begin(self) -> None:
        """Called when the micro-batch begins, also when it is run again."""
        self._batch = None
        self._sizes, self._points, self._stalls, self._used = [], [], [], {}
        self._begun = self._clock.now()
        self._ended = False

    def on_saved(self, storage: torch.UntypedStorage, record: SavedStorage) -> None:
        """Called when autograd has saved a storage."""
        if self._batch is not record.batch:
            if self._batch is not None:  # the micro-batch was run again
                self.begin()
            self._batch = record.batch
        if not self._ended and not self._used:
            self._points.append((self._clock.now(), record.index))
            self._sizes.append(record.nbytes)

    def on_unpacked(self, record: SavedStorage) -> None:
        """Called when backward unpacks a tensor."""
        if self._batch is record.batch and not self._ended and record.index not in self._used:
            self._used[record.index] = record.state is not State.RESIDENT
            self._points.append((self._clock.now(), record.index))

    def on_stall(self, begun: Any, ended: Any) -> None:
        """Called with each span in which the compute stream may have waited for a transfer."""
        if not self._ended:
            self._stalls.append((len(self._points), begun, ended))

    def end(self) -> None:
        """Called when the backward has ended."""
        if not self._ended:
            self._points.append((self._clock.now(), None))
            self._ended = True

    @property
    def complete(self) -> bool:
        """Whether the micro-batch had one forward and then one backward, whose storages were all seen."""
        return self._ended and 0 < len(self._used) and max(self._used) < len(self._sizes)

    def timeline(self) -> SavedTimeline | None:
        """Returns the timeline; `None`: the device has not passed it yet, or it is not `complete`."""
        if not self.complete:
            return None
        times = [self._clock.elapsed(self._begun, mark) for mark, _ in self._points]
        stalls = [(after, self._clock.elapsed(begun, ended)) for after, begun, ended in self._stalls]
        computed: list[float] = []
        stalled, position = 0.0, 0
        for number, time in enumerate(times):
            while position < len(stalls) and stalls[position][0] <= number:
                stall = stalls[position][1]
                if stall is None:
                    return None
                stalled += max(0.0, stall)
                position += 1
            if time is None:
                return None
            computed.append(max(computed[-1] if computed else 0.0, time - stalled))
        saves = len(self._sizes)
        forward = computed[saves]
        return SavedTimeline(
            sizes=tuple(self._sizes),
            movable=frozenset(index for index, offloaded in self._used.items() if offloaded),
            saved_at=tuple(computed[:saves]),
            order=tuple(self._used),
            used_at=tuple(time - forward for time in computed[saves:-1]),
            forward_seconds=forward,
            backward_seconds=computed[-1] - forward,
        )
