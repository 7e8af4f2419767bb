"""`PlanProgress`: progress from a recorded micro-batch to a plan whose prediction is right."""

from dataclasses import dataclass, field
from typing import Literal

from lightning_ssd._lightning import pl
from lightning_ssd.callbacks.plan_runner import Comparison, PlanRunner
from lightning_ssd.callbacks.seen_batches import BatchShape
from lightning_ssd.callbacks.step_drift import StepDrift
from lightning_ssd.planning import Plan

MAX_ERROR = 0.02
"""Relative error of a prediction above which the profiles are corrected again."""

MAX_CALIBRATIONS = 4
"""Most corrections of one profile by measured steps."""

Verdict = Literal["right", "wrong", "slower", "drifted"]


@dataclass(frozen=True)
class RecordedBatch:
    """Shape of the recorded batch, and number of parameters that were trained in its micro-batch.

    Attributes:
        shape: shape; `None`: unknown.
        num_trained: parameters that required gradients.
    """

    shape: BatchShape | None
    num_trained: int

    def covers(self, shape: BatchShape | None) -> bool:
        """Returns whether a batch of that shape is known to be, tensor by tensor, no larger than the recorded one."""
        return shape is not None and self.shape is not None and shape.is_within(self.shape)

    def is_like(self, shape: BatchShape | None) -> bool:
        """Returns whether a step with such a batch takes about as long as with the recorded one, as far as known."""
        return shape is None or self.shape is None or shape.is_like(self.shape)


@dataclass
class PlanProgress:
    """Progress from a recorded micro-batch to a plan whose prediction is right.

    It is read and written on the training thread, between two steps.

    Attributes:
        recorded: the recorded batch; `None`: none was recorded.
        allocated_bytes: `Profiler.allocated_bytes` of the training that the profiles are of.
        runner: runs the steps under plans; `None`: the recorded micro-batch has no profile yet.
        key: key of the plan in the cache.
        calibrating: True while the calibration plan is in force.
        comparison: the last comparison of a plan's prediction with measured steps.
        calibrations: corrections of the profiles by steps under plans, since they were made.
        replaced: measured steps of the plan that the one in force has replaced after a correction.
        retried: whether the training was profiled again because a correction did not explain the measured steps.
        fragmented_plan: plan that stays in force although memory is fragmented, because others take longer.
        compared_plan: the plan that the next field belongs to.
        drift: compares the steps under that plan.
    """

    recorded: RecordedBatch | None = None
    allocated_bytes: int = 0
    runner: PlanRunner | None = None
    key: str = ""
    calibrating: bool = False
    comparison: Comparison | None = None
    calibrations: int = 0
    replaced: Comparison | None = None
    retried: bool = False
    fragmented_plan: Plan | None = None
    compared_plan: Plan | None = None
    drift: StepDrift = field(default_factory=StepDrift)

    def begin_profile(self, runner: PlanRunner) -> None:
        """Called when a new profile has a runner."""
        self.runner, self.calibrations = runner, 0

    def next_comparison(self, runner: PlanRunner, tolerance: float) -> Comparison | None:
        """Returns the comparison for the plan in force that is due, if the device has executed its steps.

        Args:
            runner: runs the steps.
            tolerance: relative drift of the step time after which the training is planned again.
        """
        if runner.plan is not self.compared_plan:  # other callers of the runner may have applied it
            self.compared_plan, self.drift = runner.plan, StepDrift(tolerance)
        comparison = runner.measured() if self.drift.is_due(runner.num_steps) else None
        self.comparison = comparison or self.comparison
        return comparison

    def judge(self, comparison: Comparison, num_steps: int) -> Verdict:
        """Returns what measured steps say about the plan in force.

        Args:
            comparison: the last comparison.
            num_steps: steps under the plan.

        Returns:
            `"wrong"`: the profiles should be corrected; `"slower"`: steps were faster under the plan that it has
            replaced, and the corrections don't explain that; `"drifted"`: the training should be profiled again.
        """
        usual, seconds = self.drift.usual, comparison.step_seconds
        drifted = self.drift.add(num_steps, seconds)
        if usual is not None:
            return "drifted" if drifted else "right"
        wrong = abs(seconds / comparison.predicted.step_seconds - 1) > MAX_ERROR
        if self.replaced is not None and wrong and seconds > self.replaced.step_seconds:
            return "slower"
        self.replaced = None
        return "wrong" if not self.calibrations or (wrong and self.calibrations < MAX_CALIBRATIONS) else "right"


def count_trained(module: pl.LightningModule) -> int:
    """Returns the number of parameters that require gradients."""
    return sum(parameter.requires_grad for parameter in module.parameters())
