"""The graph of one forward: its operations, the buffers that they read and make, and those that autograd saves.

The number of a buffer in the graph is the one name of a saved tensor, from its recorder to the choices of a plan and to
the later forwards that follow it. (Plans in files have names of unit calls and operators instead: `ForwardGraph.saved`
lists them with the numbers.) A buffer has the operation that made it, and the position among its results.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations.rerun_state import UnitProof
from lightning_ssd.activations.transient_memory import TransientMemory
from lightning_ssd.activations.unit_dispatch_mode import Segment, UnitCall

_COMMUNICATION = ("c10d", "_c10d_functional")
"""Namespaces of operations that other processes have to execute, too."""

COMPILED_OPERATOR = "compiled"
"""Name of a call of a compiled unit, which is one operation, in names of saved tensors."""


@dataclass
class Buffer:
    """A storage in a forward or its backward that is no weight.

    Attributes:
        maker: index of the operation that made it; None: it existed before the forward, or is the backward's.
        position: position of its tensor among the results of `maker`.
        unit_call: unit call in which autograd saved it; None: it was not saved.
        mutated: whether it was changed in place after it was made.
        last_change: index of the last operation that changed it in place; -1: there is none.
        outlives_call: whether it stays on the device if `unit_call` is checkpointed: autograd has saved it after the
            unit's forward had returned, or a key-value cache of the model refers to it.
    """

    nbytes: int
    maker: int | None = None
    position: int = 0
    unit_call: UnitCall | None = None
    mutated: bool = False
    last_change: int = -1
    outlives_call: bool = False


@dataclass
class Operation:
    """One operation.

    Attributes:
        func: the dispatched operation; `None`: the call of a compiled unit. The storages that it makes and saves have
            the positions from 0 on, in the order of saving; others that it returns those from -1 down, in their order.
        where: name of the module that was running, relative to its unit.
        inputs: numbers of the buffers that it reads.
        deterministic: whether a second execution on the same buffers, from the same state of the random number
            generator, returns the same results.
        seconds: device seconds.
    """

    func: Any
    segment: Segment
    unit_call: UnitCall
    where: str
    inputs: tuple[int, ...]
    flops: float
    deterministic: bool
    seconds: float = 0.0


@dataclass(frozen=True)
class Saved:
    """A buffer that autograd saves.

    Attributes:
        unit_call: unit call in which it was first saved.
        name: name, unique in the unit call.
        recompute_ops: indices of the operations that recompute it from weights and other saved buffers, in order.
        recompute_workspace_bytes: peak workspace bytes during recomputation, without the buffer itself.
        recomputable: whether it can be recomputed in the backward of this unit call.
        is_unit_input: whether it was made before the unit call began.
    """

    unit_call: UnitCall
    name: str
    buffer: int
    nbytes: int
    recompute_ops: tuple[int, ...]
    recompute_workspace_bytes: int
    recomputable: bool
    is_unit_input: bool


@dataclass
class ForwardGraph:
    """The operations of one forward, and its buffers, then those of its backward, in the order of their first use."""

    operations: list[Operation] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    backward_seconds: dict[UnitCall, float] = field(default_factory=dict)
    """Device seconds of the backward of each unit call."""
    transients: TransientMemory = field(default_factory=TransientMemory)
    """Memory of forward and backward without weights, their gradients, and saved tensors."""
    arguments: dict[UnitCall, frozenset[int]] = field(default_factory=dict)
    """Numbers of the buffers among the arguments of each unit call whose forward may be run again in backward."""
    proofs: dict[UnitCall, UnitProof] = field(default_factory=dict)
    """For each of these calls, the proof that it may, which user code ends by changing the unit."""
    results: dict[UnitCall, dict[int, int]] = field(default_factory=dict)
    """For each of these calls, numbers of the buffers of returned tensors, by position among them."""
    cast_bytes: dict[UnitCall, int] = field(default_factory=dict)
    """Bytes of autocast's casts of weights that each unit call has made and backward needs."""
    rerun: set[int] = field(default_factory=set)
    """Indices of units in which modules have run in backward, too: a plan or user code checkpoints them."""

    def checkpoint_bytes(self) -> dict[UnitCall, int]:
        """Returns the unit calls that can be checkpointed, each with the bytes that stay besides its saved input.

        These are its arguments that autograd does not save, its results that autograd saves, tensors in caches, and
        those saved between the end of its forward and the begin of the next unit. An argument that several calls share
        counts once.

        A call can't be checkpointed if it depends on tensors that are changed in place after it has begun, or that it
        gets from another unit otherwise than as an argument, or if it changes running statistics or communicates.
        """
        inside: dict[UnitCall, set[int]] = {}
        outside: dict[UnitCall, set[int]] = {}  # of units that call others: their other operations
        readers: dict[int, set[UnitCall | None]] = {}
        for index, operation in enumerate(self.operations):
            unit_call, segment = operation.unit_call, operation.segment
            is_inside = segment.begun_by == "enter" and segment.unit == unit_call.unit
            if is_inside:
                inside.setdefault(unit_call, set()).add(index)
            elif segment.unit != unit_call.unit:
                outside.setdefault(unit_call, set()).add(index)
            for number in operation.inputs:
                readers.setdefault(number, set()).add(unit_call if is_inside else None)
        saved: dict[UnitCall, list[int]] = {}
        for number, buffer in enumerate(self.buffers):
            if buffer.unit_call is not None:
                saved.setdefault(buffer.unit_call, []).append(number)
        counted: set[int] = set()
        result = {}
        for unit_call, operations in inside.items():
            arguments = self.arguments.get(unit_call)
            if arguments is None or unit_call in outside or not self._may_run_again(operations, arguments):
                continue
            not_saved = {number for number in arguments if self.buffers[number].unit_call is None} - counted
            counted |= not_saved
            remaining = {
                number
                for number in saved.get(unit_call, ())
                if self.buffers[number].outlives_call
                or (self.buffers[number].maker in operations and readers.get(number, set()) - {unit_call})
            }
            result[unit_call] = sum(self.buffers[number].nbytes for number in not_saved | remaining)
        return result

    def lone_arguments(self) -> dict[UnitCall, list[int]]:
        """Returns, for calls that may be run again, the arguments that are those of one call, and that no call saves.

        Autocast saves casts of such tensors, for one. They are numbers of buffers that an operation has made.
        """
        counts = Counter(number for arguments in self.arguments.values() for number in arguments)
        return {
            unit_call: [
                number
                for number in arguments
                if counts[number] == 1
                and self.buffers[number].unit_call is None
                and self.buffers[number].maker is not None
            ]
            for unit_call, arguments in self.arguments.items()
        }

    def _may_run_again(self, operations: set[int], arguments: frozenset[int]) -> bool:
        """Returns whether the operations of a unit call, which reads `arguments`, have the same effects if they run
        again.
        """
        begin = min(operations)
        for operation in (self.operations[index] for index in operations):
            func = operation.func
            if func is not None and (
                changes_statistics(internals.schema_of(func).name) or func.namespace in _COMMUNICATION
            ):
                return False
            for number in operation.inputs:
                buffer = self.buffers[number]
                if buffer.maker not in operations and (
                    buffer.last_change >= begin or (buffer.maker is not None and number not in arguments)
                ):
                    return False
        return True

    def unit_calls(self) -> list[UnitCall]:
        """Returns all unit calls, in the order in which they began."""
        return list(dict.fromkeys(operation.unit_call for operation in self.operations))

    def saved(self, min_bytes: int) -> list[Saved]:
        """Returns the buffers that autograd saves.

        Args:
            min_bytes: bytes of the smallest buffer that may be dropped; smaller ones are kept on the device.
        """
        counts: dict[tuple[UnitCall, str], int] = {}
        made_by: dict[int, list[int]] = {}
        for number, buffer in enumerate(self.buffers):
            if buffer.maker is not None and buffer.unit_call is None:
                made_by.setdefault(buffer.maker, []).append(number)
        found = []
        for number, buffer in enumerate(self.buffers):
            if buffer.unit_call is None:
                continue
            maker = None if buffer.maker is None else self.operations[buffer.maker]
            is_unit_input = maker is None or maker.unit_call != buffer.unit_call
            recompute_ops = None if is_unit_input else self._recompute_ops(number, buffer.unit_call, min_bytes)
            operations = recompute_ops or set()
            name = "input" if maker is None else _name(maker, buffer)
            count = counts[buffer.unit_call, name] = counts.get((buffer.unit_call, name), 0) + 1
            found.append(
                Saved(
                    buffer.unit_call,
                    name if count == 1 else f"{name}#{count}",
                    number,
                    buffer.nbytes,
                    tuple(sorted(operations)),
                    self._recompute_workspace_bytes(number, operations, made_by),
                    recompute_ops is not None,
                    is_unit_input,
                )
            )
        return found

    def _recompute_workspace_bytes(
        self, number: int, recompute_ops: set[int], made_by: Mapping[int, Sequence[int]]
    ) -> int:
        """Returns the peak workspace bytes while `recompute_ops` recompute a buffer, without the buffer itself.

        `made_by` has the buffers that each operation makes and that are not saved.
        """
        made = {other for index in recompute_ops for other in made_by.get(index, ())}
        most = 0
        for index in recompute_ops:
            operation = self.operations[index]
            live = sum(self.buffers[read].nbytes for read in operation.inputs if read in made)
            if index != self.buffers[number].maker:  # the buffer itself is not allocated yet
                live += sum(self.buffers[other].nbytes for other in made_by.get(index, ()))
                live -= self.buffers[number].nbytes
            most = max(most, live)
        return most

    def _recompute_ops(self, number: int, unit_call: UnitCall, min_bytes: int) -> set[int] | None:
        """Returns the operations that recompute a buffer in backward of `unit_call`; None: it can't be recomputed."""
        recompute_ops: set[int] = set()
        needed = [number]
        while needed:
            buffer = self.buffers[needed.pop()]
            if buffer.maker is None or buffer.maker in recompute_ops:
                continue
            maker = self.operations[buffer.maker]
            if buffer.mutated or not maker.deterministic or maker.unit_call != unit_call:
                return None
            if any([self.buffers[read].mutated for read in maker.inputs]):
                return None
            recompute_ops.add(buffer.maker)
            # Inputs that are saved, or small, are available and need no recomputation.
            needed += [
                read
                for read in maker.inputs
                if self.buffers[read].unit_call is None and self.buffers[read].nbytes >= min_bytes
            ]
        return recompute_ops


