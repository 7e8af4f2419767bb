"""`RegionPlanner` plans the saved tensors of trainings with compiled code, whose operators are not visible."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Literal

from lightning_ssd._lightning import pl
from lightning_ssd.activations import ActivationOffloader, MeasuredPeaks, PartitionerBudget, PlannedExcess
from lightning_ssd.callbacks.cached_regions import CachedRegions
from lightning_ssd.callbacks.fragments import FRAGMENT_RESERVE_STEP, MAX_FRAGMENT_RESERVE, FragmentCheck
from lightning_ssd.callbacks.memory_guard import MemoryGuard
from lightning_ssd.callbacks.planned_shapes import PlannedShape, PlannedShapes, UnplannedBatches
from lightning_ssd.callbacks.prefetch_scheduler import PrefetchScheduler
from lightning_ssd.callbacks.recompilation import Recompilation
from lightning_ssd.callbacks.region_progress import TIMED_STEPS, RegionProgress, Trial
from lightning_ssd.callbacks.region_recording import MAX_RECORDINGS, NO_TENSORS, RegionRecording
from lightning_ssd.callbacks.region_search import RegionSearch
from lightning_ssd.callbacks.seen_batches import BatchShape, SeenBatches
from lightning_ssd.callbacks.storage_planner import StoragePlanner
from lightning_ssd.device import make_clock
from lightning_ssd.planning import SavedTimeline

MAX_MISSED = 25
"""Steps in a row that are not timed with batches of the shape that is planned, after which another one is planned."""

Phase = Literal["compiling", "recording", "reading", "timing", "decided"]


class RegionPlanner:
    """Plans saved storages by their order and times, and how much compiled code saves.

    A dispatch mode would make Dynamo run compiled code in eager mode. So storages are recorded as the saved-tensor
    hooks see them (`RegionRecording`): those of a compiled region appear together when its forward ends, and are used
    together when its backward begins. `plan_storages` chooses keep, host or SSD for each of them.

    First, one micro-batch is recorded, with all storages offloaded. Then rules are tried (`RegionSearch`): steps
    without a plan are timed, and steps under the plan. If the plan stalls the training, code is compiled again with
    lower values of `activation_memory_budget`, so that it saves less and recomputes the rest, and is recorded, planned
    and timed again, as long as `Recompilation` finds a value that may make steps faster. The last one is between the
    fastest and the next higher value. The fastest trial is applied.

    The fastest rule is stored in the `PlanCache`. A later training with the same key records a micro-batch, too, but
    has only one trial: code is compiled with the stored `activation_memory_budget`, and the stored plan is applied, if
    compiled code saves the same storages. If they differ, or steps are not as fast as then, the search begins as
    without the cache.

    The first search is for a large batch. A micro-batch follows the plan of its shape, or that of the smallest planned
    shape that is no smaller, and its memory is compared only with that of other micro-batches under this plan. Without
    such a shape, it is treated as before the plan: a larger one than all before offloads all storages. If there are
    many of them, a micro-batch of their shape is recorded, planned and timed, too, with the same
    `activation_memory_budget`.

    Later steps are timed, too. If they drift, or if fragments of memory delay them, their shape is planned again.

    All methods are called on the training thread, outside of forward and backward; none waits for the device.

    Args:
        offloader: activation offloader of the training.
        guard: compares micro-batches without a plan; its limit is that of bytes that may be kept on the device.
        batches: batches of the whole training.
        schedulers: callbacks that set the window, which is fixed when a micro-batch is recorded.
        recompiles: whether code may be compiled again with another `activation_memory_budget`.
        make_key: returns the key of a plan in the cache, given the recorded storages, the shape of their batch, and the
            `activation_memory_budget` of their code.
        found: the fastest rules that this training has found, by their keys, to which this one adds its own.
        spent_seconds: seconds in which this training has compiled code again before.
        refines: whether model states are in their final tiers; until then, the search leaves out trials with little
            gain.

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
        found: dict[str, CachedRegions],
        spent_seconds: float,
        refines: bool,
    ) -> None:
        self._offloader = offloader
        self._guard = guard
        self._limit = guard.limit
        self._schedulers = schedulers
        clock = make_clock(offloader.device)
        self._budget = PartitionerBudget()
        self.recompilation = Recompilation(self._budget, allowed=recompiles, spent_seconds=spent_seconds)
        self._placement = PlannedExcess(tuple(offloader.tiers), guard.limit)
        self._phase: Phase = "recording"
        self._recording = RegionRecording(offloader, clock, batches)
        planner = StoragePlanner(offloader, guard.limit.meter, any(one.is_fixed for one in schedulers))
        self._search = RegionSearch(offloader, planner, self.recompilation, clock, make_key, found, refines=refines)
        self._plans: PlannedShapes[RegionProgress] = PlannedShapes(guard.limit.meter)
        self._planned: PlannedShape[RegionProgress] | None = None
        """The shape that is being planned, or was planned last; `None`: none was recorded."""
        self._followed: PlannedShape[RegionProgress] | None = None
        """The shape whose rule the present micro-batch follows."""
        self._timed: PlannedShape[RegionProgress] | None = None
        """The shape of all micro-batches of the present step, or almost so; `None`: there are several."""
        self._unplanned = UnplannedBatches()
        self._fragments = FragmentCheck(guard.limit.meter)
        self._fragment_reserve = 0.0
        """Share of the limit that is withheld for fragments."""
        self._num_missed = 0
        """Steps since the last one that was timed with the shape that is being planned."""
        self._num_abandoned = 0
        """Shapes that did not occur again."""
        offloader.run(replace(offloader.policy, placement=self._placement))
        guard.restart()

    @property
    def applied(self) -> Trial | None:
        """The trial in force for the shape that was planned last; `None` before the first one."""
        return self._search.progress.applied

    @property
    def followed(self) -> Trial | None:
        """The trial whose rule the present micro-batch follows; `None`: it has no plan of its shape."""
        return None if self._followed is None else self._followed.state.applied

    @property
    def trials(self) -> Sequence[Trial]:
        """The trials that have ended of the shape that was planned last, in their order."""
        return self._search.progress.trials

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

    # ---- a micro-batch ----

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
        if self._phase == "recording" and begins_step and self._recording.may_begin(shape):
            self._record(shape, trained)
            return True
        self._follow(found)
        close = found if found is not None and self._plans.is_close(found, shape) else None
        if begins_step:
            self._timed = close
            if close is not None:
                close.state.timer.begin()
        elif self._timed is not None and close is not self._timed:
            self._timed.state.timer.skip()
            self._timed = None
        return found is not None

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
        self._search.is_first = False
        self._restart(shape)

    def _restart(self, shape: BatchShape | None, key: str = "", *, known: bool = False) -> None:
        """Has a micro-batch of a shape recorded (`None`: of any), and the fastest rule for it searched.

        Args:
            shape: the shape.
            key: as for `RegionSearch.restart`.
            known: as for `RegionSearch.restart`.
        """
        self._phase = "recording"
        self._search.restart(key, known=known)
        self._recording.restart(shape)
        self._num_missed = 0

    def _follow(self, found: PlannedShape[RegionProgress] | None) -> None:
        """Puts the rule of a shape in force for the present micro-batch, or that of micro-batches without a plan."""
        self._followed = found
        if found is None:  # the guard limits it
            self._placement.follow(None)
            return
        progress, trial = found.state, found.state.applied
        plan = None if trial is None else trial.plan
        self._limit.select(progress.peaks)
        if progress.room_bytes is None and self._limit.known:
            progress.room_bytes = self._limit.room_bytes
        if not self._limit.known:
            self._limit.measure()
        if trial is not None:
            window = progress.window_bytes if plan is None else plan.window_bytes
            self._offloader.run(replace(self._offloader.policy, window_bytes=window))
        self._offloader.limit_window()
        timeline = None if plan is None else progress.timeline
        self._placement.follow(plan, () if timeline is None else timeline.saved_at)

    def _record(self, shape: BatchShape, trained: tuple[bool, ...]) -> None:
        """Records the present micro-batch, with all storages offloaded."""
        window = self._offloader.policy.window_bytes
        for scheduler in self._schedulers:  # plans have windows of their own, and rules without a plan keep this one
            scheduler.override_window(window)
        progress = self._search.begin_record(window)
        self._timed = self._planned = self._followed = self._plans.make(shape, trained, progress)
        self._limit.select(progress.peaks)
        self._limit.measure()
        self._offloader.limit_window()
        self._placement.follow(None)
        self._recording.begin()

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Excludes the time in the context, before the forward of a micro-batch, from measured and recorded times."""
        with nullcontext() if self._timed is None else self._timed.state.timer.excluded():
            yield
        self._recording.begin_forward()

    def end_backward(self) -> None:
        """Called when the backward of a micro-batch has ended."""
        self._recording.end_backward()

    def end_micro_batch(self) -> None:
        """Called when a micro-batch has ended."""
        self._budget.exit()
        if self._recording.end():
            assert self._planned is not None
            self._plans.add(self._planned)
            self._phase = "reading"

    # ---- a step ----

    def skip_step(self) -> None:
        """Excludes the present step, which has fewer micro-batches than others, from timed ones."""
        if self._timed is not None:
            self._timed.state.timer.skip()
            self._timed = None

    def end_step(self, *, ran_out: bool) -> None:
        """Called when a step has ended.

        Args:
            ran_out: whether a micro-batch of the step ran out of memory, and was run again.
        """
        timed = self._timed
        if timed is not None:  # not when the next step begins: validations, checkpoints, data loading are in between
            timed.state.timer.end()
        if self._phase == "compiling":
            self._end_compilation()
        elif self._phase == "reading":
            self._read()
        elif self._phase == "timing":
            seconds = self._search.progress.timer.seconds
            if ran_out and timed is self._planned:
                self._apply(self._search.end_trial(math.inf))
            elif len(seconds) >= TIMED_STEPS:
                self._apply(self._search.end_trial(min(seconds)))
        elif self._phase == "decided" and timed is not None:
            if self._fragments.end_step():
                self._reserve_for_fragments(timed)
            else:
                self._check_drift(timed)
        self._count_missed()

    def refine(self) -> None:
        """Called when model states are in their final tiers: tries what the search has left out until now."""
        trial = self._search.resume()
        if trial is not None:
            self._apply(trial)

    def _end_compilation(self) -> None:
        """Has a micro-batch recorded, as a step has run compiled code."""
        assert self._planned is not None
        self.recompilation.end()
        self._guard.restart()  # compilation may have needed memory of its own
        self._phase = "recording"
        self._recording.restart(self._planned.shape)

    def _read(self) -> None:
        """Reads the recorded times, once the device has passed them, and begins a trial with these storages."""
        recorder = self._recording.recorder
        if not recorder.complete:
            self._phase = "recording"
            if self._recording.is_last:
                self._phase = "decided"
                pl.utilities.rank_zero_info(
                    "offload='auto': offloads the saved tensors that have no room, as forwards and backwards alternate "
                    "in a step."
                )
            return
        timeline = recorder.timeline()
        if timeline is None or self._search.progress.room_bytes is None:
            return  # the device is behind, or no other micro-batch has shown the room for storages
        assert self._planned is not None and self._planned.shape is not None
        self._apply(self._search.begin(timeline, self._planned.shape))

    def _apply(self, trial: Trial) -> None:
        """Puts the next trial of the search in force: first its code, of which micro-batches are recorded and timed."""
        self._phase = "decided" if self._search.decided else "timing"
        self._fragments.restart()
        if trial.memory_budget == self._budget.value:
            return
        self._budget.change(trial.memory_budget)
        self._plans.clear()  # all that is known of the code: its next micro-batches offload all
        self._guard.restart()
        if self._search.decided:
            self.recompilation.note_return()
            assert self._planned is not None
            self._planned.state.peaks = MeasuredPeaks(spare_bytes=trial.spare_bytes)
            self._plans.add(self._planned)
        else:
            self.recompilation.begin()
            self._phase = "compiling"

    def _reserve_for_fragments(self, planned: PlannedShape[RegionProgress]) -> None:
        """Plans a shape again with less memory, unless its rule offloads all that can be offloaded."""
        trial = planned.state.applied
        offloads_all = trial is not None and trial.plan is not None and not trial.plan.kept_bytes
        if offloads_all or self._fragment_reserve >= MAX_FRAGMENT_RESERVE:
            return
        self._fragment_reserve += FRAGMENT_RESERVE_STEP
        self._limit.withhold(FRAGMENT_RESERVE_STEP)
        pl.utilities.rank_zero_info(
            "offload='auto': the allocator has freed its cached memory in steps, because fragments of it were too "
            f"small: planning again with {self._fragment_reserve:.0%} of the GPU's memory reserved for them."
        )
        self._planned = planned
        self._search.is_first = False  # the code stays
        self._restart(planned.shape, planned.state.key, known=True)

    def _check_drift(self, planned: PlannedShape[RegionProgress]) -> None:
        """Plans a shape again if its steps have drifted."""
        seconds, usual = planned.state.drifted_seconds(), planned.state.drift.usual
        if seconds is not None:
            pl.utilities.rank_zero_info(
                f"offload='auto': a step with compiled code takes {seconds:.4f} s, and took {usual:.4f}: planning "
                "again."
            )
            self._planned = planned
            self._restart(planned.shape, planned.state.key)

    def _count_missed(self) -> None:
        """Ends the search for the present shape, if it does not occur again."""
        occurs = self._timed is not None and self._timed is self._planned
        self._num_missed = 0 if occurs or self._phase == "decided" else self._num_missed + 1
        if self._num_missed < MAX_MISSED:
            return
        self._num_abandoned += 1
        if self.trials:
            self._apply(self._search.decide())
            return
        if self._planned is not None:
            self._plans.remove(self._planned)  # it is planned if it occurs more often later
        if self._num_abandoned < MAX_RECORDINGS:
            self._restart(None)
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

    def close(self) -> None:
        """Restores the user's `activation_memory_budget` and window; the training is over, or is planned anew."""
        if self._budget.value != 1.0:
            self.recompilation.note_return()
        self._budget.close()
        for scheduler in self._schedulers:
            scheduler.override_window(None)
