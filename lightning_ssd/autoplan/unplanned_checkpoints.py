"""`UnplannedCheckpoints`: checkpoints units while there is no plan, if saved tensors have no room.

A plan for short memory checkpoints most units, so that offloading their saved tensors in the first steps would take
host memory, and seconds to page-lock it, for nothing.

Only units may be checkpointed that are one layer of transformers (`allows_checkpointing`). The first call of each kind
of unit runs under a `TraceMode`, which shows whether its forward may be run again, as long as no user code changes the
unit. Its saved tensors are kept or offloaded, and their bytes stand for those of later units of its kind. A micro-batch
whose memory is not known, such as one that is larger than all before, checkpoints units, too: its peak, and the bytes
of its first unit of each kind, show whether the next one has room for all saved tensors. Compiled units are not
checkpointed: their first calls compile.

A micro-batch that has run out of memory, with or without a plan, checkpoints the units that have room to run again.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations import (
    CheckpointedCall,
    EmptyCaches,
    ResidentLimit,
    UnitCall,
    UnitProof,
    allows_checkpointing,
    around_call,
    calls_are_compiled,
    in_backward,
    kind_of,
    rerun_arguments,
)
from lightning_ssd.autoplan.known_memory import KnownMemory
from lightning_ssd.autoplan.protocol import Training
from lightning_ssd.profiling import TraceMode
from lightning_ssd.uncopied import ModuleHook, Uncopied

SURELY_FITS = 0.5
"""Share of memory that allocated memory and saved tensors of units take, up to which all saved tensors are kept in a
micro-batch whose other memory is not known. Above, its units are checkpointed, which shows that memory."""

RERUN_ROOM = 3
"""Bytes for which there must be room beside those that are allocated between steps, and gradients of parameters / bytes
that a unit saves, for the unit to run again in an attempt that may be the last: its backward has gradients of its saved
tensors, too."""


class UnplannedCheckpoints(Uncopied):
    """Checkpoints units in micro-batches without a plan. All methods are called on the training thread.

    Args:
        training: the training, which can be planned as far as is known.
        short: initial value of the attribute.

    Attributes:
        short: whether saved tensors are known to have no room, so that units are checkpointed from now on.
        closed: whether `close` was called, after which no unit is checkpointed.
    """

    def __init__(self, training: Training, *, short: bool = False) -> None:
        self.short, self.closed = short, False
        self._training = training
        self._lacks = False
        """Whether earlier micro-batches have shown that saved tensors of the present one have no room."""
        self._only_now = False
        """Whether units are checkpointed in the present micro-batch alone, whose saved tensors may have no room."""
        self._again = False
        """Whether the present micro-batch has run out of memory, so that it needs the least that is possible."""
        self._limit: ResidentLimit | None = None
        """The limit of kept tensors of the present micro-batch; `None`: no unit is checkpointed in it."""
        self._kinds: dict[nn.Module, int] = {}
        """Number of the kind of each unit that may be checkpointed by its class."""
        self._proofs: dict[nn.Module, UnitProof] = {}
        """For each of them, the proof that its forward may be run again, once a call of its kind has shown that.

        User code ends the proof by changing the unit.
        """
        self._may_run_again: dict[int, bool] = {}
        """Whether units of a kind may be checkpointed, once one of them was called."""
        self._bytes: dict[int, int] = {}
        """Bytes that the last call of a kind in the present micro-batch has saved that was not checkpointed."""
        self._argument_bytes: dict[int, int] = {}
        """Bytes of the arguments of that call."""
        self._left: Counter[int] = Counter()
        """Units of each kind that the present forward has not called yet."""
        self._level = self._saved_before = 0
        """Bytes that were allocated, and that the training had saved, before the present micro-batch."""
        self._gradient_bytes = 0
        """Bytes of gradients that its backward allocates beside those, if it has run out of memory before."""
        self._calls: Counter[nn.Module] = Counter()
        self._caches = EmptyCaches()
        self._trace: TraceMode | None = None
        """Records first calls of kinds; `None`: all kinds are known."""
        self._recorded: int | None = None
        """Index of the unit whose running call is recorded."""
        self._begun: tuple[nn.Module, int, int] | None = None
        """The unit whose call runs and is not checkpointed, the bytes of its arguments, and those saved before."""
        self._checkpoint: tuple[nn.Module, CheckpointedCall] | None = None
        """The unit whose call runs and is checkpointed."""
        self._mode: object = None
        """The mode of user code in which the present micro-batch has begun."""
        self._is_hooked = False
        """Whether the units were hooked: in the first micro-batch, as modules may be in evaluation mode before."""
        self._removals: list[Callable[[], None]] = []

    @property
    def modules(self) -> dict[nn.Module, UnitProof]:
        """The units that are checkpointed, each with the proof that it may be."""
        if not self.short:
            return {}
        return {one: self._proofs[one] for one, kind in self._kinds.items() if self._may_run_again.get(kind)}

    def begin_all(self, limit: ResidentLimit) -> None:
        """Checkpoints all units that may be from now on. `limit` is that of the present or next micro-batch."""
        self.short = True
        if self.modules:
            limit.begin_anew()

    def begin_micro_batch(self, known: KnownMemory, *, again: bool = False) -> None:
        """Checkpoints units in the micro-batch that has begun, if its saved tensors have no room.

        Args:
            known: the memory of earlier micro-batches.
            again: whether the micro-batch has run out of memory, so that it needs the least that is possible.
        """
        self.end_forward()
        if not self._is_hooked:
            self._is_hooked = True
            self._hook_units()
        elif self._may_run_again.keys() == set(self._kinds.values()):
            # Not in the forward: a second attempt of the micro-batch begins with the hooks of the first one.
            self._end_trace()
        self._limit = limit = known.limit
        self._level, self._saved_before = limit.meter.allocated(), self._saved()
        self._left = Counter(self._kinds.values())
        if not again:
            self._bytes.clear()
        self._lacks, self._only_now, self._again = known.short, False, again
        self._gradient_bytes = self._count_gradients() if again else 0
        if self._kinds:
            self._lacks_room(limit)
        self._calls.clear()
        self._mode = internals.innermost_dispatch_mode()

    def end_forward(self) -> None:
        """Called when the forward has ended, or an error has ended it: no unit is checkpointed from now on."""
        self._limit = None
        self._caches.clear()
        if self._checkpoint is not None:  # an error that is no `Exception`, after which torch calls no hook
            self._checkpoint[1].interrupt()
            self._checkpoint = None
        self._end_recording()

    def close(self) -> None:
        """Removes the hooks from the units. `modules` remains."""
        self.closed = True
        self.end_forward()
        for remove in self._removals:
            remove()
        self._removals.clear()
        for proof in self._proofs.values():
            proof.forget()
        self._end_trace()

    def _hook_units(self) -> None:
        units = self._training.units()
        numbers: dict[Hashable, int] = {}
        for unit in units:
            module = unit.modules[0]
            if len(unit.modules) == 1 and not calls_are_compiled(module) and allows_checkpointing(module):
                self._kinds[module] = numbers.setdefault(kind_of(module), len(numbers))
                self._proofs[module] = UnitProof(module)
        if not self._kinds:
            return
        self._trace = TraceMode([unit.modules for unit in units], self._training.offloader.device, timed=False)
        for index, unit in enumerate(units):
            module = unit.modules[0]
            if module in self._kinds:  # hooked last, so that these hooks begin the trace before its own hooks
                begin, end = partial(self._begin_call, index, module), partial(self._end_checkpoint, module)
                self._removals.append(around_call(module, begin, end))
                last = module.register_forward_hook(ModuleHook(self._end_call), always_call=True)
                self._removals.append(last.remove)

    def _begin_call(self, index: int, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        limit, offloader = self._limit, self._training.offloader
        if limit is None or in_backward():
            return
        around = internals.innermost_saved_hooks(False), internals.innermost_dispatch_mode()
        if around != ((offloader.pack, offloader.unpack), self._mode):
            return  # a recorded or checked micro-batch, or a call on another thread, or in one of a unit or the user
        kind = self._kinds[module]
        call = UnitCall(index, self._calls[module])
        state = self._proofs[module].state() if module.training else None
        arguments = rerun_arguments(call, module, args, kwargs, self._caches, state)
        self._calls[module] += 1
        if arguments is None or state is None:
            return
        lacks_room = self._lacks_room(limit)
        argument_bytes = sum(tensor.nbytes for tensor in arguments.tensors)
        if kind not in self._may_run_again:
            assert self._trace is not None
            self._recorded = index
            self._trace.__enter__()
        elif lacks_room and self._may_run_again[kind] and self._may_checkpoint(kind, argument_bytes, limit):
            self._checkpoint = module, CheckpointedCall(module, arguments, state)
            self._checkpoint[1].begin()
            if not self.short:
                limit.unsaved_bytes += self._bytes[kind]
        if call.call_index == 0:
            self._left[kind] -= 1
        if self._checkpoint is None:
            self._begun = module, argument_bytes, self._saved()

    def _may_checkpoint(self, kind: int, argument_bytes: int, limit: ResidentLimit) -> bool:
        """Returns whether a call of a unit of a kind is checkpointed where saved tensors lack room.

        If memory has run out, no other attempt may follow: a unit that runs again has all its saved tensors on the
        device, whose bytes a call of its kind with no smaller arguments has shown in this attempt or the one before.
        """
        if not self._again:
            return self.short or kind in self._bytes
        if kind not in self._bytes or argument_bytes > self._argument_bytes[kind]:
            return False
        needed_bytes = self._level + self._gradient_bytes + RERUN_ROOM * self._bytes[kind]
        return needed_bytes <= limit.meter.limit()

    def _count_gradients(self) -> int:
        """Returns the bytes of the gradients that a backward allocates, without those of offloaded parameters."""
        states = self._training.states
        offloaded = set() if states is None else states.parameters
        with internals.without_torch_function():  # classes of the user see no reads
            others = [one for one in self._training.module.parameters() if one not in offloaded]
            return sum(one.nbytes for one in others if one.requires_grad and one.grad is None)

    def _lacks_room(self, limit: ResidentLimit) -> bool:
        """Returns whether units are checkpointed: since a forward whose saved tensors would have had no room.

        In a micro-batch whose memory is not known, they are checkpointed unless saved tensors surely have room.
        """
        surely_fit = False
        if not self.short:
            left = sum(self._bytes[kind] * count for kind, count in self._left.items() if kind in self._bytes)
            saved, most = self._saved() - self._saved_before + limit.unsaved_bytes + left, limit.meter.limit()
            possible = any(self._may_run_again.values()) and self._training.offloader.policy.mode is None
            if self._level + saved > most or (possible and self._lacks):
                self.begin_all(limit)
            elif not limit.known:
                surely_fit = self._level + saved <= SURELY_FITS * most
                surely_fit = surely_fit and not (limit.measuring and self._may_run_again)
                self._only_now = possible and not surely_fit
        if not limit.known:
            checkpoints = self._only_now or (self.short and any(self._may_run_again.values()))
            limit.keeps_unknown = not self._again and (surely_fit or checkpoints)
        return self.short or self._only_now

    def _end_checkpoint(self, module: nn.Module, output: object) -> None:
        """Called first when a call of a unit has returned, or raised an error."""
        if self._checkpoint is not None and self._checkpoint[0] is module:
            self._checkpoint[1].end()
            self._checkpoint = None

    def _end_call(self, module: nn.Module, args: object, output: object) -> None:
        """Called last when a call of a unit has returned, or with `None` when it has raised an error."""
        if self._begun is None or self._begun[0] is not module:
            return
        (_, argument_bytes, begun_at), self._begun = self._begun, None
        index, trace, kind = self._recorded, self._trace, self._kinds[module]
        self._end_recording()
        if output is None:
            return
        self._bytes[kind], self._argument_bytes[kind] = self._saved() - begun_at, argument_bytes
        if index is not None and trace is not None:
            buffers = self._training.module.buffers()
            self._may_run_again[kind] = trace.may_run_again(UnitCall(index, 0), buffers)

    def _end_recording(self) -> None:
        if self._recorded is not None and self._trace is not None:
            self._recorded = None
            self._trace.__exit__(None, None, None)

    def _end_trace(self) -> None:
        if self._trace is not None:
            self._trace.close()
            self._trace = None

    def _saved(self) -> int:
        return self._training.offloader.stats().saved
