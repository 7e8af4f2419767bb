"""Modules that `torch.compile` compiles: hooks run outside of the compiled call, so that Dynamo does not trace them.

A compiled module is one region: its weights are kept on the device from before the compiled call until after it, and
its parameters are ordinary ones meanwhile. So Dynamo compiles the same program as in plain training.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from inspect import unwrap
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeGuard

from torch import nn
from torch._dynamo.callback import callback_handler
from torch.compiler import is_dynamo_compiling

from lightning_ssd.uncopied import ModuleHook, takes_hooks

CallContext = Callable[
    [Sequence[object], Mapping[str, object]],
    contextlib.AbstractContextManager[tuple[Sequence[object], Mapping[str, object]]],
]
"""A context around a call, which is given its arguments and yields others."""


def is_compiled(module: nn.Module) -> bool:
    """Returns True if calls of `module` are compiled, or a function that is one of its attributes."""
    return _calls_are_compiled(module) or bool(_compiled_functions(module))


def is_region(module: nn.Module) -> bool:
    """Returns True if code that uses weights of `module` is compiled: its calls, or a method on the instance.

    Compiled functions that it holds and that do not refer to it, such as a loss of tensors, make it no region.
    """
    return _calls_are_compiled(module) or bool(_compiled_methods(module))


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
        called = [getattr(part, name) for name in ("forward", *_compiled_methods(part)) if name in vars(part)]
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


def renew_guards(module: nn.Module) -> None:
    """Has compiled code check the parameters of `module` at its next call, as their dtypes may be others then.

    Torch 2.11 and others skip the guards of parameters while the module's dictionary of them is unchanged. So a change
    of dtype in place went unnoticed, and code that was compiled for bf16 weights read fp32 ones.
    """
    for part in filter(takes_hooks, module.modules()):  # others have no dictionary of their own
        part._parameters["_renewed"] = None  # changes the version of the dictionary
        del part._parameters["_renewed"]


def around_calls(module: nn.Module, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
    """Makes every call of `module` call `before` before it and `after` after it, also after an error.

    `after` is not called if `before` has raised an error, or was not called because another hook had raised one.
    Wrappers of later calls of this function are outside of earlier ones.

    Returns:
        A function that restores the module.
    """
    if is_compiled_function(module._compiled_call_impl):
        return _wrap(module, "_compiled_call_impl", before, after)
    if methods := [name for name in _compiled_methods(module) if name != "forward"]:
        # Methods of a LightningModule that was compiled as a whole: they call its `forward` in compiled code.
        undo = [_wrap(module, name, before, after) for name in methods]

        def restore() -> None:
            for function in undo:
                function()

        return restore
    # If only `forward` is compiled, module hooks run outside of the compiled code.
    begun: list[bool] = []
    """For each running call, whether `before` has returned. Torch calls `end` also after an error of another hook."""

    def begin(*_: object) -> None:
        if is_dynamo_compiling():  # Dynamo shows the error if the operator can't be run otherwise
            raise RuntimeError(
                f"a {type(module).__name__}, whose weights are offloaded, is called in a function that `torch.cond` or "
                "another operator compiles. Compile the module whose forward calls the operator (`module.compile()`), "
                "in `setup` at the latest, or set `states='gpu'`."
            )
        begun.append(False)
        before()
        begun[-1] = True

    def end(*_: object) -> None:
        if begun and begun.pop():
            after()

    first = module.register_forward_pre_hook(ModuleHook(begin), prepend=True)
    last = module.register_forward_hook(ModuleHook(end), always_call=True)

    def remove() -> None:
        first.remove()
        last.remove()

    return remove


@contextlib.contextmanager
def without_own_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Removes this package's forward hooks of `modules` within the context, in which compiled code calls them.

    Modules in a compiled region have such hooks if the model contains them outside of it, too, to call them without
    compilation (`self.model`, and `self.compiled = torch.compile(self.model)`). Dynamo would trace these hooks.
    """
    removed: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for module in modules:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            if any(isinstance(hook, ModuleHook) for hook in hooks.values()):
                removed.append((hooks, dict(hooks)))
                for key in [key for key, hook in hooks.items() if isinstance(hook, ModuleHook)]:
                    del hooks[key]
    try:
        yield
    finally:
        for hooks, before in removed:
            users = {key: hook for key, hook in hooks.items() if key not in before}
            hooks.clear()
            hooks.update(before | users)


@contextlib.contextmanager
def before_compilations(action: Callable[[], None]) -> Iterator[None]:
    """Calls `action` whenever torch begins to compile code, or kernels of it, within the context on this thread."""
    thread = threading.get_ident()

    def begin(*_: object) -> None:  # older torch gives it no argument
        if threading.get_ident() == thread:
            action()

    callback_handler.register_start_callback(begin)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # `torch.compiler.reset` has removed it
            callback_handler.remove_start_callback(begin)


def run_functions_within(model: nn.Module, context: CallContext) -> list[Callable[[], None]]:
    """Makes compiled functions that modules hold as attributes run within a context.

    Functions that refer to their module are regions, and are left out, as are those of modules in a region.

    Args:
        model: the model.
        context: a context that is given the arguments of a call, and yields those that the function is given.

    Returns:
        Functions that restore the modules.
    """
    inside = {part for region in compiled_regions(model) for part in region.modules()}
    return [
        _wrap_function(module, name, context)
        for module in model.modules()
        if module not in inside
        for name in _compiled_functions(module)
    ]


def run_calls_within(
    module: nn.Module, context: Callable[[], contextlib.AbstractContextManager[object]]
) -> Callable[[], None]:
    """Makes every call of `module` run within a context of its own, which `context` returns; else as `around_calls`.

    The returned function also ends the contexts of interrupted calls: torch calls no hook after a Ctrl-C.
    """
    running: list[contextlib.ExitStack] = []
    """A context for each running call: a module may be called inside its own backward, to recompute."""

    def before() -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(context())
            running.append(stack.pop_all())

    def after() -> None:
        running.pop().close()

    restore = around_calls(module, before, after)

    def end() -> None:
        restore()
        while running:
            after()

    return end


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


def _compiled_functions(module: nn.Module) -> list[str]:
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


def _compiled_methods(module: nn.Module) -> list[str]:
    """Returns the names of those compiled functions that refer to `module`, or to modules or weights in it."""
    names = _compiled_functions(module)
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


def _wrap(module: nn.Module, name: str, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
    """Wraps a compiled attribute in calls of `before` and `after`; returns a function that restores it."""
    compiled = getattr(module, name)

    @wraps(compiled)  # copies the attributes by which torch recognizes compiled functions
    def call(*args: object, **kwargs: object) -> object:
        before()
        try:
            return compiled(*args, **kwargs)
        finally:
            after()

    setattr(module, name, call)
    return partial(setattr, module, name, compiled)


def _wrap_function(module: nn.Module, name: str, context: CallContext) -> Callable[[], None]:
    """Wraps a compiled attribute as `run_functions_within` says; returns a function that restores it."""
    compiled = getattr(module, name)

    @wraps(compiled)
    def call(*args: object, **kwargs: object) -> object:
        with context(args, kwargs) as (given, named):
            return compiled(*given, **named)

    setattr(module, name, call)
    return partial(setattr, module, name, compiled)
