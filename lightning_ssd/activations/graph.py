"""What the operations of one forward make of what, and which of it autograd saves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_ssd.activations.transient_memory import TransientMemory
from lightning_ssd.activations.unit_dispatch_mode import Segment, UnitCall


@dataclass
class Buffer:
    """A storage that came up in a forward and is no weight.

    Attributes:
        nbytes: its bytes.
        maker: index of the operation that made it; None: it was there before.
        position: of the tensor that shows it among what its maker returned.
        visit: that was under way when autograd saved it; None: it did not.
        changed: written to after it was made.
    """

    nbytes: int
    maker: int | None = None
    position: int = 0
    visit: UnitCall | None = None
    changed: bool = False


@dataclass
class Operation:
    """One operation.

    Attributes:
        func: as dispatched.
        part: that it belongs to.
        visit: that was under way.
        where: name of the module that was running, relative to its unit.
        inputs: numbers of the buffers that it reads.
        flops: of it.
        repeatable: run again on the same buffers, it returns the same.
        seconds: on the device.
    """

    func: Any
    part: Segment
    visit: UnitCall
    where: str
    inputs: tuple[int, ...]
    flops: float
    repeatable: bool
    seconds: float = 0.0


@dataclass(frozen=True)
class Saved:
    """A buffer that autograd saves.

    Attributes:
        visit: that was under way when it was saved first.
        name: unique in the visit.
        buffer: its number.
        nbytes: its bytes.
        chain: indices of the operations that make it from weights and from other buffers that are saved, in order.
        scratch: most bytes that are needed on the way, beside the buffer.
        again: whether they can be run again, in the backward of this visit.
        inbound: it was there before the visit began.
    """

    visit: UnitCall
    name: str
    buffer: int
    nbytes: int
    chain: tuple[int, ...]
    scratch: int
    again: bool
    inbound: bool


@dataclass
class ForwardGraph:
    """The operations and buffers of one forward, both in the order in which they came up."""

    operations: list[Operation] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    backward_seconds: dict[UnitCall, float] = field(default_factory=dict)
    """Of each visit, on the device."""
    transients: TransientMemory = field(default_factory=TransientMemory)
    """What memory it took, and its backward, beside weights, their gradients, and what autograd saves."""

    def visits(self) -> list[UnitCall]:
        """Returns all visits, in the order in which they began."""
        return list(dict.fromkeys(operation.visit for operation in self.operations))

    def saved(self, min_bytes: int) -> list[Saved]:
        """Returns the buffers that autograd saves.

        Args:
            min_bytes: smaller buffers stay on the device, whatever becomes of the others.
        """
        taken: dict[tuple[UnitCall, str], int] = {}
        made_by: dict[int, list[int]] = {}
        for number, buffer in enumerate(self.buffers):
            if buffer.maker is not None and buffer.visit is None:
                made_by.setdefault(buffer.maker, []).append(number)
        found = []
        for number, buffer in enumerate(self.buffers):
            if buffer.visit is None:
                continue
            maker = None if buffer.maker is None else self.operations[buffer.maker]
            inbound = maker is None or maker.visit != buffer.visit
            chain = None if inbound else self._chain(number, buffer.visit, min_bytes)
            name = "input" if maker is None else _name(maker, buffer)
            count = taken[buffer.visit, name] = taken.get((buffer.visit, name), 0) + 1
            found.append(
                Saved(
                    buffer.visit,
                    name if count == 1 else f"{name}#{count}",
                    number,
                    buffer.nbytes,
                    tuple(sorted(chain)) if chain is not None else (),
                    self._scratch(number, chain, made_by) if chain is not None else 0,
                    chain is not None,
                    inbound,
                )
            )
        return found

    def _scratch(self, number: int, chain: set[int], made_by: Mapping[int, Sequence[int]]) -> int:
        """Returns the most bytes on the device while a buffer is made by `chain`, beside itself.

        Args:
            number: of the buffer.
            chain: operations.
            made_by: of each operation, what it makes that is not saved.
        """
        made = {other for index in chain for other in made_by.get(index, ())}
        most = 0
        for index in chain:
            operation = self.operations[index]
            live = sum(self.buffers[read].nbytes for read in operation.inputs if read in made)
            if index != self.buffers[number].maker:  # the buffer itself is not there yet
                live += sum(self.buffers[other].nbytes for other in made_by.get(index, ()))
                live -= self.buffers[number].nbytes
            most = max(most, live)
        return most

    def _chain(self, number: int, visit: UnitCall, min_bytes: int) -> set[int] | None:
        """Returns what has to be run to make a buffer again in the backward of `visit`; None: it can't be."""
        chain: set[int] = set()
        wanted = [number]
        while wanted:
            buffer = self.buffers[wanted.pop()]
            if buffer.maker is None or buffer.maker in chain:
                continue
            maker = self.operations[buffer.maker]
            if buffer.changed or not maker.repeatable or maker.visit != visit:
                return None
            if any(self.buffers[read].changed for read in maker.inputs):
                return None
            chain.add(buffer.maker)
            # What is saved, or small, is there.
            wanted += [
                read
                for read in maker.inputs
                if self.buffers[read].visit is None and self.buffers[read].nbytes >= min_bytes
            ]
        return chain


def tensors_of(tree: Any) -> list[Tensor]:
    """Returns the tensors in `tree`, in order."""
    if isinstance(tree, Tensor):  # as most are
        return [tree]
    return [value for value in tree_leaves(tree) if isinstance(value, Tensor)]


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    changed = [
        given.get(argument.name)
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tensors_of(changed)


def is_random(func: Any) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def _name(maker: Operation, buffer: Buffer) -> str:
    name = maker.func._schema.name.partition("::")[2]
    where = f"{maker.where}:{name}" if maker.where else name
    return f"{where}.{buffer.position}" if buffer.position else where
