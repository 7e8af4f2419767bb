"""`RegionProgress`: progress from a recorded micro-batch with compiled code to the fastest rule for its shape."""

import math
from dataclasses import dataclass, field

from lightning_ssd.activations import MeasuredPeaks
from lightning_ssd.callbacks.cached_regions import CachedRegions
from lightning_ssd.callbacks.step_drift import StepDrift
from lightning_ssd.callbacks.step_timer import StepTimer
from lightning_ssd.planning import SavedTimeline, StoragePlan

__all__ = ["RegionProgress", "Trial"]


@dataclass
class Trial:
    """Steps under one rule.

    Attributes:
        memory_budget: `activation_memory_budget` of compiled code.
        plan: plan of saved storages; `None`: those without room are offloaded, evenly spread over the forward.
        saved_bytes: bytes that a micro-batch saves.
        seconds: measured duration of a step; infinite if a micro-batch ran out of memory.
        stalled: measured share of forward and backward in which the device waited for transfers.
    """

    memory_budget: float
    plan: StoragePlan | None
    saved_bytes: int
    seconds: float = math.inf
    stalled: float = 0.0


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
        number: number of the trial in force.
        wait: steps before the next timed one.
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
    wait: int = 0
    drift: StepDrift = field(default_factory=StepDrift)
