"""The micro-batches of a pipeline schedule within one micro-batch of the Trainer.

A schedule of `torch.distributed.pipelining` runs forwards and backwards of several micro-batches in one
`training_step`, in an order that repeats in each step. As in SSDTrain, each has a record of its own, and the offloader
is notified before each forward and backward: then the order of the last step tells what follows.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightning_ssd.activations.micro_batch import MicroBatch, Pattern


class StagePass(NamedTuple):
    """A forward or backward of a schedule.

    Attributes:
        chunk: index of the micro-batch in the schedule.
    """

    stage: int
    chunk: int
    backward: bool

    @property
    def key(self) -> tuple[int, int]:
        """Stage and micro-batch."""
        return self.stage, self.chunk


class PipelineOrder:
    """The order of forwards and backwards in the last step, and the micro-batches of the present one.

    Used on the training thread, under the offloader's lock.
    """

    def __init__(self) -> None:
        self._batches: dict[tuple[int, int], MicroBatch] = {}
        """Micro-batches of the present step, by stage and index."""
        self._patterns: dict[tuple[int, int], Pattern] = {}
        """Patterns of the last ones that have ended."""
        self._last: list[StagePass] = []
        self._present: list[StagePass] = []
        self._repeats = False
        """Whether the present step has followed the last one so far."""

    def begin_step(self) -> None:
        """Begins a step."""
        if self._present:
            self._last, self._present = self._present, []
        self._batches.clear()
        self._repeats = True

    def begin(self, now: StagePass, whole: MicroBatch, window_bytes: int) -> tuple[MicroBatch, MicroBatch | None]:
        """Begins a forward or backward.

        Args:
            window_bytes: bytes that are kept on the device because a backward that follows, at once or after one other
                pass, needs them first.

        Returns:
            Its micro-batch, and the one whose backward follows it if that is another one; None: that is not known.
        """
        expected = self._expect(now)
        if now.backward:
            batch = self._batches[now.key]
        else:
            # After one other pass, they would have to be loaded during that pass, and may still be in flight then.
            keeps_early = now._replace(backward=True) in expected
            batch = whole.begin_part(self._patterns.get(now.key), window_bytes, keeps_early=keeps_early)
            self._batches[now.key] = batch
        if not expected or not expected[0].backward or expected[0].key == now.key:
            return batch, None
        return batch, self._batches.get(expected[0].key)

    def end_backward(self, now: StagePass) -> None:
        """Ends a backward."""
        batch = self._batches[now.key]
        batch.end()
        self._patterns[now.key] = batch.pattern()

    def batches(self) -> Iterable[MicroBatch]:
        """Returns the micro-batches of the present step."""
        return self._batches.values()

    def _expect(self, now: StagePass) -> Sequence[StagePass]:
        """Notes a forward or backward, and returns those that followed it in the last step, if both are alike."""
        self._present.append(now)
        after = len(self._present)
        self._repeats &= self._last[after - 1 : after] == [now]
        return self._last[after : after + 2] if self._repeats else ()
