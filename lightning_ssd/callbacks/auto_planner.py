"""`AutoPlanner`: the callback of `offload="auto"`."""

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.autoplan import AutoPlan, Outcome, PlanCycle
from lightning_ssd.callbacks.find import find_offloader, offload_config, trainer_callbacks
from lightning_ssd.callbacks.step_profiling import StepProfiling
from lightning_ssd.callbacks.training import LightningTraining, states_owner
from lightning_ssd.callbacks.training_events import TrainingEvents


class AutoPlanner(TrainingEvents):
    """Decides for `offload="auto"`, from the memory of the first steps, how saved tensors are treated.

    In the first steps, saved tensors for which the device has room are kept (`OffloadExcess`). If they have no room,
    units that may be are checkpointed (`UnplannedCheckpoints`), and other saved tensors are offloaded. After one to
    three steps the outcome is one of these:

    - `"keep"`: the device has room for all saved tensors, and a tenth more. They are kept, and saved-tensor hooks are
      disabled, so that a step is plain Lightning's, while batches are no larger than earlier ones. Hooks are enabled
      for larger batches, when other parameters are trained, and when allocated memory grows.
    - `"plan"`: the device lacks room. The training is profiled and planned as by a `SwapPlanner`: saved tensors are
      kept, offloaded and recomputed, and, with `states="auto"`, offloaded model states are moved. The plan is for
      batches of every size; those that may need more memory than all before have all units checkpointed that may be,
      or offload all saved tensors. Saved tensors of compiled blocks are kept or offloaded, or their block is
      checkpointed; before, code may be compiled again once, so that it saves less.
    - `"offload"`: the device lacks room, and the training can't be planned, because other processes have a part of the
      weights, or code is compiled that is no block, for example. Saved tensors without room are offloaded.
      If profiles or plans run out of memory instead, units are checkpointed, too.

    A log line names the outcome. A micro-batch that runs out of memory is run again with all saved tensors offloaded or
    recomputed (`MicroBatchRetry`), and then less memory is used. That is possible for the first micro-batches under
    each rule or plan, and for those that are larger than earlier ones.

    The callback does nothing if `offload` is not `"auto"`, or if the user's callbacks profile the training. On a CPU
    there is no limit of device memory: all saved tensors are kept from the first step on.
    """

    _events: AutoPlan | None
    """Decides about the present training; `None`: there is none, or another callback decides."""

    @override
    def __getstate__(self) -> Mapping[str, Any]:
        return {}  # a pickled Trainer does not continue its training

    @property
    def outcome(self) -> Outcome:
        """The decision; `"measuring"` before there is one."""
        return "measuring" if self._events is None else self._events.outcome

    @property
    def decides(self) -> bool:
        """Whether the callback decides in the present training, whose device has a limit of memory."""
        return self._events is not None and self._events.decides

    @property
    def planner(self) -> PlanCycle | None:
        """The plan of operators; `None`: there is none."""
        return None if self._events is None else self._events.cycle

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end(trainer)
        if find_offloader(trainer) is None or offload_config(trainer).amount() != "auto":
            return
        if any(isinstance(callback, StepProfiling) for callback in trainer_callbacks(trainer)):
            return
        self._events = AutoPlan(LightningTraining(trainer, pl_module))
        owner = states_owner(trainer)
        if owner is not None:
            owner.planner = self._events

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._events is not None:
            self._events.end_training()  # user code may script or trace the model at the end of the training

    @override
    def _end(self, trainer: pl.Trainer) -> None:
        owner = states_owner(trainer)
        if self._events is not None and owner is not None:
            owner.planner = None
        super()._end(trainer)
