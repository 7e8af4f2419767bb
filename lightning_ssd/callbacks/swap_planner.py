"""`SwapPlanner`: profiles the first steps, chooses a plan, and compares its prediction with measured steps.

A training has these phases, in the order of the methods. All of them are called on the training thread.

1. profile: `StepProfiling` records a micro-batch, checks its recomputations, and times steps.
2. reuse: if an earlier training is stored in the cache, its measurements replace the timed steps (`recorded`).
3. calibrate: steps under the calibration plan correct the profile (`profiled`, `_end_calibration`).
4. plan: `PlanMaker` makes a plan and `PlanRunner` applies it, or model states are moved and profiled anew (`_decide`).
5. correct: `PlanProgress` judges steps under the plan (`_compare`), after which it may be another one.
"""

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.callbacks.fragments import MAX_FRAGMENT_RESERVE, RETRY_SECONDS, is_fragmented
from lightning_ssd.callbacks.micro_batch_switch import ends_short_window
from lightning_ssd.callbacks.obstacles import check_can_plan
from lightning_ssd.callbacks.offloader import find_model_states, get_offloader
from lightning_ssd.callbacks.output_files import check_output
from lightning_ssd.callbacks.plan_cache import SWITCH, CachedPlan, PlanCache, warn_unused
from lightning_ssd.callbacks.plan_key import has_more_memory, plan_key, recorded_forward
from lightning_ssd.callbacks.plan_maker import PlanMaker
from lightning_ssd.callbacks.plan_progress import MAX_CALIBRATIONS, PlanProgress, RecordedBatch, count_trained
from lightning_ssd.callbacks.plan_report import (
    log_metrics,
    recommend_move,
    report_comparison,
    report_last_plan,
    report_move,
)
from lightning_ssd.callbacks.plan_runner import HISTORY, WARMUP_AFTER_CHANGE, Comparison, PlanRunner, offload_all
from lightning_ssd.callbacks.planned_shapes import PlannedShapes
from lightning_ssd.callbacks.prefetch_scheduler import find_schedulers
from lightning_ssd.callbacks.profiling_budget import ProfilingBudget
from lightning_ssd.callbacks.seen_batches import BatchShape
from lightning_ssd.callbacks.step_drift import TOLERANCE
from lightning_ssd.callbacks.step_profiling import StepProfiling
from lightning_ssd.planning import (
    PLANNERS,
    FixedPlacement,
    HardwareProfile,
    ModelProfile,
    Plan,
    Prediction,
    exceeds_no_more,
    plan_with_coefficient,
    render_summary,
    simulate,
)
from lightning_ssd.profiling import (
    add_unseen_memory,
    current_placement,
    measure_training_machine,
    with_measured_step_rate,
)
from lightning_ssd.sizes import (
    LEAST_BUDGET,
    SizeArgument,
    check_above_zero,
    check_choice,
    check_flag,
    format_bytes,
    parse_bytes,
    parse_path,
)

log = logging.getLogger(__name__)


