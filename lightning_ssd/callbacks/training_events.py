"""`TrainingEvents`: callbacks that plan or profile a training pass its events to an object of `autoplan`."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.autoplan import AutoPlan, ProfiledSteps
from lightning_ssd.callbacks.find import find_offloader
from lightning_ssd.callbacks.micro_batch_switch import ends_short_window


class TrainingEvents(pl.Callback):
    """Passes the events of a training, from its start on, to the object that a subclass sets at the start."""

    _events: AutoPlan | ProfiledSteps | None = None
    """Gets the events of the present training; `None`: none does."""

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._events is not None and find_offloader(trainer) is not None:
            self._events.begin_micro_batch(batch)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if self._events is not None and find_offloader(trainer) is not None:
            self._events.begin_backward(loss)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._events is not None and find_offloader(trainer) is not None:
            self._events.end_backward()

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self._events is not None:
            self._events.begin_optimizer()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._events is not None:
            ends_step = not (pl_module.automatic_optimization and trainer.fit_loop._should_accumulate())
            self._events.end_micro_batch(ends_step=ends_step, short=ends_step and ends_short_window(trainer))

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._events is not None:
            self._events.end_epoch()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._events is not None:
            self._events.pause()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._events is not None:
            self._events.resume()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._end(trainer)

    def _end(self, trainer: pl.Trainer) -> None:
        """Ends the present training, also one that Lightning's Tuner began and did not end."""
        events, self._events = self._events, None
        if events is not None:
            events.close()
