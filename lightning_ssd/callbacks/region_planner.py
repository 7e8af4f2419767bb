"""`RegionPlanner` plans the saved tensors of trainings with compiled code, whose operators are not visible."""

import logging
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Literal

from lightning_ssd._lightning import pl
from lightning_ssd.activations import (
    ActivationOffloader,
    MeasuredPeaks,
    PartitionerBudget,
    PlannedExcess,
    SSDTierBase,
)
from lightning_ssd.callbacks.cached_regions import CachedRegions
from lightning_ssd.callbacks.memory_guard import MemoryGuard
from lightning_ssd.callbacks.plan_cache import SWITCH, PlanCache, warn_unused
from lightning_ssd.callbacks.plan_key import has_more_memory
from lightning_ssd.callbacks.planned_shapes import PlannedShape, PlannedShapes, UnplannedBatches
from lightning_ssd.callbacks.prefetch_scheduler import PrefetchScheduler
from lightning_ssd.callbacks.recompilation import Recompilation
from lightning_ssd.callbacks.region_progress import RegionProgress, Trial
from lightning_ssd.callbacks.seen_batches import BatchShape, SeenBatches
from lightning_ssd.callbacks.step_drift import MEDIAN_STEPS, TOLERANCE, StepDrift
from lightning_ssd.callbacks.step_timer import StepTimer
from lightning_ssd.device import make_clock
from lightning_ssd.planning import SavedTimeline, StoragePlan, TierSpeed, plan_storages
from lightning_ssd.profiling import HOST_FILL, SavedTimelineRecorder
from lightning_ssd.sizes import format_bytes
from lightning_ssd.types import InputChoice

log = logging.getLogger(__name__)

WARM_UP = 1
"""Steps after a change that are not timed: the allocator moves memory in them."""

TIMED_STEPS = 3
"""Steps of each trial that are timed. Their minimum counts: interruptions of the host lengthen single steps."""

MAX_RECORDINGS = 3
"""Micro-batches that are recorded, before the training is not planned as none had one forward and one backward."""

MAX_MISSED = 25
"""Steps in a row without a batch of the shape that is planned, after which another shape is planned."""

NO_TENSORS = BatchShape((), 0)
"""Shape of batches without tensors, which count as equal."""

MIN_GAIN = 0.01
"""Share of a step by which a trial must be faster than an earlier one to be applied."""

Phase = Literal["compiling", "recording", "reading", "timing", "decided"]


