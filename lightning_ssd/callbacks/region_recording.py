"""`RegionRecording`: the micro-batch of a training with compiled code whose saved storages are recorded."""

from dataclasses import replace

from lightning_ssd.activations import ActivationOffloader
from lightning_ssd.callbacks.seen_batches import BatchShape, SeenBatches
from lightning_ssd.device import Clock
from lightning_ssd.profiling import SavedTimelineRecorder

MAX_RECORDINGS = 3
"""Micro-batches that are recorded, before the training is not planned as none had one forward and one backward."""

NO_TENSORS = BatchShape((), 0)
"""Shape of batches without tensors, which count as equal."""


class RegionRecording:
    """Chooses a micro-batch, and records when it saves and uses its storages, by the offloader's hooks.

    It is the first phase of a plan for compiled code, and follows each compilation. All methods are called on the
    training thread. In between, the hooks call the recorder, in backward on autograd's thread.

    Args:
        offloader: activation offloader of the training.
        clock: the device's clock.
        batches: batches of the whole training, of which a large one may be recorded.

    Attributes:
        recorder: has the recorded storages, once the micro-batch has ended.
    """

    def __init__(self, offloader: ActivationOffloader, clock: Clock, batches: SeenBatches) -> None:
        self._offloader = offloader
        self.recorder = SavedTimelineRecorder(clock)
        self._recordable: SeenBatches | None = batches
        """Batches of which a large one may be recorded; `None`: any."""
        self._count = 0
        """Micro-batches that were recorded in a row."""

    def restart(self, shape: BatchShape | None) -> None:
        """Has a micro-batch of a shape recorded; `None`: of any shape."""
        self._count = 0
        self._recordable = None if shape is None else SeenBatches()
        if self._recordable is not None and shape is not None:
            self._recordable.add(shape)

    def may_begin(self, shape: BatchShape) -> bool:
        """Returns whether a micro-batch of a shape may be recorded."""
        batches = self._recordable
        return batches is None or shape is NO_TENSORS or (batches.covers(shape) and batches.is_large(shape))

    def begin(self) -> None:
        """Records the present micro-batch, which has saved nothing yet."""
        recorder = self.recorder
        recorder.begin()
        self._offloader.run(
            replace(
                self._offloader.policy,
                hooks_enabled=True,
                on_saved=recorder.on_saved,
                on_unpacked=recorder.on_unpacked,
                on_stall=recorder.on_stall,
            )
        )

    @property
    def active(self) -> bool:
        """Whether the present micro-batch is recorded."""
        return self._offloader.policy.on_saved is not None

    def begin_forward(self) -> None:
        """Called when the time before the forward of the present micro-batch was not part of it."""
        if self.active:
            self.recorder.begin()

    def end_backward(self) -> None:
        """Called when the backward of the present micro-batch has ended."""
        if self.active:
            self.recorder.end()

    def end(self) -> bool:
        """Called when the present micro-batch has ended; returns whether it was recorded."""
        recorded = self.active
        if recorded:
            self._offloader.run(replace(self._offloader.policy, on_saved=None, on_unpacked=None, on_stall=None))
            self._count += 1
        return recorded

    @property
    def is_last(self) -> bool:
        """Whether no further micro-batch is recorded if this one is not complete."""
        return self._count == MAX_RECORDINGS
