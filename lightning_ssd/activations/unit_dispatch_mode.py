"""A forward as a sequence of operations, below autograd, divided into segments where units begin and end.

The graph of one forward (`graph.py`) is applied to the next ones (`plan_mode.py`), which run the same sequence unless
the model's control flow depends on data. A segment whose operations differ does not affect others.
"""

import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations.autocast import calls_operators, outer_autocast
from lightning_ssd.activations.compiled_code import GuardHook, around_call, calls_are_compiled
from lightning_ssd.uncopied import Uncopied, takes_hooks

_COMPILES = hasattr(internals.TorchDispatchMode, "ignore_compile_internals")
"""Whether torch compiles code under modes that allow it."""

_NO_DISPATCH = torch.Tensor.__torch_dispatch__  # inherited by classes that do not dispatch


class Segment(NamedTuple):
    """A part of a forward in which no unit begins or ends.

    Attributes:
        begun_by: event at the begin of the segment: the forward's start, or a unit's enter or exit.
        unit: index of the unit of this event.
        call_index: number of earlier events of this kind and unit in the forward.
    """

    begun_by: Literal["start", "enter", "exit"]
    unit: int
    call_index: int


class UnitCall(NamedTuple):
    """A call of a unit's forward, together with the operations after it until the next unit begins.

    Attributes:
        call_index: number of earlier calls of the unit in the forward; above 0 only for units that are called
            repeatedly.
    """

    unit: int
    call_index: int


