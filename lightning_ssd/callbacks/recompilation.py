"""`Recompilation`: how often, and with which `activation_memory_budget`, code is compiled again to save less."""

import math

from lightning_ssd.activations import PartitionerBudget, compile_seconds
from lightning_ssd.callbacks.region_progress import RegionProgress
from lightning_ssd.planning import TierSpeed, free_bytes
from lightning_ssd.types import InputChoice

__all__ = ["Recompilation"]

TOLERATED_STALL = 0.02
"""Share of a micro-batch for which it may wait for transfers before code is compiled again to save less."""

MAX_COMPILE_SECONDS = 120.0
"""Seconds for which code may be compiled again, in all."""

MAX_BUDGETS = 4
"""Values of `activation_memory_budget` that are tried at most."""


class Recompilation:
    """Chooses lower values of `activation_memory_budget`, as long as they may make steps faster and there is time.

    Args:
        budget: sets the value for compiled code.
        allowed: whether code may be compiled again at all.

    Attributes:
        spent_seconds: seconds in which code was compiled again.
    """

    def __init__(self, budget: PartitionerBudget, *, allowed: bool) -> None:
        self.spent_seconds = 0.0
        self._budget = budget
        self._allowed = allowed
        self._num_budgets = 0
        """Values that were tried."""
        self._compile_seconds = compile_seconds()
        """Seconds that the code of the training takes to compile, as measured last."""
        self._compiled_before = 0.0
        """`compile_seconds` when the present compilation began."""

    @property
    def possible(self) -> bool:
        """Whether code may be compiled again now."""
        return self._allowed and self._budget.may_change

    def next_value(self, progress: RegionProgress, speeds: dict[InputChoice, TierSpeed]) -> float | None:
        """Returns the next value to try, after the trial of a plan has ended; `None`: no more.

        Args:
            progress: progress of the shape, whose last trial is in force.
            speeds: speeds of the tiers.
        """
        trial, timeline, room = progress.applied, progress.timeline, progress.room_bytes
        assert trial is not None and trial.plan is not None and timeline is not None and room is not None
        if not self.possible or self._num_budgets == MAX_BUDGETS:
            return None
        stalled = max(trial.plan.stall_seconds / timeline.seconds, trial.stalled)
        if not trial.plan.excess_bytes and stalled <= TOLERATED_STALL and trial.seconds < math.inf:
            return None
        earlier = (one.seconds for one in progress.trials if one.memory_budget > trial.memory_budget)
        fastest = min(earlier, default=math.inf)
        if fastest < math.inf and fastest <= trial.seconds:
            return None  # more recomputation has made steps slower
        # After this trial code is compiled again, and once more if an earlier one was faster.
        if self.spent_seconds + 2 * self._compile_seconds > MAX_COMPILE_SECONDS:
            return None
        free = sum(timeline.sizes[index] for index in timeline.movable - timeline.early(progress.window_bytes))
        excess = free - room - free_bytes(timeline, speeds, TOLERATED_STALL / 2)
        share = (1 - max(0.0, excess) / trial.saved_bytes) * trial.memory_budget
        value = min(math.floor(10 * share) / 10, round(trial.memory_budget - 0.1, 1))
        value = max(0.1, value)
        if value >= trial.memory_budget:
            return None
        self._num_budgets += 1
        return value

    def begin(self) -> None:
        """Called when the value was changed, which resets torch's count of seconds, before code is compiled again."""
        self._compiled_before = compile_seconds()

    def end(self) -> None:
        """Called when code was compiled again."""
        self._compile_seconds = compile_seconds() - self._compiled_before
        self.spent_seconds += self._compile_seconds
