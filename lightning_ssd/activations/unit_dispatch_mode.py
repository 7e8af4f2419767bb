"""A forward as a sequence of operations, below autograd, cut into parts where units begin and end.

Which operation comes where is the same in every forward of a model that does the same each time. What one forward told
of the operations (`graph`) can therefore be applied to the next ones (`director`); a part that departs from what is
known concerns nobody after it.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle


class Segment(NamedTuple):
    """A stretch of a forward in which no unit begins or ends.

    Attributes:
        begun_by: what it began with.
        unit: the unit that began or ended there.
        time: how often that had happened before in this forward.
    """

    begun_by: Literal["start", "enter", "exit"]
    unit: int
    time: int


class UnitCall(NamedTuple):
    """A run of a unit's forward, with what follows it until the next unit begins.

    Attributes:
        unit: index of the unit.
        time: how often it had run before in this forward: more than once where weights are tied.
    """

    unit: int
    time: int


class UnitDispatchMode(TorchDispatchMode):
    """Is told of every operation of the forwards that run inside it; those of backwards are let through.

    It belongs to the training thread. Autograd's threads take it over for the time of a backward that begins inside.

    Args:
        units: of each unit, the modules whose forwards are its.
    """

    supports_higher_order_operators = True

    def __init__(self, units: Sequence[Sequence[nn.Module]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._handles: list[RemovableHandle] = []
        self._entered = 0
        self._open: list[UnitCall] = []
        self._times: Counter[tuple[str, int]] = Counter()
        self.visit = UnitCall(0, 0)
        """The innermost one that is under way, or the last one."""
        self.elapsed: float | None = None
        """Seconds that the forward takes as far as it has come, if that is known."""
        for index, modules in enumerate(units):
            for module in modules:
                self._hook(index, module)

    def close(self) -> None:
        """Takes the hooks off the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Any:
        self._open.clear()
        self._times.clear()
        self.visit = UnitCall(0, 0)
        self.begin_part(Segment("start", 0, 0))
        self._entered += 1
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._entered -= 1
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if in_backward() or not isinstance(func, torch._ops.OpOverload):  # what takes functions is not one operation
            return func(*args, **(kwargs or {}))
        return self.operation(func, args, kwargs or {})

    @abstractmethod
    def begin_part(self, part: Segment) -> None:
        """What follows belongs to `part`."""

    @abstractmethod
    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation and returns what it returns."""

    def left(self, visit: UnitCall, output: object) -> None:  # noqa: B027  # most modes have nothing to do here
        """A visit is over, and has returned `output`."""

    def _hook(self, index: int, module: nn.Module) -> None:
        def before(module: nn.Module, args: object) -> None:
            if self._entered and not in_backward():
                self._open.append(UnitCall(index, self._times["enter", index]))
                self._turn("enter", index)

        def after(module: nn.Module, args: object, output: object) -> None:
            if self._entered and not in_backward():
                if self._open:
                    self.left(self._open.pop(), output)
                self._turn("exit", index)

        self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def _turn(self, event: Literal["enter", "exit"], index: int) -> None:
        if self._open:
            self.visit = self._open[-1]
        self.begin_part(Segment(event, index, self._times[event, index]))
        self._times[event, index] += 1


def in_backward() -> bool:
    """Whether a backward runs on this thread: what is computed again there is not forward."""
    return torch._C._current_graph_task_id() != -1
