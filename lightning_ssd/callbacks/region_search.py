"""`RegionSearch`: tries rules for the saved storages of compiled code, one after the other, and finds the fastest."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace

from lightning_ssd._lightning import pl
from lightning_ssd.activations import ActivationOffloader, MeasuredPeaks
from lightning_ssd.callbacks.cached_regions import CachedRegions
from lightning_ssd.callbacks.plan_cache import SWITCH, PlanCache, warn_unused
from lightning_ssd.callbacks.plan_key import has_more_memory
from lightning_ssd.callbacks.recompilation import Recompilation
from lightning_ssd.callbacks.region_progress import TIMED_STEPS, WARM_UP, RegionProgress, Trial
from lightning_ssd.callbacks.seen_batches import BatchShape
from lightning_ssd.callbacks.step_drift import MEDIAN_STEPS, TOLERANCE
from lightning_ssd.callbacks.step_timer import StepTimer
from lightning_ssd.callbacks.storage_planner import StoragePlanner
from lightning_ssd.device import Clock
from lightning_ssd.planning import SavedTimeline, StoragePlan
from lightning_ssd.sizes import format_bytes

MAX_STALL = 0.1
"""Share of micro-batches that may be stalls under a plan for one that offloads less to be tried: with more stalls, code
that saves less is faster."""

MAX_OFFLOADED = 0.95
"""Offloaded bytes / those of the plan before, below which a plan that offloads less is tried."""

log = logging.getLogger(__name__)


class RegionSearch:
    """Finds the fastest rule for the micro-batches of one shape, after another one was searched for another shape.

    The first trial has no plan, and the second one a plan of the recorded storages. If that stalls the training,
    further trials have plans of code that saves less (`Recompilation`): each of them needs a compilation and another
    recorded micro-batch. A plan that offloads more than the measured peak of its steps requires is followed by one that
    offloads less. If the cache has the rule of an earlier training, that rule is the only trial, unless its steps are
    slower or faster than they were then. One that this training has found with the same model states on the device is
    the first trial, unless its steps are slower.

    Plans that offload less, and intermediate values of `activation_memory_budget`, have little gain. They are left out
    as long as model states may be moved, after which the search begins again; `resume` tries them when tiers are final.

    `begin`, `end_trial`, `resume` and `decide` put the next trial in force, and return it. If its `memory_budget`
    differs from that of compiled code, the caller has code compiled again; if the search is not `decided` then, the
    caller has a micro-batch recorded, and calls `begin` again.

    All methods are called on the training thread, between two steps.

    Args:
        offloader: activation offloader of the training.
        planner: makes plans.
        recompilation: the values of `activation_memory_budget` to try, and the present one.
        clock: the device's clock, which times steps.
        make_key: returns the key of a plan in the cache, given the recorded storages, the shape of their batch, and the
            `activation_memory_budget` of their code.
        found: the fastest rules that this training has found before, by their keys; those found here are added. They
            are known again when model states are moved back, whether or not there is a cache.
        refines: whether the trials with little gain are made, too.

    Attributes:
        progress: progress of the shape.
        decided: whether the fastest rule is in force.
        is_first: whether `activation_memory_budget` may be changed: it is chosen in the first search.
    """

    def __init__(
        self,
        offloader: ActivationOffloader,
        planner: StoragePlanner,
        recompilation: Recompilation,
        clock: Clock,
        make_key: Callable[[SavedTimeline, BatchShape, float], str],
        found: dict[str, CachedRegions],
        *,
        refines: bool,
    ) -> None:
        self.is_first = True
        self._refines = refines
        self._found = found
        self._offloader = offloader
        self._planner = planner
        self._recompilation = recompilation
        self._clock = clock
        self._make_key = make_key
        self._cache = PlanCache()
        self._before = offloader.stats()
        """Totals of the offloader when the present trial began."""
        self.restart()

    def restart(self, key: str = "", *, known: bool = False) -> None:
        """Begins the search for a shape, of which a micro-batch is recorded next.

        Args:
            key: key under which the rule is stored; "": that of the recorded storages.
            known: whether the rule that was found under this key is tried first, with the memory that there is now.
        """
        self.progress = RegionProgress(self._make_timer(), key=key, cached=self._found.get(key) if known else None)
        self.decided = False

    def begin_record(self, window_bytes: int) -> RegionProgress:
        """Returns the progress of the micro-batch that is recorded now, of the same search.

        It is another object than before: a micro-batch of another shape, which was recorded before in vain, has that.

        Args:
            window_bytes: window of micro-batches without a plan.
        """
        self.progress = replace(
            self.progress,
            timer=self._make_timer(),
            timeline=None,
            room_bytes=None,
            peaks=MeasuredPeaks(),
            window_bytes=window_bytes,
        )
        return self.progress

    def _make_timer(self) -> StepTimer:
        return StepTimer(self._clock, max(TIMED_STEPS, MEDIAN_STEPS), WARM_UP)

    def begin(self, timeline: SavedTimeline, shape: BatchShape) -> Trial:
        """Begins a trial with storages that were recorded, in a micro-batch of `shape`, since the last compilation."""
        progress = self.progress
        progress.timeline = timeline
        if not progress.key:
            progress.key = self._make_key(timeline, shape, self._recompilation.value)
            progress.cached = self._load(progress.key)
            if progress.cached is not None and progress.cached.memory_budget != self._recompilation.value:
                return self._compile(progress.cached.memory_budget)
        if progress.cached is not None:
            return self._try_cached(progress.cached, timeline)
        return self._try(self._planner.plan(progress) if progress.trials else None)

    def end_trial(self, seconds: float) -> Trial:
        """Ends the trial in force, whose steps take `seconds`, infinite if one has run out of memory."""
        progress = self.progress
        trial = progress.applied
        assert trial is not None
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
            return self._check_cached(progress.cached, trial)
        if trial.plan is None:
            return self._try(self._planner.plan(progress))
        following = self._try_next(trial)
        return self.decide() if following is None else following

    def resume(self) -> Trial | None:
        """Called when model states are in their final tiers: begins the first trial that was left out.

        Returns:
            The trial in force; `None`: no trial was left out of the search, or it has not ended.
        """
        before, self._refines = self._refines, True
        trial = self.progress.applied
        if before or not self.decided or trial is None or trial.plan is None:
            return None
        following = self._try_next(trial)
        self.decided = following is None
        return following

    def decide(self) -> Trial:
        """Puts the fastest trial in force for good, stores its rule, and logs it."""
        progress = self.progress
        chosen, first = progress.fastest(), progress.trials[0]
        if chosen is not progress.applied:
            progress.apply(chosen)
        self.decided = True
        if progress.key and chosen.seconds < math.inf:
            memory = self._planner.memory()
            entry = CachedRegions(chosen.plan, chosen.memory_budget, chosen.seconds, *memory, chosen.spare_bytes)
            self._found[progress.key] = entry
            self._cache.save(progress.key, entry)
        text = f"a step with compiled code takes {chosen.seconds:.4f} s"
        if chosen.plan is None:
            text += " without a plan, and is not faster with one"
        else:
            saved, offloaded = format_bytes(chosen.saved_bytes), format_bytes(chosen.plan.offloaded_bytes)
            text += "" if first.plan is not None else f", and took {first.seconds:.4f} without a plan"
            text += f": {offloaded} of {saved} saved bytes are offloaded"
            if chosen.memory_budget != 1.0:
                text += (
                    f", and compiled code saves less by activation_memory_budget={chosen.memory_budget:g}, "
                    "which may change the last digits of results"
                )
        pl.utilities.rank_zero_info(f"offload='auto': {text}.")
        return chosen

    # ---- the next trial ----

    def _try_next(self, trial: Trial) -> Trial | None:
        """Begins the trial after that of a plan, which is in force; `None`: there is none."""
        progress, plan = self.progress, trial.plan
        assert plan is not None and progress.timeline is not None
        # After a return to an earlier value, the recorded storages are those of other code.
        recorded = plan.sizes == progress.timeline.sizes
        if (
            self._refines
            and recorded
            and not trial.spare_bytes
            and trial.stalled <= MAX_STALL
            and trial.seconds < math.inf
        ):
            spare = self._planner.spare_bytes(plan, progress)
            smaller = self._planner.plan(progress, spare)
            if smaller.offloaded_bytes < MAX_OFFLOADED * plan.offloaded_bytes:
                return self._try(smaller, spare)
        if not self.is_first:
            return None
        value = self._recompilation.next_value(progress, self._planner.speeds(), refine=self._refines)
        return None if value is None else self._compile(value)

    def _try(self, plan: StoragePlan | None, spare_bytes: float = 0.0) -> Trial:
        """Begins the trial of `plan`, or of the rule without a plan, with the present code."""
        timeline = self.progress.timeline
        assert timeline is not None
        trial = Trial(self._recompilation.value, plan, sum(timeline.sizes), spare_bytes=spare_bytes)
        self.progress.apply(trial)
        self._planner.meter.reset_peak()
        self._before = self._offloader.stats()
        return trial

    def _compile(self, value: float) -> Trial:
        """Begins a trial with other code, and logs it. Its plan is made once a micro-batch was recorded."""
        pl.utilities.rank_zero_info(
            f"offload='auto': code is compiled again with activation_memory_budget={value:g}, so that it saves less "
            "and recomputes: the last digits of results may change. Deterministic algorithms prevent it."
        )
        return self._apply_compiled(value)

    def _apply_compiled(self, value: float) -> Trial:
        trial = Trial(value, None)
        self.progress.apply(trial)
        return trial

    def _stalled(self) -> float:
        """Returns the share of the micro-batches of the present trial in which the device waited for transfers."""
        before, now = self._before, self._offloader.stats()
        seconds = now.seconds - before.seconds
        stalls = now.store_stall + now.load_stall - before.store_stall - before.load_stall
        return stalls / seconds if seconds else 0.0

    # ---- the rule of an earlier training ----

    def _load(self, key: str) -> CachedRegions | None:
        """Returns the rule that this training or an earlier one has found, if it may be applied."""
        cached = self._found.get(key) or self._cache.load_once(key, CachedRegions)
        if cached is None:
            return None
        if has_more_memory(self._planner.memory(), (cached.gpu_bytes, cached.host_bytes)):
            pl.utilities.rank_zero_info(
                "offload='auto': an earlier training with the same compiled code had less memory: its plan is not used."
            )
            return None
        may_compile = self._recompilation.possible and self.is_first
        return cached if may_compile or cached.memory_budget == self._recompilation.value else None

    def _try_cached(self, cached: CachedRegions, timeline: SavedTimeline) -> Trial:
        """Begins a trial with the plan of an earlier training, or with one for the present limits of memory."""
        plan, spare = cached.plan, cached.spare_bytes
        if plan is not None and plan.sizes != timeline.sizes:
            warn_unused("compiled code saves other tensors")
            return self._search_again()
        if plan is not None and (
            plan.movable != timeline.movable or not self._planner.has_room(plan, self.progress, spare)
        ):
            plan = self._planner.plan(self.progress, spare)
        return self._try(plan, spare)

    def _check_cached(self, cached: CachedRegions, trial: Trial) -> Trial:
        """Ends the trial of a plan that was found before: applies it for good if steps are as fast as then.

        Steps that are faster than those of an earlier training are of a machine with another best plan. Faster ones
        than before in this training are not: the steps of single trials vary, more so right after states were moved.
        """
        of_training = self.progress.key in self._found
        change = trial.seconds / cached.seconds - 1
        if change > TOLERANCE or (change < -TOLERANCE and not of_training):
            warn_unused(f"a step takes {trial.seconds:.4f} s, and took {cached.seconds:.4f}")
            return self._search_again()
        self.progress.cached = None
        took = f"a step takes {trial.seconds:.4f} s under its plan"
        if of_training:
            text = f"compiled code was planned with model states in these tiers before: {took}."
        else:
            text = f"an earlier training with the same compiled code was planned: {took}. "
            text += f"{SWITCH}=0 in the environment has every training planned."
        pl.utilities.rank_zero_info(f"offload='auto': {text}")
        # The search of an earlier training was refined; the one of this training was not while states were moved.
        following = self._try_next(trial) if of_training and self._refines and trial.plan is not None else None
        self.decided = following is None
        return trial if following is None else following

    def _search_again(self) -> Trial:
        """Begins the trials anew, with the user's `activation_memory_budget`."""
        self.progress.cached = None
        self.progress.trials.clear()
        compiled = self.is_first and self._recompilation.value != 1.0
        return self._apply_compiled(1.0) if compiled else self._try(None)
