"""`AutoPlan`: decides for `offload="auto"`, from measured memory, whether tensors are kept, planned or offloaded.

A training has these phases. All methods are called on the training thread.

1. measure: each micro-batch keeps the saved tensors that have room (`KnownMemory`, `_apply_limit`), and so do those
   that are recorded and checked for a plan. If not all have room, units are checkpointed (`UnplannedCheckpoints`).
2. decide, at the end of each step until there is a plan (`_decide`).
3. plan: a `PlanCycle`, to which the events of the training are passed. Compiled code may be compiled again before
   there is a plan, once (`Recompilation`): then all begins anew.

A micro-batch that runs out of memory is run again in any phase (`save_memory`, `restart_after_offload`). If profiles or
plans run out of memory, the training continues without a plan, under the rules of phase 1 (`_plan_smaller`).
"""

from collections import Counter
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from lightning_ssd.activations import (
    KeepAll,
    OffloadAll,
    OffloadExcess,
    OffloadPolicy,
    count_cuda_graphs,
    make_auto_placement,
    runs_cuda_graphs,
)
from lightning_ssd.autoplan.batches import BatchShape, SeenBatches, trained_parameters
from lightning_ssd.autoplan.known_memory import KnownMemory
from lightning_ssd.autoplan.obstacles import (
    BLOCKS,
    COMPILED,
    CompiledCode,
    compiled_units,
    obstacle_to_planning,
)
from lightning_ssd.autoplan.plan_cycle import PlanCycle
from lightning_ssd.autoplan.plan_maker import PlanOptions
from lightning_ssd.autoplan.protocol import Training
from lightning_ssd.autoplan.recompilation import Recompilation
from lightning_ssd.autoplan.unplanned_checkpoints import UnplannedCheckpoints
from lightning_ssd.device import FRAGMENTS
from lightning_ssd.remedies import SMALLER
from lightning_ssd.sizes import format_bytes
from lightning_ssd.uncopied import Uncopied

Outcome = Literal["measuring", "keep", "plan", "offload"]

FIRST_STEPS = 2
"""Steps before the decision: the first one allocates optimizer states, the second one shows their memory. One step is
enough if its saved tensors do not fit beside the memory that stays allocated after it."""

MAX_FAILED_PROFILES = 3
"""Profiles that ran out of memory, after which the training continues without a plan. One more is tried each time that
all model states were offloaded."""

MAX_FAILED_CHECKPOINTS = 3
"""Micro-batches with units checkpointed in place of a plan that ran out of memory, after which none is checkpointed:
there may be no room for all saved tensors of a unit, which are on the device when it runs again."""

PROVEN = 16
"""Micro-batches in a row without an OutOfMemoryError, after which none is expected under the same rule."""

FIRST_MICRO_BATCHES = 2
"""Micro-batches under a rule whose optimizer steps begin after backward. Most of those that run out of memory are among
them; in later ones the delay would cost more time than a failure."""


