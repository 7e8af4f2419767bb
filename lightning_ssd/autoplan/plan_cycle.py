"""`PlanCycle`: the life of a plan of operators: measure, plan, apply.

A training has these phases, in the order of the methods. All of them are called on the training thread.

1. profile: `ProfiledSteps` records a micro-batch, checks its recomputations, and times steps. The timed steps run under
   a calibration plan, which checkpoints all units that may be and keeps all else, and correct the profile
   (`_apply_calibration`). Where that does not fit, they offload all else, or, if no unit may be checkpointed or that
   does not fit either, all saved tensors.
2. plan: `PlanMaker` makes a plan, for other tiers of model states if that is faster: then states are moved, once.
   `PlanRunner` applies it (`_decide`). If code is compiled again instead, there is no plan, and this object is closed.
3. compare: measured steps are compared with the prediction (`_compare`). If they exceed the limit of GPU memory, the
   plan is made again.

A micro-batch follows the row of the plan for its size (`_follow`). If its batch is larger than all before, all units
are checkpointed that may be. It offloads all saved tensors if there is no room for that, or if it trains other
parameters.
"""

import logging
import math
from dataclasses import replace
from typing import Any

from lightning_ssd.activations import AllocatorMeter
from lightning_ssd.autoplan.batches import ROWS, BatchShape, RecordedBatch, row_of, size_of_row
from lightning_ssd.autoplan.plan_maker import PlanMaker, PlanOptions
from lightning_ssd.autoplan.plan_report import (
    log_metrics,
    report_comparison,
    report_large_transient,
    report_last_plan,
    report_move,
)
from lightning_ssd.autoplan.plan_runner import COMPARED_STEPS, Comparison, PlanRow, PlanRunner, offload_all
from lightning_ssd.autoplan.profiled_steps import ProfiledSteps
from lightning_ssd.autoplan.protocol import StatesOwner, Training
from lightning_ssd.autoplan.recompilation import Recompilation
from lightning_ssd.planning import ModelProfile, Plan, Prediction, render_summary, simulate
from lightning_ssd.profiling import (
    add_unseen_memory,
    current_placement,
    measure_training_machine,
    offloading_plan,
    with_measured_step_rate,
)
from lightning_ssd.sizes import format_bytes

LASTING = 4
"""Steps in a row with more allocated memory, other trained parameters, or units that are not checkpointed because user
code has changed them, after which a training is profiled again."""

MAX_CHANGES = 3
"""Most times that a training is profiled again for changed units, which user code may change in each step."""

GROWTH = 0.01
"""Largest growth of allocated bytes / limit of memory, with which the plan still applies."""

MAX_EXCESS = 0.01
"""Largest share of the GPU limit by which measured steps may exceed it, before the plan is made again."""

log = logging.getLogger(__name__)


