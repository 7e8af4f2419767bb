"""Activation checkpointing of single unit calls: the unit's forward is run again in backward.

Units are checkpointed if they are layers of the class `GradientCheckpointingLayer` of transformers, with which their
author allows it, or if they are compiled: backward then runs the same compiled code again. `CheckpointedCall` uses
torch's implementation, but begins it in a hook before the forward and ends it in a hook after the forward. Therefore
the module gets no attribute, and calls its forward as in plain training: a model that is copied, saved, validated or
exported in the middle of a training is the user's model.
"""

import contextlib
import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations.compiled_code import calls_are_compiled, run_again
from lightning_ssd.activations.graph import tensors_of
from lightning_ssd.activations.rerun_state import KEEP_UNIT, ModuleState, RerunState, class_of_transformers
from lightning_ssd.activations.unit_dispatch_mode import UnitCall, wraps
from lightning_ssd.activations.weights import storage_of
from lightning_ssd.uncopied import ModuleHook, is_users_hook, takes_hooks

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes of a module with hooks that would run a second time if they are on modules inside of a unit."""

_VALUES = frozenset({type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size})
"""Types of arguments that have no state."""


def allows_checkpointing(module: nn.Module) -> bool:
    """Returns whether the forward of `module` may be run again in backward: its author allows it, or it is compiled.

    A compiled forward must also run as one graph, which the profiled call shows: then Python runs no code in between.
    Hooks of the user on modules inside of it would run a second time, those before its forward may replace its
    arguments, and a hook after its forward that runs before the one that ends a `CheckpointedCall` may save tensors. A
    user who has enabled checkpointing or replaced the forward has chosen how it runs. In backward, no
    `TorchFunctionMode` of the forward is active.
    """
    compiled = calls_are_compiled(module)
    kind = class_of_transformers("modeling_layers", "GradientCheckpointingLayer")
    if not module.training or not (compiled or (kind is not None and isinstance(module, kind))):
        return False
    if not compiled and "forward" in vars(module):
        return False
    around = (*module._forward_pre_hooks.values(), *itertools.islice(module._forward_hooks.values(), 1))
    if internals.count_function_modes() or internals.has_global_module_hooks() or any(map(is_users_hook, around)):
        return False
    return all(_is_plain(inner, module, compiled=compiled) for inner in module.modules())


def _is_plain(inner: nn.Module, module: nn.Module, *, compiled: bool) -> bool:
    """Returns whether a module inside of `module`, or `module` itself, runs as its author has written it.

    If calls of `module` are compiled, its own hooks may run inside of the compiled code.
    """
    if not takes_hooks(inner) or vars(inner).get("gradient_checkpointing"):
        return False
    if inner is not module or not compiled:
        forward = vars(inner).get("forward")
        if inner._compiled_call_impl is not None and not compiled:
            return False
        if forward is not None and getattr(forward, "__self__", None) is not inner:
            return False  # it is no method, but a wrapper such as a user's that collects results
    return (inner is module and not compiled) or not any(
        is_users_hook(hook) for name in _HOOKS for hook in getattr(inner, name).values()
    )


class EmptyCaches:
    """Copies of the key-value caches that a model fills in a forward, made while they were empty.

    A forward that is run again must not add its keys and values to the same cache a second time.
    """

    def __init__(self) -> None:
        self._copies: weakref.WeakKeyDictionary[object, object | None] = weakref.WeakKeyDictionary()
        """By cache, its empty copy; None: it was not empty, or can't be copied."""

    def clear(self) -> None:
        """Called at the end of a forward."""
        self._copies.clear()

    def copy_if_empty(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Called before each unit call of a forward: copies the caches among its arguments, of which none was seen."""
        for value in filter(_is_cache, (*args, *kwargs.values())):
            if value not in self._copies:
                self._copies[value] = None
                if not any(tensor.dim() for tensor in _cached(value)):  # scalars are settings, such as a window's size
                    with contextlib.suppress(Exception):  # of the user's own class
                        self._copies[value] = copy.deepcopy(value)

    def empty_copy(self, value: object) -> object | None:
        """Returns the empty copy of a cache; None: there is none, or `value` is no cache."""
        return self._copies.get(value) if _is_cache(value) else None

    def tensors(self) -> Iterator[Tensor]:
        """Yields the tensors that are in the caches now."""
        for cache in list(self._copies):
            yield from _cached(cache)


def _is_cache(value: object) -> bool:
    kind = class_of_transformers("cache_utils", "Cache")
    return kind is not None and isinstance(value, kind) and value.__hash__ is not None


def _cached(cache: object) -> Iterator[Tensor]:
    """Yields the tensors among the attributes and elements of a cache, and of objects in it."""
    seen: dict[int, object] = {}
    left = [cache]
    while left:
        value = left.pop()
        if id(value) in seen:  # objects may refer to each other
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            yield value
            continue
        elements = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        attributes = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
        left += (*elements, *attributes)


@dataclass(frozen=True, slots=True)
class _Position:
    """Position of a tensor among those of `Arguments`."""

    index: int


@dataclass(frozen=True, slots=True)
class _EmptyCache:
    """Empty copy of a cache among the arguments of a forward, which the first run fills."""

    cache: object


class Arguments:
    """Arguments of a forward, by which it may be run again.

    Attributes:
        tensors: the tensors among them, in order, also those inside of lists, tuples and dicts.
        has_cache: whether a cache is among them, which is empty for the first call of a module alone.
    """

    def __init__(self, args: Sequence[object], kwargs: Mapping[str, object], caches: EmptyCaches) -> None:
        self.tensors: list[Tensor] = []
        self.has_cache = False
        self._caches = caches
        self._packed = self._pack((tuple(args), dict(kwargs)))

    def take_tensors(self) -> list[Tensor]:
        """Returns `tensors`, which are empty from now on: the owner of the result alone keeps their memory."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def unpack(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns positional and keyword arguments with `tensors` and empty caches, for another run."""
        args, kwargs = _unpack(self._packed, tensors)
        return args, kwargs

    def _pack(self, value: Any) -> Any:
        kind = type(value)
        # Tensors inside of `torch.vmap` have no storage.
        if kind in (Tensor, nn.Parameter, internals.FakeTensor) and internals.has_storage(value):
            if value.is_inference():  # torch saves the arguments, which autograd refuses then
                raise _OtherArgumentError
            self.tensors.append(value)
            return _Position(len(self.tensors) - 1)
        if kind in _VALUES or kind in (tuple, list, dict):
            return _mapped(value, self._pack)
        empty = self._caches.empty_copy(value)
        if empty is None:
            raise _OtherArgumentError
        self.has_cache = True
        return _EmptyCache(empty)


def _unpack(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, _Position):
        return tensors[value.index]
    if isinstance(value, _EmptyCache):
        return copy.deepcopy(value.cache)
    # A nested function would be in a cycle with itself, which would keep the tensors alive after backward.
    return _mapped(value, functools.partial(_unpack, tensors=tensors))


class _OtherArgumentError(Exception):
    """An argument was made in inference mode, or is an object whose state may change between forward and backward."""


def rerun_arguments(
    unit_call: UnitCall, module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], caches: EmptyCaches
) -> Arguments | None:
    """Returns the arguments of a call that may be run again in backward; None: it may not.

    Empty copies of caches among the arguments are added to `caches`.
    """
    caches.copy_if_empty(args, kwargs)
    if not torch.is_grad_enabled() or not allows_checkpointing(module):
        return None
    try:
        arguments = Arguments(args, kwargs, caches)
    except _OtherArgumentError:
        return None
    return arguments if unit_call.call_index == 0 or not arguments.has_cache else None


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Returns a container with `function` applied to its elements, and any other value itself."""
    if type(value) in (tuple, list):
        return type(value)(map(function, value))
    return {key: function(element) for key, element in value.items()} if type(value) is dict else value


class CheckpointedCall:
    """A call of a module whose saved tensors are dropped, and made in backward by another run of its forward.

    Torch saves the module's arguments in their place, and restores the states of random number generators and autocast;
    `RerunState` restores the module's own state.
    """

    def __init__(self, module: nn.Module, arguments: Arguments, state: ModuleState) -> None:
        self._module = module
        self._arguments = arguments
        self._state = RerunState(module, state)
        self._is_interrupted = False
        self._checkpoint = internals.begin_checkpoint(self._run_again, arguments.take_tensors())

    def begin(self) -> None:
        """Called before the forward: applies torch's hooks for saved tensors."""
        next(self._checkpoint)

    def end(self) -> None:
        """Called when the forward has returned, or raised an `Exception`: removes these hooks."""
        next(self._checkpoint, None)

    def interrupt(self) -> None:
        """Called when the forward has raised another error, after which torch calls no hook: removes these hooks."""
        self._is_interrupted = True
        self._checkpoint.close()

    def _run_again(self, *tensors: Tensor) -> None:
        if self._is_interrupted:
            raise RuntimeError(
                f"{type(self._module).__name__} has raised an error that is no `Exception`, and the model caught it. "
                "What the model computed then can't be told from that layer's forward, which is checkpointed. "
                f"Raise a subclass of `Exception`, or {KEEP_UNIT}."
            )
        changed = self._state.changed()
        for tensor, error in changed:
            if isinstance(tensor, nn.Parameter) or not _has_storage(tensor) or calls_are_compiled(self._module):
                raise error
        args, kwargs = self._arguments.unpack(tensors)
        with self._state.restored(), _weights_in_use(self._module, args), _not_read(changed):
            run_again(self._module, args, kwargs)


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and internals.has_storage(tensor)


