"""Regions: modules and functions that `torch.compile` has compiled, and how their code uses weights."""

import contextlib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from inspect import unwrap
from types import CodeType, FunctionType, MethodType
from typing import TypeGuard

from torch import nn


def is_compiled(module: nn.Module) -> bool:
    """Returns True if calls of `module` are compiled, or a function that is one of its attributes."""
    return _calls_are_compiled(module) or bool(compiled_functions(module))


def is_region(module: nn.Module) -> bool:
    """Returns True if code that uses weights of `module` is compiled: its calls, or a method on the instance.

    Compiled functions that it holds and that do not refer to it, such as a loss of tensors, make it no region.
    """
    return _calls_are_compiled(module) or bool(compiled_methods(module))


def compiled_regions(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost compiled modules of `module`."""
    if is_region(module):
        yield module
        return
    for child in module.children():
        yield from compiled_regions(child)


def may_read_weights(region: nn.Module, multiplies: Callable[[nn.Module], bool]) -> bool:
    """Returns whether compiled code may use a weight of a product otherwise than in one product under autocast.

    It may read it elsewhere, disable autocast, or use it by two modules. The names tell that are in the code of modules
    which have such weights below them, in their methods and in functions of their file that this code names. Functions
    of other files that it calls with a module are not examined.

    Args:
        region: a compiled module.
        multiplies: returns whether a module has weights of a product.
    """
    owners: Counter[nn.Parameter] = Counter()
    for part in region.modules():
        if multiplies(part):
            owners.update(part.parameters(recurse=False))
    reading = _READING.union(*(part._parameters for part in region.modules() if multiplies(part)))
    for part in region.modules():
        if not any(map(multiplies, part.modules())):
            continue
        if part._forward_hooks or part._forward_pre_hooks or _refers_to(vars(part), owners):
            return True
        called = [getattr(part, name) for name in ("forward", *compiled_methods(part)) if name in vars(part)]
        if _names_of([*called, *_definitions(type(part), "forward")], type(part)) & reading:
            return True
    return max(owners.values(), default=0) > 1


_READING = frozenset(
    ("weight", "bias", "parameters", "named_parameters", "get_parameter", "_parameters", "state_dict", "autocast")
)
"""Names in code that may read weights, or disable autocast."""


def _refers_to(attributes: Mapping[str, object], parameters: Container[nn.Parameter]) -> bool:
    """Returns whether an attribute of a module is, or contains, one of `parameters`, beside its registered ones."""
    for name, value in attributes.items():
        if name == "_parameters":
            continue
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(item, nn.Parameter) and item in parameters for item in items):
            return True
    return False


def _definitions(cls: type, name: str) -> list[object]:
    """Returns what the classes of a module define as `name`, except torch's, which only multiply by their weights."""
    return [
        vars(base)[name]
        for base in cls.__mro__
        if name in vars(base) and base is not nn.Module and not (name == "forward" and _only_multiplies(base))
    ]


def _only_multiplies(cls: type) -> bool:
    """Returns whether the forward of a class uses weights of products as their factors only."""
    own = cls.__module__.startswith(("torch.nn.modules.linear", "torch.nn.modules.conv"))
    return own or cls.__module__ == "transformers.pytorch_utils" and cls.__name__ == "Conv1D"


def _names_of(called: Iterable[object], cls: type) -> set[str]:
    """Returns the names in the code of functions, and of the methods and functions that it names.

    Args:
        called: the functions, or what a class defines.
        cls: class of the module whose methods they are.
    """
    names: set[str] = set()
    done: set[object] = set()
    left = list(called)
    while left:
        function = left.pop()
        if isinstance(function, property):
            function = function.fget
        function = getattr(function, "__func__", function)
        function = unwrap(function) if callable(function) else function
        code = getattr(function, "__code__", None)
        if code is None:
            if callable(function) and not isinstance(function, type):
                names.update(_READING)  # code that can't be examined
            continue
        if code in done:
            continue
        done.add(code)
        found = set(_names(code))
        names |= found
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # an empty cell
                if _is_function(cell.cell_contents):
                    left.append(cell.cell_contents)
        for name in found - {"device"}:  # a property of Lightning's and other modules, which may name parameters
            left += [value for value in _definitions(cls, name) if isinstance(value, _METHODS)]
            value = getattr(function, "__globals__", {}).get(name)
            if _is_function(value) and value.__module__ == getattr(function, "__module__", None):
                left.append(value)
    return names


_METHODS = (FunctionType, property, staticmethod, classmethod)


def _names(code: CodeType) -> Iterator[str]:
    """Yields the names and strings in `code`, and in the functions that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple | frozenset):
            yield from (item for item in constant if isinstance(item, str))
        elif isinstance(constant, CodeType):
            yield from _names(constant)


def _is_function(value: object) -> TypeGuard[FunctionType]:
    """Returns whether `value` is a function. `isinstance` would ask a proxy for the class of an object that is gone."""
    return issubclass(type(value), FunctionType)


def _calls_are_compiled(module: nn.Module) -> bool:
    """Returns whether calls of `module` run compiled code: `module.compile()`, `torch.compile(module)`, a decorator."""
    if not _can_be_called(module):
        return False
    if type(module).__name__ == "OptimizedModule":
        return is_compiled_function(vars(module).get("forward"))  # else made by `torch.compiler.disable`
    return is_compiled_function(module._compiled_call_impl) or is_compiled_function(
        getattr(type(module), "forward", None)
    )


def is_compiled_function(value: object) -> bool:
    """Returns whether `torch.compile` has made a function. It returns its argument with `disable=True`."""
    return (
        _is_function(value)
        and hasattr(value, "_torchdynamo_orig_callable")
        and not hasattr(value, "_torchdynamo_disable")  # `torch.compiler.disable` sets both
    )


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
