"""Modules that `torch.compile` compiles: hooks run outside of the compiled call, so that Dynamo does not trace them.

A compiled module is one region: its weights are kept on the device from before the compiled call until after it, and
its parameters are ordinary ones meanwhile. So Dynamo compiles the same program as in plain training.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations import is_compiled_function, wrap_function
from lightning_ssd.model_states.units import (
    compiled_functions,
    compiled_methods,
    compiled_regions,
)
from lightning_ssd.uncopied import ModuleHook, takes_hooks

CallContext = Callable[
    [Sequence[object], Mapping[str, object]],
    contextlib.AbstractContextManager[tuple[Sequence[object], Mapping[str, object]]],
]
"""A context around a call, which is given its arguments and yields others."""


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
    Wrappers of later calls of this function are outside of earlier ones. Reruns of checkpointed units call both, too.

    Returns:
        A function that restores the module.
    """
    if is_compiled_function(module._compiled_call_impl):
        return _wrap(module, "_compiled_call_impl", before, after)
    undo = contextlib.ExitStack()
    if methods := [name for name in compiled_methods(module) if name != "forward"]:
        # Methods of a LightningModule that was compiled as a whole: they call its `forward` in compiled code.
        for name in methods:
            undo.callback(_wrap(module, name, before, after))
        return undo.close
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

    # A rerun of a checkpointed unit uses the weights as the first run did.
    undo.callback(module.register_forward_pre_hook(ModuleHook(begin, in_reruns=True), prepend=True).remove)
    undo.callback(module.register_forward_hook(ModuleHook(end, in_reruns=True), always_call=True).remove)
    return undo.close


@contextlib.contextmanager
def without_own_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Removes this package's forward hooks of `modules` within the context, in which compiled code calls them.

    Modules in a compiled region have such hooks if the model contains them outside of it, too, to call them without
    compilation (`self.model`, and `self.compiled = torch.compile(self.model)`). Dynamo would trace these hooks.
    """
    removed: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for module in modules:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            if any([isinstance(hook, ModuleHook) for hook in hooks.values()]):
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

    internals.compile_callbacks.register_start_callback(begin)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # `torch.compiler.reset` has removed it
            internals.compile_callbacks.remove_start_callback(begin)


def run_functions_within(model: nn.Module, context: CallContext) -> list[Callable[[], None]]:
    """Makes compiled functions that modules hold as attributes run within a context.

    Functions that refer to their module are regions, and are left out, as are those of modules in a region.

    Args:
        context: a context that is given the arguments of a call, and yields those that the function is given.

    Returns:
        Functions that restore the modules.
    """
    inside = {part for region in compiled_regions(model) for part in region.modules()}
    restoring: list[Callable[[], None]] = []
    for module in model.modules():
        for name in compiled_functions(module) if module not in inside else ():
            compiled = getattr(module, name)
            setattr(module, name, _within(compiled, context))
            restoring.append(partial(setattr, module, name, compiled))
    return restoring


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


def _wrap(module: nn.Module, name: str, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
    """Wraps a compiled attribute in calls of `before` and `after`; returns a function that restores it."""
    return wrap_function(module, name, lambda *_: before(), lambda _: after(), in_reruns=True)


def _within(compiled: Callable[..., object], context: CallContext) -> Callable[..., object]:
    @wraps(compiled)
    def call(*args: object, **kwargs: object) -> object:
        with context(args, kwargs) as (given, named):
            return compiled(*given, **named)

    return call
