"""`AutoPlanner`: decides for `offload="auto"`, from measured memory, whether tensors are kept, planned or offloaded.

A training has these phases. All methods are called on the training thread.

1. measure: each micro-batch keeps the saved tensors that have room (`MemoryGuard`, `_apply_limit`).
2. decide, at the end of each step until there is a planner (`_decide`).
3. plan: a `ShapePlanner`, which is a callback of its own, or a `RegionPlanner` and `ResidentStates`, to which this
   callback passes the events of the training.

A micro-batch that runs out of memory is run again in any phase (`save_memory`, `restart_after_offload`).
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor
from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.activations import (
    ActivationOffloader,
    KeepAll,
    OffloadAll,
    OffloadExcess,
    OffloadPolicy,
    PlacementPolicy,
    ResidentLimit,
    compile_settings,
    make_auto_placement,
)
from lightning_ssd.callbacks.cached_regions import CachedRegions
from lightning_ssd.callbacks.memory_guard import MemoryGuard
from lightning_ssd.callbacks.micro_batch_switch import MicroBatchSwitch, ends_short_window
from lightning_ssd.callbacks.obstacles import COMPILED, Obstacles
from lightning_ssd.callbacks.offloader import (
    find_model_states,
    find_offloader,
    get_offloader,
    offload_config,
    offloads_states,
    trainer_callbacks,
)
from lightning_ssd.callbacks.plan_key import plan_key
from lightning_ssd.callbacks.prefetch_scheduler import find_schedulers
from lightning_ssd.callbacks.profiling_budget import ProfilingBudget
from lightning_ssd.callbacks.proven_rules import ProvenRules
from lightning_ssd.callbacks.region_planner import RegionPlanner
from lightning_ssd.callbacks.resident_states import ResidentStates
from lightning_ssd.callbacks.seen_batches import BatchShape, SeenBatches
from lightning_ssd.callbacks.shape_planner import ShapePlanner
from lightning_ssd.callbacks.step_profiling import StepProfiling
from lightning_ssd.callbacks.swap_planner import SwapPlanner
from lightning_ssd.device import make_clock
from lightning_ssd.planning import SavedTimeline
from lightning_ssd.retry import UNRECORDED
from lightning_ssd.sizes import format_bytes

Outcome = Literal["measuring", "keep", "plan", "offload"]

FIRST_STEPS = 2
"""Steps before the decision: the first one allocates optimizer states, the second one shows their memory."""

SHORT_STEPS_AFTER_KEEP = 2
"""Steps in a row without room for all saved tensors, after which a training whose outcome is "keep" is planned. With
another outcome one such step is enough."""

MAX_FAILED_PROFILES = 3
"""Profiles that micro-batches without enough memory have ended, after which the training is not planned any more."""


class AutoPlanner(pl.Callback):
    """Decides for `offload="auto"`, from the memory of the first steps, how saved tensors are treated.

    In the first steps, saved tensors for which the device has room are kept and the others are offloaded
    (`OffloadExcess`), which is safe but not the fastest choice. After two steps, or three where memory is short, the
    outcome is one of these:

    - `"keep"`: the device has room for all saved tensors, and a tenth more. They are kept, and saved-tensor hooks are
      disabled, so that a step is plain Lightning's, while batches are no larger than earlier ones. Hooks are enabled
      for larger batches, when other parameters are trained, and when allocated memory grows.
    - `"plan"`: the device lacks room. A `SwapPlanner` is added to the Trainer's callbacks, which profiles the training
      and plans which tensors are kept, offloaded and recomputed, and, with `states="auto"`, the tiers of offloaded
      model states. Micro-batches that may need more memory than a planned one offload all saved tensors. If there are
      many of them, they are planned, too, so that batches of a few shapes have a plan each (`ShapePlanner`).
      In a training with compiled code, whose operators are not visible, a `RegionPlanner` plans instead, and
      `ResidentStates` moves offloaded model states to the device where that makes steps faster.
    - `"offload"`: the device lacks room, and the training can't be planned, because several processes train, for
      example. Saved tensors without room are offloaded, as in the first steps.

    A log line names the outcome. A micro-batch that runs out of memory is run again with all saved tensors offloaded
    (`MicroBatchRetry`), and then less memory is used. That is possible for the first micro-batches under each rule or
    plan, and for those that are larger than earlier ones.

    The callback does nothing if `offload` is not `"auto"`, or if the user's callbacks profile the training. On a CPU
    there is no limit of device memory: all saved tensors are kept from the first step on.

    Attributes:
        outcome: the decision; `"measuring"` before there is one.
        planner: the planner that was added; `None`: there is none.
        regions: the planner of a training with compiled code; `None`: there is none.
        states: moves offloaded model states of a training with compiled code; `None`: there is no such training.
        begins_step: whether the present micro-batch is the first one of a step.
    """

    def __init__(self) -> None:
        self._obstacles = Obstacles()
        self._reset()

    def _reset(self) -> None:
        self._obstacles.close()
        self._obstacles = Obstacles()
        self.planner: ShapePlanner | None = None
        self._parameters: tuple[Tensor, ...] = ()
        self._batches = SeenBatches()
        """Batches of the whole training."""
        self._failed_profiles = 0
        self.states: ResidentStates | None = None
        self._found_regions: dict[str, CachedRegions] = {}
        """The fastest rules for saved tensors of compiled code, for each placement of model states that was tried."""
        self._compile_seconds = 0.0
        """Seconds in which code was compiled again to save less."""
        self._reset_rules()

    def _reset_rules(self) -> None:
        self.outcome: Outcome = "measuring"
        self.regions: RegionPlanner | None = None
        self._guard: MemoryGuard | None = None
        """Compares micro-batches with measured ones; `None`: the callback does nothing."""
        self._guarded = False
        """Whether the guard compares the present micro-batch, as it follows no plan of its shape."""
        self._shape: BatchShape | None = None
        """Shape of the present batch."""
        self._at_boundary = True
        """Whether the next micro-batch is the first of a step."""
        self.begins_step = True
        self._steps = 0
        """Steps that have ended under these rules."""
        self._short = False
        """Whether saved tensors of a micro-batch of the present step had no room."""
        self._short_steps = 0
        """Steps in a row in which that was true."""
        self._logged: set[Outcome] = set()
        self._policy: OffloadPolicy | None = None
        """The plan's policy, while another one is in force for one micro-batch."""
        self._placement: PlacementPolicy | None = None
        """Placement of that other policy."""
        self._proven = ProvenRules()
        self._ran_out = False
        """Whether a micro-batch of the present step has run out of memory."""

    @override
    def __getstate__(self) -> Mapping[str, Any]:
        fresh = type(self)()  # a pickled Trainer does not continue its training
        return vars(fresh)

    @property
    def decides(self) -> bool:
        """Whether the callback decides in the present training, whose device has a limit of memory."""
        return self._guard is not None

    @property
    def may_run_out(self) -> bool:
        """Whether the present micro-batch may run out of memory, so that it has to be able to run again."""
        return self._guard is not None and self._proven.may_run_out

    @property
    def begins_rule(self) -> bool:
        """Whether the present micro-batch is one of the very first under its rule: most that run out of memory are."""
        return self._guard is not None and self._proven.begins_rule

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """Excludes the time in the context, before the forward of a micro-batch, from measured times.

        The steps by which plans are made, corrected and compared would otherwise include the time in which the first
        micro-batches record their state, and later steps don't.
        """
        with contextlib.ExitStack() as stack:
            for timed in (self.planner, self.regions, self.states):
                if timed is not None:
                    stack.enter_context(timed.excluded())
            yield

    # ---- a training ----

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._remove_planner(trainer)
        self._close_regions()
        self._reset()
        offloader = find_offloader(trainer)
        if offloader is None or offload_config(trainer).amount() != "auto":
            return
        if any(isinstance(callback, StepProfiling) for callback in trainer_callbacks(trainer)):
            return
        self._parameters = tuple(pl_module.parameters())
        self._profiling_budget = ProfilingBudget()
        self._begin_rules(trainer, offloader)
        if self._guard is not None:
            self._obstacles.begin()

    def _begin_rules(self, trainer: pl.Trainer, offloader: ActivationOffloader) -> None:
        """Begins to decide for the steps with an offloader."""
        # An earlier training may have had the same offloader: Lightning's Tuner trains several times.
        placement = make_auto_placement(tuple(offloader.tiers), offloader.device)
        offloader.run(OffloadPolicy(placement))
        if not isinstance(placement, OffloadExcess):  # nothing is ever offloaded
            self.outcome = "keep"
            self._enable_hooks(trainer, offloader, False)
            return
        self._guard = MemoryGuard(placement.limit)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        offloader = find_offloader(trainer)
        if self._guard is None or offloader is None:
            return
        self._restore(offloader)  # a hook of the module may have skipped the last batch
        if self._at_boundary:
            self._short = False
            if self.planner is None:  # the planner counts its own steps
                self._profiling_budget.begin_step()
        self._shape = BatchShape.of(batch)
        larger = not self._batches.covers(self._shape)
        if self._shape is not None:
            self._batches.add(self._shape)
        trained = tuple(parameter.requires_grad for parameter in self._parameters)
        swaps, regions = self.planner, self.regions
        planned = regions is not None and regions.begin_micro_batch(self._shape, trained, begins_step=self._at_boundary)
        self._guarded = swaps is None and not planned
        if swaps is not None:
            self._apply_plan(trainer, offloader, swaps, self._guard)
        elif planned:
            self._enable_hooks(trainer, offloader, not self._guard.limit.fits)
        else:
            self._apply_limit(trainer, offloader, self._guard, trained)
        if self.states is not None:
            kept = regions is None and self.outcome == "keep" and self._guard.fits
            timed = kept or (regions is not None and regions.decided)
            self.states.begin_micro_batch(self._shape, begins_step=self._at_boundary, timed=timed)
        plan = None if swaps is None else swaps.rule
        self._proven.begin((self.outcome, plan, None if regions is None else regions.rule), larger=larger)
        self.begins_step, self._at_boundary = self._at_boundary, False

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        offloader = find_offloader(trainer)
        if self._guard is not None and self._steps == 0 and offloader is not None:
            self._obstacles.see_first_step(loss, offloader.device)
        if self.outcome in ("measuring", "keep") and (self._short or _states_are_movable(trainer)):
            self._obstacles.see_backward(loss)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.regions is not None:
            self.regions.end_backward()
        if pl_module.automatic_optimization:  # with manual optimization more backwards may follow
            self._end_backward(trainer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._guard is None:
            return
        if not pl_module.automatic_optimization:
            self._end_backward(trainer)
        offloader = get_offloader(trainer)
        self._restore(offloader)
        if self.regions is not None:
            self.regions.end_micro_batch()
        self._proven.end()
        if self._guarded:
            self._guard.end(self._shape)
        if pl_module.automatic_optimization and trainer.fit_loop._should_accumulate():
            return
        self._at_boundary = True
        self._steps += 1
        if ends_short_window(trainer):
            for timing in (self.regions, self.states):
                if timing is not None:
                    timing.skip_step()
        if self._steps == FIRST_STEPS:
            self._obstacles.end_first_steps()
        if self._obstacles.cuda_graphs and self._steps == 1:
            self._keep_for_cuda_graphs(trainer, offloader)
        else:
            self._end_step(trainer, pl_module, offloader, self._guard)

    def _end_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, offloader: ActivationOffloader, guard: MemoryGuard
    ) -> None:
        """Decides for the steps after one that has ended, or passes its end to `RegionPlanner` and `ResidentStates`."""
        ran_out, self._ran_out = self._ran_out, False
        if self.planner is not None:
            if self._obstacles.find_late():
                self._plan_compiled(trainer)
            elif ran_out:
                self._plan_smaller(trainer, offloader, guard, self.planner)
            return
        self._profiling_budget.end_step()
        if self.regions is None:
            self._decide(trainer, pl_module, guard)
        else:
            self.regions.end_step(ran_out=ran_out)
        trials = () if self.regions is None else self.regions.trials
        most_saved = max((trial.saved_bytes for trial in trials), default=0)
        if self.states is None or self.states.decided:
            return
        if self.states.end_step(guard.limit, most_saved):
            self._restart_decision(trainer)
        elif self.states.decided and self.regions is not None:
            self.regions.refine()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._guard is not None and self.planner is None:
            self._profiling_budget.pause()
        for timed in (self.regions, self.states):
            if timed is not None:
                timed.pause()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._guard is not None and self.planner is None:
            self._profiling_budget.resume()
        for timed in (self.regions, self.states):
            if timed is not None:
                timed.resume()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.regions is not None:
            self.regions.end_micro_batch()  # a hook of the module may have skipped the last one

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._guard = None
        self._obstacles.close()
        self._close_regions()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._guard = self.states = None
        self._parameters = ()
        self._remove_planner(trainer)
        self._obstacles.close()
        self._close_regions()

    # ---- before there is a plan ----

    def _apply_limit(
        self, trainer: pl.Trainer, offloader: ActivationOffloader, guard: MemoryGuard, trained: tuple[bool, ...]
    ) -> None:
        """Limits the saved tensors that the present micro-batch keeps, and disables hooks if all of them have room."""
        guard.begin(self._shape, trained)
        if (self.states is not None or self.regions is not None) and not guard.limit.known:
            guard.limit.measure()  # model states that were moved, or compiled code, may have left no room
        self._short |= guard.short
        decided = self._steps >= FIRST_STEPS
        offloader.limit_window()
        self._enable_hooks(trainer, offloader, not (decided and guard.fits))
        if decided and guard.limit.fits and self.outcome != "keep" and self.regions is None:
            self.outcome = "keep"
            peak, most = format_bytes(guard.limit.needed_bytes), format_bytes(guard.limit.meter.limit())
            self._log(f"keeps all saved tensors on the {_name(offloader)}: a step needs at most {peak} of {most}")

    def _end_backward(self, trainer: pl.Trainer) -> None:
        """Passes the peak of a micro-batch without hooks to the limit, because the offloader did not follow it."""
        offloader = find_offloader(trainer)
        if self._guard is not None and offloader is not None and not offloader.policy.hooks_enabled:
            self._guard.limit.end(hooks=False)

    def _decide(self, trainer: pl.Trainer, pl_module: pl.LightningModule, guard: MemoryGuard) -> None:
        """Adds a planner to the training if saved tensors have no room, or if model states may be moved."""
        movable = _states_are_movable(trainer)
        self._short_steps = self._short_steps + 1 if self._short else 0
        if self._steps < FIRST_STEPS or guard.limit.measuring:
            return
        if not movable and self._short_steps < (SHORT_STEPS_AFTER_KEEP if self.outcome == "keep" else 1):
            return
        obstacle = self._obstacles.find(trainer, pl_module, self._shape)
        if obstacle is None:
            self._add_planner(trainer, pl_module, guard)
        elif obstacle == COMPILED and trainer.world_size == 1 and pl_module.automatic_optimization:
            if movable and self.states is None:
                self.states = ResidentStates(trainer.strategy, make_clock(get_offloader(trainer).device))
            if self._short:
                self._plan_regions(trainer, pl_module, guard)
        elif self._short:
            self._offload_excess(obstacle)

    def _add_planner(self, trainer: pl.Trainer, pl_module: pl.LightningModule, guard: MemoryGuard) -> None:
        self.outcome = "plan"
        reason = "not all of them have room" if self._short else "offloaded model states may be moved"
        self._log(f"plans which saved tensors are kept, offloaded and recomputed: {reason}")
        _make_states_movable(trainer)
        planner = ShapePlanner(guard.limit.meter, self._batches)
        with self._profiling_budget.counted():
            planner.on_train_start(trainer, pl_module)
        planner.continue_budget(self._profiling_budget)
        self.planner = planner
        callbacks = trainer_callbacks(trainer)
        # Before the callback that begins micro-batches, which the planner's policy is for.
        position = next(index for index, one in enumerate(callbacks) if isinstance(one, MicroBatchSwitch))
        # A new list, because Lightning is iterating over the old one.
        trainer.callbacks = [*callbacks[:position], planner, *callbacks[position:]]  # type: ignore[attr-defined]

    def _keep_for_cuda_graphs(self, trainer: pl.Trainer, offloader: ActivationOffloader) -> None:
        """Keeps all saved tensors from the second step on, which records the CUDA graphs. The first one warms them up.

        A graph writes its saved tensors to memory of its own in each step. They can't be offloaded, and a recorded
        graph expects that they stay alive as long as they did when it was recorded.
        """
        self.outcome = "keep"
        self._log(
            f"keeps all saved tensors on the {_name(offloader)}: compiled code records CUDA graphs "
            "(`mode='reduce-overhead'`), whose saved tensors can't be offloaded. Where memory is short, compile "
            "without that mode"
        )
        self._guard = None
        offloader.run(replace(offloader.policy, placement=KeepAll()))
        self._enable_hooks(trainer, offloader, False)

    def _plan_regions(self, trainer: pl.Trainer, pl_module: pl.LightningModule, guard: MemoryGuard) -> None:
        """Plans saved tensors of a training with compiled code, whose operators are not visible."""
        self.outcome = "plan"
        self._log("plans which saved tensors of compiled code are kept and offloaded: not all of them have room")
        offloader = get_offloader(trainer)
        device, recompiles = offloader.device, self._obstacles.compiled_backward

        def make_key(timeline: SavedTimeline, shape: BatchShape, memory_budget: float) -> str:
            tiers = None if find_model_states(trainer) is None else _present_tiers(trainer)
            recorded = (compile_settings(pl_module), memory_budget, recompiles, timeline.sizes, timeline.order, tiers)
            return plan_key(trainer, pl_module, device, shape, recorded)

        self.regions = RegionPlanner(
            offloader,
            guard,
            self._batches,
            find_schedulers(trainer),
            recompiles=recompiles,
            make_key=make_key,
            found=self._found_regions,
            spent_seconds=self._compile_seconds,
            refines=self.states is None or self.states.decided,
        )

    def _restart_decision(self, trainer: pl.Trainer) -> None:
        """Decides anew, because model states were moved, or compiled code was found late."""
        self._close_regions()
        self._reset_rules()
        self._begin_rules(trainer, get_offloader(trainer))

    def _plan_compiled(self, trainer: pl.Trainer) -> None:
        """Ends the plan of operators, as compiled code runs under it."""
        pl.utilities.rank_zero_info(
            "offload='auto': compiled code of this training was called late, in a step whose operators were recorded "
            "or planned. Saved tensors of all its code are planned from now on, and no operators are recomputed."
        )
        self._remove_planner(trainer)
        self._restart_decision(trainer)

    def _close_regions(self) -> None:
        regions, self.regions = self.regions, None
        if regions is not None:
            regions.close()
            self._compile_seconds = regions.recompilation.spent_seconds

    def _remove_planner(self, trainer: pl.Trainer) -> None:
        planner, self.planner = self.planner, None
        if planner is not None:
            planner.teardown(trainer, trainer.lightning_module, "fit")
            for scheduler in find_schedulers(trainer):
                scheduler.override_window(None)
            trainer.callbacks = [one for one in trainer_callbacks(trainer) if one is not planner]  # type: ignore[attr-defined]

    # ---- under a plan ----

    def _apply_plan(
        self, trainer: pl.Trainer, offloader: ActivationOffloader, planner: SwapPlanner, guard: MemoryGuard
    ) -> None:
        """Sets hooks and window for the present micro-batch, after `planner`, the callback before, has set its plan.

        Hooks are disabled if the plan keeps all. Without a plan the window is limited.
        """
        if planner.measuring or planner.plan is None or planner.prediction is None:
            offloader.limit_window(guard.limit.fitting_window)  # all saved tensors are offloaded
            return
        spare = ResidentLimit.SPARE * planner.prediction.gpu_peak_bytes <= guard.limit.meter.limit()
        enabled = offloads_states(trainer) or not (planner.plan.keeps_all and spare)
        self._replace(offloader, replace(offloader.policy, hooks_enabled=enabled))

    def _replace(self, offloader: ActivationOffloader, policy: OffloadPolicy) -> None:
        """Puts `policy` in place of the plan's for the present micro-batch."""
        if policy != offloader.policy:
            self._policy, self._placement = offloader.policy, policy.placement
            offloader.run(policy)

    def _restore(self, offloader: ActivationOffloader) -> None:
        """Puts the plan's policy in force again, if `_replace` has replaced it and no later plan is in force."""
        policy, self._policy = self._policy, None
        if policy is not None and offloader.policy.placement is self._placement:
            offloader.run(policy)

    # ---- a micro-batch that ran out of memory ----

    def save_memory(self, trainer: pl.Trainer, part: str) -> None:
        """Prepares the second attempt of a micro-batch: all saved tensors are offloaded, one at a time.

        Args:
            trainer: the Trainer.
            part: forward or backward, which has failed.
        """
        offloader = get_offloader(trainer)
        assert self._guard is not None
        pl.utilities.rank_zero_info(
            f"offload='auto': the {_name(offloader)} has run out of memory in the {part} of a micro-batch, which is "
            f"run again with all saved tensors offloaded. {UNRECORDED}"
        )
        self._proven.restart()
        self._ran_out = self._short = True
        self._restore(offloader)
        if self.planner is not None:
            self._failed_profiles += self.planner.measuring
            self.planner.discard()
        offloader.begin_micro_batch()
        offloader.free_discarded()
        policy = replace(offloader.policy, window_bytes=0, hooks_enabled=True, mode=None)
        if self.planner is not None:
            self._replace(offloader, replace(policy, placement=OffloadAll(tuple(offloader.tiers))))
            return
        self._guard.limit.lower()
        self._guard.limit.measure()
        offloader.run(policy)

    def restart_after_offload(self, trainer: pl.Trainer, part: str) -> None:
        """Prepares the third attempt of a micro-batch, for which all model states were offloaded.

        Args:
            trainer: the Trainer, with another offloader and other memory than before.
            part: forward or backward, which has failed.
        """
        shape, trained = self._shape, tuple(parameter.requires_grad for parameter in self._parameters)
        self._remove_planner(trainer)
        self._restart_decision(trainer)
        offloader = get_offloader(trainer)
        pl.utilities.rank_zero_info(
            f"offload='auto': the {_name(offloader)} has run out of memory again in the {part} of a micro-batch, which "
            "is run again with its model states offloaded, "
            + ("too." if offloader.tiers else "which leave no room to offload saved tensors: all are kept.")
        )
        offloader.begin_micro_batch()
        if self._guard is None:  # nothing more can be offloaded
            return
        self._shape, self._guarded, self._at_boundary, self._ran_out = shape, True, False, True
        self._apply_limit(trainer, offloader, self._guard, trained)
        self._guard.limit.measure()
        offloader.run(replace(offloader.policy, window_bytes=0))

    def _plan_smaller(
        self, trainer: pl.Trainer, offloader: ActivationOffloader, guard: MemoryGuard, planner: SwapPlanner
    ) -> None:
        """Has steps after one that ran out of memory need less."""
        if self._failed_profiles < MAX_FAILED_PROFILES:
            planner.plan_smaller("a step has run out of memory")
            return
        self._remove_planner(trainer)
        self._obstacles.lasting = "profiling needs more memory than there is"
        self._offload_excess(self._obstacles.lasting)
        placement = OffloadExcess(tuple(offloader.tiers), guard.limit)
        offloader.run(replace(offloader.policy, placement=placement, mode=None, hooks_enabled=True))

    # ---- helpers ----

    def _enable_hooks(self, trainer: pl.Trainer, offloader: ActivationOffloader, enabled: bool) -> None:
        enabled |= offloads_states(trainer)
        if offloader.policy.hooks_enabled != enabled:
            offloader.run(replace(offloader.policy, hooks_enabled=enabled))

    def _offload_excess(self, obstacle: str) -> None:
        """Decides that no plan is made, because of an obstacle."""
        self.outcome = "offload"
        self._log(f"offloads the saved tensors that have no room, and recomputes nothing, as {obstacle}")

    def _log(self, text: str) -> None:
        if self.outcome not in self._logged:
            self._logged.add(self.outcome)
            pl.utilities.rank_zero_info(f"offload='auto': {text}.")


def _states_are_movable(trainer: pl.Trainer) -> bool:
    """Returns whether model states are offloaded, and may be moved to other tiers."""
    strategy: Any = trainer.strategy
    return find_model_states(trainer) is not None and strategy.can_move_states()


def _present_tiers(trainer: pl.Trainer) -> object:
    """Returns the tiers of offloaded model states, as JSON has them."""
    strategy: Any = trainer.strategy
    return {unit: sorted(tiers.parts.items()) for unit, tiers in strategy.present_tiers().items()}


def _make_states_movable(trainer: pl.Trainer) -> None:
    """Lets plans move model states that are on the device, if they take most of it."""
    strategy: Any = trainer.strategy
    if find_offloader(trainer) is getattr(strategy, "offloader", None) and strategy.states_need_most_memory():
        with contextlib.suppress(ValueError):
            strategy.make_states_movable()


def _name(offloader: ActivationOffloader) -> str:
    return "GPU" if offloader.device.type == "cuda" else offloader.device.type.upper()