class AutoPlan(Uncopied):
    """Decides about the saved tensors of one training, and places its model states if they may be moved.

    Attributes:
        outcome: the decision; `"measuring"` before there is one.
        cycle: the plan and its life; `None`: there is none.
    """

    def __init__(self, training: Training) -> None:
        self.outcome: Outcome = "measuring"
        self.cycle: PlanCycle | None = None
        self._training = training
        kind = training.offloader.device.type
        self._device = "GPU" if kind == "cuda" else kind.upper()
        self._obstacle: str | None = None
        """Reason why this training can't be planned; `None`: none was found."""
        self._cuda_graphs = False
        """Whether compiled code of the first step has CUDA graphs."""
        self._num_graphs_before = count_cuda_graphs(training.offloader.device)
        self._code: CompiledCode | None = None
        """Notices compiled code that is no unit, in the first steps and under modes; `None`: nothing is decided."""
        self._recompilation = Recompilation(training)
        self._parameters = tuple(training.module.parameters())
        self._batches = SeenBatches()
        """Batches of the whole training."""
        self._failed_profiles = 0
        self._checkpoints: UnplannedCheckpoints | None = None
        """Checkpoints units while there is no plan; `None`: the training can't be planned."""
        self._begin()
        if self._known is not None:
            self._code = CompiledCode(compiled_units(training))

    def _begin(self) -> None:
        """Begins to decide for the steps with the present offloader."""
        self.outcome = "measuring"
        self.cycle = None
        self._end_checkpoints()
        self._gave_up = False
        """Whether profiles or plans have run out of memory, so that there is none any more."""
        self._failed_checkpoints = 0
        """Micro-batches that have run out of memory since, while units were checkpointed."""
        self._known: KnownMemory | None = None
        """Compares micro-batches with measured ones; `None`: nothing is decided."""
        self._shape: BatchShape | None = None
        """Shape of the present batch."""
        self._trained: frozenset[int] = frozenset()
        """Indices of the parameters that it trains."""
        self._limited = False
        """Whether the present micro-batch keeps the saved tensors that have room, so that its memory is compared with
        measured ones."""
        self._at_boundary = True
        """Whether the next micro-batch is the first of a step."""
        self._begins_step = True
        self._steps = 0
        """Steps that have ended under these rules."""
        self._short = False
        """Whether saved tensors of a micro-batch of the present step had no room."""
        self._logged: set[Outcome] = set()
        self._policy: OffloadPolicy | None = None
        """The policy in force before a second attempt at the present micro-batch."""
        self._rule: object = None
        """Rule of the present micro-batch."""
        self._proven: Counter[object] = Counter()
        """Micro-batches under each rule that had enough memory, since one ran out of it."""
        self._ran_out = False
        """Whether a micro-batch of the present step has run out of memory."""
        self._most_allocated = 0
        """The most bytes that were allocated, without evictable ones."""
        offloader = self._training.offloader
        # An earlier training may have had the same offloader: Lightning's Tuner trains several times.
        placement = make_auto_placement(tuple(offloader.tiers), offloader.device)
        offloader.run(OffloadPolicy(placement))
        if not isinstance(placement, OffloadExcess):  # nothing is ever offloaded
            self.outcome = "keep"
            self._enable_hooks(False)
            return
        self._known = KnownMemory(placement.limit)
        if self._training.automatic and (self._obstacle or obstacle_to_planning(self._training)) is None:
            self._checkpoints = UnplannedCheckpoints(self._training)

    @property
    def decides(self) -> bool:
        """Whether there is something to decide: the device has a limit of memory."""
        return self._known is not None

    # ---- questions of the strategy: see `MicroBatchPlanner` ----

    @property
    def may_run_out(self) -> bool:
        """Whether the present micro-batch may run out of memory, so that it has to be able to run again."""
        return self._known is not None and self._proven[self._rule] < PROVEN

    @property
    def spare_bytes(self) -> int:
        """Bytes of the device that the present micro-batch and its step do not need; 0 while it may run out."""
        if self._known is None or self.may_run_out:
            return 0
        meter = self._known.limit.meter
        # The allocator may hold more bytes in fragments than the limit leaves for them.
        free = min(int(meter.limit()) - self._most_allocated, meter.unreserved())
        return max(0, free - FRAGMENTS)

    @property
    def begins_rule(self) -> bool:
        """Whether the present micro-batch is one of the very first under its rule: most that run out of memory are."""
        return self._known is not None and self._proven[self._rule] < FIRST_MICRO_BATCHES

    @property
    def begins_step(self) -> bool:
        """Whether the present micro-batch is the first one of a step."""
        return self._begins_step

    # ---- events of the training ----

    def begin_micro_batch(self, batch: Any) -> None:
        """Called when a micro-batch begins, after the offloader has begun it."""
        if self._known is None:
            return
        self._restore()  # a hook of the module may have skipped the last batch
        if self._at_boundary:
            self._short = False
        self._shape = BatchShape.of(batch)
        self._trained = trained_parameters(self._parameters)
        larger = not self._batches.covers(self._shape)
        if self._shape is not None:
            self._batches.add(self._shape)
        self._begins_step, self._at_boundary = self._at_boundary, False
        if self.cycle is not None:
            self.cycle.checkpointed = {} if self._checkpoints is None else self._checkpoints.modules
            self.cycle.begin_micro_batch(batch)
        self._limited = self.cycle is None or self.cycle.keeps_fitting
        if self._limited:
            self._apply_limit(self._known)
        elif self.cycle is not None and self.cycle.offloads_all:
            self._training.offloader.limit_window(self._known.limit.fitting_window)
        self._begin_checkpoints(self._known)
        self._rule = self.outcome, None if self.cycle is None else self.cycle.rule
        if larger:
            self._proven[self._rule] = 0

    def begin_backward(self, loss: Tensor) -> None:
        """Called before each backward."""
        if self._checkpoints is not None:
            self._checkpoints.end_forward()
        if self._code is not None and self._steps == 0:
            self._cuda_graphs |= runs_cuda_graphs(self._training.offloader.device, self._num_graphs_before)
        if self.cycle is not None:
            self.cycle.begin_backward(loss)

    def end_backward(self) -> None:
        """Called after each backward."""
        if self.cycle is not None:
            self.cycle.end_backward()
        if self._training.automatic:  # with manual optimization more backwards may follow
            self._end_backward()

    def begin_optimizer(self) -> None:
        """Called before each optimizer step."""
        if self.cycle is not None:
            self.cycle.begin_optimizer()

    def end_micro_batch(self, *, ends_step: bool, short: bool) -> None:
        """Called when a micro-batch has ended.

        Args:
            ends_step: whether it was the last one of its step.
            short: whether that step had fewer micro-batches than others.
        """
        known = self._known
        if known is None:
            return
        if not self._training.automatic:
            self._end_backward()
        self._restore()
        self._proven[self._rule] += 1
        self._most_allocated = max(self._most_allocated, known.limit.meter.peak())
        if self._limited:
            known.end(self._shape, self._trained)
        if self.cycle is not None:
            self.cycle.end_micro_batch(ends_step=ends_step, short=short)
        if not ends_step:
            return
        self._at_boundary = True
        self._steps += 1
        if self._steps == FIRST_STEPS and self._code is not None:
            self._code.close()
        if self._cuda_graphs and self._steps == 1:
            self._keep_for_cuda_graphs()
        else:
            self._end_step(known)

    def _end_step(self, known: KnownMemory) -> None:
        """Decides for the steps after one that has ended, or passes its end to the plan."""
        ran_out, self._ran_out = self._ran_out, False
        if self.cycle is None and not self._gave_up:
            self._decide(known)
        elif self._code is not None and self._code.ran_under_mode:
            self._end_plan_of_late_code(self._code)
        elif self._recompilation.due:
            self._close_plan()
            self._recompilation.begin()
            self._begin()
        elif self.cycle is not None and ran_out:
            self._plan_smaller(known, self.cycle)

    def pause(self) -> None:
        """Called when a validation begins."""
        if self.cycle is not None:
            self.cycle.pause()

    def resume(self) -> None:
        """Called when a validation has ended."""
        if self.cycle is not None:
            self.cycle.resume()

    def end_epoch(self) -> None:
        """Called when an epoch has ended, maybe because a hook of the module has skipped its last batches."""
        if self.cycle is not None:
            self.cycle.end_epoch()

    def end_training(self) -> None:
        """Called when training ends: removes all hooks and modes of a plan, whose measurements remain readable."""
        if self.cycle is not None:
            if self.cycle.planned:
                self.cycle.report()
            self.cycle.close()
        if self._checkpoints is not None:
            self._checkpoints.close()

    def close(self) -> None:
        """Ends all decisions."""
        self._known = None
        if self._checkpoints is not None:
            self._checkpoints.close()
        code, self._code = self._code, None
        if code is not None:
            code.close()
        self._close_plan()
        self._recompilation.close()

    # ---- before there is a plan of operators ----

    def _apply_limit(self, known: KnownMemory) -> None:
        """Limits the saved tensors that the present micro-batch keeps.

        Hooks are disabled if all of them have room, unless the training is profiled for a plan.
        """
        known.begin(self._shape, self._trained)
        self._short |= known.short
        self._training.offloader.limit_window()
        if self.cycle is not None:
            return
        # Units that are checkpointed in place of a plan need hooks even where all other saved tensors fit.
        decided = self._steps >= FIRST_STEPS and not (self._gave_up and self._checkpoints is not None)
        self._enable_hooks(not (decided and known.fits))
        if decided and known.limit.fits and self.outcome != "keep":
            self.outcome = "keep"
            peak, most = format_bytes(known.limit.needed_bytes), format_bytes(known.limit.meter.limit())
            self._log(f"keeps all saved tensors on the {self._device}: a step needs at most {peak} of {most}")

    def _begin_checkpoints(self, known: KnownMemory, *, again: bool = False) -> None:
        """Checkpoints units in the present micro-batch if it has no plan, or `again` if it has run out of memory.

        No unit is hooked while all saved tensors are kept, until those of a larger batch may have no room.
        """
        checkpoints, cycle = self._checkpoints, self.cycle
        if checkpoints is None:
            return
        kept = self.outcome == "keep" and not known.limit.scarce
        if not again and (kept or (cycle is not None and cycle.phase in ("timing", "idle"))):
            checkpoints.close()
        elif self._shape is not None:  # without shapes of batches there is no plan
            if checkpoints.closed and (cycle is None or again):  # modules may have changed since they were called
                checkpoints = self._checkpoints = UnplannedCheckpoints(self._training, short=self._gave_up)
            checkpoints.begin_micro_batch(known, again=again)

    def _end_checkpoints(self) -> None:
        """Checkpoints no unit from now on."""
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints = None

    def _end_backward(self) -> None:
        """Passes the peak of a micro-batch without hooks to the limit, because the offloader did not follow it."""
        if self._known is not None and not self._training.offloader.policy.hooks_enabled:
            self._known.limit.end(hooks=False)

    def _decide(self, known: KnownMemory) -> None:
        """Plans the training if saved tensors have no room, or if model states may be moved."""
        movable = _states_are_movable(self._training)
        pattern = self._training.offloader.last_pattern
        unsaved = known.limit.unsaved_bytes
        first_lacks_room = (
            self._steps == 1 and pattern is not None and known.lacks(pattern.offloadable_bytes(0) + unsaved)
        )
        checkpoints = self._checkpoints
        checkpointed = checkpoints is not None and bool(checkpoints.modules)
        self._short = self._short or first_lacks_room or checkpointed
        if not (first_lacks_room or checkpointed) and (self._steps < FIRST_STEPS or known.limit.measuring):
            return
        if not (movable or self._short):
            return
        obstacle = self._find_obstacle()
        if obstacle is None:
            if checkpoints is not None and self._short and not checkpointed:
                checkpoints.begin_all(known.limit)
            self._begin_plan(known)
        elif checkpointed:  # such as compiled code that ran later: nothing is known of steps that checkpoint no unit
            self._obstacle = obstacle
            self._begin()
        elif self._short:
            if self._obstacle is not None:  # an obstacle of all batches. Proofs of units need what plans need
                self._end_checkpoints()
            self._offload_excess(obstacle)

    def _find_obstacle(self) -> str | None:
        """Returns the reason why the training can't be planned now, by the present batch; `None`: it can."""
        if self._obstacle is None and self._code is not None and self._code.ran:
            self._obstacle = COMPILED
        if self._obstacle is None and self._shape is None:
            return "batches have no tensors, by whose shapes a plan would recognize batches that need no more memory"
        self._obstacle = self._obstacle or obstacle_to_planning(self._training)
        return self._obstacle

    def _begin_plan(self, known: KnownMemory) -> None:
        self.outcome = "plan"
        if self._code is not None:
            self._code.close()  # calls in the first steps have shown the code that was compiled earlier
        reason = "not all of them have room" if self._short else "offloaded model states may be moved"
        if held := self._training.offloader.host_bytes:
            reason += f". Until a plan is in force, those that are offloaded take {format_bytes(held)} of host memory"
        self._log(f"plans which saved tensors are kept, offloaded and recomputed: {reason}")
        meter = known.limit.meter
        options = PlanOptions(gpu_memory=f"{int(meter.limit())}B", warm_up=1)
        # The user has added no planner, and expects no metrics of one.
        self.cycle = PlanCycle(
            self._training,
            options,
            meter,
            logs_metrics=False,
            keeps_fitting=True,
            recompilation=self._recompilation,
        )
        self.cycle.recordable = self._batches

    def _keep_for_cuda_graphs(self) -> None:
        """Keeps all saved tensors from the second step on, which records the CUDA graphs. The first one warms them up.

        A graph writes its saved tensors to memory of its own in each step. They can't be offloaded, and a recorded
        graph expects that they stay alive as long as they did when it was recorded.
        """
        self.outcome = "keep"
        self._log(
            f"keeps all saved tensors on the {self._device}: compiled code records CUDA graphs "
            "(`mode='reduce-overhead'`), whose saved tensors can't be offloaded. Where memory is short, compile "
            "without that mode"
        )
        self._known = None
        offloader = self._training.offloader
        offloader.run(replace(offloader.policy, placement=KeepAll()))
        self._enable_hooks(False)

    def _end_plan_of_late_code(self, code: CompiledCode) -> None:
        """Ends the plan or checkpoints of units, as compiled code that is no unit runs under their modes."""
        self._obstacle = COMPILED
        code.forget(self._training.inform)
        self._training.inform(
            "offload='auto': compiled code that is no block of the model was called in a step that was recorded or "
            f"planned. From now on there is no plan, and saved tensors that have no room are offloaded ({BLOCKS})."
        )
        self._close_plan()
        self._begin()

    def _close_plan(self) -> None:
        cycle, self.cycle = self.cycle, None
        if cycle is not None:
            cycle.close()
            self._training.set_window(None)

    # ---- a micro-batch that ran out of memory ----

    def save_memory(self, part: str, note: str) -> None:
        """Prepares the second attempt of a micro-batch: units are checkpointed, other saved tensors are offloaded.

        Args:
            part: forward or backward, which has failed.
            note: a sentence for the log about state that is not restored.
        """
        offloader, known = self._training.offloader, self._known
        assert known is not None
        self._training.inform(
            f"offload='auto': the {self._device} has run out of memory in the {part} of a micro-batch, which is "
            f"run again with all saved tensors offloaded or recomputed. {note}"
        )
        self._proven.clear()
        self._ran_out = self._short = True
        if self.cycle is not None:
            self._failed_profiles += self.cycle.measuring
            self.cycle.run_out()
            if self._limited:
                known.limit.lower()
                self._limited = False  # its second attempt offloads all
            self._policy = offloader.policy
        offloader.begin_micro_batch()
        offloader.free_discarded()
        policy = replace(offloader.policy, window_bytes=0, hooks_enabled=True, mode=None)
        if self.cycle is None:
            known.limit.lower()
            known.limit.measure()
        else:
            policy = replace(policy, placement=OffloadAll(tuple(offloader.tiers)))
        offloader.run(policy)
        self._begin_checkpoints(known, again=True)
        if self._checkpoints is not None:
            self._checkpoints.short = True
            self._failed_checkpoints += self._gave_up
            if self._failed_checkpoints == MAX_FAILED_CHECKPOINTS:
                self._end_checkpoints()
                self._training.inform(
                    "offload='auto': checkpoints no unit from now on, as memory has run out with checkpointed units."
                )

    def restart_after_offload(self, part: str) -> None:
        """Prepares the third attempt of a micro-batch, for which all model states were offloaded.

        Args:
            part: forward or backward, which has failed.
        """
        shape, trained, begins_step = self._shape, self._trained, self._begins_step
        self._close_plan()
        self._begin()
        offloader = self._training.offloader
        self._training.inform(
            f"offload='auto': the {self._device} has run out of memory again in the {part} of a micro-batch, which "
            "is run again with its model states offloaded, "
            + ("too." if offloader.tiers else "which leave no room to offload saved tensors: all are kept.")
        )
        offloader.begin_micro_batch()
        if self._known is None:  # nothing more can be offloaded
            return
        self._shape, self._trained, self._begins_step = shape, trained, begins_step
        self._limited, self._at_boundary, self._ran_out = True, False, True
        self._apply_limit(self._known)
        self._known.limit.measure()
        self._begin_checkpoints(self._known, again=True)
        offloader.run(replace(offloader.policy, window_bytes=0))

    def _restore(self) -> None:
        """Puts the policy in force again that a second attempt has replaced."""
        policy, self._policy = self._policy, None
        if policy is not None:
            self._training.offloader.run(policy)

    def _plan_smaller(self, known: KnownMemory, cycle: PlanCycle) -> None:
        """Has steps after one that ran out of memory need less.

        If there is no smaller plan, or profiles have run out of memory too often, there is no plan until model states
        are offloaded (`restart_after_offload`).
        """
        if cycle.measuring:
            if self._failed_profiles < MAX_FAILED_PROFILES:
                return
            reason = "profiling needs more memory than there is"
        elif cycle.plan_smaller():
            return
        else:
            reason = (
                f"no plan needs less memory than one that has run out of it, or it would be slower than none. {SMALLER}"
            )
            if self._checkpoints is not None:  # states may have been moved since its hooks were registered
                self._checkpoints.close()
        self._gave_up = True
        self._close_plan()
        if self._checkpoints is not None and not self._checkpoints.modules:
            self._end_checkpoints()
        self._offload_excess(reason)
        offloader = self._training.offloader
        placement = OffloadExcess(tuple(offloader.tiers), known.limit)
        offloader.run(replace(offloader.policy, placement=placement, mode=None, hooks_enabled=True))

    # ---- helpers ----

    def _enable_hooks(self, enabled: bool) -> None:
        states, offloader = self._training.states, self._training.offloader
        enabled |= states is not None and bool(states.stores)  # offloaded weights need hooks
        if offloader.policy.hooks_enabled != enabled:
            offloader.run(replace(offloader.policy, hooks_enabled=enabled))

    def _offload_excess(self, reason: str) -> None:
        """Decides that there is no plan, for a reason."""
        self.outcome = "offload"
        if self._checkpoints is not None and self._checkpoints.modules:
            self._log(f"checkpoints units, and offloads other saved tensors that have no room, as {reason}")
        else:
            self._log(f"offloads the saved tensors that have no room, and recomputes nothing, as {reason}")

    def _log(self, text: str) -> None:
        if self.outcome not in self._logged:
            self._logged.add(self.outcome)
            self._training.inform(f"offload='auto': {text}.")


def _states_are_movable(training: Training) -> bool:
    """Returns whether model states are offloaded, and may be moved to other tiers."""
    owner = training.owner
    return owner is not None and training.states is not None and owner.can_move_states()
