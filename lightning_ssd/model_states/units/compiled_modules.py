"""Regions: modules and functions that `torch.compile` has compiled."""

import contextlib
from collections.abc import Container, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import TypeGuard

from torch import nn

from lightning_ssd.activations import calls_are_compiled, is_compiled_function


def is_compiled(module: nn.Module) -> bool:
    """Returns True if calls of `module` are compiled, or a function that is one of its attributes."""
    return calls_are_compiled(module) or bool(compiled_functions(module))


def is_region(module: nn.Module) -> bool:
    """Returns True if code that uses weights of `module` is compiled: its calls, or a method on the instance.

    Compiled functions that it holds and that do not refer to it, such as a loss of tensors, make it no region.
    """
    return calls_are_compiled(module) or bool(compiled_methods(module))


def compiled_regions(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost compiled modules of `module`."""
    if is_region(module):
        yield module
        return
    for child in module.children():
        yield from compiled_regions(child)


def _is_function(value: object) -> TypeGuard[FunctionType]:
    """Returns whether `value` is a function. `isinstance` would ask a proxy for the class of an object that is gone."""
    return issubclass(type(value), FunctionType)


def compiled_functions(module: nn.Module) -> list[str]:
    """Returns the names of compiled functions among the attributes of the instance, which are no submodules."""
    return [
        name
        for name, value in vars(module).items()
        if is_compiled_function(value) and (name != "_compiled_call_impl" or _can_be_called(module))
    ]


def _can_be_called(module: nn.Module) -> bool:
    """Returns whether `module` has a forward: `compile()` of a ModuleList, whose modules are called, has no effect."""
    # The class of TorchScript's modules has no such attribute.
    return getattr(type(module), "forward", None) is not nn.Module.forward or "forward" in vars(module)


def compiled_methods(module: nn.Module) -> list[str]:
    """Returns the names of those compiled functions that refer to `module`, or to modules or weights in it."""
    names = compiled_functions(module)
    return [name for name in names if _refers(vars(module)[name], set(module.modules()), set(module.parameters()))]


def _refers(value: object, modules: Container[nn.Module], parameters: Container[nn.Parameter]) -> bool:
    """Returns whether a function refers to one of `modules` or `parameters` by its closure, its object or arguments."""
    left, done = [value], set[int]()
    while left:
        value = left.pop()
        if id(value) in done:
            continue
        done.add(id(value))
        if isinstance(value, nn.Module):
            if value in modules:
                return True
        elif isinstance(value, nn.Parameter):
            if value in parameters:
                return True
        elif isinstance(value, MethodType):
            owner = value.__self__
            left += [
                value.__func__,
                *([owner] if isinstance(owner, nn.Module) else getattr(owner, "__dict__", {}).values()),
            ]
        elif isinstance(value, partial):
            left += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list | tuple | set):
            left += value
        elif _is_function(value):
            left += [getattr(value, "_torchdynamo_orig_callable", None), value.__defaults__, value.__kwdefaults__]
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty cell
                    left.append(cell.cell_contents)
    return False