class RegionPlanner:
    """Plans saved storages by their order and times, and how much compiled code saves.

    A dispatch mode would make Dynamo run compiled code in eager mode. So storages are recorded as the saved-tensor
    hooks see them (`SavedTimelineRecorder`): those of a compiled region appear together when its forward ends, and are
    used together when its backward begins. `plan_storages` chooses keep, host or SSD for each of them.

    First, one micro-batch is recorded, with all storages offloaded, and steps without a plan are timed. Then steps
    under the plan are timed. If the plan is predicted to stall the training, code is compiled again with lower values
    of `activation_memory_budget`, so that it saves less and recomputes the rest, recorded, planned and timed, as long
    as `Recompilation` finds a value that may make steps faster: at last one between the fastest and the next higher
    one. The fastest trial is applied.

    It is stored in the `PlanCache`. A later training with the same key records a micro-batch, too, but has only one
    trial: code is compiled with the stored `activation_memory_budget`, and the stored plan is applied, if compiled code
    saves the same storages. If they differ or steps are not as fast as then, the search begins as without the cache.

    That is done for a large batch. A micro-batch follows the plan of its shape, or that of the smallest planned shape
    that is no smaller, and its memory is compared with that of such micro-batches alone. If there is none, it is
    treated as before the plan: those that are not within an earlier one offload all storages. If there are many of
    them, a micro-batch of their shape is recorded, planned and timed, too, with the same `activation_memory_budget`.

    Steps are timed under the fastest rule, too. If they drift, their shape is planned again.

    All methods are called on the training thread, outside of forward and backward; none waits for the device.

    Args:
        offloader: activation offloader of the training.
        guard: compares micro-batches without a plan; its limit is that of bytes that may be kept on the device.
        batches: batches of the whole training.
        schedulers: callbacks that set the window, which does not grow any more once a micro-batch was recorded.
        recompiles: whether code may be compiled again with another `activation_memory_budget`.
        make_key: returns the key of a plan in the cache, given the recorded storages, the shape of their batch, and the
            `activation_memory_budget` of their code.

    Attributes:
        recompilation: the values of `activation_memory_budget` to try.
    """

    def __init__(
        self,
        offloader: ActivationOffloader,
        guard: MemoryGuard,
        batches: SeenBatches,
        schedulers: Sequence[PrefetchScheduler],
        *,
        recompiles: bool,
        make_key: Callable[[SavedTimeline, BatchShape, float], str],
    ) -> None:
        self._offloader = offloader
        self._guard = guard
        self._limit = guard.limit
        self._schedulers = schedulers
        self._clock = make_clock(offloader.device)
        self._recorder = SavedTimelineRecorder(self._clock)
        self._budget = PartitionerBudget()
        self.recompilation = Recompilation(self._budget, allowed=recompiles)
        self._make_key = make_key
        self._cache = PlanCache()
        self._placement = PlannedExcess(tuple(offloader.tiers), guard.limit)
        self._phase: Phase = "recording"
        self._num_recordings = 0
        """Micro-batches that were recorded in a row."""
        self._plans: PlannedShapes[RegionProgress] = PlannedShapes(guard.limit.meter)
        self._planned: PlannedShape[RegionProgress] | None = None
        """The shape that is being planned, or was planned last; `None`: none was recorded."""
        self._progress = self._new_progress()
        """Progress of the shape that is being planned, or was planned last."""
        self._followed: PlannedShape[RegionProgress] | None = None
        """The shape whose rule the present micro-batch follows."""
        self._recordable: SeenBatches | None = batches
        """Batches of which a large one may be recorded; `None`: any."""
        self._unplanned = UnplannedBatches()
        self._num_missed = 0
        """Steps since the last one of the shape that is being planned."""
        self._num_abandoned = 0
        """Shapes that did not occur again."""
        self._is_only = True
        """Whether no other shape was planned: the budget is chosen for the first one."""
        self._timed: PlannedShape[RegionProgress] | None = None
        """The shape of all micro-batches of the present step, or almost so; `None`: there are several."""
        self._number = 0
        """Number of the last trial."""
        self._before = offloader.stats()
        """Totals of the offloader when the present trial began."""
        offloader.run(replace(offloader.policy, placement=self._placement))
        guard.restart()

    @property
    def applied(self) -> Trial | None:
        """The trial in force for the shape that was planned last; `None` before the first one."""
        return self._progress.applied

    @property
    def followed(self) -> Trial | None:
        """The trial whose rule the present micro-batch follows; `None`: it has no plan of its shape."""
        return None if self._followed is None else self._followed.state.applied

    @property
    def trials(self) -> Sequence[Trial]:
        """The trials that have ended of the shape that was planned last, in their order."""
        return self._progress.trials

    @property
    def decided(self) -> bool:
        """Whether the fastest trial is in force, and no shape is being planned."""
        return self._phase == "decided"

    @property
    def rule(self) -> object:
        """Compares equal as long as micro-batches have the same code and the same rules."""
        return self._phase, self._budget.value, 0 if self._followed is None else self._followed.state.number

    @property
    def memory_budget(self) -> float:
        """The `activation_memory_budget` that compiled code has in this training; 1: the user's."""
        return self._budget.value

    # ---- events of the training ----

    def begin_micro_batch(self, shape: BatchShape | None, trained: tuple[bool, ...], *, begins_step: bool) -> bool:
        """Called when a micro-batch begins, after the offloader and the limit have begun it.

        Args:
            shape: shape of the batch; `None`: unknown.
            trained: whether each parameter requires gradients.
            begins_step: whether it is the first micro-batch of a step.

        Returns:
            Whether the micro-batch is recorded, or follows the rule of a shape. If not, the guard compares it.
        """
        self._budget.enter()
        shape = NO_TENSORS if shape is None else shape
        found = self._plans.find(shape, trained)
        if self._phase == "decided" and begins_step and self._needs_plan(found, shape):
            self._plan_shape(shape)
        if self._phase == "recording" and begins_step and self._may_record(shape):
            self._record(shape, trained)
            return True
        self._follow(found)
        close = found if found is not None and self._plans.is_close(found, shape) else None
        if begins_step:
            self._time_step(close)
        elif self._timed is not None and close is not self._timed:
            self._timed.state.timer.skip()
            self._timed = None
        return found is not None

    def _may_record(self, shape: BatchShape) -> bool:
        batches = self._recordable
        return batches is None or shape is NO_TENSORS or (batches.covers(shape) and batches.is_large(shape))

    def _follow(self, found: PlannedShape[RegionProgress] | None) -> None:
        """Puts the rule of a shape in force for the present micro-batch, or that of micro-batches without a plan."""
        self._followed = found
        progress = None if found is None else found.state
        trial = None if progress is None else progress.applied
        plan = None if trial is None else trial.plan
        self._limit.select(None if progress is None else progress.peaks)
        if progress is not None and progress.room_bytes is None and self._limit.known:
            progress.room_bytes = self._limit.room_bytes
        if not self._limit.known:
            self._limit.measure()
        if progress is not None and trial is not None:
            window = progress.window_bytes if plan is None else plan.window_bytes
            self._offloader.run(replace(self._offloader.policy, window_bytes=window))
        self._offloader.limit_window()
        self._placement.follow(plan)

    def _needs_plan(self, found: PlannedShape[RegionProgress] | None, shape: BatchShape) -> bool:
        """Returns whether there are so many micro-batches without a plan of their size that one should be made."""
        if found is not None:
            trial = found.state.applied
            if self._plans.is_close(found, shape) or (trial and trial.plan and not trial.plan.offloaded_bytes):
                return False
        return self._unplanned.add(shape, planned=found is not None)

    def _plan_shape(self, shape: BatchShape) -> None:
        """Plans for another shape, from the present micro-batch on."""
        pl.utilities.rank_zero_info(
            "offload='auto': batches differ from those that were planned: planning for them, too."
        )
        self._unplanned.restart()
        self._is_only = False
        self._search(shape)

    def _search(self, shape: BatchShape | None, key: str = "") -> None:
        """Has a micro-batch recorded, and the fastest rule for its shape searched.

        Args:
            shape: the shape; `None`: any.
            key: key under which the rule is stored; "": that of the recorded storages.
        """
        self._phase = "recording"
        self._progress = self._new_progress()
        self._progress.key = key
        self._recordable = None
        if shape is not None:
            self._record_shape(shape)
        self._num_recordings = self._num_missed = 0

    def _new_progress(self) -> RegionProgress:
        return RegionProgress(StepTimer(self._clock, max(TIMED_STEPS, MEDIAN_STEPS)))

    def _record_shape(self, shape: BatchShape) -> None:
        """Has the next micro-batch of a shape recorded."""
        self._recordable = SeenBatches()
        self._recordable.add(shape)

    def _record(self, shape: BatchShape, trained: tuple[bool, ...]) -> None:
        """Records the present micro-batch, with all storages offloaded."""
        window, peaks = self._offloader.policy.window_bytes, MeasuredPeaks()
        for scheduler in self._schedulers:  # plans have windows of their own, and rules without a plan keep this one
            scheduler.override_window(window)
        self._progress = replace(self._progress, timeline=None, room_bytes=None, peaks=peaks, window_bytes=window)
        self._timed = self._planned = self._followed = self._plans.make(shape, trained, self._progress)
        self._limit.select(peaks)
        self._limit.measure()
        self._offloader.limit_window()
        self._placement.follow(None)
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

    def end_backward(self) -> None:
        """Called when the backward of a micro-batch has ended."""
        if self._recording:
            self._recorder.end()

    def end_micro_batch(self) -> None:
        """Called when a micro-batch has ended."""
        self._budget.exit()
        if self._recording:
            self._offloader.run(replace(self._offloader.policy, on_saved=None, on_unpacked=None, on_stall=None))
            if self._planned is not None:
                self._plans.add(self._planned)
            self._num_recordings += 1
            self._phase = "reading"

    @property
    def _recording(self) -> bool:
        """Whether the present micro-batch is recorded."""
        return self._offloader.policy.on_saved is not None

    def end_step(self, *, ran_out: bool) -> None:
        """Called when a step has ended.

        Args:
            ran_out: whether a micro-batch of the step ran out of memory, and was run again.
        """
        progress, timed = self._progress, self._timed
        if timed is not None:  # not when the next step begins: validations, checkpoints, data loading are in between
            timed.state.timer.end()
        if self._phase == "compiling":
            self._end_compilation()
        elif self._phase == "reading":
            self._read()
        elif self._phase == "timing":
            if ran_out and timed is self._planned:
                self._end_trial(math.inf)
            elif len(progress.timer.seconds) >= TIMED_STEPS:
                self._end_trial(min(progress.timer.seconds))
        elif self._phase == "decided" and timed is not None:
            self._check_drift(timed)
        self._count_missed()

    def _count_missed(self) -> None:
        """Ends the search for the present shape, if it does not occur again."""
        occurs = self._timed is not None and self._timed is self._planned
        self._num_missed = 0 if occurs or self._phase == "decided" else self._num_missed + 1
        if self._num_missed < MAX_MISSED:
            return
        self._num_abandoned += 1
        if self._progress.trials:
            self._decide()
            return
        if self._planned is not None:
            self._plans.remove(self._planned)  # it is planned if it occurs more often later
        if self._num_abandoned < MAX_RECORDINGS:
            self._search(None)
        else:
            self._phase = "decided"

    def pause(self) -> None:
        """Called when a validation begins, also between two micro-batches of a step: its time is not measured."""
        if self._timed is not None:
            self._timed.state.timer.pause()

    def resume(self) -> None:
        """Called when a validation has ended."""
        if self._timed is not None:
            self._timed.state.timer.resume()

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Excludes the time in the context, before the forward of a micro-batch, from measured and recorded times."""
        with nullcontext() if self._timed is None else self._timed.state.timer.excluded():
            yield
        if self._recording:
            self._recorder.begin()

    def close(self) -> None:
        """Restores the user's `activation_memory_budget` and window; the training is over, or is planned anew."""
        self._budget.close()
        for scheduler in self._schedulers:
            scheduler.override_window(None)

    # ---- trials ----

    def _read(self) -> None:
        """Reads the recorded times, once the device has passed them, and begins the first trial with these storages."""
        progress = self._progress
        if not self._recorder.complete:
            if self._num_recordings == MAX_RECORDINGS:
                self._phase = "decided"
                self._log("offloads the saved tensors that have no room, as forwards and backwards alternate in a step")
            else:
                self._phase = "recording"
            return
        timeline = self._recorder.timeline()
        if timeline is None or progress.room_bytes is None:
            return  # the device is behind, or no other micro-batch has shown the room for storages
        self._num_recordings = 0
        progress.timeline = timeline
        if not progress.key:
            assert self._planned is not None
            progress.key = self._make_key(timeline, self._planned.shape or NO_TENSORS, self._budget.value)
            progress.cached = self._load(progress.key)
            if progress.cached is not None and progress.cached.memory_budget != self._budget.value:
                self._recompile(progress.cached.memory_budget)
                return
        if progress.cached is not None:
            self._try_cached(progress.cached, timeline)
        elif progress.trials:
            self._begin_trial(self._plan(timeline))
        else:
            self._begin_trial(None)

    def _plan(self, timeline: SavedTimeline) -> StoragePlan:
        room, window = self._progress.room_bytes, self._progress.window_bytes
        assert room is not None
        return plan_storages(timeline, room, self._speeds(), window, fixed_window=self._has_fixed_window)

    @property
    def _has_fixed_window(self) -> bool:
        """Whether plans must have the window of micro-batches without a plan."""
        return any(scheduler.is_fixed for scheduler in self._schedulers)

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
        timeline = self._progress.timeline
        self._apply(Trial(self._budget.value, plan, 0 if timeline is None else sum(timeline.sizes)))
        self._phase = "timing"
        self._before = self._offloader.stats()

    def _apply(self, trial: Trial) -> None:
        progress = self._progress
        self._number += 1
        progress.applied, progress.number = trial, self._number
        progress.wait, progress.drift = WARM_UP, StepDrift()
        progress.timer.reset()

    def _time_step(self, planned: PlannedShape[RegionProgress] | None) -> None:
        """Times the present step under the rule of a shape; `None`: it is not timed."""
        self._timed = planned
        if planned is None:
            return
        progress = planned.state
        if progress.wait:
            progress.wait -= 1
        else:
            progress.timer.begin()

    def _check_drift(self, planned: PlannedShape[RegionProgress]) -> None:
        """Plans a shape again if its steps have drifted."""
        progress = planned.state
        drift, timer = progress.drift, progress.timer
        if not drift.is_due(timer.num_steps) or len(timer.seconds) < MEDIAN_STEPS:
            return
        seconds, usual = statistics.median(list(timer.seconds)[-MEDIAN_STEPS:]), drift.usual
        if drift.add(timer.num_steps, seconds):
            self._log(f"a step with compiled code takes {seconds:.4f} s, and took {usual:.4f}: planning again")
            self._planned = planned
            self._search(planned.shape, progress.key)

    def _end_trial(self, seconds: float) -> None:
        """Adds the present trial, and begins the next one, or applies the fastest."""
        progress = self._progress
        trial, timeline = progress.applied, progress.timeline
        assert trial is not None and timeline is not None
        trial.seconds, trial.stalled = seconds, self._stalled()
        progress.trials.append(trial)
        log.info(
            "%s with activation_memory_budget=%g: %.4f s a step, %.1f %% of it stalled",
            "no plan" if trial.plan is None else f"{format_bytes(trial.plan.offloaded_bytes)} offloaded",
            trial.memory_budget,
            seconds,
            100 * trial.stalled,
        )
        if progress.cached is not None:
            self._check_cached(progress.cached, seconds)
            return
        if trial.plan is None:
            self._begin_trial(self._plan(timeline))
            return
        value = self.recompilation.next_value(progress, self._speeds()) if self._is_only else None
        if value is None:
            self._decide()
        else:
            self._recompile(value)

    def _stalled(self) -> float:
        """Returns the share of the micro-batches of the present trial in which the device waited for transfers."""
        before, now = self._before, self._offloader.stats()
        seconds = now.seconds - before.seconds
        stalls = now.store_stall + now.load_stall - before.store_stall - before.load_stall
        return stalls / seconds if seconds else 0.0

    # ---- the partitioner's budget ----

    def _recompile(self, value: float) -> None:
        """Has code compiled to save less in the next step, and logs that it is."""
        self._log(
            f"code is compiled again with activation_memory_budget={value:g}, so that it saves less and "
            "recomputes: the last digits of results may change. Deterministic algorithms prevent it"
        )
        self._compile(value)

    def _compile(self, value: float) -> None:
        """Has code compiled with another `activation_memory_budget` in the next step."""
        self._change_budget(value)
        self.recompilation.begin()
        self._apply(Trial(value, None, 0))
        self._phase = "compiling"

    def _change_budget(self, value: float) -> None:
        """Discards compiled code, and all that is known of it: its next micro-batches offload all."""
        self._budget.change(value)
        self._plans.clear()
        self._guard.restart()

    def _end_compilation(self) -> None:
        self.recompilation.end()
        self._guard.restart()  # compilation may have needed memory of its own
        self._phase = "recording"
        if self._planned is not None and self._planned.shape is not None:
            self._record_shape(self._planned.shape)

    # ---- plans of earlier trainings ----

    def _load(self, key: str) -> CachedRegions | None:
        """Returns the rule that the cache has for this training, if it may be applied."""
        cached = self._cache.load_once(key, CachedRegions)
        if cached is None:
            return None
        if has_more_memory(self._memory(), (cached.gpu_bytes, cached.host_bytes)):
            self._log("an earlier training with the same compiled code had less memory: its plan is not used")
            return None
        may_recompile = self.recompilation.possible and self._is_only
        return cached if may_recompile or cached.memory_budget == self._budget.value else None

    def _memory(self) -> tuple[float, float]:
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
        if plan is not None and (plan.movable != timeline.movable or not self._can_apply(plan, timeline)):
            plan = self._plan(timeline)
        self._begin_trial(plan)

    def _can_apply(self, plan: StoragePlan, timeline: SavedTimeline) -> bool:
        """Returns whether the device and the tiers have room for a plan, with its window."""
        room, window = self._progress.room_bytes, self._progress.window_bytes
        if room is None or (self._has_fixed_window and plan.window_bytes != window):
            return False
        room -= plan.window_bytes + timeline.early_bytes(plan.window_bytes)
        return set(plan.choices) <= {"keep", *self._offloader.tiers} and plan.kept_bytes <= room

    def _check_cached(self, cached: CachedRegions, seconds: float) -> None:
        """Ends the trial of the plan of an earlier training: applies it for good if steps are as fast as then."""
        if abs(seconds / cached.seconds - 1) <= TOLERANCE:
            self._progress.cached = None
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
        self._progress.cached = None
        self._progress.trials.clear()
        if self._is_only and self._budget.value != 1.0:
            self._compile(1.0)
        else:
            self._begin_trial(None)

    # ---- the decision ----

    def _decide(self) -> None:
        """Applies the fastest trial: an earlier one, unless a later one is faster by `MIN_GAIN`."""
        progress = self._progress
        chosen = progress.trials[0]
        for trial in progress.trials[1:]:
            if trial.seconds < (1 - MIN_GAIN) * chosen.seconds:
                chosen = trial
        if chosen.memory_budget != self._budget.value:
            self._change_budget(chosen.memory_budget)
            assert self._planned is not None
            progress = self._progress = replace(progress, peaks=MeasuredPeaks())
            self._planned.state = progress
            self._plans.add(self._planned)
        if chosen is not progress.applied:
            self._apply(chosen)
        self._phase = "decided"
        if progress.key and chosen.seconds < math.inf:
            entry = CachedRegions(chosen.plan, chosen.memory_budget, chosen.seconds, *self._memory())
            self._cache.save(progress.key, entry)
        without, plan = progress.trials[0].seconds, chosen.plan
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
