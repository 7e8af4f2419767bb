"""`PlanMaker`: the plans of a training, within the memory that it may use."""

from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import torch

from lightning_ssd.activations import ActivationOffloader
from lightning_ssd.autoplan.plan_runner import PlanRunner
from lightning_ssd.device import usable_gpu_memory
from lightning_ssd.planning import (
    MIN_MOVE_GAIN,
    FixedPlacement,
    HardwareProfile,
    ModelProfile,
    Plan,
    Prediction,
    checkpoint_all,
    default_plan,
    default_window,
    is_better_elsewhere,
    make_plan,
    most_seconds_elsewhere,
    offload_inputs,
    plan_for_least_memory,
    shrink_plan,
    simulate,
)
from lightning_ssd.profiling import limit_hardware
from lightning_ssd.sizes import parse_bytes

TOLERANCE = 0.02
"""Largest change of a plan's prediction with which it is applied after model states were moved for it: of the duration
of a step, and of the peak in shares of the GPU limit."""

RESERVE_STEP = 0.04
"""Share of the GPU limit by which the reserve grows each time."""

MAX_RESERVE = 0.2
"""Largest reserve / GPU limit."""

LESS = 0.01
"""Share of its GPU memory by which the plan after one that did not fit, and has run out of memory, needs less."""


@dataclass(frozen=True)
class PlanOptions:
    """Arguments of `SwapPlanner`; see there."""

    planner: str = "holistic"
    plan: Plan | None = None
    gpu_memory: int | str = "auto"
    machine: HardwareProfile | None = None
    save: Path | None = None
    ssd_bytes_per_day: int | None = None
    warm_up: int = 3
    steps: int = 3

    @property
    def least(self) -> bool:
        """Whether plans are those of least GPU memory."""
        return self.gpu_memory == "least"