class PlanCycle(ProfiledSteps):
    """Makes and applies the plan of one training, after its profiled steps.

    Args:
        training: the training.
        options: the user's arguments.
        meter: the device's allocator; `None`: its memory is not limited.
        logs_metrics: whether comparisons are passed to the user's loggers.
        keeps_fitting: whether micro-batches up to the checked one follow the placement that is in force, which keeps
            the saved tensors that have room. Otherwise they offload all.
        recompilation: decides whether code is compiled again in place of a first plan. If so, the caller closes this
            object. `None`: code is not compiled again.

    Attributes:
        runner: runs the steps under plans, once the training was profiled; also readable after the training.
        calibrating: whether the calibration plan is in force, whose steps are timed for the profile.
        comparison: the last comparison of a plan's prediction with measured steps.
        offloaded: what timed steps have done, if they offloaded all saved tensors without a plan; `None`: they had one,
            the calibration plan. They have not run out of memory.
        keeps_fitting: the argument, until a micro-batch was checked or has run out of memory.
    """

    def __init__(
        self,
        training: Training,
        options: PlanOptions,
        meter: AllocatorMeter | None,
        *,
        logs_metrics: bool,
        keeps_fitting: bool = False,
        recompilation: Recompilation | None = None,
    ) -> None:
        super().__init__(training, options.warm_up, options.steps, self._plan_profile)
        self.runner: PlanRunner | None = None
        self.calibrating = False
        self.comparison: Comparison | None = None
        self._options = options
        self._meter = meter
        self._logs_metrics = logs_metrics
        self._recompilation = recompilation
        owner = training.owner
        may_offload = training.states is not None or (owner is not None and owner.can_move_states())
        machine = options.machine or measure_training_machine(
            training.offloader, training.state_format if may_offload else None
        )
        self._maker = PlanMaker(options, machine, training.offloader.device)
        self.keeps_fitting = keeps_fitting
        if not keeps_fitting:
            offload_all(training.offloader)
        self._states_moved = False
        """Whether model states were moved in this training: once, and back if the device lacks memory then, or again if
        no plan fits with their tiers after a step has run out of memory."""
        self._unmoved: Plan | None = None
        """Plan for the tiers before a move that has put more on the device; `None`: states are not to be moved back."""
        self._recorded = RecordedBatch(training.module.parameters())
        self._calibration_fits = True
        """Whether no timed step has run out of memory under the calibration plan."""
        self.offloaded: Plan | None = None
        self._saved_before = 0
        """Bytes that the training had saved before the present micro-batch."""
        self._seen_rows: set[int] = set()
        """Numbers of the rows for which there were micro-batches."""
        self._allocated = 0
        """Bytes that were allocated before the recorded step."""
        self._level = 0
        """Bytes that were allocated before the present step."""
        self._num_differing = 0
        """Steps in a row whose micro-batches don't follow the plan, or not in all units, though their batches are no
        larger."""
        self._num_changes = 0
        """Times that the training was profiled again for changed units."""
        self._num_compared = 0
        """Steps under the plan in force that were measured up to the last comparison."""
        self._compared_plan: Plan | None = None
        """The plan that this number is of."""
        self._memory_counted = False
        """Whether the profile counts the memory that measured steps need, or a step has run out of memory since."""
        self._last: tuple[PlanRunner, Plan] | None = None
        """The last plan that was applied and reported, and its runner."""

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return None if self.runner is None else self.runner.plan

    @property
    def prediction(self) -> Prediction | None:
        """The prediction for the plan in force."""
        return None if self.runner is None else self.runner.prediction

    @property
    def planned(self) -> bool:
        """Whether a plan was applied and reported, be it in force or not."""
        return self._last is not None

    @property
    def offloads_all(self) -> bool:
        """Whether the present micro-batch offloads all saved tensors."""
        return self.runner is None or self.runner.row is None

    @property
    def rule(self) -> object:
        """Compares equal for micro-batches that follow one row of a plan, or are profiled, or offload all."""
        row = None if self.runner is None else self.runner.row
        return self.phase, None if row is None else row.placement

    # ---- events of the training ----

    def begin_micro_batch(self, batch: Any) -> None:
        """Called when a micro-batch begins, after its parameters were frozen or thawed for it."""
        begins = self._at_boundary
        shape = BatchShape.of(batch)
        self._recorded.begin(shape)
        self._saved_before = self.training.offloader.stats().saved
        if begins and self._meter is not None and self.training.states is None:
            self._level = self._meter.allocated()  # prefetched weights make it differ from step to step
        if self.phase in ("waiting", "recording") and not self.keeps_fitting:
            offload_all(self.training.offloader)
        super().begin_micro_batch(batch)
        self.keeps_fitting = self.keeps_fitting and self.phase in ("waiting", "recording", "checking")
        if self.phase == "recording":
            self._recorded.record(shape)
            self._allocated = self._level
        if self.runner is None or (self.measuring and not self.calibrating):
            return
        if begins:
            self.runner.begin_step()
            if not self.calibrating:
                self._compare(self.runner)
        self._follow(self.runner, shape, begins=begins)

    def run_out(self) -> None:
        """Called when the present micro-batch has run out of memory: a profile that it is a part of begins anew."""
        self._recorded.discard()
        self.keeps_fitting = False
        if self.calibrating and self.runner is not None:
            self.runner.stop()
            self.runner.close()
            self.runner, self.calibrating, self._calibration_fits = None, False, False
        self.discard()

    def end_micro_batch(self, *, ends_step: bool, short: bool = False) -> None:
        """Called when a micro-batch has ended; arguments as those of `ProfiledSteps`."""
        if short and self.runner is not None:
            self.runner.skip_step()
        if self.calibrating and ends_step and self.runner is not None:
            self.runner.end_step()
        if self.checkpointed and self.phase == "recording":
            self._recorded.end(sum(item.nbytes for item in self.profiler.saved))
        elif self.offloads_all and not (self.checkpointed and self.phase == "checking"):
            self._recorded.end(self.training.offloader.stats().saved - self._saved_before)
        super().end_micro_batch(ends_step=ends_step)
        if ends_step and self.phase == "checking" and self._calibration_fits:
            self._apply_calibration()

    def pause(self) -> None:
        """Called when a validation begins."""
        super().pause()
        if self.runner is not None:
            self.runner.pause()

    def resume(self) -> None:
        """Called when a validation has ended."""
        super().resume()
        if self.runner is not None:
            self.runner.resume()

    def report(self) -> None:
        """Called when training ends: logs a report on the last plan, or that there was none."""
        if self._last is not None:
            report_last_plan(*self._last)
            return
        log.warning(
            "SwapPlanner: training ended before it was profiled, which takes %d steps: there was no plan. Train more "
            "steps, or give a saved plan by `plan`",
            self._options.warm_up + 1 + self._options.steps,
        )

    def close(self) -> None:
        """Removes all hooks and modes of the plan. Its measurements remain readable."""
        super().close()
        if self.runner is not None:
            self.runner.close()

    # ---- profile ----

    def _make_runner(self, profile: ModelProfile) -> PlanRunner:
        """Replaces the runner by one for a new profile."""
        if self.runner is not None:
            self.runner.close()
        placement = current_placement(self.profiler, self.training.offloader)
        hardware = self._maker.limit(profile, placement, self.training.offloader)
        self.runner = PlanRunner(self.training, self.profiler, profile, hardware, placement)
        return self.runner

    def _apply_calibration(self) -> None:
        """Has the timed steps run under the calibration plan, if there is one."""
        runner = self._make_runner(self._profile(0))
        offloading = offloading_plan(runner.profile, runner.placement, self.training.offloader)
        plan = self._maker.make_calibration(runner, offloading)
        if plan is None:
            self.runner = None
            offload_all(self.training.offloader)
            return
        self.calibrating = True
        # With offloaded states the first step is not timed: the step before it was slow, so that its optimizer jobs
        # have ended. Otherwise all steps are timed, and the fastest one counts.
        runner.apply(plan, warm_up=1 if plan.offloads_states and self._options.steps > 1 else 0)

    def _plan_profile(self, profile: ModelProfile) -> None:
        """Corrects a new profile by the timed steps, and makes the plan."""
        training, profiler = self.training, self.profiler
        calibrating = self.runner if self.calibrating else None
        self.calibrating = False
        runner = self._make_runner(profile)
        plan = None if calibrating is None else calibrating.plan
        timed = plan or offloading_plan(profile, runner.placement, training.offloader)
        self.offloaded = timed if plan is None else None
        device = training.offloader.device
        runner.hardware = with_measured_step_rate(profile, runner.hardware, timed, profiler, device)
        runner.profile = add_unseen_memory(
            profile, runner.hardware, timed, profiler, device, automatic_optimization=training.automatic
        )
        seconds = None if calibrating is None else calibrating.fastest_step()
        if seconds is not None:
            runner.correct(timed, seconds)
        self._decide(runner)

    # ---- plan ----

    def _decide(self, runner: PlanRunner) -> None:
        """Makes a plan and applies it, maybe for other tiers of model states, which are moved."""
        try:
            plan = self._maker.make(runner)
        except ValueError as error:
            if not self._num_changes:
                raise
            log.warning(
                "The given plan does not match the units as they were changed, so that another is made: %s", error
            )
            self._maker.options = replace(self._maker.options, plan=None)
            plan = self._maker.make(runner)
        if self._recompilation is not None and self._recompilation.choose(runner, plan):
            return
        self._memory_counted = False
        self._apply(*self._place_states(runner, plan))

    def _place_states(self, runner: PlanRunner, plan: Plan) -> tuple[PlanRunner, Plan]:
        """Moves model states, unless they were moved before, if another placement than that of a new plan is better.

        Returns:
            The runner for the placement, and the plan for it.
        """
        owner = self.training.owner
        if owner is None or self._states_moved or not owner.can_move_states():
            return runner, plan
        if self.training.states is None:
            runner.profile = replace(runner.profile, param_budget_bytes=owner.param_budget())
        elsewhere = self._maker.make_elsewhere(runner, plan)
        if elsewhere is None:
            return runner, plan
        self._states_moved = True
        num_resident = runner.placement.weights.count("gpu")
        predicted = simulate(runner.profile, runner.hardware, elsewhere)
        report_move(self.training, elsewhere, predicted)
        runner = self._move_states(runner, owner, elsewhere)
        self._unmoved = plan if runner.placement.weights.count("gpu") > num_resident else None
        return runner, self._maker.make_moved(runner, elsewhere, predicted)

    def _apply(self, runner: PlanRunner, plan: Plan) -> None:
        """Puts a plan in force."""
        runner.apply(plan)
        self._make_rows(runner)
        first, self._last = self._last is None, (runner, plan)
        if self._options.save is not None:
            plan.save(self._options.save)
        log.info("plan:\n%s", plan.describe())
        assert runner.prediction is not None
        summary = render_summary(runner.profile, runner.hardware, plan, runner.prediction)
        self.training.inform(f"SwapPlanner: {summary}")
        if first:
            report_large_transient(self.training, runner)

    def _move_states(self, runner: PlanRunner, owner: StatesOwner, plan: Plan) -> PlanRunner:
        """Moves model states to their tiers in `plan`, and replaces the runner by one for the same profile there."""
        runner.close()
        training = self.training
        try:
            owner.move_states(plan)
        except ValueError as error:
            log.warning("%s", error)
        self.profiler.follow_move(training.offloader, training.states)  # the offloader is a new one in each case
        placement = current_placement(self.profiler, training.offloader)
        budget = None if training.states is None else training.states.nbytes.device
        profile = replace(runner.profile, param_budget_bytes=budget)
        limits = self._maker.limit(profile, placement, training.offloader)
        hardware = replace(
            runner.hardware, gpu_bytes=limits.gpu_bytes, host_bytes=limits.host_bytes, ssd_bytes=limits.ssd_bytes
        )
        self.runner = PlanRunner(training, self.profiler, profile, hardware, placement, runner.slowdown)
        return self.runner

    # ---- compare ----

    def _compare(self, runner: PlanRunner) -> None:
        """Compares measured steps with the prediction, each time that there are enough new ones."""
        if runner.plan is not self._compared_plan:  # other callers of the runner may have applied it
            self._compared_plan, self._num_compared = runner.plan, 0
        due = runner.num_steps >= self._num_compared + COMPARED_STEPS
        comparison = runner.measured() if due else None
        if comparison is None:
            return
        first = not self._num_compared
        self._num_compared = runner.num_steps
        self.comparison = comparison
        if self._logs_metrics:
            log_metrics(self.training, runner, comparison)
        if first:
            report_comparison(self.training, comparison)
        if not self._memory_counted and self._last == (runner, runner.plan):
            self._count_measured_memory(runner, comparison)

    def _count_measured_memory(self, runner: PlanRunner, comparison: Comparison) -> None:
        """Has the profile, once, count the memory that measured steps need, and makes rows for what they leave.

        If these steps exceed the limit, the plan is made again.
        """
        self._memory_counted = True
        runner.add_missing_memory(comparison)
        most = (1 + MAX_EXCESS) * runner.hardware.gpu_bytes
        if comparison.predicted.gpu_peak_bytes <= most < comparison.gpu_peak_bytes:
            assert runner.prediction is not None
            plan = self._maker.make(runner)
            excess = simulate(runner.profile, runner.hardware, plan).excess_bytes(runner.hardware)
            if excess < runner.prediction.excess_bytes(runner.hardware):
                self._apply(runner, plan)
                return
        self._make_rows(runner)

    def plan_smaller(self) -> bool:
        """Plans with less GPU memory, because a step has run out of memory under the plan in force.

        States that the plan has moved to the GPU are moved back first. Later, states are moved from the GPU if no plan
        fits else. If none fits there either, the next plan needs less memory than the one that has failed.

        Returns:
            False if there is no such plan, or timed steps that offloaded all saved tensors were faster. Then the plan
            in force should end.
        """
        runner, owner = self.runner, self.training.owner
        assert runner is not None
        failed = runner.prediction
        assert failed is not None
        self._memory_counted = True
        if self._unmoved is not None and owner is not None and owner.can_move_states():
            self.training.inform("SwapPlanner: a step has run out of memory: model states are moved back.")
            unmoved, self._unmoved = self._unmoved, None
            runner = self._move_states(runner, owner, unmoved)
            self._apply(runner, self._maker.make(runner))
            return True
        fits = not failed.excess_bytes(runner.hardware)
        if not self._maker.reserve_more(runner) and fits:
            return True
        limit = format_bytes(runner.hardware.gpu_bytes)
        self.training.inform(f"SwapPlanner: a step has run out of memory: planning again with {limit} of the GPU.")
        plan = self._maker.make(runner)
        predicted = simulate(runner.profile, runner.hardware, plan)
        if predicted.excess_bytes(runner.hardware):
            self._states_moved = False  # more of them may have to be moved
        elif self.offloaded is not None:
            none = runner.placement.apply(runner.profile, self.offloaded)
            if predicted.step_seconds > simulate(runner.profile, runner.hardware, none).step_seconds:
                return False
        runner, plan = self._place_states(runner, plan)
        smaller = self._maker.make_smaller(runner, plan, failed)
        if smaller is not None:
            self._apply(runner, smaller)
        return smaller is not None

    # ---- the size of a micro-batch ----

    def _follow(self, runner: PlanRunner, shape: BatchShape | None, *, begins: bool) -> None:
        """Applies the row for the size of the present micro-batch, or one that needs least memory."""
        grown = self._level > self._allocated + GROWTH * (math.inf if self._meter is None else self._meter.limit())
        differs = grown or not self._recorded.trains_all
        if begins:
            changed = runner.units_changed and self._num_changes < MAX_CHANGES
            self._num_differing = self._num_differing + 1 if differs or changed else 0
            if self._num_differing >= LASTING and not self.calibrating:
                self._num_changes += changed
                self._profile_again(runner, grown=grown, changed=changed)
                return
        size = None if differs else self._recorded.size(shape)
        number = None if size is None else row_of(size)
        if number is None or (self.calibrating and number > ROWS):
            runner.follow(None if differs else self._safe_row(runner, shape))
        else:
            self._seen_rows.add(number)
            runner.follow(self._row(runner, number))
        if number != ROWS:
            runner.skip_step()

    def _make_rows(self, runner: PlanRunner) -> None:
        """Makes the rows for sizes that there were, and all smaller ones if there were several: no later step waits."""
        several = len(self._seen_rows | {ROWS}) > 1
        for number in self._seen_rows | set(range(1, ROWS) if several else ()):
            self._row(runner, number)

    def _row(self, runner: PlanRunner, number: int) -> PlanRow | None:
        """Returns a row of the plan in force. The first micro-batch of its size makes it.

        `None`: no plan for larger micro-batches than the recorded one has room, so that they offload all.
        """
        main = runner.main
        assert main is not None
        smaller = number < ROWS and (main.plan.keeps_all or self.calibrating or not self._maker.has_rows)
        if number == ROWS or smaller:
            return main
        if number not in runner.rows:
            size = size_of_row(number)
            runner.rows[number] = runner.make_row(self._maker.make_row(runner, main.plan, size), size)
        row = runner.rows[number]
        exceeds = number > ROWS and row.prediction.gpu_peak_bytes > runner.hardware.gpu_bytes
        return None if exceeds else row

    def _safe_row(self, runner: PlanRunner, shape: BatchShape | None) -> PlanRow | None:
        """Returns the row of a micro-batch that may need more memory than all before; `None`: it offloads all."""
        recorded, main = self._recorded.shape, runner.main
        size = None if shape is None or recorded is None else shape.growth_over(recorded)
        if size is None or main is None:
            return None
        number = max(ROWS, row_of(size))
        if number not in runner.safe_rows:
            size = size_of_row(number)
            plan = self._maker.make_safe(runner, main.plan, size)
            runner.safe_rows[number] = None if plan is None else runner.make_row(plan, size)
        return runner.safe_rows[number]

    def _profile_again(self, runner: PlanRunner, *, grown: bool, changed: bool) -> None:
        """Profiles the training anew, as its memory, its trained parameters or its units are other ones for good."""
        reason = "other parameters are trained than before"
        if grown:
            reason = f"{format_bytes(self._level - self._allocated)} more than before are allocated on the GPU"
        elif changed:
            reason = "units that the plan checkpoints were changed"
        last = changed and self._num_changes == MAX_CHANGES
        end = " for the last time. Units that are changed again are not checkpointed" if last else ""
        self.training.inform(f"SwapPlanner: {reason}: the training is profiled again{end}.")
        runner.stop()
        self.recordable = None
        self.begin(1)
