"""`RegionProgress`: progress from a recorded micro-batch with compiled code to the fastest rule for its shape."""

import math
import statistics
from dataclasses import dataclass, field
from itertools import count

from lightning_ssd.activations import MeasuredPeaks
from lightning_ssd.callbacks.cached_regions import CachedRegions
from lightning_ssd.callbacks.step_drift import MEDIAN_STEPS, StepDrift
from lightning_ssd.callbacks.step_timer import StepTimer
from lightning_ssd.planning import SavedTimeline, StoragePlan

__all__ = ["TIMED_STEPS", "WARM_UP", "RegionProgress", "Trial"]

WARM_UP = 1
"""Steps after a change that are not timed: the allocator moves memory in them."""

TIMED_STEPS = 3
"""Steps of each trial that are timed. Their minimum counts: interruptions of the host lengthen single steps."""

MIN_GAIN = 0.01
"""Share of a step by which a trial must be faster than an earlier one to be applied."""

_NUMBERS = count(1)


@dataclass
class Trial:
    """Steps under one rule.

    Attributes:
        memory_budget: `activation_memory_budget` of compiled code.
        plan: plan of saved storages; `None`: those without room are offloaded, evenly spread over the forward.
        saved_bytes: bytes that a micro-batch saves; 0: its code is not compiled yet.
        seconds: measured duration of a step; infinite if a micro-batch ran out of memory.
        stalled: measured share of forward and backward in which the device waited for transfers.
        spare_bytes: bytes of memory that the plan has beside the room, as `MeasuredPeaks` has them.
    """

    memory_budget: float
    plan: StoragePlan | None
    saved_bytes: int = 0
    seconds: float = math.inf
    stalled: float = 0.0
    spare_bytes: float = 0.0


@dataclass(eq=False)
class RegionProgress:
    """Progress from a recorded micro-batch of one shape to the fastest rule for it.

    Attributes:
        timer: times the steps of such batches under the trial in force.
        applied: the trial in force, or being timed; `None` before the first one.
        trials: the trials that have ended, in their order.
        timeline: the recorded storages; `None`: the device has not passed them yet.
        window_bytes: window of micro-batches without a plan.
        room_bytes: bytes of storages, and of the window, for which a micro-batch has room; `None`: not known.
        peaks: memory of such micro-batches, with which alone they are compared.
        key: key of the plan in the cache; "" before storages were recorded.
        cached: the rule of an earlier training, before its trial has ended.
        number: number of the trial in force, another one for each `apply` in this process.
        drift: compares the steps under the trial in force.
    """

    timer: StepTimer
    applied: Trial | None = None
    trials: list[Trial] = field(default_factory=list)
    timeline: SavedTimeline | None = None
    window_bytes: int = 0
    room_bytes: float | None = None
    peaks: MeasuredPeaks = field(default_factory=MeasuredPeaks)
    key: str = ""
    cached: CachedRegions | None = None
    number: int = 0
    drift: StepDrift = field(default_factory=StepDrift)

    def apply(self, trial: Trial) -> None:
        """Puts a trial in force for the next step, and times the steps after the first one."""
        self.applied, self.number, self.drift = trial, next(_NUMBERS), StepDrift()
        self.peaks.spare_bytes = trial.spare_bytes
        self.timer.reset(WARM_UP)

    def fastest(self) -> Trial:
        """Returns the fastest trial: an earlier one, unless a later one is faster by `MIN_GAIN`.

        One with spare memory, which offloads less than the trial before it, has to be faster by any time.
        """
        chosen = self.trials[0]
        for trial in self.trials[1:]:
            gain = 0.0 if trial.spare_bytes else MIN_GAIN
            if trial.seconds < (1 - gain) * chosen.seconds:
                chosen = trial
        return chosen

    def drifted_seconds(self) -> float | None:
        """Returns the present duration of a step, if it has drifted; called at the end of each step."""
        timer = self.timer
        if not self.drift.is_due(timer.num_steps) or len(timer.seconds) < MEDIAN_STEPS:
            return None
        seconds = statistics.median(list(timer.seconds)[-MEDIAN_STEPS:])
        return seconds if self.drift.add(timer.num_steps, seconds) else None