def tensors_of(tree: Any) -> list[Tensor]:
    """Returns the tensors in `tree`, in order."""
    found: list[Tensor] = []
    _add_tensors(tree, found)
    return found


def _add_tensors(tree: Any, found: list[Tensor]) -> None:
    """Adds the tensors in `tree` to `found`. It runs for each operation; `tree_leaves` would take several times as long
    for arguments of operations."""
    kind = type(tree)
    if isinstance(tree, Tensor):
        found.append(tree)
    elif kind is tuple or kind is list:
        for value in tree:
            _add_tensors(value, found)
    elif kind is dict:
        for value in tree.values():
            _add_tensors(value, found)
    elif kind not in _WITHOUT_TENSORS:
        found += [value for value in internals.tree_leaves(tree) if isinstance(value, Tensor)]


_WITHOUT_TENSORS = frozenset(
    (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
)


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors that an operation writes to."""
    schema = internals.schema_of(func)
    if not schema.is_mutable:
        return []
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)
    mutated = [
        given.get(argument.name)
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tensors_of(mutated)


def is_random(func: Any) -> bool:
    """Returns whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def changes_statistics(name: str) -> bool:
    """Returns whether an operation, by its name, updates running statistics, which its schema does not say."""
    return "batch_norm" in name or "moving_avg" in name


def _name(maker: Operation, buffer: Buffer) -> str:
    name = COMPILED_OPERATOR if maker.func is None else internals.schema_of(maker.func).name.partition("::")[2]
    where = f"{maker.where}:{name}" if maker.where else name
    return f"{where}.{buffer.position}" if buffer.position else where
