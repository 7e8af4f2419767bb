"""`PlanRunner`: runs training steps under a plan, and measures them.

A plan has rows: the one for the recorded micro-batch, and others for smaller ones, which need less memory and offload
less, and for larger ones. All rows have the operators of the recorded micro-batch, whose choices depend on no shape.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_ssd.activations import (
    ActivationOffloader,
    KeepAll,
    OffloadAll,
    OpSchedule,
    PlacementPolicy,
    PlanMode,
    make_schedule,
)
from lightning_ssd.autoplan.protocol import Training
from lightning_ssd.autoplan.step_timer import StepTimer
from lightning_ssd.device import allocator_memory, make_clock
from lightning_ssd.planning import (
    FixedPlacement,
    HardwareProfile,
    ModelProfile,
    Plan,
    Prediction,
    calibrate,
    simulate,
)
from lightning_ssd.profiling import Profiler
from lightning_ssd.types import Choice

COMPARED_STEPS = 4
"""Number of steps whose median duration is compared with a prediction."""

WARMUP_AFTER_CHANGE = 2
"""Steps after a change of plan that are not measured: the allocator moves memory in them."""

HISTORY = 64
"""Number of last steps whose durations are stored."""


@dataclass(frozen=True)
class Comparison:
    """The prediction for a plan, and measured steps.

    Attributes:
        plan: the plan of these steps.
        predicted: result of the simulation.
        step_seconds: duration of a step: the median of several.
        gpu_peak_bytes: peak of allocated GPU memory (CUDA; 0 on a CPU).
        host_peak_bytes: peak of host memory for activations and model states.
    """

    plan: Plan
    predicted: Prediction
    step_seconds: float
    gpu_peak_bytes: int
    host_peak_bytes: int


@dataclass(frozen=True, eq=False)
class PlanRow:
    """A plan for micro-batches of up to a size.

    Attributes:
        plan: the plan.
        prediction: prediction for it.
        placement: decides about saved tensors for which the plan has no choice.
        schedule: choices for the operators of a forward; `None`: the plan keeps all, and needs no mode.
        has_hooks: whether saved-tensor hooks are enabled: something is not kept, or weights are offloaded.
    """

    plan: Plan
    prediction: Prediction
    placement: PlacementPolicy
    schedule: OpSchedule | None
    has_hooks: bool


class PlanRunner:
    """Runs the steps of one training under plans for one profile.

    A new profile needs a new runner. All methods are called on the training thread, outside of forward and backward.
    None waits for the device.

    Args:
        training: the training.
        profiler: profiler with the recorded forward.
        profile: profile of the model.
        hardware: profile of the machine, with the bytes that this training may use.
        placement: tiers of model states, which plans do not change.
        slowdown: current forward time / recorded forward time, as far as it is known.

    Attributes:
        profiler: profiler with the recorded forward.
        profile: profile of the model.
        hardware: profile of the machine, with the bytes that this training may use.
        placement: tiers of model states.
        main: the row of micro-batches of the recorded size, whose steps are measured; `None`: there is no plan.
        rows: rows of micro-batches of other sizes under the same plan, by their number (see `row_of`).
        safe_rows: rows of micro-batches whose size is only bounded, by the number of the bound; `None`: they offload
            all saved tensors.
        row: the row that the present micro-batch follows; `None`: all saved tensors are offloaded.
    """

    def __init__(
        self,
        training: Training,
        profiler: Profiler,
        profile: ModelProfile,
        hardware: HardwareProfile,
        placement: FixedPlacement,
        slowdown: float = 1.0,
    ) -> None:
        self.profile = profile
        self.hardware = hardware
        self.placement = placement
        self.profiler = profiler
        self.row: PlanRow | None = None
        self.main: PlanRow | None = None
        self.rows: dict[int, PlanRow] = {}
        self.safe_rows: dict[int, PlanRow | None] = {}
        self._training = training
        self._offloader = training.offloader
        self._states = training.states
        self._timer = StepTimer(make_clock(self._offloader.device), HISTORY)
        device = self._offloader.device
        self._memory = allocator_memory(device)
        self._mode: PlanMode | None = None
        self.slowdown = slowdown
        self._warm_up = 0
        self._peak_bytes = 0  # peak of measured steps before the last validation, or other row

    @property
    def plan(self) -> Plan | None:
        """The plan in force, for micro-batches of the recorded size."""
        return None if self.main is None else self.main.plan

    @property
    def prediction(self) -> Prediction | None:
        """The prediction for the plan in force."""
        return None if self.main is None else self.main.prediction

    @property
    def num_steps(self) -> int:
        """Number of measured steps that the host has ended under the plan, without those of `WARMUP_AFTER_CHANGE`."""
        return self._timer.num_steps

    @property
    def units_changed(self) -> bool:
        """Whether units were not checkpointed in the last micro-batch, as user code has changed them."""
        planned = self.row is not None and self.row.schedule is not None
        return planned and self._mode is not None and self._mode.units_changed

    def apply(self, plan: Plan, warm_up: int = WARMUP_AFTER_CHANGE) -> None:
        """Puts `plan` in force for the next step, and predicts its steps.

        Args:
            plan: a plan with the present tiers of model states.
            warm_up: first steps under it that are not measured.

        Raises:
            ValueError: the plan does not match the model.
        """
        self.main, self.rows, self.safe_rows = self.make_row(plan), {}, {}
        for proof in self.profiler.graph.proofs.values():  # the last plan may have checkpointed more units
            proof.forget()
        self.follow(self.main)
        self._training.set_window(plan.window_bytes)
        self._warm_up = warm_up
        for tier in self._offloader.tiers.values():
            tier.reset_peak()
        self._timer.reset()

    def make_row(self, plan: Plan, size: float = 1.0) -> PlanRow:
        """Returns the row of a plan for micro-batches of up to a size: of saved bytes / those of the profile."""
        prediction = simulate(self.profile.with_size(size), self.hardware, plan)
        tiers = tuple(self._offloader.tiers)
        if plan.keeps_all:
            return PlanRow(plan, prediction, KeepAll(), None, set(self.placement.weights) != {"gpu"})
        return PlanRow(plan, prediction, OffloadAll(tiers), self._schedule(plan), True)

    def follow(self, row: PlanRow | None) -> None:
        """Applies a row to the present micro-batch, which has saved nothing yet; `None`: offloads all saved tensors."""
        if row is not self.row:
            if row is self.main:
                self._reset_peak()
            elif self.row is self.main:
                self._peak_bytes = self._gpu_peak()
        self.row = row
        if row is None:
            offload_all(self._offloader)
            return
        mode = None
        if row.schedule is not None:
            mode = self._mode = self._mode or PlanMode([unit.modules for unit in self.profiler.units], self._offloader)
            mode.schedule, mode.slowdown = row.schedule, self.slowdown
        policy = replace(
            self._offloader.policy,
            placement=row.placement,
            mode=mode,
            hooks_enabled=row.has_hooks,
        )
        if not self._training.fixed_window:
            policy = replace(policy, window_bytes=row.plan.window_bytes)
        if policy != self._offloader.policy:
            self._offloader.run(policy)

    def stop(self) -> None:
        """Offloads all saved tensors from the next step on, as before the first plan."""
        self.follow(None)
        self._training.set_window(None)
        self._timer.reset()

    def close(self) -> None:
        """Removes the hooks from the model. `measured` still returns the measurements."""
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.close()

    # ---- steps ----

    def begin_step(self) -> None:
        """Called when a step begins, which ends the step before."""
        if self._warm_up:
            self._warm_up -= 1
            if not self._warm_up:
                self._peak_bytes = 0
                self._reset_peak()
            return
        self._timer.begin()

    def end_step(self) -> None:
        """Called when a step has ended, to exclude the time until the next one begins."""
        self._timer.end()

    def fastest_step(self) -> float | None:
        """Returns the seconds of the fastest measured step under the plan; `None`: the device has ended none."""
        self._timer.end()
        return min(self._timer.seconds, default=None)

    def skip_step(self) -> None:
        """Excludes the present step from measured ones: its work is not that of the recorded micro-batch."""
        self._timer.skip()

    def pause(self) -> None:
        """Called when a validation begins, in a step or after it: the step is not measured."""
        self._timer.skip()
        self._peak_bytes = self._gpu_peak()

    def resume(self) -> None:
        """Called when a validation has ended, whose peak of memory is not that of a step."""
        self._reset_peak()

    def measured(
        self, steps: int = COMPARED_STEPS, typical: Callable[[Sequence[float]], float] = statistics.median
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
        host_bytes = self._offloader.peak_pinned_bytes() + (0 if self._states is None else self._states.nbytes.host)
        seconds = list(self._timer.seconds)[-steps:]
        return Comparison(self.plan, self.prediction, typical(seconds), self._gpu_peak(), host_bytes)

    def add_missing_memory(self, comparison: Comparison) -> None:
        """Has the profile count GPU memory that measured steps of the plan in force need beyond the prediction."""
        missing = comparison.gpu_peak_bytes - comparison.predicted.gpu_peak_bytes
        if missing <= 0 or self.main is None:
            return
        self.profile = replace(self.profile, other_gpu_bytes=self.profile.other_gpu_bytes + missing)
        self.rows.clear()  # they may need more memory than is left
        self.safe_rows.clear()
        before = self.main
        self.main = replace(before, prediction=simulate(self.profile, self.hardware, before.plan))
        self.row = self.main if self.row is before else self.row

    def correct(self, plan: Plan, step_seconds: float) -> None:
        """Corrects the profiles by the measured duration of steps under `plan`, before a plan is in force."""
        corrected = calibrate(self.profile, self.hardware, plan, step_seconds)
        if corrected is not None:
            self.slowdown *= corrected[0].forward_seconds / self.profile.forward_seconds
            self.profile, self.hardware = corrected

    # ---- implementation ----

    def _schedule(self, plan: Plan) -> OpSchedule:
        """Returns the choices of `plan` for the operators of a forward."""
        profiler = self.profiler
        choices: dict[int, Choice] = {}
        for item in profiler.saved:
            unit = plan.units[profiler.name_of(item.unit_call)]
            choices[item.buffer] = unit.input if item.is_unit_input else unit.operators[item.name]
        calls = ((one, plan.units[profiler.name_of(one)]) for one in profiler.graph.unit_calls())
        return make_schedule(
            profiler.graph,
            profiler.saved,
            choices,
            plain_calls=True,
            save_weights=plan.offloads_states,
            checkpointed={one: unit.input for one, unit in calls if unit.checkpoint},
        )

    def _gpu_peak(self) -> int:
        """Returns the peak of allocated GPU memory in steps of the main row, without validations (CUDA; else 0)."""
        if self._memory is None or self.row is not self.main:
            return self._peak_bytes
        return max(self._peak_bytes, self._memory.peak())

    def _reset_peak(self) -> None:
        if self._memory is not None:
            self._memory.reset_peak()


def offload_all(offloader: ActivationOffloader) -> None:
    """Has `offloader` offload all saved tensors: the placement before the first plan, which needs least memory."""
    placement = OffloadAll(tuple(offloader.tiers))
    offloader.run(replace(offloader.policy, placement=placement, mode=None, hooks_enabled=True))
