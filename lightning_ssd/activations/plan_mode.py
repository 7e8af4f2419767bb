"""Applies a plan to a forward: saved results of each operation are kept, offloaded, or dropped and recomputed.

Intercepting an operation takes the host longer than launching it. So two kinds of unit calls run without the mode:
those in which the plan keeps every saved tensor run as in plain training, and checkpointed ones drop every saved tensor
but their arguments, and are run again in backward (`checkpointed_call.py`). Calls of the first kind run without our
saved-tensor hooks, too; if weights are offloaded, with hooks that save references to weights. Our hooks save the
arguments of checkpointed calls, which may be offloaded.
"""

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations.checkpointed_call import CheckpointedCall, EmptyCaches, rerun_arguments
from lightning_ssd.activations.graph import ForwardGraph, Saved, tensors_of, written
from lightning_ssd.activations.recompute import (
    Recomputed,
    RecomputeNode,
    before_change,
    mark_recomputed,
    marked_recomputed,
    random_state,
    recomputed_of,
)
from lightning_ssd.activations.record import SavedStorage
from lightning_ssd.activations.rerun_state import UnitProof
from lightning_ssd.activations.unit_dispatch_mode import Segment, UnitCall, UnitDispatchMode
from lightning_ssd.storage_tags import CHOICE
from lightning_ssd.types import Choice, InputChoice, Saving

COMPARED_BYTES = 2**26
"""Most bytes of a saved storage that are compared with recomputed ones at once."""


class PlannedOp(NamedTuple):
    """One operation, and the plan's choices for its results.

    Attributes:
        func: the dispatched operation; `None`: the call of a compiled unit.
        choices: choice for each result, by its position among the returned tensors.
        saved: numbers of the recomputed buffers that autograd saves, by position.
        ends: end of the operation, seconds since the begin of the forward.
    """

    func: Any
    choices: Mapping[int, Choice]
    saved: Mapping[int, int]
    ends: float


@dataclass(frozen=True)
class OpSchedule:
    """The plan's choices for the operations of a forward.

    Attributes:
        operations: the operations of each segment.
        plain_calls: unit calls that run as in plain training.
        save_weights: whether autograd saves references to weights in these calls, because they may be offloaded.
        checkpointed: unit calls whose forward is run again in backward, each with the proof that it may. Where a call
            can't be, because of its arguments, hooks of the user, or changes of the unit, the placement policy decides
            about its saved tensors.
        results: choices for results of checkpointed unit calls, which later calls save, by position. Others are kept.
    """

    operations: Mapping[Segment, Sequence[PlannedOp]] = field(default_factory=dict)
    plain_calls: frozenset[UnitCall] = frozenset()
    save_weights: bool = False
    checkpointed: Mapping[UnitCall, UnitProof] = field(default_factory=dict)
    results: Mapping[UnitCall, Mapping[int, Choice]] = field(default_factory=dict)


class SavedTensorHooks(Protocol):
    """The part of `ActivationOffloader` that `PlanMode` uses; see there."""

    device: torch.device

    def pack(self, tensor: Tensor, /) -> Any: ...
    def unpack(self, saved: Any, /) -> Tensor: ...
    def pause(self, saving: Saving, /) -> bool: ...
    def can_resume(self) -> bool: ...
    def resume(self) -> None: ...
    def choose(self, choices: Sequence[Choice] | None, inputs: Sequence[Tensor] = (), /) -> None: ...