def _not_read(changed: Sequence[tuple[Tensor, RuntimeError]]) -> contextlib.AbstractContextManager[object]:
    """Raises the error of a tensor as soon as an operation reads it."""
    return _NotRead(changed) if changed else contextlib.nullcontext()


class _NotRead(internals.TorchDispatchMode):
    """Raises the error of a changed tensor when an operation of the second run reads that tensor.

    Most tensors of a module that change between its forward and backward are statistics, which no operation reads.
    """

    supports_higher_order_operators = True

    def __init__(self, changed: Sequence[tuple[Tensor, RuntimeError]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._errors = {internals.storage_key(storage_of(tensor)): error for tensor, error in changed}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if wraps(types):
            return NotImplemented
        for tensor in filter(_has_storage, tensors_of((args, kwargs))):
            error = self._errors.get(internals.storage_key(storage_of(tensor)))
            if error is not None:
                raise error
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _weights_in_use(module: nn.Module, args: tuple[object, ...]) -> Iterator[None]:
    """Runs the hooks that make the weights of `module` resident, as in its call, and none of the user.

    Torch keeps the weights that a rerun saves as tensors, which own the memory until backward has used them, whether
    the weights are evicted meanwhile or not.
    """
    before, after = (
        [hook for hook in hooks.values() if isinstance(hook, ModuleHook) and hook.in_reruns]
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
    )
    try:
        for hook in before:
            hook(module, args)
        yield
    finally:  # torch ends a rerun by an error once all saved tensors are made
        for hook in after:
            hook(module, args, None)
