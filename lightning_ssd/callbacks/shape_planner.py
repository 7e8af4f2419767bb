"""`ShapePlanner`: plans a training whose batches have a few shapes, with a plan for each."""

from dataclasses import replace
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.activations import AllocatorMeter
from lightning_ssd.callbacks.plan_progress import PlanProgress
from lightning_ssd.callbacks.plan_runner import PlanRunner, offload_all
from lightning_ssd.callbacks.planned_shapes import PlannedShape, PlannedShapes, UnplannedBatches
from lightning_ssd.callbacks.profiling_budget import ProfilingBudget
from lightning_ssd.callbacks.seen_batches import BatchShape, SeenBatches
from lightning_ssd.callbacks.swap_planner import SwapPlanner

__all__ = ["ShapePlanner"]


class ShapePlanner(SwapPlanner):
    """A `SwapPlanner` that makes a plan for each of a few shapes of batches.

    The first plan is made for a large batch, within the budget of profiling. A micro-batch follows the plan of its
    shape, or that of the smallest planned shape that is no smaller. If there is none, as the batch is larger, other
    parameters are trained, or more memory is allocated, all saved tensors are offloaded. If many micro-batches have no
    plan, or one for much larger batches, the training is profiled with a batch of theirs. Each plan is corrected by
    steps under it alone: the state of `SwapPlanner`, `PlanProgress`, is exchanged when a micro-batch begins.

    Args:
        meter: the device's allocator, whose limit is the memory that the training may use.
        batches: batches of the training before there is a planner, and of the whole training later.
    """

    _logs_metrics = False  # the user has added no planner, and expects no metrics of one

    def __init__(self, meter: AllocatorMeter, batches: SeenBatches) -> None:
        super().__init__(gpu_memory=f"{int(meter.limit())}B", warm_up=1)
        self._batches = batches
        self._plans: PlannedShapes[PlanProgress] = PlannedShapes(meter)
        self._planned: PlannedShape[PlanProgress] | None = None
        """The plan in force, or that of the recorded micro-batch; `None`: all saved tensors are offloaded."""
        self._recordable = batches
        """Batches of which a large one may be recorded."""
        self._unplanned = UnplannedBatches()
        self._parameters: tuple[Tensor, ...] = ()

    @property
    def rule(self) -> object:
        """Compares equal for micro-batches that follow one plan, or are profiled, or offload all saved tensors."""
        return self._phase, None if self.runner is None else self.runner.number

    @override
    def _check_not_compiled(self, compiled: bool) -> None:
        """Raises no error: `AutoPlanner` removes this planner from trainings with compiled code."""

    @override
    def may_record(self, batch: Any) -> bool:
        return self._recordable.is_large(BatchShape.of(batch))

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._parameters = tuple(pl_module.parameters())
        super().on_train_start(trainer, pl_module)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        shape, trained = BatchShape.of(batch), tuple(parameter.requires_grad for parameter in self._parameters)
        if self._at_boundary:
            # Prefetched weights make allocated bytes differ from step to step.
            self._plans.begin_step(compare_bytes=self._states is None)
        if not self.measuring:
            self._follow(trainer, pl_module, shape, trained)
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self.recording:
            if self._planned is not None:
                self._plans.remove(self._planned)  # it is profiled again
            self._planned = self._plans.make(shape, trained, self._progress)

    @override
    def _report_plan(self) -> None:
        if self.plan is not None and not self.calibrating:  # else it needs none
            super()._report_plan()

    @override
    def _end(self) -> None:
        for planned in self._plans.clear():
            self._close(planned)
        self._planned = None
        self._recordable = self._batches
        super()._end()

    @override
    def _begin_plans(self) -> None:
        assert self._planned is not None
        for removed in self._plans.add(self._planned):
            self._close(removed)

    @override
    def _restart_profiling(self, runner: PlanRunner) -> None:
        super()._restart_profiling(runner)
        self._recordable = SeenBatches()
        if self._planned is not None and self._planned.shape is not None:
            self._recordable.add(self._planned.shape)

    # ---- plans of several shapes ----

    def _follow(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        shape: BatchShape | None,
        trained: tuple[bool, ...],
    ) -> None:
        """Puts the plan of the present micro-batch in force, or has the training profiled with it."""
        found = self._plans.find(shape, trained)
        if found is not self._planned:
            self._offload_all()
            if found is not None:
                self._enter(found)
        if shape is None:
            return
        keeps_all = self.plan is not None and self.plan.keeps_all
        if found is not None and (keeps_all or self._plans.is_close(found, shape)):
            return
        if self._unplanned.add(shape, planned=found is not None) and self._at_boundary and not self.calibrating:
            self._plan(trainer, pl_module, shape)

    def _plan(self, trainer: pl.Trainer, pl_module: pl.LightningModule, shape: BatchShape) -> None:
        """Has the training profiled with the present batch."""
        pl.utilities.rank_zero_info(
            "SwapPlanner: batches or allocated memory differ from those that were planned: planning for them, too."
        )
        self._offload_all()
        self._progress = PlanProgress()
        self._profiling_budget = ProfilingBudget()
        self._unplanned.restart()
        self._recordable = SeenBatches()
        self._recordable.add(shape)
        self._begin(trainer, pl_module, 1)

    def _offload_all(self) -> None:
        """Offloads all saved tensors, until another plan is in force."""
        if self.runner is not None:
            self.runner.deactivate(in_step=not self._at_boundary)
        self._planned = None
        # `planned.state` keeps the progress of that plan, which may be a calibration plan.
        self._progress = replace(self._progress, runner=None, comparison=None, calibrating=False)
        offload_all(self._offloader)

    def _enter(self, planned: PlannedShape[PlanProgress]) -> None:
        self._planned, self._progress = planned, planned.state
        assert self.runner is not None
        self._profiler = self.runner.profiler
        self.runner.reactivate()

    def _close(self, planned: PlannedShape[PlanProgress]) -> None:
        if planned is not self._planned and planned.state.runner is not None:
            planned.state.runner.close()
            planned.state.runner.profiler.close()