def make_schedule(
    graph: ForwardGraph,
    saved: Sequence[Saved],
    choices: Mapping[int, Choice],
    *,
    plain_calls: bool = False,
    save_weights: bool = False,
    checkpointed: Mapping[UnitCall, InputChoice] = MappingProxyType({}),
) -> OpSchedule:
    """Returns the schedule for forwards with the same operations as `graph`.

    Args:
        choices: choice for saved buffers, by number; the placement policy decides about the others.
        plain_calls: whether unit calls that keep all saved tensors run as in plain training; then `choices` has each
            buffer that is not kept.
        save_weights: whether weights are offloaded, to which autograd saves references also in these calls.
        checkpointed: unit calls whose forward is run again in backward, each with the choice for its arguments that it
            alone saves (`ForwardGraph.lone_arguments`).
    """
    of_operation: dict[int, dict[int, Choice]] = {}
    recomputed: dict[int, dict[int, int]] = {}
    rerun = {index for item in saved if choices.get(item.buffer) == "recompute" for index in item.recompute_ops}
    for number, buffer in enumerate(graph.buffers):
        if buffer.maker is None:
            continue
        choice = choices.get(number, "recompute")  # those that are not saved are recomputed with their operation
        if choice != "recompute" or buffer.maker in rerun:
            of_operation.setdefault(buffer.maker, {})[buffer.position] = choice
            if choice == "recompute" and buffer.unit_call is not None:
                recomputed.setdefault(buffer.maker, {})[buffer.position] = number
    schedule: dict[Segment, list[PlannedOp]] = {}
    elapsed = 0.0
    for index, operation in enumerate(graph.operations):
        elapsed += operation.seconds
        if operation.segment.begun_by == "enter" and operation.unit_call in checkpointed:
            continue
        schedule.setdefault(operation.segment, []).append(
            PlannedOp(operation.func, of_operation.get(index, {}), recomputed.get(index, {}), elapsed)
        )
    plain = _plain_calls(graph, choices, of_operation) if plain_calls else frozenset()
    proofs = {one: graph.proofs[one] for one in checkpointed if one in graph.proofs}
    of_calls: dict[int, Choice] = dict(choices)
    for call, numbers in graph.lone_arguments().items():
        of_calls |= dict.fromkeys(numbers, checkpointed.get(call, "keep"))
    results = {
        call: {position: of_calls.get(number, "keep") for position, number in graph.results.get(call, {}).items()}
        for call in proofs
    }
    return OpSchedule(schedule, plain - checkpointed.keys(), save_weights, proofs, results)


def _plain_calls(
    graph: ForwardGraph, choices: Mapping[int, Choice], of_operation: Mapping[int, Mapping[int, Choice]]
) -> frozenset[UnitCall]:
    """Returns the unit calls whose operations need not be intercepted, and in which autograd saves only kept tensors.

    Operations that change a tensor in place are intercepted, because values may be recomputed from that tensor.
    """
    calls = {operation.unit_call for operation in graph.operations if operation.segment.begun_by == "enter"}
    unsure = {
        number
        for number, buffer in enumerate(graph.buffers)
        if choices.get(number, "keep") != "keep" or (buffer.unit_call is not None and buffer.maker is None)
    }
    for index, operation in enumerate(graph.operations):
        if operation.segment.begun_by == "enter" and (
            (operation.func is not None and internals.schema_of(operation.func).is_mutable)
            or any([choice != "keep" for choice in of_operation.get(index, {}).values()])
            or not unsure.isdisjoint(operation.inputs)
        ):
            calls.discard(operation.unit_call)
    return frozenset(calls)


