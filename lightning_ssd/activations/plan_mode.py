"""Applies a plan to a forward: saved results of each operation are kept, offloaded, or dropped and recomputed."""

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
from lightning_ssd.storage_tags import CHOICE, TRIED
from lightning_ssd.types import Choice


class PlannedOp(NamedTuple):
    """One operation, and the plan's choices for its results.

    Attributes:
        func: the dispatched operation.
        choices: choice for each result, by its position among the returned tensors.
        saved: numbers of the recomputed buffers that autograd saves, by position.
        ends: end of the operation, seconds since the begin of the forward.
    """

    func: Any
    choices: Mapping[int, Choice]
    saved: Mapping[int, int]
    ends: float


OpSchedule = Mapping[Segment, Sequence[PlannedOp]]
"""The operations of each segment of a forward."""


def make_schedule(
    graph: ForwardGraph, choices: Mapping[int, Choice], recompute_ops: Mapping[int, Sequence[int]]
) -> OpSchedule:
    """Returns the schedule for forwards with the same operations as `graph`.

    Args:
        graph: graph of a recorded forward.
        choices: choice for saved buffers, by number; the placement policy decides about the others.
        recompute_ops: for each recomputed buffer, indices of the operations that recompute it.
    """
    of_operation: dict[int, dict[int, Choice]] = {}
    saved: dict[int, dict[int, int]] = {}
    for number, choice in choices.items():
        buffer = graph.buffers[number]
        if buffer.maker is not None and choice != "recompute":
            of_operation.setdefault(buffer.maker, {})[buffer.position] = choice
    recompute = {index for ops in recompute_ops.values() for index in ops}
    for buffer_number, buffer in enumerate(graph.buffers):
        if buffer.maker in recompute and choices.get(buffer_number, "recompute") == "recompute":
            assert buffer.maker is not None
            of_operation.setdefault(buffer.maker, {})[buffer.position] = "recompute"
            if buffer.unit_call is not None:
                saved.setdefault(buffer.maker, {})[buffer.position] = buffer_number
    schedule: dict[Segment, list[PlannedOp]] = {}
    elapsed = 0.0
    for index, operation in enumerate(graph.operations):
        elapsed += operation.seconds
        schedule.setdefault(operation.segment, []).append(
            PlannedOp(operation.func, of_operation.get(index, {}), saved.get(index, {}), elapsed)
        )
    return schedule


class PlanMode(UnitDispatchMode):
    """Applies a schedule to the forwards that run inside it.

    From the first operation of a segment that differs from the schedule, the rest of the segment has no choices: the
    placement policy decides about its saved tensors.

    With `checking`, no tensor is dropped: tensors that would be recomputed are saved, recomputed when backward unpacks
    them, and compared byte by byte. This detects kernels that write to an earlier result, or whose results depend on
    more than their arguments; the schema of an operation declares neither.

    Args:
        units: as in `UnitDispatchMode`.
        device: device of the forwards.
        pack: pack hook of the activation offloader.
        unpack: unpack hook of the activation offloader.
    """

    def __init__(
        self,
        units: Sequence[Sequence[nn.Module]],
        device: torch.device,
        pack: Pack,
        unpack: Callable[[Any], Tensor],
    ) -> None:
        super().__init__(units)
        self.schedule: OpSchedule = {}
        """Schedule of the forwards that begin from now on."""
        self._device = device
        self._pack = pack
        self._unpack = unpack
        self.slowdown = 1.0
        """Current forward time / sum of the operations' profiled seconds."""
        self.checking = False
        self.proved: set[int] = set()
        """Numbers of buffers whose recomputed bytes equalled the saved ones."""
        self._expected: weakref.WeakKeyDictionary[SavedStorage, tuple[Recomputed, int]] = weakref.WeakKeyDictionary()
        self._held: list[Recomputed] = []
        """Values to recompute of the present forward. After it, only autograd's nodes keep them alive."""
        self._planned: Sequence[PlannedOp] = ()
        self._next = 0

    def __enter__(self) -> Any:
        self.elapsed = 0.0
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._held.clear()
        super().__exit__(*error)

    def on_saved(self, storage: torch.UntypedStorage, record: SavedStorage) -> None:
        """Called when autograd has saved `storage`, while checking."""
        tried: tuple[weakref.ref[Recomputed], int] | None = getattr(storage, TRIED, None)
        if tried is not None and (recomputed := tried[0]()) is not None:
            self._expected[record] = recomputed, tried[1]

    def check(self, record: SavedStorage) -> None:
        """Called when backward unpacks a tensor of `record`, while checking: compares it with the recomputed one."""
        recomputed, number = self._expected.pop(record, (None, 0))
        if recomputed is None or recomputed.expired:
            return
        assert record.data is not None
        with contextlib.suppress(RuntimeError):  # an argument has changed, or the result has another shape
            if torch.equal(record.data, recomputed.remake()):
                self.proved.add(number)

    def begin_segment(self, segment: Segment) -> None:
        self._planned = self.schedule.get(segment, ())
        self._next = 0

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func._schema.is_mutable:
            before_change(written(func, args, kwargs))
        planned = self._next_operation(func)
        if planned is None or not planned.choices:
            return func(*args, **kwargs)
        recompute = "recompute" in planned.choices.values()
        random = random_state(func, self._device) if recompute else None
        result = func(*args, **kwargs)
        tensors = tensors_of(result)
        node = RecomputeNode(func, args, kwargs, tensors, random, self._pack, self._unpack) if recompute else None
        for position, choice in planned.choices.items():
            tensor = tensors[position]
            if choice != "recompute":
                setattr(tensor.untyped_storage(), CHOICE, choice)
            elif node is not None:
                recomputed = node.result(tensor, position)
                self._held.append(recomputed)
                if self.checking and position in planned.saved:
                    setattr(tensor.untyped_storage(), TRIED, (weakref.ref(recomputed), planned.saved[position]))
                else:
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


def choice_of(storage: torch.UntypedStorage) -> Choice | None:
    """Returns the plan's choice for `storage`, or None if the plan has none."""
    choice: Choice | None = getattr(storage, CHOICE, None)
    return choice
