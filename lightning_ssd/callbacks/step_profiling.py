"""`StepProfiling`: the callbacks that profile the operators of a training refuse compiled code."""

from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.autoplan import CompiledCode, ProfiledSteps, compiled_units
from lightning_ssd.callbacks.find import find_offloader, trainer_callbacks
from lightning_ssd.callbacks.training import LightningTraining
from lightning_ssd.callbacks.training_events import TrainingEvents
from lightning_ssd.sizes import check_count


class StepProfiling(TrainingEvents):
    """Profiles trainings whose operators it can follow; others are refused.

    Args:
        warm_up: steps up to and including the step of the recorded micro-batch.

    Raises:
        TypeError, ValueError: an argument has a wrong type or is out of range.
    """

    follows_units: ClassVar[bool] = False
    """Whether compiled units are accepted, each as one operator."""

    _events: ProfiledSteps | None

    def __init__(self, warm_up: int, steps: int) -> None:
        check_count("warm_up", warm_up, 1)
        check_count("steps", steps, 1)
        self._warm_up = warm_up
        self._steps = steps
        self._code: CompiledCode | None = None
        """Notices compiled code of the present training."""

    def make_events(self, training: LightningTraining) -> ProfiledSteps:
        """Returns the object to which the events of a training are passed, before its first step."""
        raise NotImplementedError

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        name = type(self).__name__
        if find_offloader(trainer) is None:
            raise ValueError(f"{name} needs `strategy='ssd_offload'`, or an `ActivationOffload` callback.")
        for other in trainer_callbacks(trainer):
            if isinstance(other, StepProfiling) and other is not self:
                raise ValueError(f"{name} and {type(other).__name__} both measure the first steps. Remove one.")
        self._end(trainer)
        training = LightningTraining(trainer, pl_module)
        self._code = CompiledCode(compiled_units(training) if self.follows_units else ())
        self._events = self.make_events(training)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._events is not None and self._code is not None:
            if self._events.phase == "waiting":
                self._check_not_compiled(self._code.ran)
            else:
                self._code.close()
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if self._code is not None:
            self._check_not_compiled(self._code.ran_under_mode)
        super().on_before_backward(trainer, pl_module, loss)

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

    @override
    def _end(self, trainer: pl.Trainer) -> None:
        code, self._code = self._code, None
        if code is not None:
            code.close()
        super()._end(trainer)