class PlanMode(UnitDispatchMode):
    """Applies a schedule to the forwards that run inside it.

    From the first operation of a segment that differs from the schedule, the rest of the segment has no choices: the
    placement policy decides about its saved tensors. It also decides about the results of an operation that would be
    recomputed, if its arguments or results were made in inference mode, unlike those of the recorded forward.

    With `checking`, no tensor is dropped: tensors that would be recomputed are saved, recomputed when backward unpacks
    them, and compared byte by byte. This detects kernels that write to an earlier result, or whose results depend on
    more than their arguments; the schema of an operation declares neither.
    """

    def __init__(self, units: Sequence[Sequence[nn.Module]], hooks: SavedTensorHooks) -> None:
        super().__init__(units)
        self.schedule = OpSchedule()
        """Schedule of the forwards that begin from now on."""
        self._hooks = hooks
        self._containing = _containing(units)
        self._checkpointed: CheckpointedCall | None = None
        """The checkpointing of the call `_paused_by`; `None`: the call is not run again in backward."""
        self._caches = EmptyCaches()
        self.units_changed = False
        """Whether the last forward had calls that were not checkpointed because user code had changed their units."""
        self.slowdown = 1.0
        """Current forward time / sum of the operations' profiled seconds."""
        self.checking = False
        self.proved: set[int] = set()
        """Numbers of buffers whose recomputed bytes equalled the saved ones."""
        self._expected: weakref.WeakKeyDictionary[SavedStorage, Recomputed] = weakref.WeakKeyDictionary()
        self._held: list[Recomputed] = []
        """Values to recompute of the present forward. After it, only autograd's nodes keep them alive."""
        self._planned: Sequence[PlannedOp] = ()
        self._next = 0
        self._planned_call: PlannedOp | None = None
        """Entry of the schedule for the running call of a compiled unit."""

    def __enter__(self) -> Any:
        self.elapsed = 0.0
        self.units_changed = False
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self._end_pause()
        finally:  # a failed transfer must not leave the mode in force for later code
            self._caches.clear()
            self._held.clear()
            super().__exit__(*error)

    def on_saved(self, storage: torch.UntypedStorage, record: SavedStorage) -> None:
        """Called when autograd has saved `storage`, while checking."""
        recomputed = marked_recomputed(storage)
        if recomputed is not None and recomputed.checked is not None:
            self._expected[record] = recomputed

    def check(self, record: SavedStorage) -> None:
        """Called when backward unpacks a tensor of `record`, while checking: compares it with the recomputed one.

        If memory runs out, the tensor counts as not recomputable. That is rare, because the comparison's memory is
        freed before the operator's backward allocates its own.
        """
        recomputed = self._expected.pop(record, None)
        if recomputed is None or recomputed.expired:
            return
        assert record.data is not None and recomputed.checked is not None
        with contextlib.suppress(RuntimeError):  # an argument has changed, or memory has run out
            if _equal(record.data, recomputed.remake()):
                self.proved.add(recomputed.checked)

    def begin_segment(self, segment: Segment) -> None:
        # The plain call has called another unit, or has raised an error that is no `Exception`, and called no hook. It
        # can't end inside of the user's hooks and modes: there, the other unit is a part of it. The hooks of
        # a checkpointed call make that true of it, too.
        if self._paused_by is not None and self._hooks.can_resume():
            self._end_pause()
        self._planned = self.schedule.operations.get(segment, ())
        self._next = 0
        call = UnitCall(segment.unit, segment.call_index)
        if (
            segment.begun_by == "enter"
            and call in self.schedule.plain_calls
            and call.unit not in self._containing
            and self._paused_by is None
            and self._hooks.pause("weights" if self.schedule.save_weights else "nothing")
        ):
            self._paused_by = call

    def unit_called(
        self, unit_call: UnitCall, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        if not self.schedule.checkpointed:
            return
        proof = self.schedule.checkpointed.get(unit_call)
        if proof is None or self._paused_by is not None:
            self._caches.copy_if_empty(args, kwargs)
            return
        state = proof.state() if module.training else None
        arguments = rerun_arguments(unit_call, module, args, kwargs, self._caches, state)
        if arguments is None:
            return
        self.units_changed |= state is None
        if state is not None and self._hooks.pause("all"):
            self._paused_by = unit_call
            for tensor in arguments.tensors:
                self._tag(tensor, "keep")
            self._checkpointed = CheckpointedCall(module, arguments, state)
            self._checkpointed.begin()

    def compiled_called(
        self, unit_call: UnitCall, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self._planned_call = None if self._paused_by is not None else self._next_operation(None)
        if self._planned_call is not None:
            choices = self._planned_call.choices
            saved = [choices.get(position, "keep") for position in range(1 + max(choices, default=-1))]
            self._hooks.choose(saved, tensors_of((tuple(args), dict(kwargs))))

    def compiled_returned(self, unit_call: UnitCall, module: nn.Module, output: object) -> None:
        if self._planned_call is None:
            return
        for index, tensor in enumerate(tensors_of(output)):
            choice = self._planned_call.choices.get(-1 - index)
            if choice is not None and tensor.layout is torch.strided:
                setattr(tensor.untyped_storage(), CHOICE, choice)

    def compiled_ended(self) -> None:
        self._planned_call = None
        self._hooks.choose(None)

    def unit_returned(self, unit_call: UnitCall, output: object) -> None:
        if unit_call != self._paused_by:
            return
        if self._checkpointed is not None:
            self._checkpointed.end()
            self._checkpointed = None
        if self._hooks.can_resume():  # no context is open that a later hook of the user leaves
            self._end_pause()
        choices = self.schedule.results.get(unit_call, {})
        for position, tensor in enumerate(tensors_of(output)):
            self._tag(tensor, choices.get(position, "keep"))

    def _tag(self, tensor: Tensor, choice: Choice) -> None:
        """Chooses how the storage of a tensor is saved by hooks, unless there is a choice already."""
        # Tensors inside of `torch.vmap` have no storage.
        if type(tensor) is Tensor and tensor.layout is torch.strided and internals.has_storage(tensor):
            storage = tensor.untyped_storage()
            if getattr(storage, CHOICE, None) is None and recomputed_of(tensor, storage) is None:
                setattr(storage, CHOICE, choice)

    def _end_pause(self) -> None:
        if self._paused_by is not None:
            self._paused_by = None
            if self._checkpointed is not None:
                self._checkpointed.interrupt()
                self._checkpointed = None
            self._hooks.resume()

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        if internals.schema_of(func).is_mutable:
            before_change(written(func, args, kwargs))
        planned = self._next_operation(func)
        if planned is None or not planned.choices:
            return func(*args, **kwargs)
        recompute = "recompute" in planned.choices.values()
        random = random_state(func, self._hooks.device) if recompute else None
        result = func(*args, **kwargs)
        tensors = tensors_of(result)
        if recompute and any([tensor.is_inference() for tensor in (*tensors_of((args, kwargs)), *tensors)]):
            return result  # changes of tensors made in inference mode are not counted, so that no result is recomputed
        node = (
            RecomputeNode(func, args, kwargs, tensors, random, self._hooks.pack, self._hooks.unpack)
            if recompute
            else None
        )
        for position, choice in planned.choices.items():
            tensor = tensors[position]
            if choice != "recompute":
                setattr(tensor.untyped_storage(), CHOICE, choice)
            elif node is not None:
                recomputed = node.result(tensor, position)
                recomputed.checked = planned.saved.get(position) if self.checking else None
                self._held.append(recomputed)
                mark_recomputed(tensor, recomputed)
        return result

    def _next_operation(self, func: Any) -> PlannedOp | None:
        """Returns the schedule's entry for the next operation, if that is `func`."""
        if self._next >= len(self._planned):
            return None
        planned = self._planned[self._next]
        if planned.func is not func:
            self._planned = ()
            return None
        self._next += 1
        self.elapsed = self.slowdown * planned.ends
        return planned


def _equal(one: Tensor, other: Tensor) -> bool:
    """Returns whether the bytes of two storages are equal.

    They are compared piece by piece, because torch allocates a boolean for each compared byte.
    """
    pieces = one.split(COMPARED_BYTES), other.split(COMPARED_BYTES)
    return one.numel() == other.numel() and all(map(torch.equal, *pieces))


def _containing(units: Sequence[Sequence[nn.Module]]) -> frozenset[int]:
    """Returns the indices of units that contain modules of other units."""
    of_module = {module: index for index, modules in enumerate(units) for module in modules}
    return frozenset(
        index
        for index, modules in enumerate(units)
        if any([of_module.get(inner, index) != index for module in modules for inner in module.modules()])
    )
