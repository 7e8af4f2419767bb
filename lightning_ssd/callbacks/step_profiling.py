"""`StepProfiling`: the callbacks that profile the operators of a training pass its events to `autoplan`."""

from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.autoplan import CompiledCode, PlanCycle, ProfiledSteps, compiled_units
from lightning_ssd.callbacks.micro_batch_switch import ends_short_window
from lightning_ssd.callbacks.offloader import find_offloader, trainer_callbacks
from lightning_ssd.callbacks.training import LightningTraining
from lightning_ssd.planning import ModelProfile
from lightning_ssd.sizes import check_count

__all__ = ["StepProfiling"]


class StepProfiling(pl.Callback):
    """Passes the events of a training to the object that profiles it, and refuses compiled code that it can't follow.

    Args:
        warm_up: steps up to and including the step of the recorded micro-batch.
        steps: timed steps.

    Raises:
        TypeError, ValueError: an argument has a wrong type or is out of range.
    """

    follows_units: ClassVar[bool] = False
    """Whether compiled units are accepted, each as one operator."""

    def __init__(self, warm_up: int, steps: int) -> None:
        check_count("warm_up", warm_up, 1)
        check_count("steps", steps, 1)
        self._warm_up = warm_up
        self._steps = steps
        self._events: PlanCycle | ProfiledSteps | None = None
        """Profiles the present training; `None`: there is none."""
        self._code: CompiledCode | None = None
        """Notices compiled code of the present training."""

    def make_events(self, training: LightningTraining) -> PlanCycle | ProfiledSteps:
        """Returns the object to which the events of a training are passed, before its first step."""
        raise NotImplementedError

    def profiled(self, trainer: pl.Trainer, profile: ModelProfile) -> None:
        """Called with the profile of `ProfiledSteps`, at the end of the last timed step."""

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        name = type(self).__name__
        if find_offloader(trainer) is None:
            raise ValueError(f"{name} needs `strategy='ssd_offload'`, or an `ActivationOffload` callback.")
        for other in trainer_callbacks(trainer):
            if isinstance(other, StepProfiling) and other is not self:
                raise ValueError(f"{name} and {type(other).__name__} both measure the first steps. Remove one.")
        self._end()  # Lightning's Tuner begins trainings without an end of the one before
        training = LightningTraining(trainer, pl_module)
        self._code = CompiledCode(compiled_units(training) if self.follows_units else ())
        self._events = self.make_events(training)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._events is None or self._code is None:
            return
        if self._profiled.phase == "waiting":
            self._check_not_compiled(self._code.ran)
        else:
            self._code.close()
        self._events.begin_micro_batch(batch)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if self._events is not None and self._code is not None:
            self._check_not_compiled(self._code.ran_under_mode)
            self._events.begin_backward()

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._events is not None:
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
        ends_step = not (pl_module.automatic_optimization and trainer.fit_loop._should_accumulate())
        if isinstance(self._events, PlanCycle):
            self._events.end_micro_batch(ends_step=ends_step, short=ends_step and ends_short_window(trainer))
        elif self._events is not None:
            profile = self._events.end_micro_batch(ends_step=ends_step)
            if profile is not None:
                self.profiled(trainer, profile)

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
        self._end()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._end()

    @property
    def _profiled(self) -> ProfiledSteps:
        assert self._events is not None
        return self._events.profiled if isinstance(self._events, PlanCycle) else self._events

    def _check_not_compiled(self, compiled: bool) -> None:
        """Raises ValueError if `compiled`: code of the training is or should be compiled."""
        if compiled:
            assert self._code is not None
            self._code.forget(pl.utilities.rank_zero_info)
            raise ValueError(
                "`torch.compile` compiles a part of `training_step`, whose single operations "
                f"{type(self).__name__} can't follow. Remove `torch.compile`, or remove the callback. (`torch.cond` "
                "and other operators that take functions compile them, too.)"
            )

    def _end(self) -> None:
        if self._code is not None:
            self._code.close()
        if self._events is not None:
            self._events.close()