class SwapPlanner(StepProfiling):
    """Chooses by measurement, for each saved tensor: keep it on the GPU, offload it, or recompute it in backward.

    Training begins with all saved tensors offloaded, which needs least GPU memory. After `warm_up` steps some steps are
    profiled. The next steps run under a calibration plan, which recomputes as much as possible, so that the GPU is
    always busy and runs at the clock rate that it sustains. Between two steps the plan is made and applied: each saved
    tensor of each unit is kept, offloaded to host memory or to the SSDs, or recomputed. All of these steps are ordinary
    training steps: losses, gradients and weights are the same bit for bit.

    The first plan is in force after 12 steps, or 22 if model states were moved. If profiling is expected to take more
    than 25 steps or 30 seconds, its warm-up, its timed steps and the steps of the calibration plan are shortened, to
    four steps in all at least. A log line names each part that is shorter.

    If an earlier training of the same model, batch shape and machine was planned, no steps are timed, and the plan of
    that training is applied after one recorded and one checked step, if its forward was the same. If the limits of
    memory have changed, another plan is made from its measurements.

    From then on steps are timed on the device's clock, without a wait of the host. The loggers get `SwapPlanner/...`:
    `predicted_step_s` and `measured_step_s`, `predicted_device_bytes` and `measured_device_bytes`,
    `predicted_host_bytes` and `measured_host_bytes`, `swap_coefficient`. The log has the plan and the resource that
    bounds the step, and at the end of training hardware that would make it faster.

    With `states="auto"` and no `gpu_memory` of the strategy, offloaded weights and optimizer states are moved, between
    two steps, to the tiers that make a step shorter, or to those of a paper's plan: GPU, host memory or SSDs, unit by
    unit. Then the training is profiled again. Results are the same, except the last digits of an optimizer that steps
    on the GPU from then on.

    A tensor is recomputed only if its recomputation gave the same bytes as autograd had saved, in one micro-batch. With
    manual optimization nothing is recomputed.

    Args:
        planner: `"holistic"` searches by simulation, within the budgets. `"lohan"`, `"fuyou"`, `"ssdtrain"` and
            `"teraio"` are the rules of these papers, for comparison.
        plan: YAML file of a plan to apply instead of making one, such as a saved and edited plan. With `states="auto"`
            it also places the weights and optimizer states of units and their parts from the start.
        gpu_memory: bytes of the device that the training may use in all (or `"40GiB"`). `"auto"`: 92 % of the memory
            that this process may use. `"least"`: the least that makes a step at most 2 % longer than `"auto"` does.
        machine: JSON file of the machine's rates (`lightning-ssd plan --save-machine`), instead of measuring them when
            training starts.
        save: YAML file to write plans to. If another placement of model states is faster and they may not be moved, a
            plan with that placement is written beside it, as `NAME.states.yaml`.
        ssd_bytes_per_day: bytes that may be written to the SSDs in a day of training (or `"1TB"`); `None`: no limit.
        warm_up: steps before the timed ones, the last of which is recorded; fewer if profiling would take more than 25
            steps or 30 seconds.
        steps: steps that are timed, once with all saved tensors offloaded and once under the calibration plan; fewer
            if profiling would take more than 25 steps or 30 seconds.
        tolerance: relative drift of the step time after which the training is profiled and planned again.
        cache: whether plans are stored in the user's cache directory (`~/.cache/lightning_ssd/plans`) and used by later
            trainings of the same model on the same machine. The environment variable `LIGHTNING_SSD_PLAN_CACHE=0`
            switches it off for all trainings, also for those without this callback.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range, the plan is not one for the model, it can't be saved, or the model is
            compiled.
    """

    _logs_metrics = True
    """Whether metrics are logged to the Trainer's loggers."""

    def __init__(
        self,
        planner: Literal["holistic", "lohan", "fuyou", "ssdtrain", "teraio"] = "holistic",
        plan: str | Path | None = None,
        gpu_memory: int | str | Literal["auto", "least"] = "auto",
        machine: str | Path | None = None,
        save: str | Path | None = None,
        ssd_bytes_per_day: int | str | None = None,
        warm_up: int = 3,
        steps: int = 3,
        tolerance: float = TOLERANCE,
        cache: bool = True,
    ) -> None:
        super().__init__(warm_up, steps)
        check_choice("planner", planner, PLANNERS)
        SizeArgument("gpu_memory", ("auto", "least"), least=LEAST_BUDGET).parse(gpu_memory)
        check_above_zero("tolerance", tolerance, TOLERANCE)
        check_flag("cache", cache)
        self._planner = planner
        self.user_plan = None if plan is None else Plan.load(parse_path("plan", plan, "plan.yaml"))
        """The plan that the user gave. With `states="auto"` it also places model states."""
        self._gpu_memory = gpu_memory
        self._machine = None
        if machine is not None:
            self._machine = HardwareProfile.from_json(parse_path("machine", machine, "machine.json"))
        self._save = None if save is None else parse_path("save", save, "plan.yaml")
        self._per_day = None
        if ssd_bytes_per_day is not None:
            self._per_day = parse_bytes(ssd_bytes_per_day, "ssd_bytes_per_day", least=LEAST_BUDGET)
        self._tolerance = tolerance
        self._uses_cache = cache and plan is None
        self._progress = PlanProgress()

    @property
    def runner(self) -> PlanRunner | None:
        """Runs the steps under plans, once the training was profiled; also readable after the training."""
        return self._progress.runner

    @property
    def comparison(self) -> Comparison | None:
        """The last comparison of a plan's prediction with measured steps."""
        return self._progress.comparison

    @property
    def calibrating(self) -> bool:
        """True while the calibration plan is in force."""
        return self._progress.calibrating

    @property
    def profile(self) -> ModelProfile | None:
        """The model as profiled last, corrected by later steps."""
        return None if self.runner is None else self.runner.profile

    @property
    def hardware(self) -> HardwareProfile | None:
        """The machine, with the bytes of it that this training may use."""
        return None if self.runner is None else self.runner.hardware

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return None if self.runner is None else self.runner.plan

    @property
    def prediction(self) -> Prediction | None:
        """The prediction for the plan in force."""
        return None if self.runner is None else self.runner.prediction

    # ---- a training ----

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end()  # Lightning's Tuner begins trainings without an end of the one before
        self._progress = PlanProgress()
        if self._save is not None:
            check_output("`save` of SwapPlanner", self._save)
        super().on_train_start(trainer, pl_module)
        check_can_plan(trainer, pl_module)
        with self._profiling_budget.counted():
            machine = measure_training_machine(self._offloader) if self._machine is None else self._machine
        device = self._offloader.device
        self._maker = PlanMaker(self._planner, self.user_plan, self._gpu_memory, machine, self._per_day, device)
        self._states_moved = False
        """Whether model states were moved in this training, which happens at most once."""
        self._cache = PlanCache() if self._uses_cache else None

    @override
    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule, warm_up: int) -> None:
        super()._begin(trainer, pl_module, warm_up)
        self._offloader = get_offloader(trainer)
        self._states = find_model_states(trainer)
        offload_all(self._offloader)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        begins = self._at_boundary
        if self.runner is None and self._phase == "waiting":
            self._check_not_compiled(self._compiled.ran)
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        shape = BatchShape.of(batch)
        if self._phase == "recording":
            self._progress.recorded = RecordedBatch(shape, count_trained(pl_module))
            self._progress.allocated_bytes = self.profiler.allocated_bytes
        runner = self.runner
        if runner is not None and runner.hooks_skippable:
            self._toggle_hooks(pl_module, shape, runner)
        if runner is None or self.measuring:
            return
        if begins:
            self._begin_step(trainer, pl_module, runner)
        recorded = self._progress.recorded
        if self.runner is runner and recorded is not None and not recorded.is_like(shape):
            runner.skip_step()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self.runner is not None and self._at_boundary and ends_short_window(trainer):
            self.runner.skip_step()

    def _begin_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, runner: PlanRunner) -> None:
        """Ends the step before, corrects plans by it if it was measured, and begins a step."""
        if self.calibrating and not runner.num_steps and not self._profiling_budget.allows(1):
            self._skip_calibration()
            self._decide(trainer, pl_module, runner)
            return
        runner.begin_step()
        if self.calibrating:
            self._end_calibration(trainer, pl_module, runner)
        else:
            self._compare(trainer, runner)

    def _toggle_hooks(self, pl_module: pl.LightningModule, shape: BatchShape | None, runner: PlanRunner) -> None:
        """Enables the saved-tensor hooks, unless the batch, under a plan that keeps all, is within the recorded one."""
        recorded = self._progress.recorded
        assert recorded is not None
        if count_trained(pl_module) != recorded.num_trained:
            runner.hooks_skippable = False
        runner.enable_hooks(not (runner.hooks_skippable and recorded.covers(shape)))

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        if self.runner is not None:
            self.runner.pause()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if self.runner is not None:
            self.runner.resume()

    def excluded(self) -> AbstractContextManager[None]:
        """Returns a context whose time is not part of the present step's, if that is measured."""
        return nullcontext() if self.runner is None else self.runner.excluded()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._report_plan()
        self._end()  # removes the hooks from the model, which user code may script or trace at the end of the training

    def _report_plan(self) -> None:
        """Logs a report on the last plan, or that there was none."""
        if self.runner is not None and self.plan is not None and not self.calibrating:
            report_last_plan(self.runner, self.plan)
            return
        # Warm-up with a recorded step, timed steps, those of the calibration plan, and one that ends the last of them;
        # again after a move of model states, with one step of warm-up.
        measured = self._steps + WARMUP_AFTER_CHANGE + self._steps + 1
        most = self._warm_up + measured + (1 + measured if self._states_moved else 0)
        log.warning(
            "SwapPlanner: training ended before it was profiled, which takes up to %d steps: there was no plan. Train "
            "more steps, or give a saved plan by `plan`",
            most,
        )

    @override
    def _end(self) -> None:
        super()._end()
        if self.runner is not None:
            self.runner.close()

    # ---- profile ----

    @override
    def has_time(self, steps: int) -> bool:
        calibration = 0 if self.user_plan is not None else WARMUP_AFTER_CHANGE + self._steps
        return self._profiling_budget.allows(steps + calibration)

    def _make_runner(
        self,
        trainer: pl.Trainer,
        profile: ModelProfile,
        hardware: HardwareProfile,
        placement: FixedPlacement,
        slowdown: float = 1.0,
    ) -> PlanRunner:
        """Makes the runner of a new profile."""
        if self.runner is not None:
            self.runner.close()
        schedulers = find_schedulers(trainer)
        runner = PlanRunner(
            self.profiler, self._offloader, self._states, schedulers, profile, hardware, placement, slowdown
        )
        self._progress.begin_profile(runner)
        self._begin_plans()
        return runner

    def _begin_plans(self) -> None:
        """Called when a new profile has a runner, before its first plan."""

    def _restart_profiling(self, runner: PlanRunner) -> None:
        """Profiles the training again, from the next step on."""
        runner.stop()
        self._profiling_budget = ProfilingBudget()
        self._profiling_budget.begin_step()
        self.schedule(1)

    # ---- reuse ----

    @override
    def recorded(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reuses the plan and the measurements of an earlier training, if its forward was the same."""
        if self._cache is None:
            return
        profile = self._make_profile(trainer, pl_module, steps=0)
        placement = current_placement(self.profiler, self._offloader)
        forward = ((placement.weights, placement.states), recorded_forward(profile), self._maker.settings)
        batch = self._progress.recorded
        shape = None if batch is None else batch.shape
        self._progress.key = plan_key(trainer, pl_module, self._offloader.device, shape, forward)
        cached = self._cache.load_once(self._progress.key, CachedPlan)
        if cached is None:
            return
        obstacle = cached.obstacle(profile, self._maker.machine)
        if obstacle is None:
            self._reuse(trainer, pl_module, cached, profile, placement)
        else:
            warn_unused(obstacle)

    def _reuse(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        cached: CachedPlan,
        recorded: ModelProfile,
        placement: FixedPlacement,
    ) -> None:
        """Applies a plan from the cache, or one made from its measurements if the limits of memory have changed."""
        maker, before = self._maker, cached.measured(recorded)
        maker.fragment_reserve = max(maker.fragment_reserve, min(cached.fragment_reserve, MAX_FRAGMENT_RESERVE))
        hardware = maker.limit(cached.hardware, before, placement, self._offloader)
        profile = self._add_allocated_memory(cached, before, hardware)
        slowdown = profile.forward_seconds / recorded.forward_seconds
        runner = self._make_runner(trainer, profile, hardware, placement, slowdown)
        plan = placement.apply(profile, cached.plan)
        # The stored plan may not fit, if none does.
        allowed = simulate(before, cached.hardware, plan).excess_bytes(cached.hardware)
        fits = simulate(profile, hardware, plan).excess_bytes(hardware) <= allowed
        now, then = ((one.gpu_bytes, one.host_bytes) for one in (hardware, cached.hardware))
        same = fits and not has_more_memory(now, then)
        pl.utilities.rank_zero_info(
            "SwapPlanner: an earlier training with the same forward was measured, so that no steps are timed: "
            f"{'its plan is' if same else 'a plan for the present limits of memory is made and'} applied. "
            f"{SWITCH}=0 in the environment has every training measured."
        )
        self._phase = "idle"
        if same and cached.confirmed:
            self._progress.calibrations = MAX_CALIBRATIONS
        self._decide(trainer, pl_module, runner, plan if same else None)

    def _add_allocated_memory(
        self, cached: CachedPlan, profile: ModelProfile, hardware: HardwareProfile
    ) -> ModelProfile:
        """Returns the profile with GPU memory that is allocated before steps, and was not in the stored training."""
        more = self._progress.allocated_bytes - cached.allocated_bytes
        if more <= PlannedShapes.GROWTH * hardware.gpu_bytes:
            self._progress.allocated_bytes = cached.allocated_bytes
            return profile
        return replace(profile, other_gpu_bytes=profile.other_gpu_bytes + more)

    def _store(self, runner: PlanRunner, plan: Plan, *, confirmed: bool = False) -> None:
        """Stores a plan and the measurements that it was made from."""
        if self._cache is not None and self._progress.key:
            maker = self._maker
            machine, reserve, allocated_bytes = maker.machine, maker.fragment_reserve, self._progress.allocated_bytes
            cached = CachedPlan(plan, runner.profile, runner.hardware, machine, reserve, confirmed, allocated_bytes)
            self._cache.save(self._progress.key, cached)

    # ---- calibrate ----

    @override
    def profiled(self, trainer: pl.Trainer, pl_module: pl.LightningModule, profile: ModelProfile) -> None:
        profiler, offloader = self.profiler, self._offloader
        placement = current_placement(profiler, offloader)
        hardware = self._maker.limit(self._maker.machine, profile, placement, offloader)
        hardware = with_measured_step_rate(profile, hardware, placement, profiler, offloader)
        profile = add_unseen_memory(
            profile,
            hardware,
            placement,
            profiler,
            offloader,
            automatic_optimization=pl_module.automatic_optimization,
        )
        runner = self._make_runner(trainer, profile, hardware, placement)
        calibration = plan_with_coefficient(profile, hardware, 0.0, placement)
        fits = not simulate(profile, hardware, calibration).excess_bytes(hardware)
        self._progress.calibrating = self.user_plan is None and fits
        if self.calibrating and not self._profiling_budget.allows(WARMUP_AFTER_CHANGE + 1):
            self._skip_calibration()
        if self.calibrating:
            runner.apply(calibration)
        else:
            self._decide(trainer, pl_module, runner)

    def _skip_calibration(self) -> None:
        self._progress.calibrating = False
        self._log_shortened("the plan is made without a measured step of recomputation")

    def _end_calibration(self, trainer: pl.Trainer, pl_module: pl.LightningModule, runner: PlanRunner) -> None:
        """Corrects the profile by steps under the calibration plan, once there are enough, and makes the first plan."""
        # With few steps the minimum is the best estimate: interruptions of the host lengthen single steps.
        count = self._steps if self._profiling_budget.allows(1) else 1
        comparison = runner.measured(min(count, HISTORY), min)
        if comparison is not None:
            self._progress.calibrating = False
            runner.calibrate(comparison, self._tolerance)
            self._decide(trainer, pl_module, runner)

    # ---- plan ----

    def _decide(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, runner: PlanRunner, plan: Plan | None = None
    ) -> None:
        """Applies `plan`, or makes one and applies it; or moves model states and has the training profiled again."""
        if plan is None:
            plan = self._maker.make(runner)
            self._store(runner, plan)
        elsewhere = None
        if self._states is not None:
            elsewhere = self._maker.make_elsewhere(runner, plan, moved=self._states_moved)
        if elsewhere is not None and self._move_states(trainer, pl_module, runner, elsewhere):
            return
        self._apply(runner, plan)
        if elsewhere is not None:
            recommend_move(runner, elsewhere, self._planner, self._save)

    def _apply(self, runner: PlanRunner, plan: Plan) -> None:
        runner.apply(plan)
        if self._save is not None:
            plan.save(self._save)
        log.info("plan from step %d on:\n%s", self._step, plan.describe())
        assert runner.prediction is not None
        summary = render_summary(runner.profile, runner.hardware, plan, runner.prediction)
        pl.utilities.rank_zero_info(f"SwapPlanner: {summary}")

    def _move_states(self, trainer: pl.Trainer, pl_module: pl.LightningModule, runner: PlanRunner, plan: Plan) -> bool:
        """Moves model states to their tiers in `plan` and restarts profiling; returns False if that is not allowed."""
        strategy: Any = trainer.strategy
        if self._states_moved or not strategy.can_move_states():
            return False
        self._states_moved = True
        self._end()
        self._progress.runner = None
        try:
            strategy.move_states(plan)
        except ValueError as error:
            log.warning("%s", error)
        else:
            report_move(runner, plan)
        self._begin(trainer, pl_module, 1)
        return True

    # ---- correct ----

    def _compare(self, trainer: pl.Trainer, runner: PlanRunner) -> None:
        """Compares measured steps with the prediction, once there are enough of them under the plan in force."""
        progress = self._progress
        comparison = progress.next_comparison(runner, self._tolerance)
        if comparison is None:
            return
        if is_fragmented(comparison.alloc_retries, runner.num_steps) and self._plan_for_fragments(runner, comparison):
            return
        if self._logs_metrics:
            log_metrics(trainer, runner, comparison)
        usual = progress.drift.usual
        if usual is None:
            report_comparison(comparison)
        verdict = progress.judge(comparison, runner.num_steps)
        if verdict == "wrong":
            self._correct(runner, comparison)
        elif verdict == "slower":
            self._return_to_replaced(runner, comparison)
        elif verdict == "drifted" and self.user_plan is None:
            seconds = f"a step takes {comparison.step_seconds:.3f} s, and took {usual:.3f}"
            pl.utilities.rank_zero_info(f"SwapPlanner: {seconds}: planning again.")
            self._restart_profiling(runner)

    def plan_smaller(self, reason: str) -> None:
        """Plans with less GPU memory, if there is a plan. Called between two steps; the log names the `reason`."""
        if self.runner is not None and not self.measuring:
            plan = self._maker.reserve_for_fragments(self.runner)
            if plan is not None:
                self._progress.calibrating = False
                self._apply_smaller(self.runner, plan, reason)

    def _plan_for_fragments(self, runner: PlanRunner, comparison: Comparison) -> bool:
        """Plans with less GPU memory, because fragments use the rest, unless steps would be longer than with retries.

        Returns:
            Whether another plan was applied.
        """
        if self._progress.fragmented_plan is runner.plan:  # a plan for less memory takes longer
            return False
        assert runner.prediction is not None
        retried = RETRY_SECONDS * comparison.alloc_retries / runner.num_steps
        plan = self._maker.reserve_for_fragments(runner, runner.prediction.step_seconds + retried)
        if plan is None:
            self._progress.fragmented_plan = runner.plan
            return False
        reason = "the allocator has freed its cached memory in steps, because fragments of it were too small"
        self._apply_smaller(runner, plan, reason)
        return True

    def _apply_smaller(self, runner: PlanRunner, plan: Plan, reason: str) -> None:
        """Applies a plan for less GPU memory."""
        self._progress.replaced = None  # the plan before may need more memory than is left
        limit = format_bytes(runner.hardware.gpu_bytes)
        pl.utilities.rank_zero_info(f"SwapPlanner: {reason}: planning again with {limit} of the GPU.")
        self._apply(runner, plan)
        self._store(runner, plan)

    def _correct(self, runner: PlanRunner, comparison: Comparison) -> None:
        """Corrects the profiles by the first steps under the plan. Plans again if that helps, and profiles again, once,
        if the correction does not explain the steps."""
        progress = self._progress
        progress.calibrations += 1
        explained = runner.calibrate(comparison, self._tolerance)
        if not explained and self.user_plan is None and not progress.retried:
            progress.retried = True
            pl.utilities.rank_zero_info(
                f"SwapPlanner: a step takes {comparison.step_seconds:.3f} s instead of "
                f"{comparison.predicted.step_seconds:.3f}: measuring again."
            )
            self._restart_profiling(runner)
        else:
            before, plan = runner.prediction, self._maker.make_better(runner, explained=explained)
            if plan is not None:
                self._apply(runner, plan)
                assert before is not None and runner.prediction is not None
                may_return = exceeds_no_more(before, runner.prediction, runner.hardware)
                progress.replaced = comparison if may_return else None
        if runner.plan is not None:
            self._store(runner, runner.plan)

    def _return_to_replaced(self, runner: PlanRunner, comparison: Comparison) -> None:
        """Applies the replaced plan again and ends corrections: profiles don't explain why its successor is slower."""
        progress = self._progress
        replaced, progress.replaced = progress.replaced, None
        assert replaced is not None
        progress.calibrations = MAX_CALIBRATIONS
        pl.utilities.rank_zero_info(
            f"SwapPlanner: a step took {replaced.step_seconds:.3f} s under the plan before, and takes "
            f"{comparison.step_seconds:.3f} s under this one: the plan before is applied again."
        )
        self._apply(runner, replaced.plan)
        self._store(runner, replaced.plan, confirmed=True)
