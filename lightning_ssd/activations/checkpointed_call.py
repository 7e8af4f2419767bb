"""Activation checkpointing of single unit calls: the unit's forward is run again in backward.

A `GradientCheckpointingLayer` of transformers passes its forward to its attribute `_gradient_checkpointing_func` if its
attribute `gradient_checkpointing` is true. `CheckpointedCall` sets these attributes in a hook before the forward and
restores them when the forward begins, so that user code never finds them: a model that is copied, saved, validated or
exported in the middle of a training is the user's model.
"""

import contextlib
import copy
import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.checkpoint import checkpoint

from lightning_ssd.activations.rerun_state import RerunState
from lightning_ssd.activations.unit_dispatch_mode import UnitCall
from lightning_ssd.uncopied import is_users_hook, takes_hooks

_READS = frozenset({"gradient_checkpointing", "_can_checkpoint_with_cache", "_gradient_checkpointing_func", "partial"})
"""Names in the code of a forward that passes a `functools.partial` of itself to the checkpointing function, and caches
on request. Earlier versions of transformers read them before hooks run, or always drop caches."""

_ATTRIBUTES = ("gradient_checkpointing", "_can_checkpoint_with_cache", "_gradient_checkpointing_func")
"""Attributes of a module that are set before its forward begins."""

_BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")
"""Attributes of a module with hooks for which torch replaces its arguments by views, after the hooks before forward."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", *_BACKWARD_HOOKS)
"""Attributes of a module with hooks that would run a second time if they are on modules inside of a unit."""

_VALUES = frozenset({type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size})
"""Types of arguments that have no state."""

_ABSENT: Any = object()


def allows_checkpointing(module: nn.Module) -> bool:
    """Returns whether the author of `module` allows that its forward is run again in backward.

    Hooks of the user on modules inside of it would run a second time, and those that change gradients of its arguments
    would not see the arguments of the second run. A user who has enabled checkpointing, compiled
    the module or replaced its forward has chosen how it runs. In backward, no `TorchFunctionMode` of the forward is
    active.
    """
    kind = _class_of_transformers("modeling_layers", "GradientCheckpointingLayer")
    if not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):  # before torch 2.8
        return False  # hooks can't be removed for the length of a call
    if kind is None or not isinstance(module, kind) or not module.training or "forward" in vars(module):
        return False
    code = getattr(type(module).forward, "__code__", None)
    if code is None or not _READS.issubset(code.co_names) or module._can_checkpoint_with_cache:
        return False  # a layer that reads caches which others have filled finds them empty in backward
    of_arguments = [*module._forward_pre_hooks.values()]
    of_arguments += [module._forward_hooks[number] for number in module._forward_hooks_with_kwargs]
    if torch._C._len_torch_function_stack() or _has_any_global_hook() or any(map(is_users_hook, of_arguments)):
        return False
    return all(_is_plain(inner, module) for inner in module.modules())


def _is_plain(inner: nn.Module, module: nn.Module) -> bool:
    """Returns whether a module inside of `module`, or `module` itself, runs as its author has written it."""
    if not takes_hooks(inner) or inner._compiled_call_impl is not None or vars(inner).get("gradient_checkpointing"):
        return False
    forward = vars(inner).get("forward")
    if forward is not None and getattr(forward, "__self__", None) is not inner:
        return False  # it is no method, but a wrapper such as a user's that collects results
    names = _BACKWARD_HOOKS if inner is module else _HOOKS
    return not any(is_users_hook(hook) for name in names for hook in getattr(inner, name).values())


def _class_of_transformers(module: str, name: str) -> type | None:
    """Returns a class of transformers if that is imported already, which takes seconds."""
    found: type | None = getattr(sys.modules.get(f"transformers.{module}"), name, None)
    return found


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
                if next(_cached(value), None) is None:
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
    kind = _class_of_transformers("cache_utils", "Cache")
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


class _UsedCache:
    """A cache among the arguments of a forward, which only the first run fills."""

    def __init__(self, cache: object, empty: object) -> None:
        self._cache = cache
        self._empty = empty

    def next(self) -> object:
        """Returns the cache for the next run."""
        cache, self._cache = self._cache, _ABSENT  # which backward must not keep alive
        return copy.deepcopy(self._empty) if cache is _ABSENT else cache


class Arguments:
    """Arguments of a forward that may be run a second time with them.

    Attributes:
        tensors: the tensors among them, in order, also those inside of lists, tuples and dicts.
        has_cache: whether a cache is among them, which is empty for the first call of a module alone.
    """

    def __init__(self, args: Sequence[object], kwargs: Mapping[str, object], caches: EmptyCaches) -> None:
        self.tensors: list[Tensor] = []
        self.has_cache = False
        self._caches = caches
        self._packed = self._pack((tuple(args), dict(kwargs)))

    def unpack(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns positional and keyword arguments with `tensors`, for the next run."""

        def unpacked(value: Any) -> Any:
            if isinstance(value, _Position):
                return tensors[value.index]
            if isinstance(value, _UsedCache):
                return value.next()
            return _mapped(value, unpacked)

        args, kwargs = unpacked(self._packed)
        return args, kwargs

    def _pack(self, value: Any) -> Any:
        kind = type(value)
        if kind in (Tensor, nn.Parameter, FakeTensor) and torch._C._has_storage(value):  # not inside of `torch.vmap`
            self.tensors.append(value)
            return _Position(len(self.tensors) - 1)
        if kind in _VALUES or kind in (tuple, list, dict):
            return _mapped(value, self._pack)
        empty = self._caches.empty_copy(value)
        if empty is None:
            raise _OtherArgumentError
        self.has_cache = True
        return _UsedCache(value, empty)