@dataclass
class PlanMaker:
    """Makes plans from the profiles of a `PlanRunner`, or takes the user's; each is within the limits of memory.

    All methods are called on the training thread, between two micro-batches.

    Attributes:
        options: the user's arguments.
        machine: the machine as measured, without the limits of this training.
        device: the training device.
        reserve: share of the GPU limit that plans leave unused, besides the reserve of `usable_gpu_memory`: steps have
            run out of memory with less.
    """

    options: PlanOptions
    machine: HardwareProfile
    device: torch.device
    reserve: float = 0.0

    # ---- limits ----

    def limit(
        self, profile: ModelProfile, placement: FixedPlacement, offloader: ActivationOffloader
    ) -> HardwareProfile:
        """Returns the machine with the bytes that this training may use; arguments as those of `limit_hardware`."""
        gpu_bytes, per_day = self._gpu_bytes(), self.options.ssd_bytes_per_day
        return limit_hardware(
            self.machine, profile, placement, offloader, gpu_bytes=gpu_bytes, ssd_bytes_per_day=per_day
        )

    def reserve_more(self, runner: PlanRunner) -> bool:
        """Leaves more GPU memory unused in later plans of a runner; returns False if that is impossible."""
        if self.options.plan is not None or self.reserve >= MAX_RESERVE:
            return False
        self.reserve += RESERVE_STEP
        runner.hardware = replace(runner.hardware, gpu_bytes=self._gpu_bytes())
        return True

    def _gpu_bytes(self) -> int:
        """Returns the bytes of the device that plans may use."""
        if self.options.gpu_memory not in ("auto", "least"):
            most = parse_bytes(self.options.gpu_memory, "gpu_memory")
        else:
            most = usable_gpu_memory(self.device) if self.device.type == "cuda" else self.machine.host_bytes
        return int((1 - self.reserve) * most)

    # ---- plans ----

    @property
    def has_rows(self) -> bool:
        """Whether smaller micro-batches have plans of their own. The user's plan, for one, is for all."""
        return self.options.plan is None and not self.options.least and self.options.planner == "holistic"

    def make(self, runner: PlanRunner) -> Plan:
        """Returns the plan for the profiles of a runner, with the present tiers of model states.

        Raises:
            ValueError: the user's plan does not match the model.
        """
        options = self.options
        if options.plan is not None:
            options.plan.check(runner.profile)
            return runner.placement.apply(runner.profile, options.plan)
        make = plan_for_least_memory if options.least else make_plan
        return make(runner.profile, runner.hardware, options.planner, runner.placement)

    def make_calibration(self, runner: PlanRunner, offloading: Plan) -> Plan | None:
        """Returns the plan that checkpoints all units that may be and keeps all else; `None`: it does not fit.

        It needs little memory, pins none for saved tensors, and keeps the device busy. If it does not fit, all else is
        offloaded, also inputs of units. Where no unit may be, as in a model that checkpoints its layers itself, it is
        the plan that is made next if states stay where they are.

        Args:
            runner: runner with the profiles.
            offloading: the plan that offloads all saved tensors.
        """
        if self.options.plan is not None:
            return None
        model, hardware, placement = runner.profile, runner.hardware, runner.placement
        kept = default_plan(model, placement, {}, default_window(model, placement.weights))
        freeing = checkpoint_all(model, offloading)
        for plan in (checkpoint_all(model, kept) or kept, freeing and offload_inputs(freeing)):
            if plan is not None and not simulate(model, hardware, plan).excess_bytes(hardware):
                return plan
        return None

    def make_row(self, runner: PlanRunner, plan: Plan, size: float) -> Plan:
        """Returns the plan for micro-batches of another size, which is relative to that of the profile.

        Larger ones have a plan of their own, which takes as long as a first plan, unless units can be checkpointed.
        """
        model, hardware = runner.profile, runner.hardware
        freeing = plan if size < 1 else checkpoint_all(model, plan)
        if freeing is not None:
            return shrink_plan(model, hardware, freeing, size)
        return make_plan(model.with_size(size), hardware, self.options.planner, runner.placement)

    def make_safe(self, runner: PlanRunner, plan: Plan, size: float) -> Plan | None:
        """Returns the plan for micro-batches of up to a size that is not known exactly: it checkpoints all units.

        Args:
            runner: runner with the profiles.
            plan: plan with the other choices.
            size: upper bound of their saved bytes / those of the profile.

        Returns:
            The plan; `None`: no unit may be checkpointed, or it may not fit, and offloading all tensors needs less.
        """
        model, hardware = runner.profile.with_size(size), runner.hardware
        checkpointing = checkpoint_all(model, plan) if self.has_rows else None
        if checkpointing is None:
            return None
        for safe in (checkpointing, offload_inputs(checkpointing)):
            prediction = simulate(model, hardware, safe)
            if not prediction.excess_bytes(hardware):
                return safe
        offloading = default_plan(model, runner.placement, {"host": hardware.host_bytes}, 0)
        needs_more = prediction.gpu_peak_bytes > simulate(model, hardware, offloading).gpu_peak_bytes
        return None if needs_more else safe

    def make_elsewhere(self, runner: PlanRunner, present: Plan) -> Plan | None:
        """Returns a plan that places model states otherwise and fits, if it should be applied.

        A plan of a paper's planner should be applied if states are offloaded, because the paper's rule for activations
        assumes its placement of model states. A holistic plan should be applied as `is_better_elsewhere` says.

        Args:
            runner: runner with the profiles.
            present: the plan with the present tiers of model states.
        """
        if self.options.plan is not None or self.options.least:
            return None
        prediction = simulate(runner.profile, runner.hardware, present)
        holistic = self.options.planner == "holistic"
        tiers = {*runner.placement.weights, *runner.placement.states}
        resident = tiers == {"gpu"}
        if resident and not holistic:
            return None
        most_seconds = most_seconds_elsewhere(runner.hardware, prediction, resident=resident)
        model = runner.profile
        if holistic and model.micro_batches * (model.forward_seconds + model.backward_seconds) > most_seconds:
            return None  # no plan is faster, and the search takes long
        if holistic and most_seconds < inf and not resident and "ssd" not in tiers:
            # Only moves to the device could be faster, by at most the share of the states that moves. They have
            # most room if all units are checkpointed. The search takes as long as that for the present plan: half of
            # the longest step after the first.
            freeing = checkpoint_all(runner.profile, present) or present
            least = min(prediction.gpu_peak_bytes, simulate(runner.profile, runner.hardware, freeing).gpu_peak_bytes)
            placed = zip(runner.profile.parts, present.parts(runner.profile), strict=True)
            offloaded = sum(profile.resident_bytes for (_, profile), part in placed if part.offloaded)
            if runner.hardware.gpu_bytes - least < MIN_MOVE_GAIN * offloaded:
                return None
        # The training will step as it does now, and the present plan is predicted so.
        plan = make_plan(runner.profile, runner.hardware, self.options.planner, None, runner.placement.clip)
        better = simulate(runner.profile, runner.hardware, plan)
        if not holistic:
            same = runner.placement.apply(runner.profile, plan).units == plan.units
            return None if same or better.excess_bytes(runner.hardware) else plan
        return plan if is_better_elsewhere(runner.hardware, prediction, better, resident=resident) else None

    def make_smaller(self, runner: PlanRunner, plan: Plan, failed: Prediction) -> Plan | None:
        """Returns a plan for steps after one that has run out of memory; `None`: none needs less memory.

        A plan that does not fit is made for the limit, whatever it exceeds it by, so that it may be that of the failed
        step. The result needs less than that by `LESS`.

        Args:
            runner: runner with the profiles.
            plan: a new plan, which is the result if it fits.
            failed: prediction for the plan of the failed step.
        """
        model, hardware = runner.profile, runner.hardware
        most = int((1 - LESS) * failed.gpu_peak_bytes)
        prediction = simulate(model, hardware, plan)
        if not prediction.excess_bytes(hardware) or prediction.gpu_peak_bytes <= most:
            return plan
        plan = make_plan(model, replace(hardware, gpu_bytes=most), self.options.planner, runner.placement)
        return plan if simulate(model, hardware, plan).gpu_peak_bytes <= most else None

    def make_moved(self, runner: PlanRunner, plan: Plan, predicted: Prediction) -> Plan:
        """Returns the plan after model states were moved to their tiers in `plan`, for which they are profiled anew.

        Another search takes as long as the first one. It is made if the limits of memory or the tiers are other ones
        than were expected.

        Args:
            runner: runner with the profiles after the move.
            plan: result of `make_elsewhere`.
            predicted: its prediction before the move.
        """
        placed = runner.placement.apply(runner.profile, plan)
        found = simulate(runner.profile, runner.hardware, placed)
        changes = (
            found.step_seconds / predicted.step_seconds - 1,
            (found.gpu_peak_bytes - predicted.gpu_peak_bytes) / runner.hardware.gpu_bytes,
        )
        as_expected = max(map(abs, changes)) <= TOLERANCE and not found.excess_bytes(runner.hardware)
        return placed if as_expected else self.make(runner)
