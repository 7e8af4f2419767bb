"""Model states: weights, gradients, master weights and optimizer states of one model, off the device.

A step, as FSDP names its phases:

- pre-forward, post-forward: `ParamPrefetcher` makes a unit's weights resident around its forward (`unit_hooks`).
- pre-backward: a saved weight that backward unpacks makes its flat parameter resident.
- post-accumulate-grad: `GradientOffloader` copies a gradient to the host; `StepScheduler` submits the step of a flat
  parameter whose gradients are complete, and the CPU makes it while the device computes.
- end of backward, `optimizer.step`: the scale of the gradients is decided, and the remaining steps are submitted.

The next forward of a unit waits for the unit's own step. Small parameters are kept on the device, where the user's
optimizer steps them: the offloaded ones have no `.grad` while its `step` runs.

`steps/gradient_arrivals.py` follows a gradient from its hook to the stepped weight, call by call.

Each event of Lightning, of modules and of the user's optimizers has a method of `ModelStates`, which calls the pieces
in the right order. The state and the decisions are in the pieces: callers that need one piece alone take it from here.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_ssd import torch_internals as internals
from lightning_ssd.device import Worker
from lightning_ssd.interrupts import uninterrupted
from lightning_ssd.model_states.access import Access, GradDtype, GradientAccess, end_aliases
from lightning_ssd.model_states.checkpoints import ModelRestorer, StateDicts
from lightning_ssd.model_states.forwards import UnitHooks, renew_guards
from lightning_ssd.model_states.gradients import (
    Gradient,
    GradientOffloader,
    GradientPool,
    GradScaleDecision,
    add_check,
)
from lightning_ssd.model_states.journal import CommitRecord, Journal
from lightning_ssd.model_states.optimizers import (
    GenericOptimizer,
    WholeStep,
    check_state,
    guard_state,
    parameters_of,
    unscales_itself,
)
from lightning_ssd.model_states.placement import RankStates, Setup
from lightning_ssd.model_states.steps import (
    DeviceStates,
    GradientArrivals,
    GradientClipping,
    RankReduction,
    RankSteps,
    RunningStep,
    StepRecords,
    StepScheduler,
    hook_step,
    hook_zero_grad,
    keep_last,
    unscale_as_optimizer,
)
from lightning_ssd.model_states.stores import SpareMemory, StagedFlats, StagedState, summon
from lightning_ssd.model_states.units import FlatParameter, is_region
from lightning_ssd.model_states.weights import MasterWeights, OffloadedModel, ParamPrefetcher
from lightning_ssd.shutdown import Shutdown
from lightning_ssd.storage import Slab, commit
from lightning_ssd.uncopied import Uncopied

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StateBytes:
    """Memory of model states, in bytes.

    Attributes:
        device: budget for resident weights.
        allocated: host memory, gradients and staging included; second versions in `spare` are not.
        spare: host memory for second versions.
        ssd: scratch space.
    """

    device: int
    allocated: int
    spare: SpareMemory
    ssd: int

    @property
    def host(self) -> int:
        """Allocated host memory, including second versions."""
        return self.allocated + self.spare.reserved

    @property
    def host_limit(self) -> int:
        """Most host memory that may be allocated."""
        return self.allocated + self.spare.nbytes


class ModelStates(Uncopied):
    """Trains one model whose states are offloaded: the facade over the pieces that move and step its flat parameters.

    Duty: hooks the model and its optimizers, passes each event to the piece that has the state for it, and restores the
    model at the end. The pieces: `ParamPrefetcher` (weights on the device), `GradientOffloader` (gradients to the
    host), `StepScheduler` (optimizer steps), `Access` and `GradientAccess` (operators of user code), `StateDicts`
    (checkpoints).

    Threads: all methods and hooks run on the training thread, or on autograd's thread while the training thread waits
    in `backward`; `ParamPrefetcher.check_caller` refuses all others. Optimizer jobs and accumulations run on the thread
    of `worker`.

    Ownership: the model's parameters are views of their flat parameters from construction until `close` or `dissolve`,
    which make them whole on the CPU or return them. All objects of `offloaded` are owned.

    Attributes:
        masters: master weights of resident 16-bit parameters.
        records: records of `recover=True`.
        decision: the scale of each step.
        device_states: optimizer states of several ranks on this one's device; None: there are none.
        closed: whether threads and hooks have ended.

    Args:
        module: the model; its parameters outside of the flat parameters are on the device.
        offloaded: flat parameters of the model, whose stores have the model's weights.
        masters: master weights of resident parameters; owned.
        pool: host memory that gradients share; owned. None: each has its own.
        worker: runs optimizer jobs and accumulations; owned.
        nbytes: bytes of memory budgets and allocations.
        ranks: what several ranks share of the model. None: there is one rank.
        journal: records steps for `recover=True`; owned.
        recovered: last record of a killed run, whose values are in the stores of `offloaded`.
        undo: receives callbacks that end threads which are started here.
    """

    def __init__(
        self,
        module: nn.Module,
        offloaded: OffloadedModel,
        masters: MasterWeights,
        pool: GradientPool | None,
        worker: Worker,
        setup: Setup,
        nbytes: StateBytes,
        *,
        ranks: RankStates | None,
        journal: Journal | None,
        recovered: CommitRecord | None,
        undo: contextlib.ExitStack,
    ) -> None:
        self.offloaded = offloaded
        self.stores = offloaded.stores
        self.staging = offloaded.staging
        self.nbytes = nbytes
        self.recovered = recovered
        self.parts_of = setup.parts_of
        self.shares_gradients = setup.shares_gradients
        self._copies = copies = offloaded.copies
        self._masters = masters
        self.masters: Mapping[nn.Parameter, nn.Parameter] = masters.by_param
        self._pool = pool
        self._flat_of = {
            item.parameter: (flat, index) for flat in self.stores for index, item in enumerate(flat.param_views)
        }
        self._optimizers = offloaded.optimizers
        self._whole = setup.whole
        self._summoned = False
        self._renew_guards = partial(renew_guards, module)
        self._changed = False
        """Whether user code has changed weights since the present micro-batch began."""
        self.closed = False
        self._restorer = ModelRestorer(offloaded)
        self._handles: list[RemovableHandle] = []
        self._undo: list[Callable[[], None]] = []

        # Weights. `_staged` and `_prefetcher` call each other: a prefetch unstages values first, staging waits for
        # prefetches.
        self._staged = StagedFlats(
            self.stores,
            check_caller=lambda: self._prefetcher.check_caller(),
            drain=lambda flat: self.steps.drain_flat(flat),
            begin_change=self._begin_change,
            arrived=lambda flat: self._prefetcher.wait(flat),
            release=lambda flat: self._prefetcher.evict(flat),
            checkin=lambda flat, masters, loaded: self._checkin(flat, masters, loaded),
            on_ranks=ranks is not None,
        )
        self._prefetcher = ParamPrefetcher(
            [flat_params for _, flat_params in offloaded.units],
            self.stores,
            copies,
            nbytes.device,
            self._staged.unstage_for,
            self._staged.pull,
        )
        # Gradients.
        shared = {} if ranks is None else ranks.gradients
        slabs = {flat: one.copies[one.rank] for flat, one in shared.items()}
        if pool is None and ranks is None:
            slabs = {flat: Slab(flat.nbytes, pin=False) for flat in offloaded.flat_optimizers}
            commit(list(slabs.values()), pin=copies.device.type == "cuda")
        gradients = {flat: Gradient(flat, pool or slabs[flat], shared.get(flat)) for flat in offloaded.flat_optimizers}
        self.decision = GradScaleDecision(
            copies, clip=setup.config.clip, needs_norm=setup.needs_norm, loss_scaled=setup.loss_scaled
        )
        self.gradients = GradientOffloader(
            gradients,
            offloaded.groups,
            pool,
            self._prefetcher,
            copies,
            worker,
            self.decision,
            recorded=journal is not None,
            peers=None if ranks is None else ranks.peers,
        )
        # Steps.
        self.running = RunningStep(defer_to_user_hooks=setup.defer_to_user_hooks)
        self._clipping = GradientClipping(self.gradients, self.decision, self.running, setup)
        self.records = StepRecords(journal, self.stores, self.gradients)
        self._ranks = ranks
        self._last_micro_batch = setup.last_micro_batch
        self._reduction: RankReduction | None = None
        self._rank_steps: RankSteps | None = None
        self.device_states: DeviceStates | None = None
        if ranks is not None:
            others = [(name, one) for name, one in module.named_parameters() if one not in self._flat_of]
            self._reduction = RankReduction(ranks.ranks, others, module.buffers)
            self._rank_steps = RankSteps(ranks, self.stores, offloaded.flat_optimizers, self.gradients, copies, worker)
            undo.callback(self._rank_steps.close)
            self.device_states = self._rank_steps.device_states
        self.steps = StepScheduler(
            offloaded,
            self.gradients,
            self._prefetcher,
            self._staged,
            self.decision,
            worker,
            setup,
            self.records,
            self.running,
            self._clipping,
            self._rank_steps,
        )
        # User code.
        for parameter in self._flat_of:  # in plain training, Lightning zeroes the gradients of an earlier training
            parameter.grad = None
        self._grads = GradientAccess(
            gradients, self.gradients, lambda flat: self._clipping.apply(offloaded.groups[flat][0])
        )
        self._grad_dtype = GradDtype(self.stores, offloaded.groups)
        arrivals = GradientArrivals(
            offloaded,
            self._optimizers,
            self.gradients,
            self._grads,
            self._grad_dtype,
            self._prefetcher,
            self.steps,
            self.running,
            self._clipping,
        )
        self._access = Access(
            self.stores,
            self._prefetcher,
            self._staged,
            self._grad_dtype,
            self._grads,
            begin_change=self._begin_change,
            watched=self.running.defer_next,
        )
        self._grads.access = self._access
        self._hook_model(module)
        self._handles += arrivals.hook()
        stepped_flat = [optimizer for optimizer in self._optimizers if optimizer not in setup.whole]
        self._hook_optimizers(stepped_flat)
        self.state_dicts = StateDicts(
            module,
            self._staged,
            offloaded.flat_optimizers,
            self._flat_of,
            masters,
            stepped_flat,
            changing=self.records.drop,
            loading=None if ranks is None else partial(ranks.ranks.messages.exchange, "load"),
        )
        if recovered is None:
            self.state_dicts.adopt_states(stepped_flat)
        for optimizer in stepped_flat:
            # A dictionary, because states have the order of the parameters.
            stepped = {one: None for one in parameters_of(optimizer) if self._is_stepped_flat(one)}
            self._undo.append(guard_state(optimizer, stepped, self._has_state, self.state_dicts.copy_state))
        for flat in self.stores:  # user code's memory that parameters share has the values from before a checkpoint
            self._staged.push(flat)
        self._staged.unstage()
        self._access.open()  # last, so that parameters are ordinary after an error

    def _hook_model(self, module: nn.Module) -> None:
        """Hooks forwards."""
        renew_guards(module)
        self._undo.append(self._renew_guards)
        for flat in self.stores:
            flat.unshard = partial(self._prefetcher.unshard, flat)
        if is_region(module) and self.stores:
            log.warning(
                "%s is compiled as a whole, so that all its weights are fetched together. To have a few on the device "
                "at a time, compile its blocks (`block.compile()`) instead.",
                type(module).__name__,
            )

        hooks = UnitHooks(
            module,
            self.offloaded.units,
            self._flat_of,
            self._masters.by_param,
            self._prefetcher,
            self._access,
            summoned=lambda: self._summoned,
        )
        self._undo += hooks.register()

    def _hook_optimizers(self, stepped_flat: Sequence[Optimizer]) -> None:
        """Hooks optimizers; those in `stepped_flat` are stepped by flat parameters, the others whole."""
        for optimizer in stepped_flat:
            hooks = hook_step(optimizer, self._grads, self._begin_own_step, self.steps.closure, self.end_step)
            self._handles += hooks
            self._undo.append(keep_last(optimizer, hooks[0]))
        for optimizer in self._optimizers:
            if optimizer not in stepped_flat:
                self._undo.append(WholeStep(optimizer, self.full_grads).restore)
            self._undo += hook_zero_grad(optimizer, self._grads, self._zero_grad)

    def _is_stepped_flat(self, parameter: nn.Parameter) -> bool:
        return parameter in self._flat_of and self._flat_of[parameter][0] in self.offloaded.flat_optimizers

    def _has_state(self, parameter: nn.Parameter) -> bool:
        """Returns whether an offloaded parameter has an optimizer state; waits for its submitted step if that decides.

        Later steps are not waited for: with `recover=True`, each step is recorded with its optimizer's state dict.
        """
        flat, index = self._flat_of[parameter]
        optimizer, names = self.offloaded.flat_optimizers[flat], self.stores[flat].layout.state_names
        found = optimizer.has_state(index, names, running=True)
        if found is None:
            self.steps.drain_flat(flat)
            found = optimizer.has_state(index, names, running=False)
        return bool(found)

    # ---- a micro-batch ----

    def begin(self, kind: Literal["train", "evaluate"]) -> None:
        """Begins a micro-batch: a forward with a backward ("train") or without."""
        self._staged.unstage()
        self._grads.hidden = False  # after a step that failed
        self._changed = False
        if self._reduction is not None:
            self._reduction.begin_micro_batch()
        self._masters.sync_params()
        self._prefetcher.begin(kind)
        self._grad_dtype.begin_micro_batch()

    @property
    def can_run_again(self) -> bool:
        """Whether the present micro-batch may be run again: no gradient of it is stepped, or added to earlier ones.

        Nor has user code changed a weight.
        """
        backward = self.gradients.backward
        kept = backward.droppable or not backward.arriving
        return kept and not (self._changed or self._grad_dtype.summed_on_host)

    @property
    def speculates(self) -> bool:
        """Whether steps are made now before the norm of all gradients is known, in memory of a second version."""
        two_versions = any(store.layout.versions == 2 for store in self.stores.values())
        return two_versions and not self.decision.defers

    @property
    def gradients_are_hooked(self) -> bool:
        """Whether user code has registered hooks of gradients of offloaded parameters, beside the one of this class."""
        with internals.without_torch_function():
            return any([one._backward_hooks or len(one._post_accumulate_grad_hooks) > 1 for one in self._flat_of])

    @uninterrupted
    def end_backward(self, *, by_user: bool = False) -> None:
        """Ends a backward: the gradients that it has offloaded are stepped, or accumulated.

        Args:
            by_user: whether user code may have called it without Lightning; its gradients are about to be used.

        Raises:
            RuntimeError: user code has called it, and there are several ranks; or another rank has failed.
        """
        self.steps.end_backward(by_user=by_user)
        if self._reduction is not None and not by_user and self._last_micro_batch():
            self._reduction.reduce()

    # ---- an optimizer step ----

    def begin_step(self, optimizer: Optimizer) -> None:
        """Begins a step of `optimizer`, unless it has begun. Backward then submits steps of complete gradients."""
        self._prefetcher.check_caller()
        if self.running.optimizer is not optimizer:
            check_state(optimizer)
            self.state_dicts.before_step()
            self.steps.begin(optimizer)

    def begin_scaled_step(self, optimizer: Optimizer) -> None:
        """Begins a step of `optimizer` whose losses are scaled, before its backward if no user code may read gradients.

        Otherwise the optimizer's `step` begins it.
        """
        self.steps.defer_inexact_clipping()
        if not self.running.defer_to_user_hooks:
            self.begin_step(optimizer)

    def _begin_own_step(self, optimizer: Optimizer) -> None:
        """Begins the code of the optimizer's `step`; the strategy may have begun the step before."""
        if self.running.defer_to_user_hooks and unscales_itself(optimizer):
            self.end_backward(by_user=True)
            offloaded = {item.parameter for flat in self.offloaded.flat_optimizers for item in flat.param_views}
            if not unscale_as_optimizer(optimizer, offloaded):
                self.steps.skip(optimizer)
                return
        self.begin_step(optimizer)
        self.steps.note_options(optimizer)

    @uninterrupted
    def end_step(self, optimizer: Optimizer) -> None:
        """Ends the step of `optimizer` on the device. Jobs on the CPU continue."""
        if self.running.optimizer is optimizer:
            self.end_backward(by_user=True)
            self.steps.end()
            self._grad_dtype.end_step(optimizer)

    @uninterrupted
    def cancel_step(self, optimizer: Optimizer) -> None:
        """Ends a step of `optimizer` without a step of any parameter: `training_step` has skipped its last micro-batch.

        A `backward` that user code has called itself may have submitted steps, which can't be taken back: then it ends
        like others.
        """
        if self.running.optimizer is not optimizer:
            return
        if self.steps.has_submitted:
            self.end_step(optimizer)
            return
        self.steps.cancel()
        self._grad_dtype.end_step(optimizer)

    @uninterrupted
    def skip_step(self, optimizer: Optimizer) -> None:
        """Ends a step of `optimizer` that the loss scaler has skipped, without a call of `optimizer.step`."""
        if self.running.defer_to_user_hooks and optimizer not in self._whole:
            self.steps.skip(optimizer)
        else:
            self.end_step(optimizer)

    def unscale(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Divides the gradients of `optimizer` by the scale of `scaler`; one that is not finite skips the step.

        This does the same for offloaded gradients as `scaler.unscale_`, which is called for the others.
        """
        if optimizer in self._whole:
            with self.full_grads(optimizer):
                scaler.unscale_(optimizer)
            return
        with self._grads.hide():
            scaler.unscale_(optimizer)
        if not scaler.is_enabled():
            self.decision.reset_checks()
            return
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        if not self.running.defer_to_user_hooks:
            flats = [flat for flat, _ in self.gradients.of(optimizer)]
            if self._rank_steps is not None and not self._rank_steps.are_finite(flats):
                self.decision.note_not_finite()
            self.decision.merge_checks(found)
        else:
            self.end_backward(by_user=True)
            self._clipping.resume_stepped(optimizer)
            if not (norms := self._clipping.norms(optimizer)):
                return
            device = self._copies.device
            measured = torch.stack([norm.to(device) for norm in norms.values()]).tolist()
            large = [parameter for parameter, norm in zip(norms, measured, strict=True) if not math.isfinite(norm)]
            infinite = any([not self._is_finite(parameter) for parameter in large])
            add_check(found, torch.full((), float(infinite), device=device))
        self._clipping.unscale(optimizer, scaler, found)

    def _is_finite(self, parameter: nn.Parameter) -> bool:
        """Returns whether the gradient of an offloaded parameter is finite, whose norm may be infinite nevertheless."""
        flat, index = self._flat_of[parameter]
        assigned = self.gradients[flat].assigned
        gradient = assigned[index] if index in assigned else flat.param_views[index].of(self._grads.whole(flat, index))
        return bool(gradient.isfinite().all())

    def clip(self, optimizer: Optimizer, limit: float, algorithm: str) -> None:
        """Clips the gradients of `optimizer` as `torch.nn.utils.clip_grad_norm_` (or `_value_`) does.

        Args:
            algorithm: "norm" or "value".
        """
        clip = torch.nn.utils.clip_grad_norm_ if algorithm == "norm" else torch.nn.utils.clip_grad_value_
        optimizer = getattr(optimizer, "optimizer", optimizer)  # of Lightning's wrapper
        if optimizer in self._optimizers and self._clipping.is_known(optimizer, algorithm, limit):
            self.end_backward(by_user=True)
            with self._grads.hide():
                self._clipping.clip(optimizer, algorithm, limit)
            return
        parameters = (parameter for parameter in parameters_of(optimizer))  # torch warns of an empty generator
        if optimizer not in self._optimizers and not self._masters.by_param:
            # None of its parameters is offloaded. `full_grads` would stage and store frozen weights for nothing.
            clip(parameters, limit)
        else:
            self.steps.check_not_begun(optimizer)
            with self.full_grads(optimizer):
                clip(parameters, limit)

    def _zero_grad(self, optimizer: Optimizer, set_to_none: bool) -> None:
        """Drops the offloaded gradients of `optimizer`, or makes them zero."""
        self._prefetcher.check_caller()
        self.steps.check_may_drop(optimizer)
        self._grads.zero(optimizer, set_to_none)
        self._clipping.drop(optimizer)
        self.decision.reset_checks()

    # ---- whole weights and gradients, for user code ----

    @contextlib.contextmanager
    def full_grads(self, optimizer: Optimizer | None = None) -> Iterator[None]:
        """Gives every offloaded parameter its master weights as `.data` and its gradient as `.grad`, on the CPU.

        Changes count. Nested calls have no effect.

        Args:
            optimizer: an optimizer whose next step uses the gradients. Those that its last step has used, and
                `zero_grad` has not dropped, are given, too. None: such gradients are not given.
        """
        if self._summoned:
            yield
            return
        self._clipping.apply_all()
        with self.summon_full_params():
            self.gradients.accumulate_all()
            self.drain()
            if optimizer is not None:
                self._clipping.resume_stepped(optimizer)
            with self.gradients.as_grads():
                yield

    @contextlib.contextmanager
    def summon_full_params(self) -> Iterator[None]:
        """Makes every offloaded parameter a whole fp32 tensor on the CPU, its master weights.

        Changes count. Nested calls have no effect.

        Raises:
            RuntimeError: a step has begun in a backward that runs, or that has failed.
        """
        if self._summoned:
            yield
            return
        self._prefetcher.check_caller()
        for flat in self.stores:
            self._prefetcher.check(flat)
        self._staged.pull_all()
        self.drain()
        self._prefetcher.evict_all()
        self._renew_guards()
        with summon(self.stores, self._checkin, read_only=self._why_read_only):
            self._summoned = True
            try:
                with self._masters.summon():
                    yield
            finally:
                self._summoned = False
                self._renew_guards()

    @property
    def _why_read_only(self) -> str | None:
        """Why user code may not change weights, and the remedy, as the end of a message; None: it may."""
        if self.records.enabled:
            return "which `recover=True` can't repeat after a kill. Change them before `fit`, or set `recover=False`."
        return None

    def _checkin(self, flat: FlatParameter, masters: Tensor, loaded: StagedState | None = None) -> None:
        """Stores master weights of `flat` that user code may have changed, with several ranks at a later time.

        `loaded` as in `RankSteps.write`.
        """
        if self._rank_steps is None:
            self.stores[flat].checkin(masters)
        else:
            self._rank_steps.write(flat, masters, loaded)

    def _begin_change(self, flat: FlatParameter) -> None:
        """Prepares a change of weights of `flat` by user code.

        Raises:
            RuntimeError: weights may not change, or the flat parameter's step has begun.
        """
        if self._why_read_only is not None:
            raise RuntimeError(f"weights of {flat.name} are changed outside of the optimizer, {self._why_read_only}")
        self._prefetcher.check(flat)
        self._changed = True

    # ---- counters and sizes ----

    @property
    def parameters(self) -> set[nn.Parameter]:
        """The offloaded parameters."""
        return set(self._flat_of)

    @property
    def weight_wait_seconds(self) -> float:
        """Seconds for which the host has waited in forwards and backwards until copies of weights were issued."""
        return self._prefetcher.wait_seconds

    @property
    def gradient_bytes(self) -> int:
        """Most bytes of the device for gradients that the devices of several ranks sum."""
        return 0 if self._rank_steps is None else self._rank_steps.device_bytes

    # ---- the end ----

    def drain(self) -> None:
        """Returns when every submitted step is committed or skipped, and its values are stored.

        Raises:
            Exception: the error of a step.
        """
        self._staged.unstage()
        self.steps.drain()

    def end_generic_steps(self) -> None:
        """Returns when no step runs code of the optimizer's class, which steps of Adam, AdamW and SGD do not.

        Raises:
            Exception: the error of a step.
        """
        if any([isinstance(one, GenericOptimizer) for one in self.offloaded.flat_optimizers.values()]):
            self.drain()

    def finish(self) -> None:
        """Drains, and returns when the last record is written.

        Raises:
            Exception: the error of a step, or of the record.
        """
        self.drain()
        self.records.wait()

    def close(self, failure: BaseException | None = None) -> None:
        """Makes the parameters whole on the CPU, and ends threads and hooks.

        Args:
            failure: error that has ended the training. It gets a note if the weights are not those of one step. The
                last record, if there is one, and its values are kept on the SSDs for the next run.

        Raises:
            Exception: without `failure`, if a step failed or its result could not be read; with a note as above. The
                last record is kept then, too.
        """
        if self.closed:
            return
        shutdown = Shutdown(failure)
        if failure is None:
            shutdown.run(self._staged.pull_all)
            shutdown.run(self.finish)
        if self._ranks is not None and shutdown.failure is not None:
            self._ranks.ranks.messages.fail(shutdown.failure)  # other ranks wait, and jobs of this one for them
        if self._rank_steps is not None:
            shutdown.run(self._rank_steps.fetches.end)
        shutdown.run(self._end)
        self._restore_model(shutdown)
        if self._ranks is not None and shutdown.failure is not None:
            self._ranks.ranks.messages.fail(shutdown.failure)
        shutdown.raise_failure()

    def dissolve(self) -> tuple[OffloadedModel, Mapping[nn.Parameter, Tensor]]:
        """Ends threads and hooks, and returns the offloaded model, whose parameters are still views of flat parameters.

        Returns:
            The offloaded model, and the master weights of 16-bit parameters on the device.

        Raises:
            Exception: the error of a step; the model is restored then.
        """
        assert not self.records.enabled, "flat parameters of a recorded run don't change"
        assert self._ranks is None, "flat parameters of several ranks don't change"
        self._staged.pull_all()
        self.drain()
        self.state_dicts.before_step()
        self._prefetcher.evict_all()
        self._masters.sync()
        for store in self.stores.values():
            store.buffers.drop_second()
        masters = {parameter: master.data for parameter, master in self._masters.by_param.items()}
        shutdown = Shutdown()
        shutdown.run(self._end)
        if shutdown.failure is not None:
            self._restore_model(shutdown)
        shutdown.raise_failure()
        return self.offloaded, masters

    def _end(self) -> None:
        """Ends threads and hooks, and frees all memory but the stored values.

        Raises:
            Exception: the first error; all has ended.
        """
        self.closed = True
        shutdown = Shutdown()
        shutdown.run(self.state_dicts.remove)
        for handle in self._handles:
            handle.remove()
        for flat in self.stores:
            flat.unshard = flat.refuse_unshard
        for undo in reversed(self._undo):  # some wrap the same attribute
            shutdown.run(undo)  # before parameters are ordinary ones, as interrupted calls of modules end now
        self._access.close()
        shutdown.run(self.decision.fail)
        shutdown.run(self._copies.drain)
        shutdown.run(self.records.close)
        shutdown.run(self.steps.close)
        for flat in self.stores:
            shutdown.run(self._prefetcher.evict, flat)
        if self._ranks is not None:
            shutdown.run(self._ranks.close_peers)
        shutdown.run(self.gradients.free)  # before the whole weights need room
        if self._pool is not None:
            shutdown.run(self._pool.close)
        shutdown.run(self._masters.close)
        shutdown.run(self.decision.close)
        shutdown.raise_failure()

    def _restore_model(self, shutdown: Shutdown) -> None:
        """Restores the parameters, moves optimizer states to the user's optimizers, and frees the stored values."""
        private: dict[FlatParameter, Callable[[Tensor], Tensor | None]] = {}
        if self._ranks is not None and shutdown.failure is None:  # all owners have made the last steps
            shutdown.run(self._ranks.free_gradients)
            private = {flat: self._ranks.ranks.memory[owner].private for flat, owner in self._ranks.owners.items()}
        # Only after the weights are restored, the journal says whether the next run needs the states.
        self._restorer.restore_parameters(
            shutdown, self.steps.history.revert_partial_steps(), hand_over=not self.records.enabled, private=private
        )
        for parameter in self._flat_of:
            shutdown.run(end_aliases, parameter)
        kept = self.records.end(shutdown)
        if self.records.enabled:
            self._restorer.hand_over(kept=kept)
        shutdown.run(self._copies.close)
        if self.staging is not None:
            shutdown.run(self._restorer.close_scratch, self.staging, kept=kept)