class _OtherArgumentError(Exception):
    """An argument is an object whose state may change between forward and backward."""


def rerun_arguments(
    unit_call: UnitCall, module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], caches: EmptyCaches
) -> Arguments | None:
    """Returns the arguments of a call that may be run again in backward; None: it may not.

    Args:
        unit_call: the call.
        module: the module.
        args: positional arguments of the module.
        kwargs: its keyword arguments.
        caches: empty copies of caches, to which those among the arguments are added.
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

    Args:
        module: the module, which `allows_checkpointing`.
        arguments: arguments of the call.
        kwargs: its keyword arguments.
    """

    def __init__(self, module: nn.Module, arguments: Arguments, kwargs: Mapping[str, Any]) -> None:
        self._module = module
        self._arguments = arguments
        self.kwargs = {name: value for name, value in kwargs.items() if name != "use_cache" or not value}
        """The keyword arguments without the one at which the module would warn. The forward gets all of them."""
        attributes = vars(module)
        self._before = {name: attributes.get(name, _ABSENT) for name in _ATTRIBUTES}

    def begin(self) -> None:
        """Has the module call this object in place of its forward, once."""
        vars(self._module).update(zip(_ATTRIBUTES, (True, True, self), strict=True))

    def end(self) -> None:
        """Restores the attributes of the module, once."""
        before, self._before = self._before, {}
        attributes = vars(self._module)
        for name, value in before.items():
            attributes.pop(name, None)
            if value is not _ABSENT:
                attributes[name] = value

    def __call__(self, forward: "functools.partial[Any]", *args: object) -> Any:
        """Runs the forward, and returns its result.

        Args:
            forward: the module's forward, with the module and keyword arguments.
            args: positional arguments of the forward.
        """
        self.end()
        arguments, function = self._arguments, functools.partial(forward.func, *forward.args)
        state, runs = RerunState(self._module), itertools.count()

        def run(*tensors: Tensor) -> Any:
            positional, keywords = arguments.unpack(tensors)
            with state.restored() if next(runs) else contextlib.nullcontext():
                return function(*positional, **keywords)

        return checkpoint(run, *arguments.tensors, use_reentrant=False)
