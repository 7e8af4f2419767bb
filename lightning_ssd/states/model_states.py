"""Weights, gradients and optimizer states of one model out of the device's memory.

One step: a unit's weights are fetched around its forward and backward (`stream`), its gradients leave as they appear
(LoHan's active gradient offloading), and when the last one of a flat has landed its optimizer step runs on the CPU
while the device goes on (`stepper`). The next forward of a unit waits for that unit's step alone. Parameters that stay
on the device (small ones) are stepped by the user's optimizer as ever: those that have left have no `.grad` when its
`step` looks.

Threads: the training thread and, while it waits in `backward`, autograd's threads call in here, one at a time; the
stepper's thread runs what `_submit_sum` and `_launch` hand to it, with the buffers that these name; completion and
I/O threads only move bytes and futures.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_ssd.device import CopyEngine, Mark, WorkCounter, Worker, all_of, finished, then
from lightning_ssd.spans import wait_for
from lightning_ssd.states.access import Access
from lightning_ssd.states.buffers import StateStaging
from lightning_ssd.states.compile import around_calls, compiled_regions, is_compiled
from lightning_ssd.states.ending import Ending
from lightning_ssd.states.flat import FlatParameter
from lightning_ssd.states.grad_scale import GradScaleDecision
from lightning_ssd.states.gradient import Gradient, GradientPool, GradientState
from lightning_ssd.states.gradient_access import GradientAccess
from lightning_ssd.states.home import Home
from lightning_ssd.states.journal import CommitRecord, Journal
from lightning_ssd.states.left import LeftStates
from lightning_ssd.states.lent_weights import LentWeights
from lightning_ssd.states.masters import MasterWeights
from lightning_ssd.states.optimizer_state import check_state, guard_state
from lightning_ssd.states.optimizers import FlatOptimizer, WholeOptimizer, parameters_of, zeroes_otherwise
from lightning_ssd.states.parameter import hook_gradient, ordinary
from lightning_ssd.states.plain_data import PlainData
from lightning_ssd.states.prefetcher import ParamPrefetcher
from lightning_ssd.states.settings import describe
from lightning_ssd.states.shared_memory import SharedMemory
from lightning_ssd.states.staged import StagedFlats
from lightning_ssd.states.state_dicts import StateDicts
from lightning_ssd.states.step import OptimizerStep
from lightning_ssd.states.whole_step import WholeStep
from lightning_ssd.storage import IOStats
from lightning_ssd.types import Clip, Overlap

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What is left of model states whose hooks and threads have ended: others are made of it.

    Attributes:
        units: as in `ModelStates`.
        homes: as in `ModelStates`; the parameters point to their flats.
        rules: as in `ModelStates`.
        groups: as in `ModelStates`.
        copies: as in `ModelStates`.
        scratch: as in `ModelStates`.
        masters: of parameters that stay on the device in 16 bits, their master weights.
    """

    units: Sequence[tuple[Sequence[nn.Module], Sequence[FlatParameter]]]
    homes: Mapping[FlatParameter, Home]
    rules: Mapping[FlatParameter, FlatOptimizer]
    groups: Mapping[FlatParameter, tuple[Optimizer, int]]
    copies: CopyEngine
    scratch: StateStaging | None
    masters: Mapping[nn.Parameter, Tensor]


@dataclass(frozen=True)
class StepTerms:
    """How the steps of a training are made.

    Attributes:
        overlap: "none": a step's jobs run when backward has ended, and the step waits for them. "naive": a flat's job
            reads, steps and writes back before the next begins (LoHan's figure 3b). "optimized": the three overlap.
        gated: whether a step needs to know all gradients before it is made: their norm, which clips them, or whether
            all are finite. Jobs wait for that.
        clip_value: what elements of gradients are clamped to in every step.
        scaled: whether losses are scaled, and a step is skipped if a gradient is not finite.
        clip: "deferred": gated jobs wait. "speculative": where a home has two slots they are made at once, with what
            the factor most likely is, and made again if it was not. "auto": that, when it is seldom wrong.
        hold: whether user code may look at gradients or settings between backward and step: nothing begins earlier.
        whole: optimizers that are stepped whole (see `WholeStep`); `hold` is set if there are any.
    """

    overlap: Overlap
    gated: bool
    clip_value: float | None
    scaled: bool
    clip: Clip
    hold: bool
    whole: Sequence[Optimizer] = ()


