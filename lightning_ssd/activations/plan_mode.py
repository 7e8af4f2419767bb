"""A forward under a plan: what autograd saves of each operation is kept, sent out, or dropped and computed again."""

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_ssd.activations.graph import ForwardGraph, tensors_of, written
from lightning_ssd.activations.recompute import (
    Pack,
    Recomputed,
    RecomputeNode,
    before_change,
    mark_recomputed,
    random_state,
)
from lightning_ssd.activations.record import SavedStorage
from lightning_ssd.activations.unit_dispatch_mode import Segment, UnitDispatchMode
from lightning_ssd.device.storage_tags import CHOICE, TRIED
from lightning_ssd.types import Choice


class PlannedOp(NamedTuple):
    """One operation, and what becomes of its results.

    Attributes:
        func: as dispatched.
        choices: by position among the tensors that it returns.
        saved: numbers of the buffers that autograd saves of those that are computed again, by position.
        ends: seconds of the forward when it was over.
    """

    func: Any
    choices: Mapping[int, Choice]
    saved: Mapping[int, int]
    ends: float


OpSchedule = Mapping[Segment, Sequence[PlannedOp]]
"""The operations of a forward."""


def make_schedule(
    graph: ForwardGraph, choices: Mapping[int, Choice], chains: Mapping[int, Sequence[int]]
) -> OpSchedule:
    """Returns the program of the forwards that are like the one of `graph`.

    Args:
        graph: of a forward.
        choices: of buffers that autograd saves, what becomes of them; others go where there is room.
        chains: of those that are computed again, the operations that it takes.
    """
    of_operation: dict[int, dict[int, Choice]] = {}
    saved: dict[int, dict[int, int]] = {}
    for number, choice in choices.items():
        buffer = graph.buffers[number]
        if buffer.maker is not None and choice != "recompute":
            of_operation.setdefault(buffer.maker, {})[buffer.position] = choice
    again = {index for chain in chains.values() for index in chain}
    for buffer_number, buffer in enumerate(graph.buffers):
        if buffer.maker in again and choices.get(buffer_number, "recompute") == "recompute":
            assert buffer.maker is not None
            of_operation.setdefault(buffer.maker, {})[buffer.position] = "recompute"
            if buffer.visit is not None:
                saved.setdefault(buffer.maker, {})[buffer.position] = buffer_number
    program: dict[Segment, list[PlannedOp]] = {}
    elapsed = 0.0
    for index, operation in enumerate(graph.operations):
        elapsed += operation.seconds
        program.setdefault(operation.part, []).append(
            PlannedOp(operation.func, of_operation.get(index, {}), saved.get(index, {}), elapsed)
        )
    return program


class PlanMode(UnitDispatchMode):
    """Applies a program to the forwards that run inside it.

    A part that does something else than the program says has no directions from there on: what it saves goes out.

    With `checking`, nothing is dropped: what would be computed again is saved, and computed again when backward wants
    it, and the two are compared, byte by byte. No schema of an operation tells what kernels of other people's have
    written to its result, or what it depends on beside its arguments; this does.

    Args:
        units: as in `UnitDispatchMode`.
        device: that the forwards run on.
        pack: takes a tensor over, as autograd's hook does.
        unpack: gives it back.
    """

    def __init__(
        self,
        units: Sequence[Sequence[nn.Module]],
        device: torch.device,
        pack: Pack,
        unpack: Callable[[Any], Tensor],
    ) -> None:
        super().__init__(units)
        self.program: OpSchedule = {}
        """For the forwards that begin from now on."""
        self._device = device
        self._pack = pack
        self._unpack = unpack
        self.pace = 1.0
        """Seconds that forwards take for each that their operations took one by one."""
        self.checking = False
        self.proved: set[int] = set()
        """Buffers that were what they had been when they were computed again."""
        self._expected: weakref.WeakKeyDictionary[SavedStorage, tuple[Recomputed, int]] = weakref.WeakKeyDictionary()
        self._held: list[Recomputed] = []
        """Of the present forward: after it, they live as long as what autograd keeps."""
        self._steps: Sequence[PlannedOp] = ()
        self._next = 0

    def __enter__(self) -> Any:
        self.elapsed = 0.0
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._held.clear()
        super().__exit__(*error)

    def saved(self, storage: torch.UntypedStorage, record: SavedStorage) -> None:
        """While checking: autograd has saved `storage`."""
        tried: tuple[weakref.ref[Recomputed], int] | None = getattr(storage, TRIED, None)
        if tried is not None and (recomputed := tried[0]()) is not None:
            self._expected[record] = recomputed, tried[1]

    def check(self, record: SavedStorage) -> None:
        """While checking: backward is about to be given what `record` has."""
        recomputed, number = self._expected.pop(record, (None, 0))
        if recomputed is None or recomputed.expired:
            return
        assert record.data is not None
        with contextlib.suppress(RuntimeError):  # it reads what has changed since, or returns something else
            if torch.equal(record.data, recomputed.remake()):
                self.proved.add(number)

    def begin_part(self, part: Segment) -> None:
        self._steps = self.program.get(part, ())
        self._next = 0

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func._schema.is_mutable:
            before_change(written(func, args, kwargs))
        step = self._follow(func)
        if step is None or not step.choices:
            return func(*args, **kwargs)
        again = "recompute" in step.choices.values()
        random = random_state(func, self._device) if again else None
        result = func(*args, **kwargs)
        tensors = tensors_of(result)
        recipe = RecomputeNode(func, args, kwargs, tensors, random, self._pack, self._unpack) if again else None
        for position, choice in step.choices.items():
            tensor = tensors[position]
            if choice != "recompute":
                setattr(tensor.untyped_storage(), CHOICE, choice)
            elif recipe is not None:
                recomputed = recipe.result(tensor, position)
                self._held.append(recomputed)
                if self.checking and position in step.saved:
                    setattr(tensor.untyped_storage(), TRIED, (weakref.ref(recomputed), step.saved[position]))
                else:
                    mark_recomputed(tensor, recomputed)
        return result

    def _follow(self, func: Any) -> PlannedOp | None:
        """Returns what the program has for the next operation, if it is `func`."""
        if self._next >= len(self._steps):
            return None
        step = self._steps[self._next]
        if step.func is not func:
            self._steps = ()
            return None
        self._next += 1
        self.elapsed = self.pace * step.ends
        return step


def choice_of(storage: torch.UntypedStorage) -> Choice | None:
    """Returns what becomes of `storage`, if that was said."""
    choice: Choice | None = getattr(storage, CHOICE, None)
    return choice
