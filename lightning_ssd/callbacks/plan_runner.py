"""`PlanRunner`: runs training steps under a plan, measures them, and corrects the profiles that plans are made from."""

import logging
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import count

from lightning_ssd.activations import (
    ActivationOffloader,
    OffloadAll,
    OffloadOnPressure,
    OffloadPolicy,
    PlacementPolicy,
    PlanMode,
    UnitDispatchMode,
    make_schedule,
)
from lightning_ssd.callbacks.prefetch_scheduler import PrefetchScheduler
from lightning_ssd.callbacks.step_drift import MEDIAN_STEPS
from lightning_ssd.callbacks.step_timer import StepTimer
from lightning_ssd.device import WorkCounter, allocator_memory, make_clock, process_gpu_memory
from lightning_ssd.model_states import ModelStates
from lightning_ssd.planning import (
    FixedPlacement,
    HardwareProfile,
    ModelProfile,
    Plan,
    Prediction,
    calibrate,
    calibrate_step_rate,
    simulate,
)
from lightning_ssd.profiling import Profiler

log = logging.getLogger(__name__)

WARMUP_AFTER_CHANGE = 2
"""Steps after a change of plan that are not measured: the allocator moves memory in them."""

HISTORY = 64
"""Number of last steps whose durations are stored."""

PRESSURE_AT = 0.8
"""Share of the GPU limit above which a plan that keeps everything offloads; the rest is for backward."""

HOOKS_OFF_BELOW = 0.5
"""Share of the GPU limit: hooks may be disabled when a plan that keeps everything is predicted to peak below it."""

_NUMBERS = count(1)


@dataclass(frozen=True)
class Comparison:
    """The prediction for a plan, and measured steps.

    Attributes:
        plan: the plan of these steps.
        predicted: result of the simulation.
        step_seconds: duration of a step: the median of several, or the minimum for a calibration plan.
        gpu_peak_bytes: peak of allocated GPU memory (CUDA; 0 on a CPU).
        host_peak_bytes: peak of host memory for activations and model states.
        alloc_retries: allocations of GPU memory in all steps under the plan, after those of `WARMUP_AFTER_CHANGE`, that
            found no room among the allocator's fragments. Each one synchronizes the device and frees all cached memory.
    """

    plan: Plan
    predicted: Prediction
    step_seconds: float
    gpu_peak_bytes: int
    host_peak_bytes: int
    alloc_retries: int = 0


