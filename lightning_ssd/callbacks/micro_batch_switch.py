"""`MicroBatchSwitch` notifies the activation offloader when micro-batches begin and end."""

from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.callbacks.find import find_offloader, trainer_callbacks


@dataclass(frozen=True)
class MicroBatchInfo:
    """Position of a micro-batch in its accumulation window.

    Attributes:
        index: number in the window, from 0.
        is_last: whether the optimizer steps after the micro-batch's backward, also in shorter windows at the end of an
            epoch and after a change of `accumulate_grad_batches`. Always `True` with manual optimization, where the
            steps of a batch are unknown in advance.
    """

    index: int
    is_last: bool


def ends_short_window(trainer: pl.Trainer) -> bool:
    """Returns whether a step that ends with the present batch has fewer micro-batches than others of the training.

    It is the last one of an epoch. If all epochs have fewer batches than steps may accumulate, it is none.
    """
    switch = [one for one in trainer_callbacks(trainer) if isinstance(one, MicroBatchSwitch)][0]
    usual = min(trainer.accumulate_grad_batches, switch.longest_window)
    return switch.current is not None and switch.current.index + 1 < usual


class MicroBatchSwitch(pl.Callback):
    """Begins a micro-batch of the activation offloader at every batch, and ends its backward (SSDTrain figure 2).

    `current` is the position of the present micro-batch, for other callbacks. It is also set without an offloading
    strategy or callback. Offloading adds this callback automatically.
    """

    def __init__(self) -> None:
        self.current: MicroBatchInfo | None = None
        self.longest_window = 0
        """Micro-batches of the longest window of the training so far."""

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.current = None  # an earlier fit may have ended inside a window
        self.longest_window = 0

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        same_window = self.current is not None and not self.current.is_last and batch_idx > 0
        index = self.current.index + 1 if self.current is not None and same_window else 0
        self.current = MicroBatchInfo(index, is_last=not trainer.fit_loop._should_accumulate())
        self.longest_window = max(self.longest_window, index + 1)
        if (offloader := find_offloader(trainer)) is not None:
            offloader.begin_micro_batch()

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # With manual optimization more backwards may follow.
        if pl_module.automatic_optimization and (offloader := find_offloader(trainer)) is not None:
            offloader.end_backward()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not pl_module.automatic_optimization and (offloader := find_offloader(trainer)) is not None:
            offloader.end_backward()
