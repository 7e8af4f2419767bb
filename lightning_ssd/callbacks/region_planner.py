"""`RegionPlanner` plans the saved tensors of trainings with compiled code, whose operators are not visible."""

import logging
import math
from collections.abc import Callable, Sequence
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
from lightning_ssd.callbacks.cached_regions import CachedRegions
from lightning_ssd.callbacks.plan_cache import SWITCH, PlanCache, warn_unused
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

TOLERANCE = 0.1
"""Relative difference of a step's duration from that of an earlier training, up to which its plan is right."""

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

    It is stored in the `PlanCache`. A later training with the same key records a micro-batch, too, but has only one
    trial: code is compiled with the stored `activation_memory_budget`, and the stored plan is applied, if compiled code
    saves the same storages. If they differ or steps are not as fast as then, the search begins as without the cache.

    All methods are called on the training thread, outside of forward and backward; none waits for the device.

    Args:
        offloader: activation offloader of the training.
        limit: bytes that may be kept on the device.
        schedulers: callbacks that set the window; plans override it.
        recompiles: whether code may be compiled again with another `activation_memory_budget`.
        make_key: returns the key of the training's plan in the cache, given the recorded storages.

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
        make_key: Callable[[SavedTimeline], str],
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
        self._make_key = make_key
        self._cache = PlanCache()
        self._key: str | None = None
        """Key of the training's plan in the cache; `None`: no micro-batch was recorded."""
        self._cached: CachedRegions | None = None
        """The rule of an earlier training, before its trial has ended."""
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
        if self._key is None:
            self._key = self._make_key(timeline)
            self._cached = self._load(self._key)
            if self._cached is not None and self._cached.memory_budget != self._budget.value:
                self._recompile(self._cached.memory_budget)
                return
        if self._cached is not None:
            self._try_cached(self._cached, timeline)
        elif self.trials:
            self._begin_trial(self._plan(timeline))
        else:
            self._begin_trial(None)

    def _plan(self, timeline: SavedTimeline) -> StoragePlan:
        speeds = self._speeds()
        return plan_storages(
            timeline, self._room_bytes, speeds, self._window_bytes, fixed_window=self._has_fixed_window
        )

    @property
    def _has_fixed_window(self) -> bool:
        """Whether plans must have the window of the recorded micro-batch."""
        return not self._schedulers or any(scheduler.is_fixed for scheduler in self._schedulers)

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
        if self._cached is not None:
            self._check_cached(self._cached, seconds)
            return
        if trial.plan is None:
            self._begin_trial(self._plan(self._timeline))
            return
        value = self._next_budget(trial, trial.plan, self._timeline)
        if value is None:
            self._decide()
        else:
            self._num_budgets += 1
            self._recompile(value)

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

    def _recompile(self, value: float) -> None:
        """Has code compiled to save less in the next step, and logs that it is."""
        self._log(
            f"code is compiled again with activation_memory_budget={value:g}, so that it saves less and "
            "recomputes: the last digits of results may change. Deterministic algorithms prevent it"
        )
        self._compile(value)

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

    # ---- plans of earlier trainings ----

    def _load(self, key: str) -> CachedRegions | None:
        """Returns the rule that the cache has for this training, if it may be applied."""
        cached = self._cache.load(key, CachedRegions)
        if cached is None:
            return None
        if cached.has_less_memory(*self._memory()):
            self._log("an earlier training with the same compiled code had less memory: its plan is not used")
            return None
        other_value = cached.memory_budget != self._budget.value
        return None if other_value and not (self._recompiles and self._budget.may_change) else cached

    def _memory(self) -> tuple[float, int]:
        """Returns the bytes of the device, and of host memory for activations, that this training may use."""
        host = self._offloader.tiers.get("host")
        return self._limit.meter.limit(), 0 if host is None else host.capacity

    def _try_cached(self, cached: CachedRegions, timeline: SavedTimeline) -> None:
        """Begins a trial with the plan of an earlier training, or with one for the present limits of memory."""
        plan = cached.plan
        if plan is not None and plan.sizes != timeline.sizes:
            warn_unused("compiled code saves other tensors")
            self._search_again()
            return
        if plan is not None and (plan.movable != timeline.movable or not self._can_apply(plan)):
            plan = self._plan(timeline)
        self._begin_trial(plan)

    def _can_apply(self, plan: StoragePlan) -> bool:
        """Returns whether the device and the tiers have room for a plan, with its window."""
        room = self._room_bytes - (plan.window_bytes - self._window_bytes)
        if self._has_fixed_window and plan.window_bytes != self._window_bytes:
            return False
        return set(plan.choices) <= {"keep", *self._offloader.tiers} and plan.kept_bytes <= room

    def _check_cached(self, cached: CachedRegions, seconds: float) -> None:
        """Ends the trial of the plan of an earlier training: applies it for good if steps are as fast as then."""
        self._cached = None
        if abs(seconds / cached.seconds - 1) <= TOLERANCE:
            self._phase = "decided"
            self._log(
                f"an earlier training with the same compiled code was planned: a step takes {seconds:.4f} s under its "
                f"plan. {SWITCH}=0 in the environment has every training planned"
            )
            return
        warn_unused(f"a step takes {seconds:.4f} s, and took {cached.seconds:.4f}")
        self._search_again()

    def _search_again(self) -> None:
        """Begins the trials anew, with the user's `activation_memory_budget`."""
        self._cached = None
        self.trials = []
        if self._budget.value != 1.0:
            self._compile(1.0)
        else:
            self._begin_trial(None)

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
        if self._key is not None and chosen.seconds < math.inf:
            entry = CachedRegions(chosen.plan, chosen.memory_budget, chosen.seconds, *self._memory())
            self._cache.save(self._key, entry)
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
