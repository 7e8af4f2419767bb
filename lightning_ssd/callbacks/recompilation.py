"""`Recompilation`: how often, and with which `activation_memory_budget`, code is compiled again to save less."""

import math
from collections.abc import Sequence

from lightning_ssd.activations import PartitionerBudget, compile_seconds
from lightning_ssd.callbacks.region_progress import RegionProgress, Trial
from lightning_ssd.planning import TierSpeed, free_bytes
from lightning_ssd.types import InputChoice

__all__ = ["Recompilation"]

TOLERATED_STALL = 0.02
"""Share of a micro-batch for which it may wait for transfers before code is compiled again to save less."""

MAX_COMPILE_SECONDS = 120.0
"""Seconds for which the code of a training may be compiled again, in all."""

MAX_BUDGETS = 4
"""Values of `activation_memory_budget` that are tried at most with model states in the same tiers."""


class Recompilation:
    """Chooses lower values of `activation_memory_budget`, as long as they may make steps faster and there is time.

    Args:
        budget: sets the value for compiled code.
        allowed: whether code may be compiled again at all.
        spent_seconds: seconds in which this training has compiled code again before.

    Attributes:
        spent_seconds: seconds in which this training has compiled code again.
    """

    def __init__(self, budget: PartitionerBudget, *, allowed: bool, spent_seconds: float = 0.0) -> None:
        self.spent_seconds = spent_seconds
        self._budget = budget
        self._allowed = allowed
        self._num_budgets = 0
        """Values that were tried."""
        self._compile_seconds = compile_seconds()
        """Seconds that the code of the training takes to compile, as measured last."""
        self._compiled_before = 0.0
        """`compile_seconds` when the present compilation began."""

    @property
    def value(self) -> float:
        """The value that compiled code has; 1: the user's."""
        return self._budget.value

    @property
    def possible(self) -> bool:
        """Whether code may be compiled again now."""
        return self._allowed and self._budget.may_change

    def next_value(
        self, progress: RegionProgress, speeds: dict[InputChoice, TierSpeed], *, refine: bool
    ) -> float | None:
        """Returns the next value to try, after the trial of a plan has ended; `None`: no more.

        Values become lower until steps are not stalled, or not faster. Then values between the fastest and the next
        higher one are tried: fewer bytes are recomputed, and some are offloaded while the device computes.

        Args:
            progress: progress of the shape, whose trial of that plan is in force.
            speeds: speeds of the tiers.
            refine: whether values between others are tried.
        """
        if not self.possible or self._num_budgets == MAX_BUDGETS:
            return None
        # After this trial code is compiled again, and once more if an earlier one was faster.
        if self.spent_seconds + 2 * self._compile_seconds > MAX_COMPILE_SECONDS:
            return None
        value = _lower_value(progress, speeds)
        if value is None and refine:
            value = _value_between(progress.trials)
        self._num_budgets += value is not None
        return value

    def begin(self) -> None:
        """Called when the value was changed, which resets torch's count of seconds, before code is compiled again."""
        self._compiled_before = compile_seconds()

    def note_return(self) -> None:
        """Called when code is compiled again with an earlier value, which is assumed to take as long as before."""
        self.spent_seconds += self._compile_seconds

    def end(self) -> None:
        """Called when code was compiled again."""
        self._compile_seconds = compile_seconds() - self._compiled_before
        self.spent_seconds += self._compile_seconds


def _lower_value(progress: RegionProgress, speeds: dict[InputChoice, TierSpeed]) -> float | None:
    """Returns a value with which transfers should not stall the training; `None`: there is no need or no use."""
    trial, timeline, room = progress.applied, progress.timeline, progress.room_bytes
    assert trial is not None and trial.plan is not None and timeline is not None and room is not None
    stalled = max(trial.plan.stall_seconds / timeline.seconds, trial.stalled)
    if not trial.plan.excess_bytes and stalled <= TOLERATED_STALL and trial.seconds < math.inf:
        return None
    earlier = [one for one in progress.trials if one.memory_budget != trial.memory_budget]
    if any(one.memory_budget < trial.memory_budget or one.seconds <= trial.seconds < math.inf for one in earlier):
        return None
    free = sum(timeline.sizes[index] for index in timeline.movable - timeline.early(progress.window_bytes))
    excess = free - room - free_bytes(timeline, speeds, TOLERATED_STALL / 2)
    share = (1 - max(0.0, excess) / trial.saved_bytes) * trial.memory_budget
    value = max(0.1, min(math.floor(10 * share) / 10, round(trial.memory_budget - 0.1, 1)))
    return value if value < trial.memory_budget else None


def _value_between(trials: Sequence[Trial]) -> float | None:
    """Returns a value, in tenths, between that of the fastest trial and the next higher one; `None`: there is none.

    The highest one is 1, whether or not its trial is among them: every search has begun with it.
    """
    fastest = min(trials, key=lambda one: one.seconds).memory_budget
    above = min((one.memory_budget for one in trials if one.memory_budget > fastest), default=1.0)
    low, high = round(10 * fastest), round(10 * above)
    return (low + high + 1) // 2 / 10 if high - low > 1 else None
