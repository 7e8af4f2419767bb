"""`follow_stages`: the activation offloader follows the micro-batches of a pipeline schedule."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lightning_ssd._lightning import pl
from lightning_ssd.activations import ActivationOffloader, StagePass
from lightning_ssd.callbacks.find import find_offloader

if TYPE_CHECKING:  # a long import, which the caller has made
    from torch.distributed.pipelining import PipelineStage


@contextlib.contextmanager
def follow_stages(trainer: pl.Trainer, *stages: "PipelineStage") -> Iterator[None]:
    """Offloads saved tensors of each micro-batch of a pipeline schedule apart, in the order of the schedule.

    Wraps `schedule.step` of `torch.distributed.pipelining` in `training_step`, with manual optimization. Saved tensors
    of micro-batches that wait for their backward are offloaded, and prefetched during the forward or backward before
    it. If the backward of a micro-batch is near its forward, the tensors that it needs first are kept. Without this
    context all micro-batches of the schedule are offloaded as one. It does nothing if activations are not offloaded.

    Example:
        >>> def training_step(self, batch, batch_idx):
        ...     with follow_stages(self.trainer, self.stage):
        ...         self.schedule.step(batch) if self.stage.is_first else self.schedule.step(target=batch)
        ...     self.optimizers().step()
        ...     self.optimizers().zero_grad()

    Args:
        trainer: the Trainer that runs the training step.
        stages: this process's stages of the schedule.
    """
    offloader = find_offloader(trainer)
    if offloader is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        for stage in stages:
            stack.enter_context(_followed(stage, "forward_one_chunk", offloader, backward=False))
            stack.enter_context(_followed(stage, "backward_one_chunk", offloader, backward=True))
        yield


@contextlib.contextmanager
def _followed(stage: "PipelineStage", name: str, offloader: ActivationOffloader, *, backward: bool) -> Iterator[None]:
    """Notifies the offloader of calls of the method `name` of `stage`, whose first argument is the micro-batch."""
    method: Callable[..., Any] = getattr(stage, name)
    replaced = vars(stage).get(name)

    def call(chunk: int, *args: Any, **kwargs: Any) -> Any:
        with offloader.stage_pass(StagePass(stage.stage_index, chunk, backward)):
            return method(chunk, *args, **kwargs)

    setattr(stage, name, call)
    try:
        yield
    finally:
        if replaced is None:
            delattr(stage, name)
        else:
            setattr(stage, name, replaced)