class PlanRunner:
    """Runs the steps of one training under plans for one profile.

    A new profile needs a new runner. All methods are called on the training thread, outside of forward and backward.
    None waits for the device, but `begin_step` once under each plan, when pinned memory is freed.

    Args:
        profiler: profiler with the recorded forward.
        offloader: activation offloader, to which plans are applied.
        states: offloaded model states; `None`: all of them are on the GPU.
        schedulers: callbacks that set the prefetch window; plans override it.
        profile: profile of the model.
        hardware: profile of the machine, with the bytes that this training may use.
        placement: tiers of model states, which plans do not change.
        slowdown: forward time of the profile / forward time that `profiler` has recorded.

    Attributes:
        profiler: profiler with the recorded forward.
        profile: profile of the model, corrected by `calibrate`.
        hardware: profile of the machine, corrected by `calibrate`.
        placement: tiers of model states.
        plan: the plan in force.
        prediction: prediction for the plan in force.
        number: number of the plan in force, another one for each `apply` in this process.
        hooks_skippable: whether the plan keeps everything and needs little memory, so that hooks may be disabled.
    """

    def __init__(
        self,
        profiler: Profiler,
        offloader: ActivationOffloader,
        states: ModelStates | None,
        schedulers: Sequence[PrefetchScheduler],
        profile: ModelProfile,
        hardware: HardwareProfile,
        placement: FixedPlacement,
        slowdown: float = 1.0,
    ) -> None:
        self.profile = profile
        self.hardware = hardware
        self.placement = placement
        self.plan: Plan | None = None
        self.prediction: Prediction | None = None
        self.number = 0
        self.hooks_skippable = False
        self._steps_planned = False  # whether a plan has chosen the parts that the GPU steps
        self.profiler = profiler
        self._offloader = offloader
        self._states = states
        self._schedulers = schedulers
        self._timer = StepTimer(make_clock(offloader.device), HISTORY)
        device = offloader.device
        self._memory = allocator_memory(device)
        self._retries = 0  # retried allocations before the measured steps
        available = process_gpu_memory(device) if device.type == "cuda" else math.inf
        self._gpu_limit = min(hardware.gpu_bytes, available)  # bytes that this training may allocate
        self._mode: PlanMode | None = None
        self._policy: OffloadPolicy | None = None
        """The policy of the plan in force."""
        self._slowdown = slowdown  # current forward time / recorded forward time
        self._warm_up = 0
        self._trimmed = False  # whether pinned memory that the plan does not need was freed
        self._peak_bytes = 0  # peak of measured steps before the last validation
        self._stepped = WorkCounter(0, 0.0)  # work of the CPU optimizer when measured steps began

    @property
    def num_steps(self) -> int:
        """Number of steps that the host has ended under the plan, without those of `WARMUP_AFTER_CHANGE`."""
        return self._timer.num_steps

    def apply(self, plan: Plan) -> None:
        """Puts `plan` in force for the next step, and predicts its steps.

        Args:
            plan: a plan with the present tiers of model states.

        Raises:
            ValueError: the plan does not match the model.
        """
        self.prediction = simulate(self.profile, self.hardware, plan)
        self.plan = plan
        self.number = next(_NUMBERS)
        self._place_steps(plan)
        if plan.keeps_all:
            self.close()
            self._set_placement(OffloadOnPressure(tuple(self._offloader.tiers), self._is_short), None)
            # Hooks are needed for offloaded weights, and for batches that need more memory than the recorded one.
            ample = self.prediction.gpu_peak_bytes <= HOOKS_OFF_BELOW * self._gpu_limit
            self.hooks_skippable = ample and set(self.placement.weights) == {"gpu"}
        else:
            self._set_placement(OffloadAll(tuple(self._offloader.tiers)), self._plan_mode(plan))
            self.hooks_skippable = False
        self._policy = self._offloader.policy
        self._set_window(plan.window_bytes)
        self._warm_up = WARMUP_AFTER_CHANGE
        self._trimmed = False
        self._offloader.reset_pinned_peak()
        self._timer.reset()

    def _place_steps(self, plan: Plan) -> None:
        """Makes the GPU step the parts that the plan names, and keep the gradients that the plan does.

        Without such plans, a trial of shares chooses the parts, and their gradients are offloaded.
        """
        if self._states is None:
            return
        placed = [
            (part, plan.units[unit.name].of(part.name))
            for unit in self.profiler.units
            for part in self.profiler.parts_of(unit)
        ]
        parts = [part for part, placement in placed if placement.step == "gpu"]
        kept = [part for part, placement in placed if placement.gradients == "gpu"]
        if not (parts or self._steps_planned):
            return
        self._steps_planned = True
        chosen, kept_gradients = ([one for part in each for _, one in part.parameters] for each in (parts, kept))
        if not self._states.step_on_device(chosen, kept_gradients):
            log.warning(
                "The GPU has no memory for the optimizer steps of %d parts of units that the plan assigns to it: "
                "processors do not change, so that steps may take longer than predicted.",
                len(parts),
            )

    def deactivate(self, *, in_step: bool) -> None:
        """Called before steps under another rule; `in_step`: the present step has begun, and is not measured."""
        if in_step:
            self._timer.skip()
        else:
            self._timer.end()
        self._peak_bytes = self._gpu_peak()

    def reactivate(self) -> None:
        """Puts the plan in force again, after `deactivate`. Its measured steps still count."""
        assert self.plan is not None and self._policy is not None
        self._offloader.run(self._policy)
        self._set_window(self.plan.window_bytes)
        self._reset_peak()

    def stop(self) -> None:
        """Offloads all saved tensors from the next step on, as before the first plan."""
        self.hooks_skippable = False
        offload_all(self._offloader)
        self._set_window(None)
        self._timer.reset()

    def close(self) -> None:
        """Removes the hooks from the model. `measured` still returns the measurements."""
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.close()

    # ---- steps ----

    def enable_hooks(self, enabled: bool) -> None:
        """Enables or disables saved-tensor hooks for the next forward; see `hooks_skippable`."""
        if self._offloader.policy.hooks_enabled != enabled:
            self._offloader.run(replace(self._offloader.policy, hooks_enabled=enabled))

    def begin_step(self) -> None:
        """Called when a step begins, which ends the step before."""
        if self._warm_up:
            self._warm_up -= 1
            if not self._warm_up:
                self._peak_bytes = 0
                self._reset_peak()
                if self._memory is not None:
                    self._retries = self._memory.retries()
                if self._states is not None:
                    self._stepped = self._states.stepped()
            return
        self._timer.end()
        if not self._trimmed and self.num_steps >= MEDIAN_STEPS:  # calibration plans have fewer steps
            self._offloader.trim_pinned()  # profiled steps may have offloaded more
            self._trimmed = True
        self._timer.begin()

    def skip_step(self) -> None:
        """Excludes the present step from measured ones: its work is not that of the recorded micro-batch."""
        self._timer.skip()

    def pause(self) -> None:
        """Called when a validation begins, whose time and memory are not measured."""
        self._timer.pause()
        self._peak_bytes = self._gpu_peak()

    def resume(self) -> None:
        """Called when a validation has ended."""
        self._timer.resume()
        self._reset_peak()

    def excluded(self) -> AbstractContextManager[None]:
        """Returns a context whose time is not part of the present step's."""
        return self._timer.excluded()

    def measured(
        self, steps: int = MEDIAN_STEPS, typical: Callable[[Sequence[float]], float] = statistics.median
    ) -> Comparison | None:
        """Returns the prediction and the last measured steps under the plan.

        Args:
            steps: number of steps, up to `HISTORY`.
            typical: returns the typical duration of several.

        Returns:
            The comparison, or `None` while the device has ended fewer steps under the plan.
        """
        if self.plan is None or self.prediction is None or len(self._timer.seconds) < steps:
            return None
        host_bytes = self._offloader.peak_pinned_bytes() + (0 if self._states is None else self._states.host_bytes)
        seconds = list(self._timer.seconds)[-steps:]
        retries = 0 if self._memory is None else self._memory.retries() - self._retries
        return Comparison(self.plan, self.prediction, typical(seconds), self._gpu_peak(), host_bytes, retries)

    def calibrate(self, comparison: Comparison, tolerance: float) -> bool:
        """Corrects the profiles by measured steps of the plan in force, and predicts them again.

        Reasons for a difference: a GPU that waits for transfers is cooler, and faster, than one that never does; drives
        and host memory are slower under the load of a whole step; some GPU memory belongs to no recorded operator. The
        rate of the CPU optimizer is measured; the rest of the difference is inferred from the step's duration.

        Args:
            comparison: measured steps of the plan in force.
            tolerance: relative error of the step's duration that needs no correction.

        Returns:
            Whether the corrections explain the step's duration.
        """
        assert self.plan is not None
        predicted, measured = comparison.predicted, comparison.step_seconds
        if comparison.gpu_peak_bytes:
            unseen = self.profile.other_gpu_bytes + comparison.gpu_peak_bytes - predicted.gpu_peak_bytes
            # A plan that needs less than predicted does not show that another plan will, which would not fit then.
            # The bytes are below 0 where the profile counts more than there is, as of gradients in 16 bits.
            least = min(0, self.profile.other_gpu_bytes)
            self.profile = replace(self.profile, other_gpu_bytes=max(least, unseen))
        stepped = WorkCounter(0, 0.0) if self._states is None else self._states.stepped().since(self._stepped)
        if stepped.amount and stepped.seconds:
            rate = stepped.amount / stepped.seconds
            self.hardware = calibrate_step_rate(self.profile, self.hardware, self.plan, rate, measured)
        corrected = calibrate(self.profile, self.hardware, self.plan, measured)
        if corrected is not None:
            self._slowdown *= corrected[0].forward_seconds / self.profile.forward_seconds
            if self._mode is not None:
                self._mode.slowdown = self._slowdown
            self.profile, self.hardware = corrected
        self.prediction = simulate(self.profile, self.hardware, self.plan)
        return corrected is not None or abs(measured / self.prediction.step_seconds - 1) <= tolerance

    # ---- implementation ----

    def _set_placement(self, placement: PlacementPolicy, mode: UnitDispatchMode | None) -> None:
        self._offloader.run(replace(self._offloader.policy, placement=placement, mode=mode, hooks_enabled=True))

    def _plan_mode(self, plan: Plan) -> PlanMode:
        """Returns the dispatch mode that applies `plan` to forwards."""
        profiler = self.profiler
        choices, recompute_ops = {}, {}
        for item in profiler.saved:
            unit = plan.units[profiler.name_of(item.unit_call)]
            choices[item.buffer] = unit.input if item.is_unit_input else unit.operators[item.name]
            if choices[item.buffer] == "recompute":
                recompute_ops[item.buffer] = item.recompute_ops
        if self._mode is None:
            modules = [unit.modules for unit in profiler.units]
            self._mode = PlanMode(modules, self._offloader)
        self._mode.slowdown = self._slowdown
        checkpointed = (one for one in profiler.graph.unit_calls() if plan.units[profiler.name_of(one)].checkpoint)
        self._mode.schedule = make_schedule(
            profiler.graph,
            choices,
            recompute_ops,
            plain_calls=True,
            save_weights=plan.offloads_states,
            checkpointed=frozenset(checkpointed),
        )
        return self._mode

    def _set_window(self, window_bytes: int | None) -> None:
        for scheduler in self._schedulers:
            scheduler.override_window(window_bytes)

    def _is_short(self) -> bool:
        """Returns whether a forward that differs from the recorded one leaves too little GPU memory."""
        if self._memory is None:
            return False
        assert self.prediction is not None
        return self._memory.allocated() > max(self.prediction.gpu_peak_bytes, PRESSURE_AT * self._gpu_limit)

    def _gpu_peak(self) -> int:
        """Returns the peak of allocated GPU memory in measured steps, without validations (CUDA; else 0)."""
        return 0 if self._memory is None else max(self._peak_bytes, self._memory.peak())

    def _reset_peak(self) -> None:
        if self._memory is not None:
            self._memory.reset_peak()


def offload_all(offloader: ActivationOffloader) -> None:
    """Has `offloader` offload all saved tensors: the placement before the first plan, which needs least memory."""
    placement = OffloadAll(tuple(offloader.tiers))
    offloader.run(replace(offloader.policy, placement=placement, mode=None, hooks_enabled=True))