class UnitDispatchMode(Uncopied, internals.TorchDispatchMode):
    """Intercepts every operation of the forwards that run inside it. Operations of backwards are not intercepted.

    A call of a compiled unit is one operation: the mode is removed from before the call until after it, so that Dynamo
    runs the code that it has compiled without a mode.

    The mode belongs to the training thread. Autograd's threads inherit it during a backward that begins inside it. Unit
    calls on threads that user code starts in a forward are no events of the forward, as their operations are not seen.

    Args:
        units: modules of each unit. Operations of modules that take no hooks belong to the unit before.

    Attributes:
        num_compiled: calls of compiled code in forwards under any of these modes in this process, each counted at least
            once, without those of compiled units. Its operations are those of its graphs.
        num_not_compiled: operations under any of these modes of functions that `torch.compile` compiles elsewhere, and
            that older torch leaves uncompiled under every dispatch mode.
    """

    supports_higher_order_operators = True
    compiled_is_one: ClassVar[bool] = True
    """Whether calls of compiled units are one operation."""
    num_compiled: ClassVar[int] = 0
    num_not_compiled: ClassVar[int] = 0

    def __init__(self, units: Sequence[Sequence[nn.Module]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._removals: list[Callable[[], None]] = []
        """Functions that remove the hooks."""
        self._entered = 0
        self._paused_by: UnitCall | None = None
        """The running unit call that runs without mode and hooks, as a plan says."""
        self._compiled: UnitCall | None = None
        """The running call of a compiled unit, in which the mode is not in force."""
        self._is_removed = False
        """Whether the mode was removed for this call, and not by a pause before it."""
        self._num_graphs = 0
        """Compiled graphs that this call has run: one, if Python runs no code in between."""
        self._guards: GuardHook | None = None
        """Notices calls of code that was compiled before the running forward; None: no forward runs."""
        self._count = 0
        """Value of `count_compiled` at the begin of the forward, plus what compiled units have added."""
        self._count_before = 0
        """Value of `count_compiled` at the begin of the running call of a compiled unit."""
        self._thread = 0
        """Identifier of the thread of the running forward."""
        self._open: list[UnitCall] = []
        self._call_counts: Counter[tuple[str, int]] = Counter()
        self.unit_call = UnitCall(0, 0)
        """The innermost running unit call, or the last one."""
        self.elapsed: float | None = None
        """Profiled seconds of the forward up to the present operation; None if unknown."""
        for index, modules in enumerate(units):
            for module in filter(takes_hooks, modules):
                self._hook(index, module)

    def close(self) -> None:
        """Removes the hooks from the modules."""
        for remove in self._removals:
            remove()
        self._removals.clear()

    def __enter__(self) -> Any:
        self._open.clear()
        self._call_counts.clear()
        self.unit_call = UnitCall(0, 0)
        self.begin_segment(Segment("start", 0, 0))
        self._entered += 1
        self._thread = threading.get_ident()
        if self._guards is None:
            self._count = internals.count_compiled()
            self._guards = GuardHook(self._on_compiled_call)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        if self._compiled is not None:  # it has raised an error that is no `Exception`, after which torch calls no hook
            self._end_compiled()
        self._entered -= 1
        if not self._entered and self._guards is not None:
            self._guards.close()
            self._guards = None
            if internals.count_compiled() != self._count:
                self._on_compiled_call()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _on_compiled_call(self) -> None:
        if threading.get_ident() != self._thread:
            return
        if self._compiled is None:
            UnitDispatchMode.num_compiled += 1
        else:
            self._num_graphs += 1

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True: Dynamo compiles code that runs under the mode, and the mode intercepts the compiled code."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: torch would wrap `__torch_dispatch__` so that each operation takes twice as long."""
        return False

    @internals.skipped_by_dynamo
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        callback = internals.set_eval_frame(None)
        if callable(callback) and not _COMPILES:  # Dynamo's, which compiles the code that calls the operation
            UnitDispatchMode.num_not_compiled += 1
        try:
            return self._dispatch(func, types, args, kwargs)
        finally:
            internals.set_eval_frame(callback)

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if wraps(types):
            return NotImplemented
        if not isinstance(func, internals.OpOverload):  # higher-order operators are not one operation
            return func(*args, **(kwargs or {}))
        if not calls_operators(func):
            return self._run(func, args, kwargs or {})
        with outer_autocast():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs) if in_backward() else self.operation(func, args, kwargs)

    @abstractmethod
    def begin_segment(self, segment: Segment) -> None:
        """Called at the begin of the segment `segment`."""

    @abstractmethod
    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation and returns its result."""

    def unit_called(  # noqa: B027  # optional
        self, unit_call: UnitCall, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Called before the forward of a unit's module, after `begin_segment`."""

    def unit_returned(self, unit_call: UnitCall, output: object) -> None:  # noqa: B027  # optional
        """Called when a unit call has returned `output`."""

    def compiled_called(  # noqa: B027  # optional
        self, unit_call: UnitCall, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Called before the forward of a compiled unit, after `unit_called`, once the mode is removed."""

    def compiled_returned(self, unit_call: UnitCall, module: nn.Module, output: object) -> None:  # noqa: B027
        """Called when that forward has returned `output`, before `unit_returned`; not after an error."""

    def compiled_ended(self) -> None:  # noqa: B027
        """Called when that forward has ended, before the mode is in force again; also after an error."""

    def _hook(self, index: int, module: nn.Module) -> None:
        def before(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            if self._follows_unit_calls():
                self._open.append(UnitCall(index, self._call_counts["enter", index]))
                self._on_unit_event("enter", index)
                self.unit_called(self._open[-1], module, args, kwargs)
                if self.compiled_is_one and calls_are_compiled(module):
                    self._begin_compiled(self._open[-1], module, args, kwargs)

        def after(output: object) -> None:
            if self._follows_unit_calls():
                if self._open:
                    unit_call = self._open.pop()
                    if unit_call == self._compiled:
                        if output is not None:
                            self.compiled_returned(unit_call, module, output)
                        self._end_compiled()
                    self.unit_returned(unit_call, output)
                self._on_unit_event("exit", index)

        self._removals.append(around_call(module, before, after))

    def _begin_compiled(
        self, unit_call: UnitCall, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Removes the mode, unless user code has entered another one inside of it: then its code is late code."""
        if self._compiled is not None:
            return  # it is called by a compiled unit
        self._is_removed = internals.innermost_dispatch_mode() is self
        if not self._is_removed and self._paused_by is None:
            return
        if self._is_removed:
            internals.pop_dispatch_mode()
        self._compiled, self._num_graphs = unit_call, 0
        self._count_before = internals.count_compiled()
        self.compiled_called(unit_call, module, args, kwargs)

    def _end_compiled(self) -> None:
        self._compiled = None
        self.compiled_ended()
        self._count += internals.count_compiled() - self._count_before
        if self._is_removed:
            internals.push_dispatch_mode(self)

    def _follows_unit_calls(self) -> bool:
        """Returns whether a forward inside the mode runs on this thread."""
        return self._entered > 0 and self._thread == threading.get_ident() and not in_backward()

    def _on_unit_event(self, event: Literal["enter", "exit"], index: int) -> None:
        if self._open:
            self.unit_call = self._open[-1]
        self.begin_segment(Segment(event, index, self._call_counts[event, index]))
        self._call_counts[event, index] += 1


def in_backward() -> bool:
    """Returns whether a backward runs on this thread, in which recomputed operations are not part of a forward."""
    return internals.graph_task() != -1


def wraps(types: Iterable[type]) -> bool:
    """Returns whether a dispatched function is one of tensor subclasses that run other functions in its place.

    A mode that returns `NotImplemented` for it intercepts these functions instead, on the wrapped tensors. Functions of
    the subclasses may be queries of attributes (`aten.sym_size`), and their results have no bytes.

    Args:
        types: classes of the arguments, as a mode gets them: those that dispatch, and any class for the `detach` by
            which autograd unpacks a saved tensor.
    """
    dispatching = (kind for kind in types if getattr(kind, "__torch_dispatch__", None) is not _NO_DISPATCH)
    return any([not issubclass(kind, internals.FakeTensor) for kind in dispatching])
