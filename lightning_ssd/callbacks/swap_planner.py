"""`SwapPlanner`: profiles the first steps, chooses a plan, and compares its prediction with measured steps.

The file is large because all decisions about the plan in force are in it: the first plan, plans of earlier trainings,
tiers of model states, and corrections by measured steps. They depend on each other, and share the state `PlanProgress`.
The work is done elsewhere: `StepProfiling` measures, `planning` makes plans, and `PlanRunner` applies them.
"""

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.callbacks.obstacles import check_can_plan, compiled_frames
from lightning_ssd.callbacks.offloader import find_model_states, get_offloader
from lightning_ssd.callbacks.plan_cache import SWITCH, CachedPlan, PlanCache, warn_unused
from lightning_ssd.callbacks.plan_key import has_more_memory, is_like, plan_key, recorded_forward
from lightning_ssd.callbacks.plan_runner import (
    HISTORY,
    WARMUP_AFTER_CHANGE,
    Comparison,
    PlanRunner,
    offload_all,
)
from lightning_ssd.callbacks.prefetch_scheduler import find_schedulers
from lightning_ssd.callbacks.profiling_budget import ProfilingBudget
from lightning_ssd.callbacks.seen_batches import BatchShape
from lightning_ssd.callbacks.step_drift import TOLERANCE, StepDrift
from lightning_ssd.callbacks.step_profiling import StepProfiling
from lightning_ssd.device import usable_gpu_memory
from lightning_ssd.planning import (
    PLANNERS,
    FixedPlacement,
    HardwareProfile,
    ModelProfile,
    Plan,
    Prediction,
    find_what_ifs,
    make_plan,
    make_report,
    plan_for_least_memory,
    plan_with_coefficient,
    render_report,
    render_summary,
    render_what_ifs,
    simulate,
    swap_coefficient,
)
from lightning_ssd.profiling import (
    add_unseen_memory,
    count_bytes,
    current_placement,
    limit_hardware,
    measure_training_machine,
)
from lightning_ssd.sizes import (
    SizeArgument,
    check_above_zero,
    check_choice,
    check_flag,
    format_bytes,
    parse_bytes,
    parse_path,
)

log = logging.getLogger(__name__)

MIN_PLAN_GAIN = 0.01
"""Share of a step, or of memory, that another plan must save to be applied."""

MIN_MOVE_GAIN = 0.05
"""Share of a step that another placement of model states must save to be worth a move."""

MIN_LEAVE_GAIN = 0.25
"""Share of a step that another placement of model states must save if all states are on the GPU now, and there is a
plan with which they may stay there. It is larger than `MIN_MOVE_GAIN`, because times of states in host memory are
predicted from a profile without any: a step predicted at 0.158 s took 0.222 s (BERT with 0.94B parameters, H100), and
staying was predicted at 0.171 s."""

MAX_ERROR = 0.02
"""Relative error of a prediction above which the profiles are corrected again."""

MAX_CALIBRATIONS = 4
"""Plans whose steps correct the profiles, before the training is profiled again."""

MAX_RETRY_RATE = 0.1
"""Retried allocations per step (fragments were too small) above which plans reserve more memory for fragments."""

FRAGMENT_RESERVE_STEP = 0.04
"""Share of the GPU limit by which the reserve for fragments grows each time."""

MAX_FRAGMENT_RESERVE = 0.2
"""Largest reserve for fragments / GPU limit."""