class ModelStates:
    """Moves and steps the flats of one model.

    Args:
        module: the model; its parameters outside the flats are on the device.
        units: of each unit, the modules whose forward needs it, and its flats.
        homes: where each flat lives; filled with its weights.
        rules: how each flat is stepped; none for those without gradients.
        groups: of each flat with a rule, its optimizer and the index of its parameter group.
        masters: of parameters that stay on the device; owned.
        copies: copies of the device; owned.
        landing: memory that gradients land in; owned. None: each flat has its own.
        scratch: what the homes on SSDs share, if there are any; owned.
        terms: how steps are made.
        budget: bytes of the device that fetched weights may take.
        host_bytes: bytes of host memory that everything takes, for whoever shares a budget with it.
        ssd_bytes: bytes on SSDs.
        journal: where steps are recorded, if a killed run is to be taken up; owned.
        recovered: what such a run recorded last, which the homes and rules have taken over.
    """

    #: Bytes of gradients that may be on their way out at once.
    WINDOW = 256 * 2**20

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[tuple[Sequence[nn.Module], Sequence[FlatParameter]]],
        homes: Mapping[FlatParameter, Home],
        rules: Mapping[FlatParameter, FlatOptimizer],
        groups: Mapping[FlatParameter, tuple[Optimizer, int]],
        masters: MasterWeights,
        copies: CopyEngine,
        scratch: StateStaging | None,
        landing: GradientPool | None,
        terms: StepTerms,
        *,
        budget: int,
        host_bytes: int,
        ssd_bytes: int,
        journal: Journal | None = None,
        recovered: CommitRecord | None = None,
    ) -> None:
        self.recovered = recovered
        self.units = units
        self.homes = homes
        self.host_bytes = host_bytes
        self.ssd_bytes = ssd_bytes
        self.rules = rules
        self._masters = masters
        self._groups = groups
        self._copies = copies
        self.scratch = scratch
        self._overlap = terms.overlap
        self.hold = terms.hold
        """Whether user code may look at gradients between backward and step, so that no step begins earlier."""
        self._watched = terms.hold
        """The same from the next step on."""
        self._clip_value = terms.clip_value
        self.weight_room_bytes = budget
        self._staged = StagedFlats(
            homes, self._drain_flat, self._begin_change, arrived=lambda flat: self._stream.wait(flat)
        )
        self._stream = ParamPrefetcher(
            [flats for _, flats in units], homes, copies, budget, self._staged.unstage, self._staged.pull
        )
        self._order = {flat: index for index, (_, flats) in enumerate(units) for flat in flats}
        self._gradients = {flat: Gradient(flat, pin=copies.device.type == "cuda", memory=landing) for flat in rules}
        self._landing = landing
        self._expected: dict[tuple[FlatParameter, tuple[bool, ...]], int] = {}
        """Landings of a flat in its last backward, by which of its parameters wanted a gradient."""
        self._leaving: deque[tuple[Tensor, Mark]] = deque()
        """Gradients on the device until their copies out were made."""
        self._leaving_bytes = 0
        self._launched: dict[FlatParameter, Future[None]] = {}
        """Steps that have begun since the last `optimizer.step`."""
        self._before: dict[FlatParameter, int] = {}
        """Of flats whose step has begun since then, how many counted before."""
        self._last: dict[FlatParameter, int] = {}
        """The same of the last `optimizer.step`."""
        self._committed: Future[None] = finished(None)
        """Done when the last step counts in all flats that have two slots: the next one overwrites the one before."""
        self._journal = journal
        self._recorded: Future[None] = finished(None)
        """Done when the last record is written: what it says counts is overwritten by the step after it."""
        self._unrecorded: dict[FlatParameter, Future[None]] = {}
        """Steps that are in no record, nor in one that is to be written."""
        self._sums: dict[FlatParameter, Future[None]] = {}
        self._norms: dict[nn.Parameter, Tensor] = {}
        self._stepping: Optimizer | None = None
        self._gate = GradScaleDecision(copies, clip=terms.clip, gated=terms.gated, scaled=terms.scaled)
        self._lent = False
        self._closed = False
        self._left = LeftStates()
        self._stepped = WorkCounter(0, 0.0)
        """Set, and whole, by the stepper's thread alone: any may read it."""
        self._stepper = Worker("stepper")  # after all that may find no memory: its thread would stay
        self._where = {item.parameter: (flat, index) for flat in homes for index, item in enumerate(flat.slices)}
        for parameter in self._where:  # of a training before: Lightning zeroes it, and autograd would add to it
            parameter.grad = None
        self._shown = GradientAccess(self._gradients, self._submit_sum, self._gradient_changed)
        for flat in homes:
            flat.fetch = partial(self._stream.want, flat)
        self._access = Access(
            homes,
            self._stream,
            self._staged,
            begin_change=self._begin_change,
            grad_of=self._shown.get,
            set_grad=self._shown.set,
            add_grad=self._shown.add,
            watched=self._watch,
        )
        self._shown.access = self._access
        self._handles: list[RemovableHandle] = []
        self._restore: list[Callable[[], None]] = []
        if is_compiled(module) and homes:
            log.warning(
                "%s is compiled as a whole, so that all its weights are fetched together. To have a few on the device "
                "at a time, compile its blocks (`block.compile()`) instead.",
                type(module).__name__,
            )
        for region in compiled_regions(module):
            self._hook_region(region)
        for index, (modules, flats) in enumerate(units):
            if flats:
                self._hook_unit(index, modules)
        for flat in homes:
            for index, item in enumerate(flat.slices):
                hook = partial(self._landed, flat, index) if flat in rules else partial(self._not_stepped, item.name)
                self._handles.append(hook_gradient(item.parameter, hook))
        optimizers = list({id(optimizer): optimizer for optimizer, _ in groups.values()}.values())
        self._optimizers = optimizers
        of_flats = [optimizer for optimizer in optimizers if optimizer not in terms.whole]
        """Those whose flats are stepped one by one."""
        for optimizer in of_flats:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        for optimizer in optimizers:
            if optimizer in terms.whole:
                self._restore.append(WholeStep(optimizer, self.full_grads).restore)
            self._watch_zero_grad(optimizer)
        self.state_dicts = StateDicts(
            module,
            self._staged,
            rules,
            self._where,
            masters,
            of_flats,
            release=self._stream.release,
            changing=self.forget_record,
        )
        if recovered is None:
            self.state_dicts.adopt_states(of_flats)
        stepped = {item.parameter for flat in rules for item in flat.slices}
        self._restore += [guard_state(optimizer, stepped) for optimizer in of_flats]
        for flat in homes:  # tensors from before share the values that were loaded into the homes
            self._staged.push(flat)
        self._staged.unstage()
        self._access.open()  # at the end: an error before leaves ordinary parameters behind

    # ---- a micro-batch ----

    def begin(self, kind: Literal["train", "evaluate"]) -> None:
        """A forward begins, with a backward ("train") or without."""
        self._staged.unstage()
        self._shown.hide(False)  # a step that failed
        self._masters.follow()
        self._stream.begin(kind)

    def end_backward(self) -> None:
        """A backward has ended: what has landed is stepped, or summed up."""
        while self._leaving:
            self._let_go()
        for flat, gradient in self._gradients.items():
            if gradient.landings:
                self._expected[flat, _wants(flat)] = gradient.landings
                gradient.landings = 0
            if any(gradient.landed):
                now = self._stepping is not None and not self.hold and self._groups[flat][0] is self._stepping
                if now and not flat.shared:
                    self._launch(flat)
                else:
                    self._submit_sum(flat)

    def io_stats(self) -> IOStats | None:
        """Returns what was written to SSDs and read from them; None: nothing is there."""
        return None if self.scratch is None else self.scratch.store.stats()

    def stepped(self) -> WorkCounter:
        """Returns what the CPU has stepped so far."""
        return self._stepped

    @property
    def parameters(self) -> set[nn.Parameter]:
        """The parameters that have left the device."""
        return set(self._where)

    @property
    def groups(self) -> Mapping[FlatParameter, tuple[Optimizer, int]]:
        """Of each flat that is stepped, its optimizer and the index of its parameter group."""
        return self._groups

    @property
    def stepping(self) -> bool:
        """Whether an optimizer's step has begun, and not ended."""
        return self._stepping is not None

    @property
    def recorded(self) -> bool:
        """Whether steps are recorded, so that a killed run can go on."""
        return self._journal is not None

    @property
    def masters(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """Of parameters that stay on the device in 16 bits, their master weights."""
        return self._masters.of

    @property
    def unrecorded(self) -> bool:
        """Whether a step was made since the last record, and there is a journal."""
        return bool(self._unrecorded)

    def record(self, rest: Callable[[], PlainData]) -> None:
        """Has a record written of the steps that have begun; the next ones wait for it.

        Args:
            rest: returns what else the next run needs, on the CPU; called on another thread.
        """
        assert self._journal is not None
        for flat, gradient in self._gradients.items():
            if flat not in self._unrecorded and (gradient.summing or any(gradient.landed)):
                raise RuntimeError(
                    f"{flat.name} keeps gradients from one batch to the next while others are stepped, and "
                    "`recover=True` does not record them. Call `zero_grad` of its optimizer, too, or set "
                    "`recover=False`."
                )
        needed = [then(self._unrecorded.get(flat, finished(None)), home.written) for flat, home in self.homes.items()]
        self._unrecorded = {}
        self._recorded = self._journal.write([self._recorded, *needed], rest)

    def forget_record(self) -> None:
        """What a record says is about to be changed: a run that is killed before the next one begins anew."""
        if self._journal is not None:
            wait([self._recorded])
            self._journal.forget()

    def drain(self) -> None:
        """Returns when every step that has begun is made.

        Raises:
            Exception: what went wrong in one.
        """
        self._staged.unstage()
        for gradient in self._gradients.values():
            gradient.settled.result()
        for home in self.homes.values():
            home.drain()

    def clip(self, optimizer: Optimizer, limit: float, algorithm: str) -> None:
        """Clips the gradients of `optimizer` as `torch.nn.utils.clip_grad_norm_` (or `_value_`) does.

        Args:
            optimizer: whose parameters.
            limit: the largest norm, or value.
            algorithm: "norm" or "value".
        """
        if optimizer not in self._optimizers and not self._masters.of:
            # None of its parameters is offloaded: the frozen weights of others would be staged and stored for nothing.
            clip = torch.nn.utils.clip_grad_norm_ if algorithm == "norm" else torch.nn.utils.clip_grad_value_
            clip(parameters_of(optimizer), limit)
            return
        early = self._stepping is optimizer and not self.hold
        if early and algorithm == "norm" and self._gate.gated:
            self._clip_by_norm(optimizer, limit)
            return
        if early and algorithm == "value" and limit == self._clip_value:
            # Of what has left, the jobs do it.
            with self._shown.hidden():
                parameters = [parameter for parameter in parameters_of(optimizer) if parameter.grad is not None]
                if parameters:
                    torch.nn.utils.clip_grad_value_(parameters, limit)
            return
        with self.full_grads():
            parameters = parameters_of(optimizer)
            if algorithm == "norm":
                torch.nn.utils.clip_grad_norm_(parameters, limit)
            else:
                torch.nn.utils.clip_grad_value_(parameters, limit)

    @contextlib.contextmanager
    def full_grads(self) -> Iterator[None]:
        """Gives every parameter that has left its master weights as `.data` and its gradient as `.grad`, on the CPU.

        What is changed there counts. Nested calls are the outermost one.
        """
        if self._lent:
            yield
            return
        with self.summon_full_params():
            for flat, gradient in self._gradients.items():
                if any(gradient.landed):
                    self._submit_sum(flat)
            self.drain()
            lent = [
                (item, gradient, index)
                for flat, gradient in self._gradients.items()
                for index, item in enumerate(flat.slices)
            ]
            for gradient in self._gradients.values():
                gradient.fold()
            for item, gradient, index in lent:
                if gradient.summed[index]:
                    item.parameter.grad = item.of(gradient.accumulated())
            try:
                yield
            finally:
                for item, gradient, index in lent:
                    grad, item.parameter.grad = item.parameter.grad, None
                    if grad is not None or gradient.summed[index]:
                        gradient.states[index] = GradientState.NONE if grad is None else GradientState.PRESENT
                    gradient.summed[index] = grad is not None
                    gradient.summing = any(gradient.summed)
                    if grad is not None and grad.data_ptr() != item.of(gradient.accumulated()).data_ptr():
                        item.of(gradient.accumulated()).copy_(grad)

    @contextlib.contextmanager
    def summon_full_params(self) -> Iterator[None]:
        """Makes every parameter that has left a whole fp32 tensor on the CPU, its master weights.

        What is changed there counts. Nested calls are the outermost one.
        """
        if self._lent:
            yield
            return
        self._pull_all()
        self.state_dicts.before_change()
        self.drain()
        self._stream.release_all()
        lent = {flat: LentWeights(flat, home.borrow()) for flat, home in self.homes.items()}
        self._lent = True
        try:
            for weights in lent.values():
                weights.lend()
            with self._masters.lend():
                yield
        finally:
            self._lent = False
            ending = Ending()
            for weights in lent.values():
                ending.run(weights.take_back)
            ending.raise_failure()
            for flat, weights in lent.items():
                masters = weights.masters
                if self._journal is None:
                    self.homes[flat].restore(masters)
                elif not self.homes[flat].holds(masters):
                    raise RuntimeError(
                        f"a hook changed weights of {flat.name}, which `recover=True` can't "
                        "repeat after a kill. Change them elsewhere, or set `recover=False`."
                    )

    def _pull_all(self) -> None:
        """Takes over what user code has written to memory that it shares with parameters."""
        for flat in self.homes:
            self._staged.pull(flat)

    def finish(self) -> None:
        """Returns when every step that has begun is made, its bytes are where they belong, and its record is written.

        Raises:
            Exception: what went wrong in one.
        """
        self.drain()
        self._recorded.result()

    def close(self, failure: BaseException | None = None) -> None:
        """Gives the parameters back, whole and on the CPU, and ends threads and hooks.

        Args:
            failure: what training has failed with. It gets a note if the weights are not those of one step; the last
                record, if there is one, and what it names stay on the SSDs for the next run.

        Raises:
            Exception: without `failure`: a step was not made, or its result could not be read; with a note as above.
                The last record stays then, too.
        """
        if self._closed:
            return
        ending = Ending(failure)
        if failure is None:
            ending.run(self._pull_all)
            ending.run(self.finish)
        ending.run(self._end)
        self._give_up(ending)
        ending.raise_failure()

    def _give_up(self, ending: Ending) -> None:
        """Gives back the parameters, and the memory of the homes."""
        failed = self._give_back(ending)
        kept = False
        if self._journal is not None:
            if ending.failure is None:  # before the bytes that it names go
                ending.run(self._journal.forget)
            kept = self._journal.written
            for flat, home in self.homes.items():
                self._give_states_back(flat, home, failed.get(flat), kept=kept)
        ending.run(self._copies.close)
        if self.scratch is not None:
            ending.run(self._let_go_of_scratch, kept=kept)

    @property
    def closed(self) -> bool:
        """Whether threads and hooks have ended."""
        return self._closed

    @property
    def accumulating(self) -> bool:
        """Whether there are gradients that no step has used."""
        return any(gradient.summing or any(gradient.landed) for gradient in self._gradients.values())

    def dissolve(self) -> Parts:
        """Ends threads and hooks, and returns what others are made of; no step is made by halves.

        Raises:
            Exception: what went wrong in a step.
        """
        assert self._journal is None, "a run that is recorded stays as it is"
        self._pull_all()
        self.drain()
        self.state_dicts.before_change()
        self._stream.release_all()
        self._masters.adopt()
        masters = {parameter: master.data for parameter, master in self._masters.of.items()}
        ending = Ending()
        ending.run(self._end)
        if ending.failure is not None:
            self._give_up(ending)
        ending.raise_failure()
        return Parts(self.units, self.homes, self.rules, self._groups, self._copies, self.scratch, masters)

    def _end(self) -> None:
        """Ends threads and hooks, and gives back all memory but that of the homes.

        Raises:
            Exception: the first error; all has ended.
        """
        self._closed = True
        ending = Ending()
        ending.run(self.state_dicts.remove)
        for handle in self._handles:
            handle.remove()
        for flat in self.homes:
            flat.fetch = flat.refuse_fetch
        self._access.close()
        for restore in reversed(self._restore):  # some wrap the same attribute
            restore()
        ending.run(self._gate.shut)
        ending.run(self._copies.drain)
        if self._journal is not None:
            ending.run(wait, [self._recorded])
            ending.run(self._journal.close)
        ending.run(wait, [gradient.settled for gradient in self._gradients.values()])  # steps that have begun are made
        ending.run(self._stepper.close)
        for flat in self.homes:
            ending.run(self._stream.release, flat)
        for gradient in self._gradients.values():  # before the weights need room
            ending.run(gradient.free)
        if self._landing is not None:
            ending.run(self._landing.close)
        ending.run(self._masters.close)
        ending.run(self._gate.close)
        ending.raise_failure()

    def _let_go_of_scratch(self, *, kept: bool) -> None:
        assert self.scratch is not None
        if self._left.on_ssd and not kept:
            self._left.blobs = self.scratch.detach()
        else:
            self.scratch.close(remove=not kept)

    # ---- weights ----

    def _hook_unit(self, index: int, modules: Sequence[nn.Module]) -> None:
        def before() -> None:
            if not self._lent:
                self._stream.enter(index)

        def after() -> None:
            if not self._lent:
                self._stream.exit(index)

        for module in modules:
            self._restore.append(around_calls(module, before, after))

    def _hook_region(self, region: nn.Module) -> None:
        """Has calls of a compiled module find ordinary parameters, whose weights are on the device."""
        parameters = [parameter for parameter in region.parameters() if parameter in self._where]
        mastered = [parameter for parameter in region.parameters() if parameter in self._masters.of]
        if not parameters and not mastered:
            return
        running: list[contextlib.ExitStack] = []
        """One for each call that is under way: a region may be called inside its own backward, to recompute."""

        def before() -> None:
            with contextlib.ExitStack() as stack:
                if not self._lent:
                    flats = dict.fromkeys(self._where[parameter][0] for parameter in parameters)
                    stack.enter_context(self._stream.hold(flats, record=True))
                    stack.enter_context(self._access.ordinary(parameters))
                    stack.enter_context(ordinary(mastered))
                running.append(stack.pop_all())

        def after() -> None:
            running.pop().close()

        self._restore.append(around_calls(region, before, after))

    def _give_back(self, ending: Ending) -> dict[FlatParameter, Exception]:
        """Makes the parameters whole on the CPU, as the last step that was made left them.

        Without a journal, which says whether they are the next run's, the optimizer states, too.

        Args:
            ending: its failure gets a note if the weights are not those of one step.

        Returns:
            Of flats whose last step was not made, why.
        """
        ahead: list[str] = []
        for begun, ended in ((self._before, False), (self._last, True)):
            ahead += self._take_back_half(begun, ended=ended)
        lost: list[str] = []
        failed: dict[FlatParameter, Exception] = {}
        for flat, home in self.homes.items():
            try:
                home.drain()
            except Exception as error:  # a step that was not made; its weights are those before it
                failed[flat] = error
            if (unread := home.give_back()) is not None:
                ending.run(_raise, unread)
                lost.append(flat.name)
            if self._journal is None:
                self._give_states_back(flat, home, failed.get(flat), kept=False)
            home.free_host_memory()  # at once: both together may have no room
        notes = [f"these weights could not be read, and are NaN now: {describe(lost)}"] if lost else []
        if ahead:
            notes.append(f"the weights are not those of one step: one ahead of the others are {describe(ahead)}")
        if ending.failure is not None:
            for note in notes:
                log.error("%s", note)
                ending.failure.add_note(f"After that, {note}.")
        return failed

    def _give_states_back(self, flat: FlatParameter, home: Home, failed: Exception | None, *, kept: bool) -> None:
        """Gives the user's optimizer what a checkpoint that is saved from now on is to have of it."""
        if flat not in self.rules or isinstance(self.rules[flat], WholeOptimizer):
            return
        optimizer, _ = self._groups[flat]
        if failed is not None:
            self._left.refuse(home, optimizer, f"a step of it failed ({failed}). Save before that happens.")
        elif kept:
            self._left.refuse(home, optimizer, "they are kept for the next run, which goes on from them by itself")
        else:
            try:
                self._left.give(home, self.rules[flat], optimizer)
            except Exception as error:  # such as too little memory: the other flats are given back all the same
                self._left.refuse(home, optimizer, str(error))

    def _take_back_half(self, begun: Mapping[FlatParameter, int], *, ended: bool) -> list[str]:
        """Takes a step back that was not made everywhere, where it can be: half of a step is none.

        Args:
            begun: of the flats whose step has begun, how many steps counted before.
            ended: whether parameters on the device, if they have steps, have made theirs.

        Returns:
            What has made the step all the same, by name.
        """
        homes = {flat: self.homes[flat] for flat in begun}
        counting = [flat for flat, home in homes.items() if home.steps > begun[flat]]
        if not counting:
            return []
        if ended and len(counting) == len(begun) and not any(home.written().exception() for home in homes.values()):
            return []
        made = [flat for flat in counting if homes[flat].layout.slots == 1]
        for flat in counting:
            if flat not in made:
                homes[flat].revert()
                self.rules[flat].revert()
        on_device = self._steps_on_device
        if len(made) == (len(begun) if ended else len(self.rules)) and on_device == (ended and on_device):
            return []  # all of it, with the values of one-slot flats that were not written lost
        return [flat.name for flat in made] + ["parameters that stay on the device"] * (ended and on_device)

    @property
    def _steps_on_device(self) -> bool:
        """Whether there are parameters that the user's optimizers step on the device."""
        optimizers = {id(optimizer): optimizer for optimizer, _ in self._groups.values()}.values()
        return any(
            parameter.requires_grad and parameter not in self._where
            for optimizer in optimizers
            for parameter in parameters_of(optimizer)
        )

    # ---- gradients ----

    def _watch_zero_grad(self, optimizer: Optimizer) -> None:
        """Makes torch's own `zero_grad` of the optimizer drop the gradients of a flat together.

        One that other code has put in its place drops them where it sets `Tensor.grad`, and only those.
        """
        if zeroes_otherwise(optimizer):
            return
        zero_grad = optimizer.zero_grad

        def forget_and_zero_grad(set_to_none: bool = True) -> None:
            self._shown.zero(self._groups, optimizer, set_to_none)
            self._gate.forget()
            with self._shown.hidden():
                zero_grad(set_to_none)

        optimizer.zero_grad = forget_and_zero_grad  # type: ignore[method-assign]
        self._restore.append(partial(delattr, optimizer, "zero_grad"))

    def _not_stepped(self, name: str, parameter: nn.Parameter) -> None:
        """A gradient of a parameter that is in no optimizer stays on the device: only other code may use it."""
        if any(member is parameter for optimizer in self._optimizers for member in parameters_of(optimizer)):
            raise RuntimeError(
                f"{name} was added to an optimizer after the forward had begun. Add it before, such as in "
                "`on_train_batch_start`, or set `states='gpu'`."
            )

    def _landed(self, flat: FlatParameter, index: int, parameter: nn.Parameter) -> None:
        """autograd has accumulated a gradient: it leaves."""
        with torch._C.DisableTorchFunctionSubclass():
            grad, parameter.grad = parameter.grad, None
        assert grad is not None
        if flat in self._launched:
            raise RuntimeError(
                f"a gradient of {flat.slices[index].name} arrived after the optimizer step of {flat.name} had begun: "
                "it is used differently from step to step. Set `overlap='none'`."
            )
        self._staged.unstage()  # it holds memory that steps may want, which are waited for
        gradient = self._gradients[flat]
        gradient.fold()
        if gradient.states[index] is GradientState.STEPPED:
            self._accumulate_stepped(flat, index)
        gradient.states[index] = GradientState.PRESENT
        if gradient.landed[index]:  # once more in one backward, as with reentrant checkpointing
            self._submit_sum(flat)
        if not any(gradient.landed):
            gradient.begin(lambda: [other.settled for other in self._gradients.values()])
        gradient.landed[index] = True
        gradient.landings += 1
        wants = _wants(flat)
        complete = (
            self._stepping is not None
            and self._overlap != "none"
            and not self.hold
            and flat not in self._access.summed_on_host
            and not flat.shared  # user code may write its weights until `optimizer.step`, unseen
            and self._groups[flat][0] is self._stepping
            # Each once, and in the last backward, too: a gradient that comes in parts is complete at the end only.
            and gradient.landings == sum(wants)
            and all(wants)  # backward may need the weights of a parameter that was frozen since, to its end
            and (self._expected[flat, wants] == sum(wants) if (flat, wants) in self._expected else self._foretold(flat))
        )
        if self._gate.scaled and not self.hold:
            self._gate.check(grad)
        if self._gate.gated and not gradient.summing:
            self._norms[parameter] = torch._foreach_norm([grad.float()])[0]
        if complete:
            self._stream.retire(flat)
        data = flat.slices[index].flatten(grad.detach()).view(torch.uint8)
        mark = self._copies.d2h(data, gradient.target(index), self._copies.mark(), awaited=True)
        gradient.mark = mark
        self._leave(data, mark)
        while self._leaving_bytes > self.WINDOW and len(self._leaving) > 1:
            self._let_go()
        if complete:
            self._launch(flat)

    def _accumulate_stepped(self, flat: FlatParameter, index: int) -> None:
        """A gradient is added to one that a step has used, and that nothing has dropped: as in plain training."""
        gradient = self._gradients[flat]
        if not gradient.kept:
            raise RuntimeError(
                f"a gradient of {flat.slices[index].name} is added to the one that the last step has used, which is "
                "gone. Call `optimizer.zero_grad()` between a step and the next backward."
            )
        if self._journal is not None:
            raise RuntimeError(
                f"a gradient of {flat.slices[index].name} is added to the one that the last step has used, which "
                "`recover=True` does not record. Call `optimizer.zero_grad()` between a step and the next backward, or "
                "set `recover=False`."
            )
        gradient.settled.result()
        gradient.summed[index] = gradient.summing = True

    def _foretold(self, flat: FlatParameter) -> bool:
        """Whether each gradient of `flat` surely lands once in its first backward; else that is known at its end.

        With shared memory that would be too late. A weight that one call of its module uses lands once.
        """
        return self._landing is not None and self._stream.entered_once(flat)

    def _leave(self, data: Tensor, mark: Mark) -> None:
        """Keeps device bytes alive until their copy out, whose mark is given, was made."""
        self._leaving.append((data, mark))
        self._leaving_bytes += data.numel()

    def _let_go(self) -> None:
        data, mark = self._leaving.popleft()
        self._leaving_bytes -= data.numel()
        self._copies.wait(mark)

    def _arrival(self, gradient: Gradient) -> "Future[None]":
        """Returns a future that is done when all that has left so far is on the host."""
        return self._copies.on_d2h(gradient.mark)

    def _submit_sum(self, flat: FlatParameter) -> "Future[None]":
        """Has what has landed added to what was summed up."""
        gradient = self._gradients[flat]
        landed, gradient.landed = gradient.landed, [False] * len(flat.slices)
        norms = self._gate.gated

        def add() -> None:
            gradient.add(landed)
            if norms:
                for index in range(len(flat.slices)):
                    self._measure(flat, index)

        gradient.summing = True
        gradient.settle(self._stepper.submit(add, [self._arrival(gradient)]))
        return gradient.settled

    def _measure(self, flat: FlatParameter, index: int) -> None:
        """Takes the norm of a gradient that is summed up on the host."""
        gradient, item = self._gradients[flat], flat.slices[index]
        if gradient.summed[index]:
            self._norms[item.parameter] = torch._foreach_norm([item.of(gradient.accumulated())])[0]

    def _gradient_changed(self, flat: FlatParameter, index: int) -> None:
        """Other code has changed a gradient, which is summed up or assigned."""
        if not self._gate.gated:
            return
        gradient = self._gradients[flat]
        gradient.fold()
        self._norms.pop(flat.slices[index].parameter, None)
        self._measure(flat, index)

    # ---- the step ----

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`optimizer.step` begins: it steps what has stayed on the device, and finds no other gradients."""
        self.begin_step(optimizer)

        def shown(closure: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                with self._shown.hidden(False):
                    return closure()

            return run

        if len(args) > 1 and args[1] is not None:
            args = (args[0], shown(args[1]), *args[2:])
        elif kwargs.get("closure") is not None:
            kwargs = {**kwargs, "closure": shown(kwargs["closure"])}
        self._shown.hide(True)
        return args, kwargs

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        self._shown.hide(False)
        self.end_step(optimizer)

    def begin_step(self, optimizer: Optimizer) -> None:
        """A step of `optimizer` begins: what backward completes from here on is stepped at once."""
        if self._stepping is None:
            check_state(optimizer)
            self.state_dicts.before_change()
            self.hold = self._watched
            self._stepping = optimizer
            self._gate.begin(hold=self.hold)

    def unscale(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Has gradients divided by the scale of `scaler` in the step that has begun, and skipped if one is not finite.

        Does for what has left what `scaler.unscale_` does, which it is told of.
        """
        with self._shown.hidden():
            scaler.unscale_(optimizer)
        self._gate.unscale(scaler, scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"])

    def end_step(self, optimizer: Optimizer) -> None:
        """The step of `optimizer` has ended on the device; on the CPU it goes on."""
        if self._stepping is not optimizer:
            return
        self.end_backward()  # of a user who called `loss.backward` without Lightning
        if (leaving := self._gate.open()) is not None:
            self._leave(*leaving)
        self._check_stepped_apart(optimizer)
        for flat, gradient in self._gradients.items():
            if self._groups[flat][0] is optimizer and flat not in self._launched and gradient.summing:
                self._staged.pull(flat)
                gradient.fold()
                self._launch(flat)
        self._access.summed_on_host.clear()
        launched, self._launched = self._launched, {}
        self._last, self._before = self._before, {}
        revertible = {flat: home for flat in launched if (home := self.homes[flat]).layout.slots == 2}
        if self._journal is not None:
            self._unrecorded |= launched
        if revertible:
            self._committed = all_of(then(launched[flat], home.written) for flat, home in revertible.items())
        self._stepping = None
        self._norms.clear()
        self._sums.clear()
        self._stream.renew()
        if self._overlap == "none":
            for done in launched.values():
                wait_for(done, "the step")
        for flat, done in launched.items():
            if flat.shared:
                wait_for(done, "the step")
                self._staged.push(flat)
        if launched:
            self._stream.prefetch()

    def _check_stepped_apart(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError if a step of `optimizer` changes the same memory through two parameters."""
        stepped: list[tuple[str, SharedMemory]] = []
        for flat, gradient in self._gradients.items():
            if self._groups[flat][0] is optimizer:
                for index, memory in flat.shared.items():
                    if gradient.states[index] is not GradientState.NONE:
                        stepped.append((flat.slices[index].name, memory))
        if not stepped:
            return
        for parameter in parameters_of(optimizer):
            if parameter not in self._where and parameter.grad is not None:
                stepped.append(("a parameter that is not offloaded", SharedMemory(parameter)))
        for number, (name, memory) in enumerate(stepped):
            for other, of_other in stepped[:number]:
                if memory.overlaps(of_other):
                    raise RuntimeError(
                        f"{other} and {name} share memory, since `.data` of one was set to the other's, and both are "
                        "stepped. Make them one parameter, which both modules have, or set `states='gpu'`."
                    )

    def _clip_by_norm(self, optimizer: Optimizer, limit: float) -> None:
        """Clips in the step that has begun: nobody waits for what the device knows of it."""
        for flat, gradient in self._gradients.items():
            if self._groups[flat][0] is optimizer:
                # What is summed on the host has its norm taken there. A launched step waits for the gate: not for it.
                sum_of_flat = self._sums.get(flat) if flat in self._launched else gradient.settled
                if sum_of_flat is not None:
                    wait_for(sum_of_flat, "gradients")
        with self._shown.hidden():
            self._gate.clip(parameters_of(optimizer), self._norms, limit)

    def _launch(self, flat: FlatParameter) -> None:
        """Hands the step of `flat` to the CPU."""
        gradient, home = self._gradients[flat], self.homes[flat]
        self._staged.unstage()
        self._stream.retire(flat)
        optimizer, group = self._groups[flat]
        options = {name: value for name, value in optimizer.param_groups[group].items() if name != "params"}
        # As they are now: schedulers change tensors in place.
        options = {
            name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
            for name, value in options.items()
        }
        landed = None
        if gradient.summing:
            arrived = self._sums[flat] = self._submit_sum(flat) if any(gradient.landed) else gradient.settled
        else:
            arrived = self._arrival(gradient)
            landed, gradient.landed = gradient.landed, [False] * len(flat.slices)
        limit = None if self.hold else self._clip_value
        gradient.kept = landed is None and (self.hold or (limit is None and not self._gate.gated))
        for index, item in enumerate(flat.slices):
            if gradient.states[index] is GradientState.PRESENT:
                gradient.states[index] = GradientState.STEPPED
                torch.autograd.graph.increment_version(item.parameter)  # as the optimizer does
        step = OptimizerStep(
            home,
            self.rules[flat],
            options,
            gradient,
            landed,
            self._gate.known,
            limit,
            self._stepper,
            self._count,
            self._order[flat],
        )
        if flat in self._unrecorded:
            raise RuntimeError(
                f"{flat.name} is stepped twice in one `training_step`, and `recover=True` can record one step of each "
                "parameter there. Step once, or set `recover=False`."
            )
        # What a step of before may be taken back to is not overwritten.
        ready = [] if home.layout.slots == 1 else [self._committed, self._recorded]
        guess = self._gate.guess
        # One made in vain must leave what was, and the gradient, as they are.
        certain = self._gate.known.done()
        self._before[flat] = home.steps
        if self._overlap == "naive":
            done = step.naive([arrived, *ready])
        elif guess is not None and (certain or (home.layout.slots == 2 and landed is not None)):
            done = step.early(guess, arrived, ready)
        else:
            done = step.late([arrived, *ready])
        gradient.summing = False
        gradient.settle(done)
        home.reserve(done)
        self._launched[flat] = done

    def _count(self, parameters: int, seconds: float) -> None:
        """A job of the stepper has stepped so many parameters."""
        self._stepped = self._stepped.plus(parameters, seconds)

    # ---- other code ----

    def _drain_flat(self, flat: FlatParameter) -> None:
        """Returns when the step of `flat` that has begun is made, before its values are read on the host."""
        if flat in self._launched and not self._gate.known.done():
            self._stream.check(flat)  # it waits for the end of backward
        self.homes[flat].drain()

    def _begin_change(self, flat: FlatParameter) -> None:
        """Other code is about to change weights of `flat`."""
        if self._journal is not None:
            raise RuntimeError(
                f"weights of {flat.name} are changed outside of the optimizer, which `recover=True` can't repeat after "
                "a kill. Change them before `fit`, or set `recover=False`."
            )
        self._stream.check(flat)
        self.state_dicts.before_change()

    def _watch(self) -> None:
        """A hook was registered that may look at gradients: the next steps wait for the end of backward."""
        self._watched = True


def _raise(error: Exception) -> None:
    raise error


def _wants(flat: FlatParameter) -> tuple[bool, ...]:
    """Returns of each parameter whether it wants a gradient now."""
    return tuple(item.parameter.requires_grad for item in flat.slices)
