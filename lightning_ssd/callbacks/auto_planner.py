"""`AutoPlanner`: the callback of `offload="auto"`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.autoplan import AutoPlan, Outcome, PlanCycle
from lightning_ssd.callbacks.micro_batch_switch import ends_short_window
from lightning_ssd.callbacks.offloader import find_offloader, offload_config, trainer_callbacks
from lightning_ssd.callbacks.step_profiling import StepProfiling
from lightning_ssd.callbacks.training import LightningTraining, states_owner


class AutoPlanner(pl.Callback):
    """Decides for `offload="auto"`, from the memory of the first steps, how saved tensors are treated.

    In the first steps, saved tensors for which the device has room are kept and the others are offloaded
    (`OffloadExcess`), which is safe but not the fastest choice. After one to three steps the outcome is one of these:

    - `"keep"`: the device has room for all saved tensors, and a tenth more. They are kept, and saved-tensor hooks are
      disabled, so that a step is plain Lightning's, while batches are no larger than earlier ones. Hooks are enabled
      for larger batches, when other parameters are trained, and when allocated memory grows.
    - `"plan"`: the device lacks room. The training is profiled and planned as by a `SwapPlanner`: saved tensors are
      kept, offloaded and recomputed, and, with `states="auto"`, offloaded model states are moved. The plan is for
      batches of every size; micro-batches that may need more memory than all before offload all saved tensors.
      Saved tensors of compiled blocks are kept or offloaded, or their block is checkpointed.
    - `"offload"`: the device lacks room, and the training can't be planned, because other processes have a part of the
      weights, or code is compiled that is no block, for example. Saved tensors without room are offloaded, as in the
      first steps.

    A log line names the outcome. A micro-batch that runs out of memory is run again with all saved tensors offloaded
    (`MicroBatchRetry`), and then less memory is used. That is possible for the first micro-batches under each rule or
    plan, and for those that are larger than earlier ones.

    The callback does nothing if `offload` is not `"auto"`, or if the user's callbacks profile the training. On a CPU
    there is no limit of device memory: all saved tensors are kept from the first step on.
    """

    def __init__(self) -> None:
        self._plan: AutoPlan | None = None
        """Decides about the present training; `None`: there is none, or another callback decides."""

    @override
    def __getstate__(self) -> Mapping[str, Any]:
        return {"_plan": None}  # a pickled Trainer does not continue its training

    @property
    def outcome(self) -> Outcome:
        """The decision; `"measuring"` before there is one."""
        return "measuring" if self._plan is None else self._plan.outcome

    @property
    def decides(self) -> bool:
        """Whether the callback decides in the present training, whose device has a limit of memory."""
        return self._plan is not None and self._plan.decides

    @property
    def planner(self) -> PlanCycle | None:
        """The plan of operators; `None`: there is none."""
        return None if self._plan is None else self._plan.cycle

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end(trainer)
        if find_offloader(trainer) is None or offload_config(trainer).amount() != "auto":
            return
        if any(isinstance(callback, StepProfiling) for callback in trainer_callbacks(trainer)):
            return
        self._plan = AutoPlan(LightningTraining(trainer, pl_module))
        owner = states_owner(trainer)
        if owner is not None:
            owner.planner = self._plan

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._plan is not None and find_offloader(trainer) is not None:
            self._plan.begin_micro_batch(batch)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if self._plan is not None and find_offloader(trainer) is not None:
            self._plan.before_backward(loss)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._plan is not None and find_offloader(trainer) is not None:
            self._plan.after_backward()

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self._plan is not None:
            self._plan.before_optimizer_step()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._plan is not None:
            ends_step = not (pl_module.automatic_optimization and trainer.fit_loop._should_accumulate())
            self._plan.end_micro_batch(ends_step=ends_step, short=ends_step and ends_short_window(trainer))

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._plan is not None:
            self._plan.pause()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._plan is not None:
            self._plan.resume()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._plan is not None:
            self._plan.end_epoch()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._plan is not None:
            self._plan.report()
            self._plan.close_cycle()  # user code may script or trace the model at the end of the training

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._end(trainer)

    def _end(self, trainer: pl.Trainer) -> None:
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.close()
            owner = states_owner(trainer)
            if owner is not None:
                owner.planner = None