@dataclass
class PlanProgress:
    """Progress from a recorded micro-batch to a plan whose prediction is right.

    Attributes:
        runner: runs the steps under plans; `None`: the recorded micro-batch has no profile yet.
        comparison: the last comparison of a plan's prediction with measured steps.
        recorded_bytes: size of the recorded batch; `None`: unknown.
        recorded_shape: shape of the recorded batch; `None`: unknown.
        recorded_trained: parameters that required gradients in it.
        key: key of the plan in the cache.
        calibrating: True while the calibration plan is in force.
        calibrations: corrections of the profiles by steps under plans, since they were made.
        replaced: measured steps of the plan that the one in force has replaced after a correction.
        retried: whether the training was profiled again because a correction did not explain the measured steps.
        compared_plan: the plan that the next field belongs to.
        drift: compares the steps under that plan.
    """

    runner: PlanRunner | None = None
    comparison: Comparison | None = None
    recorded_bytes: int | None = None
    recorded_shape: BatchShape | None = None
    recorded_trained: int = 0
    key: str = ""
    calibrating: bool = False
    calibrations: int = 0
    replaced: Comparison | None = None
    retried: bool = False
    compared_plan: Plan | None = None
    drift: StepDrift = field(default_factory=StepDrift)


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
        warm_up: steps before the profiled steps; fewer if profiling would take more than 25 steps or 30 seconds.
        steps: steps that are profiled, once with all saved tensors offloaded and once under the calibration plan; fewer
            if profiling would take more than 25 steps or 30 seconds.
        tolerance: relative drift of the step time after which the training is profiled and planned again.
        cache: whether plans are stored in the user's cache directory (`~/.cache/lightning_ssd/plans`) and used by later
            trainings of the same model on the same machine. The environment variable `LIGHTNING_SSD_PLAN_CACHE=0`
            switches it off for all trainings, also for those without this callback.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range, the plan is not one for the model, or the model is compiled.
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
        SizeArgument("gpu_memory", ("auto", "least")).parse(gpu_memory)
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
        self._per_day = None if ssd_bytes_per_day is None else parse_bytes(ssd_bytes_per_day, "ssd_bytes_per_day")
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
        self._progress = PlanProgress()
        super().on_train_start(trainer, pl_module)
        check_can_plan(trainer, pl_module)
        self._hardware = measure_training_machine(self._offloader) if self._machine is None else self._machine
        """The machine as measured, without the limits of this training."""
        self._states_moved = False
        """Whether model states were moved in this training, which happens at most once."""
        self._cache = PlanCache() if self._uses_cache else None
        self._fragment_reserve = 0.0
        """Share of the GPU limit that plans reserve for fragments, besides the reserve of `usable_gpu_memory`."""
        self._compiled = compiled_frames()

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
        if self.runner is None and self._phase == "waiting" and compiled_frames() != self._compiled:
            raise ValueError(
                "`torch.compile` compiles a part of `training_step`, whose single operations SwapPlanner can't plan. "
                "Remove `torch.compile`, or remove the callback."
            )
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._toggle_hooks(pl_module, batch, batch_idx)
        if self.runner is None or self.measuring or not begins:
            return
        if self.calibrating and not self.runner.num_steps and not self._profiling_budget.allows(1):
            self._skip_calibration()
            self._decide(trainer, pl_module, self.runner)
            return
        self.runner.begin_step()
        self._compare(trainer, pl_module, self.runner)

    @override
    def has_time(self, steps: int) -> bool:
        calibration = 0 if self.user_plan is not None else WARMUP_AFTER_CHANGE + self._steps
        return self._profiling_budget.allows(steps + calibration)

    def _toggle_hooks(self, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Enables the saved-tensor hooks, unless the plan keeps everything and the batch is as large as recorded."""
        if self._phase == "recording":
            progress = self._progress
            progress.recorded_bytes, progress.recorded_shape = count_bytes(batch), BatchShape.of(batch)
            progress.recorded_trained = _count_trained(pl_module)
        if self.runner is None or not self.runner.hooks_skippable:
            return
        if batch_idx == 0 and _count_trained(pl_module) != self._progress.recorded_trained:
            self.runner.hooks_skippable = False
        nbytes, recorded = count_bytes(batch), self._progress.recorded_bytes
        fits = nbytes is not None and recorded is not None and nbytes <= recorded
        self.runner.enable_hooks(not (fits and self.runner.hooks_skippable))

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
        runner = self.runner
        if runner is None or runner.plan is None or self.calibrating:
            log.warning(
                "SwapPlanner: training ended before %d steps were measured: there was no plan. Train more steps, or "
                "give a saved plan by `plan`",
                self._steps,
            )
            return
        # Only at the end, not between two steps: three further plans are made, and for a report many simulations.
        if log.isEnabledFor(logging.INFO):
            report = make_report(runner.profile, runner.hardware, runner.plan, fixed=runner.placement)
            log.info("report on the last plan:\n%s", render_report(report))
            what_ifs = report.what_ifs
        else:
            what_ifs = find_what_ifs(runner.profile, runner.hardware, runner.plan, runner.placement)
        if what_ifs:
            pl.utilities.rank_zero_info(f"SwapPlanner: steps would be {render_what_ifs(what_ifs)}.")

    @override
    def _end(self) -> None:
        super()._end()
        if self.runner is not None:
            self.runner.close()

    # ---- planning ----

    @override
    def profiled(self, trainer: pl.Trainer, pl_module: pl.LightningModule, profile: ModelProfile) -> None:
        profiler, offloader = self.profiler, self._offloader
        placement = current_placement(profiler, offloader)
        hardware = self._limit_hardware(self._hardware, profile, placement)
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

    def _limit_hardware(
        self, machine: HardwareProfile, profile: ModelProfile, placement: FixedPlacement
    ) -> HardwareProfile:
        gpu_bytes = int((1 - self._fragment_reserve) * self._gpu_bytes())
        return limit_hardware(
            machine, profile, placement, self._offloader, gpu_bytes=gpu_bytes, ssd_bytes_per_day=self._per_day
        )

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
        runner = PlanRunner(
            self.profiler,
            self._offloader,
            self._states,
            find_schedulers(trainer),
            profile,
            hardware,
            placement,
            slowdown,
        )
        self._progress.runner, self._progress.calibrations = runner, 0
        self._begin_plans()
        return runner

    def _begin_plans(self) -> None:
        """Called when a new profile has a runner, before its first plan."""

    def _gpu_bytes(self) -> int:
        """Returns the bytes of the device that this training may use."""
        if self._gpu_memory not in ("auto", "least"):
            return parse_bytes(self._gpu_memory, "gpu_memory")
        device = self._offloader.device
        return usable_gpu_memory(device) if device.type == "cuda" else self._hardware.host_bytes

    def _skip_calibration(self) -> None:
        self._progress.calibrating = False
        self._log_shortened("the plan is made without a measured step of recomputation")

    def _decide(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, runner: PlanRunner, plan: Plan | None = None
    ) -> None:
        """Applies `plan`, or makes one and applies it; or moves model states and has the training profiled again."""
        if plan is None:
            plan = self._make_plan(runner)
            self._store(runner, plan)
        elsewhere = self._plan_states(runner, simulate(runner.profile, runner.hardware, plan))
        if elsewhere is not None and self._relocate_states(trainer, pl_module, runner, elsewhere):
            return
        self._apply(runner, plan)
        if elsewhere is not None:
            self._recommend(runner, elsewhere)

    def _make_plan(self, runner: PlanRunner) -> Plan:
        if self.user_plan is not None:
            self.user_plan.check(runner.profile)
            return runner.placement.apply(runner.profile, self.user_plan)
        make = plan_for_least_memory if self._gpu_memory == "least" else make_plan
        return make(runner.profile, runner.hardware, self._planner, runner.placement)

    def _apply(self, runner: PlanRunner, plan: Plan) -> None:
        runner.apply(plan)
        if self._save is not None:
            plan.save(self._save)
        log.info("plan from step %d on:\n%s", self._step, plan.describe())
        assert runner.prediction is not None
        pl.utilities.rank_zero_info("SwapPlanner: " + render_summary(runner.profile, plan, runner.prediction))

    def _restart_profiling(self, runner: PlanRunner) -> None:
        """Profiles the training again, from the next step on."""
        runner.stop()
        self._profiling_budget = ProfilingBudget()
        self.schedule(1)

    # ---- the cache ----

    @override
    def recorded(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reuses the plan and the measurements of an earlier training, if its forward was the same."""
        if self._cache is None:
            return
        profile = self._make_profile(trainer, pl_module, steps=0)
        placement = current_placement(self.profiler, self._offloader)
        planning = (self._planner, self._gpu_memory == "least", self._per_day)
        forward = ((placement.weights, placement.states), recorded_forward(profile), planning)
        device, shape = self._offloader.device, self._progress.recorded_shape
        self._progress.key = plan_key(trainer, pl_module, device, shape, forward)
        cached = self._cache.load_once(self._progress.key, CachedPlan)
        if cached is not None and self._is_valid(cached, profile):
            self._reuse(trainer, pl_module, cached, profile, placement)

    def _is_valid(self, cached: CachedPlan, profile: ModelProfile) -> bool:
        """Returns whether a cached plan was made for the recorded forward and this machine."""
        try:
            cached.plan.check(profile)
        except ValueError as error:
            reason = str(error)
        else:
            if recorded_forward(cached.profile) != recorded_forward(profile):
                reason = "it was made for another forward"
            elif not is_like(cached.machine, self._hardware):
                reason = "the machine was measured more than twice as fast, or half as fast, then"
            else:
                return True
        warn_unused(reason)
        return False

    def _reuse(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        cached: CachedPlan,
        recorded: ModelProfile,
        placement: FixedPlacement,
    ) -> None:
        """Applies a plan from the cache, or one made from its measurements if the limits of memory have changed."""
        profile = replace(
            cached.profile,
            samples=recorded.samples,
            tokens=recorded.tokens,
            weight_room_bytes=recorded.weight_room_bytes,
        )
        self._fragment_reserve = max(self._fragment_reserve, min(cached.fragment_reserve, MAX_FRAGMENT_RESERVE))
        hardware = self._limit_hardware(cached.hardware, profile, placement)
        slowdown = profile.forward_seconds / recorded.forward_seconds
        runner = self._make_runner(trainer, profile, hardware, placement, slowdown)
        plan = placement.apply(profile, cached.plan)
        fits = not simulate(profile, hardware, plan).excess_bytes(hardware)
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

    def _store(self, runner: PlanRunner, plan: Plan, *, confirmed: bool = False) -> None:
        """Stores a plan and the measurements that it was made from."""
        if self._cache is not None and self._progress.key:
            cached = CachedPlan(
                plan, runner.profile, runner.hardware, self._hardware, self._fragment_reserve, confirmed
            )
            self._cache.save(self._progress.key, cached)

    # ---- model states ----

    def _plan_states(self, runner: PlanRunner, prediction: Prediction) -> Plan | None:
        """Returns a plan that places model states otherwise and fits, if it should be applied.

        A plan of a paper's planner should always be applied, because the paper's rule for activations assumes its
        placement of model states. A holistic plan should be applied if it is faster than `prediction` by
        `MIN_MOVE_GAIN` or `MIN_LEAVE_GAIN`, or if the plan of `prediction` does not fit.
        """
        if self._states is None or self.user_plan is not None or self._gpu_memory == "least":
            return None
        plan = make_plan(runner.profile, runner.hardware, self._planner)
        better = simulate(runner.profile, runner.hardware, plan)
        if better.excess_bytes(runner.hardware):
            return None
        if self._planner != "holistic":
            same = runner.placement.apply(runner.profile, plan).units == plan.units
            return None if same or self._states_moved else plan
        resident = {*runner.placement.weights, *runner.placement.states} == {"gpu"}
        gain = MIN_LEAVE_GAIN if resident else MIN_MOVE_GAIN
        faster = better.step_seconds <= (1 - gain) * prediction.step_seconds
        return plan if faster or prediction.excess_bytes(runner.hardware) else None

    def _relocate_states(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, runner: PlanRunner, plan: Plan
    ) -> bool:
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
            seconds = simulate(runner.profile, runner.hardware, plan).step_seconds
            whole = [unit.states for unit in plan.units.values() if not unit.parts]
            divided = len(plan.units) - len(whole)
            also = f", and those of {divided} units, part by part, in several tiers" if divided else ""
            pl.utilities.rank_zero_info(
                f"SwapPlanner: a step should take {seconds:.3f} s with the states of {whole.count('gpu')} units on the "
                f"GPU, of {whole.count('host')} in host memory and of {whole.count('ssd')} on SSDs{also}: they were "
                "moved, and the training is profiled again."
            )
        self._begin(trainer, pl_module, 1)
        return True

    def _recommend(self, runner: PlanRunner, plan: Plan) -> None:
        """Logs the step times of two placements of model states: that of `plan`, and the present one."""
        assert runner.plan is not None
        other, present = (simulate(runner.profile, runner.hardware, one).step_seconds for one in (plan, runner.plan))
        how = "Set `save` to write that plan to a file, and start with it as `plan`."
        if self._save is not None:
            path = self._save.with_suffix(".states.yaml")
            plan.save(path)
            how = f"To place them so, start with `states='auto'` and `SwapPlanner(plan={str(path)!r})`."
        pl.utilities.rank_zero_info(
            f"SwapPlanner: with model states placed otherwise, as the planner {self._planner!r} chooses, a step should "
            f"take {other:.3f} s, and {present:.3f} s as they are placed now. {how}"
        )

    # ---- comparing ----

    def _compare(self, trainer: pl.Trainer, pl_module: pl.LightningModule, runner: PlanRunner) -> None:
        """Compares measured steps with the prediction, once there are enough of them under the plan in force."""
        progress = self._progress
        if runner.plan is not progress.compared_plan:  # other callers of the runner may have applied it
            progress.compared_plan, progress.drift = runner.plan, StepDrift(self._tolerance)
        if self.calibrating:
            # With few steps the minimum is the best estimate: interruptions of the host lengthen single steps.
            count = self._steps if self._profiling_budget.allows(1) else 1
            comparison = runner.measured(min(count, HISTORY), min)
            if comparison is not None:
                progress.calibrating = False
                runner.calibrate(comparison, self._tolerance)
                self._decide(trainer, pl_module, runner)
            return
        if not progress.drift.is_due(runner.num_steps):
            return
        comparison = runner.measured()
        if comparison is None:
            return  # the device has not executed these steps yet
        progress.comparison = comparison
        fragments = "the allocator has freed its cached memory in steps, because fragments of it were too small"
        fragmented = comparison.alloc_retries > MAX_RETRY_RATE * runner.num_steps
        if fragmented and self._reserve_for_fragments(runner, fragments):
            return
        self._log_comparison(trainer, runner, comparison)
        usual = progress.drift.usual
        drifted = progress.drift.add(runner.num_steps, comparison.step_seconds)
        if usual is None:
            wrong = abs(comparison.step_seconds / comparison.predicted.step_seconds - 1) > MAX_ERROR
            replaced, progress.replaced = progress.replaced, None
            if replaced is not None and wrong and comparison.step_seconds > replaced.step_seconds:
                self._return_to(runner, replaced, comparison.step_seconds)
            elif not progress.calibrations or (wrong and progress.calibrations < MAX_CALIBRATIONS):
                progress.calibrations += 1
                self._recalibrate(runner, comparison)
                if runner.plan is not None:
                    self._store(runner, runner.plan)
            return
        if drifted and self.user_plan is None:
            seconds = f"a step takes {comparison.step_seconds:.3f} s, and took {usual:.3f}"
            pl.utilities.rank_zero_info(f"SwapPlanner: {seconds}: planning again.")
            self._restart_profiling(runner)

    def plan_smaller(self, reason: str) -> None:
        """Plans with less GPU memory, if there is a plan. Called between two steps; the log names the `reason`."""
        if self.runner is not None and not self.measuring:
            self._progress.calibrating = False
            self._reserve_for_fragments(self.runner, reason)

    def _reserve_for_fragments(self, runner: PlanRunner, reason: str) -> bool:
        """Plans with less GPU memory, because fragments use the rest; returns whether another plan was applied."""
        if self.user_plan is not None or self._fragment_reserve >= MAX_FRAGMENT_RESERVE:
            return False
        self._fragment_reserve += FRAGMENT_RESERVE_STEP
        self._progress.replaced = None  # the plan before may need more memory than is left
        limit = int((1 - self._fragment_reserve) * self._gpu_bytes())
        pl.utilities.rank_zero_info(f"SwapPlanner: {reason}: planning again with {format_bytes(limit)} of the GPU.")
        runner.hardware = replace(runner.hardware, gpu_bytes=limit)
        plan = self._make_plan(runner)
        self._apply(runner, plan)
        self._store(runner, plan)
        return True

    def _recalibrate(self, runner: PlanRunner, comparison: Comparison) -> None:
        """Corrects the profiles by the first steps under the plan, and plans again if that helps."""
        explained = runner.calibrate(comparison, self._tolerance)
        if not explained and self.user_plan is None and not self._progress.retried:
            self._progress.retried = True
            pl.utilities.rank_zero_info(
                f"SwapPlanner: a step takes {comparison.step_seconds:.3f} s instead of "
                f"{comparison.predicted.step_seconds:.3f}: measuring again."
            )
            self._restart_profiling(runner)
            return
        before = runner.prediction
        assert before is not None
        plan = self._make_plan(runner)
        after = simulate(runner.profile, runner.hardware, plan)
        excess = before.excess_bytes(runner.hardware), after.excess_bytes(runner.hardware)
        faster = after.step_seconds < (1 - MIN_PLAN_GAIN) * before.step_seconds
        least = self._gpu_memory == "least"
        smaller = least and after.gpu_peak_bytes < (1 - MIN_PLAN_GAIN) * before.gpu_peak_bytes
        if excess[1] < excess[0] or (explained and excess[1] == excess[0] and (faster or smaller)):
            self._progress.replaced = comparison if excess[1] == excess[0] else None
            self._apply(runner, plan)

    def _return_to(self, runner: PlanRunner, replaced: Comparison, seconds: float) -> None:
        """Applies the replaced plan again and ends corrections: profiles don't explain why its successor is slower.

        Args:
            runner: runs the steps.
            replaced: measured steps of the plan to apply again.
            seconds: measured seconds of a step under its successor, the plan in force.
        """
        self._progress.calibrations = MAX_CALIBRATIONS
        pl.utilities.rank_zero_info(
            f"SwapPlanner: a step took {replaced.step_seconds:.3f} s under the plan before, and takes {seconds:.3f} s "
            "under this one: the plan before is applied again."
        )
        self._apply(runner, replaced.plan)
        self._store(runner, replaced.plan, confirmed=True)

    def _log_comparison(self, trainer: pl.Trainer, runner: PlanRunner, comparison: Comparison) -> None:
        predicted = comparison.predicted
        metrics = {
            "predicted_step_s": predicted.step_seconds,
            "measured_step_s": comparison.step_seconds,
            "predicted_host_bytes": predicted.host_peak_bytes,
            "measured_host_bytes": comparison.host_peak_bytes,
            "swap_coefficient": swap_coefficient(runner.profile, comparison.plan),
        }
        if comparison.gpu_peak_bytes:
            metrics |= {
                "predicted_device_bytes": predicted.gpu_peak_bytes,
                "measured_device_bytes": comparison.gpu_peak_bytes,
            }
        for logger in trainer.loggers if self._logs_metrics else ():
            logger.log_metrics(
                {f"SwapPlanner/{name}": value for name, value in metrics.items()},
                step=trainer.fit_loop.epoch_loop._batches_that_stepped,
            )
        if self._progress.drift.usual is None:
            peak = f"predicted {format_bytes(predicted.gpu_peak_bytes)}"
            if comparison.gpu_peak_bytes:
                peak += f", {format_bytes(comparison.gpu_peak_bytes)} measured"
            seconds = f"predicted {predicted.step_seconds:.3f} s a step, measured {comparison.step_seconds:.3f}"
            pl.utilities.rank_zero_info(f"SwapPlanner: {seconds}. Peak of the device: {peak}.")


def _count_trained(module: pl.LightningModule) -> int:
    """Returns the number of parameters that require gradients."""
    return sum(parameter.requires_grad for parameter in module.parameters())
