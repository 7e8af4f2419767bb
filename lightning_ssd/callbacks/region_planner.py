"""`RegionPlanner` plans the saved tensors of trainings with compiled code, whose operators are not visible."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning_ssd._lightning import pl
from lightning_ssd.activations import (
    ActivationOffloader,
    OffloadExcess,
    PartitionerBudget,
    PlannedExcess,
    ResidentLimit,
    SSDTierBase,
    compile_seconds,
)
from lightning_ssd.callbacks.prefetch_scheduler import PrefetchScheduler
from lightning_ssd.callbacks.step_timer import StepTimer
from lightning_ssd.device import make_clock
from lightning_ssd.planning import SavedTimeline, StoragePlan, TierSpeed, free_bytes, plan_storages
from lightning_ssd.profiling import HOST_FILL, SavedTimelineRecorder
from lightning_ssd.sizes import format_bytes
from lightning_ssd.types import InputChoice

log = logging.getLogger(__name__)

WARM_UP = 1
"""Steps after a change that are not timed: the allocator moves memory in them."""

TIMED_STEPS = 3
"""Steps of each trial that are timed. Their minimum counts: interruptions of the host lengthen single steps."""

TOLERATED_STALL = 0.02
"""Share of a micro-batch for which it may wait for transfers before code is compiled again to save less."""

MAX_COMPILE_SECONDS = 120.0
"""Seconds for which code may be compiled again, in all."""

MAX_BUDGETS = 4
"""Values of `activation_memory_budget` that are tried at most."""

MAX_RECORDINGS = 3
"""Micro-batches that are recorded, before the training is not planned as none had one forward and one backward."""

MIN_GAIN = 0.01
"""Share of a step by which a trial must be faster than an earlier one to be applied."""

Phase = Literal["compiling", "recording", "reading", "timing", "decided"]


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


class RegionPlanner:
    """Plans saved storages by their order and times, and how much compiled code saves.

    A dispatch mode would make Dynamo run compiled code in eager mode. So storages are recorded as the saved-tensor
    hooks see them (`SavedTimelineRecorder`): those of a compiled region appear together when its forward ends, and are
    used together when its backward begins. `plan_storages` chooses keep, host or SSD for each of them.

    First, one micro-batch is recorded, with all storages offloaded, and steps without a plan are timed. Then steps
    under the plan are timed. If the plan is predicted to stall the training, code is compiled again with lower values
    of `activation_memory_budget`, so that it saves less and recomputes the rest, recorded, planned and timed, as long
    as that makes steps faster and takes no more than `MAX_COMPILE_SECONDS`. The fastest trial is applied.

    All methods are called on the training thread, outside of forward and backward; none waits for the device.

    Args:
        offloader: activation offloader of the training.
        limit: bytes that may be kept on the device.
        schedulers: callbacks that set the window; plans override it.
        recompiles: whether code may be compiled again with another `activation_memory_budget`.

    Attributes:
        applied: the trial in force, or being timed; `None` before the first one.
        trials: the trials that have ended, in their order.
        spent_seconds: seconds in which code was compiled again.
    """

    def __init__(
        self,
        offloader: ActivationOffloader,
        limit: ResidentLimit,
        schedulers: Sequence[PrefetchScheduler],
        *,
        recompiles: bool,
    ) -> None:
        self.applied: Trial | None = None
        self.trials: list[Trial] = []
        self.spent_seconds = 0.0
        self._offloader = offloader
        self._limit = limit
        self._schedulers = schedulers
        clock = make_clock(offloader.device)
        self._timer = StepTimer(clock, 2 * TIMED_STEPS)
        self._recorder = SavedTimelineRecorder(clock)
        self._budget = PartitionerBudget()
        self._recompiles = recompiles
        self._tiers_in_order = tuple(offloader.tiers)
        self._phase: Phase = "recording"
        self._num_recordings = 0
        """Micro-batches that were recorded in a row."""
        self._num_budgets = 0
        """Values of `activation_memory_budget` that were tried."""
        self._compile_seconds = compile_seconds()
        """Seconds that the code of the training takes to compile, as measured last."""
        self._compiled_before = 0.0
        """`compile_seconds` when the present compilation began."""
        self._timeline: SavedTimeline | None = None
        self._window_bytes = 0
        """Window of the recorded micro-batch, in which the limit was measured."""
        self._room_bytes = 0.0
        self._wait = 0
        """Steps before the next timed one."""
        self._before = offloader.stats()
        """Totals of the offloader when the present trial began."""

    @property
    def decided(self) -> bool:
        """Whether the fastest trial is in force."""
        return self._phase == "decided"

    @property
    def rule(self) -> object:
        """Compares equal as long as micro-batches have the same code and the same rules."""
        return self._phase, self._budget.value, len(self.trials)

    @property
    def memory_budget(self) -> float:
        """The `activation_memory_budget` that compiled code has in this training; 1: the user's."""
        return self._budget.value

    # ---- events of the training ----

    def begin_micro_batch(self, *, begins_step: bool) -> None:
        """Called when a micro-batch begins, after the offloader and the limit have begun it."""
        self._budget.enter()
        if not begins_step:
            return
        if self._phase in ("compiling", "recording"):
            self._limit.restart()
            self._limit.measure()
        if self._phase == "recording":
            recorder = self._recorder
            recorder.begin()
            self._offloader.run(
                replace(
                    self._offloader.policy,
                    hooks_enabled=True,
                    on_saved=recorder.on_saved,
                    on_unpacked=recorder.on_unpacked,
                    on_stall=recorder.on_stall,
                )
            )
        elif self._phase == "timing":
            self._time_step()

    def end_backward(self) -> None:
        """Called when the backward of a micro-batch has ended."""
        if self._phase == "recording":
            self._recorder.end()

    def end_micro_batch(self) -> None:
        """Called when a micro-batch has ended."""
        self._budget.exit()
        if self._offloader.policy.on_saved is not None:
            self._offloader.run(replace(self._offloader.policy, on_saved=None, on_unpacked=None, on_stall=None))

    def end_step(self, *, ran_out: bool) -> None:
        """Called when a step has ended.

        Args:
            ran_out: whether a micro-batch of the step ran out of memory, and was run again.
        """
        self._timer.end()  # not when the next one begins: validations, checkpoints and data loading are in between
        if ran_out and self._phase == "timing":
            self._end_trial(math.inf)
        elif self._phase == "compiling":
            self._end_compilation()
        elif self._phase == "recording":
            self._window_bytes = self._offloader.policy.window_bytes
            self._num_recordings += 1
            self._phase = "reading"
        elif self._phase == "reading":
            self._read()
        elif self._phase == "timing" and len(self._timer.seconds) >= TIMED_STEPS:
            self._end_trial(min(self._timer.seconds))

    def pause(self) -> None:
        """Called when a validation begins, also between two micro-batches of a step: its time is not measured."""
        self._timer.pause()

    def resume(self) -> None:
        """Called when a validation has ended."""
        self._timer.resume()

    def close(self) -> None:
        """Restores the user's `activation_memory_budget`; the training is over."""
        self._budget.close()

    # ---- trials ----

    def _read(self) -> None:
        """Reads the recorded times, once the device has passed them, and begins the first trial with these storages."""
        if not self._recorder.complete:
            if self._num_recordings == MAX_RECORDINGS:
                self._phase = "decided"
                self._log("offloads the saved tensors that have no room, as forwards and backwards alternate in a step")
            else:
                self._phase = "recording"
            return
        timeline = self._recorder.timeline()
        if timeline is None or self._limit.measuring:
            return  # the device is behind, or the room for storages is measured again
        self._num_recordings = 0
        self._timeline = timeline
        self._room_bytes = self._limit.room_bytes
        if self.trials:
            self._begin_trial(self._plan(timeline))
        else:
            self._begin_trial(None)

    def _plan(self, timeline: SavedTimeline) -> StoragePlan:
        fixed = not self._schedulers or any(scheduler.is_fixed for scheduler in self._schedulers)
        return plan_storages(timeline, self._room_bytes, self._speeds(), self._window_bytes, fixed_window=fixed)

    def _speeds(self) -> dict[InputChoice, TierSpeed]:
        """Returns the speeds of the tiers, as measured in the training so far."""
        out, into = self._offloader.copies.busy()
        write, read = (work.amount / work.seconds if work.seconds else math.inf for work in (out, into))
        speeds: dict[InputChoice, TierSpeed] = {}
        for name, tier in self._offloader.tiers.items():
            if isinstance(tier, SSDTierBase):
                blobs = tier.blobs
                speeds[name] = TierSpeed(
                    min(write, blobs.write_bandwidth), min(read, blobs.read_bandwidth), tier.capacity
                )
            else:
                speeds[name] = TierSpeed(write, read, HOST_FILL * tier.capacity)
        return speeds

    def _begin_trial(self, plan: StoragePlan | None) -> None:
        """Puts `plan` in force for the next step, or the rule without a plan, and times the following steps."""
        saved = 0 if self._timeline is None else sum(self._timeline.sizes)
        self._apply(Trial(self._budget.value, plan, saved))
        self._phase = "timing"
        self._wait = WARM_UP
        self._before = self._offloader.stats()
        self._timer.reset()

    def _apply(self, trial: Trial) -> None:
        self.applied = trial
        plan, tiers = trial.plan, self._tiers_in_order
        if plan is None:
            placement, window = OffloadExcess(tiers, self._limit), None
        else:
            window = plan.window_bytes
            placement = PlannedExcess(tiers, self._limit, plan, window - self._window_bytes)
        self._offloader.run(replace(self._offloader.policy, placement=placement))
        for scheduler in self._schedulers:
            scheduler.override_window(window)

    def _time_step(self) -> None:
        if self._wait:
            self._wait -= 1
            return
        self._timer.begin()

    def _end_trial(self, seconds: float) -> None:
        """Adds the present trial, and begins the next one, or applies the fastest."""
        trial = self.applied
        assert trial is not None and self._timeline is not None
        trial.seconds, trial.stalled = seconds, self._stalled()
        self.trials.append(trial)
        log.info(
            "%s with activation_memory_budget=%g: %.4f s a step, %.1f %% of it stalled",
            "no plan" if trial.plan is None else f"{format_bytes(trial.plan.offloaded_bytes)} offloaded",
            trial.memory_budget,
            seconds,
            100 * trial.stalled,
        )
        if trial.plan is None:
            self._begin_trial(self._plan(self._timeline))
            return
        value = self._next_budget(trial, trial.plan, self._timeline)
        if value is None:
            self._decide()
        else:
            self._num_budgets += 1
            self._log(
                f"code is compiled again with activation_memory_budget={value:g}, so that it saves less and "
                "recomputes: the last digits of results may change. Deterministic algorithms prevent it"
            )
            self._compile(value)

    def _stalled(self) -> float:
        """Returns the share of the micro-batches of the present trial in which the device waited for transfers."""
        before, now = self._before, self._offloader.stats()
        seconds = now.seconds - before.seconds
        stalls = now.store_stall + now.load_stall - before.store_stall - before.load_stall
        return stalls / seconds if seconds else 0.0

    # ---- the partitioner's budget ----

    def _next_budget(self, trial: Trial, plan: StoragePlan, timeline: SavedTimeline) -> float | None:
        """Returns the next value of `activation_memory_budget` to try; `None`: no more."""
        if not self._recompiles or self._num_budgets == MAX_BUDGETS or not self._budget.may_change:
            return None
        stalled = max(plan.stall_seconds / timeline.seconds, trial.stalled)
        if not plan.excess_bytes and stalled <= TOLERATED_STALL and trial.seconds < math.inf:
            return None
        fastest = min((one.seconds for one in self.trials if one.memory_budget > trial.memory_budget), default=math.inf)
        if fastest < math.inf and fastest <= trial.seconds:
            return None  # more recomputation has made steps slower
        # After this trial code is compiled again, and once more if an earlier one was faster.
        if self.spent_seconds + 2 * self._compile_seconds > MAX_COMPILE_SECONDS:
            return None
        free = sum(timeline.sizes[index] for index in timeline.movable - timeline.early(self._window_bytes))
        excess = free - self._room_bytes - free_bytes(timeline, self._speeds(), TOLERATED_STALL / 2)
        share = (1 - max(0.0, excess) / trial.saved_bytes) * trial.memory_budget
        value = min(math.floor(10 * share) / 10, round(trial.memory_budget - 0.1, 1))
        value = max(0.1, value)
        return value if value < trial.memory_budget else None

    def _compile(self, value: float) -> None:
        """Has code compiled with another `activation_memory_budget` in the next step."""
        self._budget.change(value)
        self._compiled_before = compile_seconds()  # `change` has reset torch's count
        # The memory of the code is not known: its micro-batches offload all.
        self._limit.restart()
        self._apply(Trial(value, None, 0))
        self._phase = "compiling"

    def _end_compilation(self) -> None:
        self._compile_seconds = compile_seconds() - self._compiled_before
        self.spent_seconds += self._compile_seconds
        self._phase = "recording"

    # ---- the decision ----

    def _decide(self) -> None:
        """Applies the fastest trial: an earlier one, unless a later one is faster by `MIN_GAIN`."""
        chosen = self.trials[0]
        for trial in self.trials[1:]:
            if trial.seconds < (1 - MIN_GAIN) * chosen.seconds:
                chosen = trial
        self._phase = "decided"
        if chosen.memory_budget != self._budget.value:
            self._budget.change(chosen.memory_budget)
            self._limit.restart()
        if chosen is not self.applied:
            self._apply(chosen)
        without, plan = self.trials[0].seconds, chosen.plan
        text = f"a step with compiled code takes {chosen.seconds:.4f} s"
        if plan is None:
            self._log(f"{text} without a plan, and is not faster with one")
            return
        saved, offloaded = format_bytes(chosen.saved_bytes), format_bytes(plan.offloaded_bytes)
        text += f", and took {without:.4f} without a plan: {offloaded} of {saved} saved bytes are offloaded"
        if chosen.memory_budget != 1.0:
            text += (
                f", and compiled code saves less by activation_memory_budget={chosen.memory_budget:g}, "
                "which may change the last digits of results"
            )
        self._log(text)

    def _log(self, text: str) -> None:
        pl.utilities.rank_zero_info(f"offload='auto': {text}.")
