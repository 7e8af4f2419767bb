"""Compiled code: its functions and calls, and the state of `torch.compile` in this process.

Trainings that do not compile import nothing of `torch.compile`.

Note:
    Hooks of a module that `module.compile()` has compiled run inside of the compiled call, where Dynamo would trace
    them. So `around_call` wraps the compiled call itself. Wrappers of one module are layers of one function, each of
    which may be removed in any order.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, TypeGuard

import torch
from torch import nn

from lightning_ssd import torch_internals as internals
from lightning_ssd.uncopied import ModuleHook

_LAYERS = "_lightning_ssd_layers"
"""Attribute of a wrapped function: the list of its layers."""


def is_compiled_function(value: object) -> TypeGuard[FunctionType]:
    """Returns whether `torch.compile` has made a function. It returns its argument with `disable=True`."""
    return (
        issubclass(type(value), FunctionType)  # `isinstance` would ask a proxy for the class of an object that is gone
        and hasattr(value, "_torchdynamo_orig_callable")
        and not hasattr(value, "_torchdynamo_disable")  # `torch.compiler.disable` sets both
    )


def calls_are_compiled(module: nn.Module) -> bool:
    """Returns whether calls of `module` run compiled code: `module.compile()`, `torch.compile(module)`, a decorator."""
    own = vars(module).get("forward")
    kind = getattr(type(module), "forward", None)
    if own is None and kind is nn.Module.forward:
        return False  # `compile()` of a ModuleList, whose modules are called, has no effect
    if type(module).__name__ == "OptimizedModule":
        return is_compiled_function(own)  # else made by `torch.compiler.disable`
    return any(map(is_compiled_function, (module._compiled_call_impl, own, kind)))


class _Layer(NamedTuple):
    """Functions that a wrapped function calls before and after each call.

    Attributes:
        before: called with the positional and keyword arguments.
        after: called with the result, or with `None` after an error, unless `before` has raised an error.
        in_reruns: whether they are also called around a call that activation checkpointing runs again.
    """

    before: Callable[[Sequence[Any], Mapping[str, Any]], object]
    after: Callable[[object], object]
    in_reruns: bool


def wrap_function(
    module: nn.Module,
    name: str,
    before: Callable[[Sequence[Any], Mapping[str, Any]], object],
    after: Callable[[object], object],
    *,
    in_reruns: bool = False,
) -> Callable[[], None]:
    """Wraps a compiled function that is an attribute of `module`; later wrappers are outside of earlier ones.

    Args:
        before: called with the positional and keyword arguments before each call.
        after: called with its result, or with `None` after an error, unless `before` has raised an error.
        in_reruns: whether both are also called around a call that activation checkpointing runs again.

    Returns:
        A function that removes the wrapper.
    """
    layer = _Layer(before, after, in_reruns)
    layers: list[_Layer] | None = vars(getattr(module, name)).get(_LAYERS)
    if layers is None:
        layers = []
        setattr(module, name, _layered(getattr(module, name), layers))
    layers.append(layer)

    def remove() -> None:
        layers.remove(layer)
        if not layers:
            setattr(module, name, getattr(module, name).__wrapped__)

    return remove


def _layered(compiled: Callable[..., Any], layers: list[_Layer]) -> Callable[..., Any]:
    @wraps(compiled)  # copies the attributes by which torch recognizes compiled functions
    def call(*args: Any, **kwargs: Any) -> Any:
        return _run(tuple(layers), compiled, args, kwargs)

    vars(call)[_LAYERS] = layers
    return call


def _run(layers: Sequence[_Layer], function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a function within layers, of which the last one is the outermost."""
    if not layers:
        return function(*args, **kwargs)
    layers[-1].before(args, kwargs)
    result = None
    try:
        result = _run(layers[:-1], function, args, kwargs)
        return result
    finally:
        layers[-1].after(result)


def around_call(
    module: nn.Module,
    before: Callable[[Sequence[Any], Mapping[str, Any]], object],
    after: Callable[[object], object],
) -> Callable[[], None]:
    """Makes each call of `module` call `before` with its arguments and `after` with its result, outside of other hooks.

    After an error, `after` is called with `None`. Torch calls it also if `before` was not called because of an error of
    another hook.

    Returns:
        A function that ends it.
    """
    if is_compiled_function(module._compiled_call_impl):
        return wrap_function(module, "_compiled_call_impl", before, after)

    def begin(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        before(args, kwargs)

    def end(module: nn.Module, args: object, output: object) -> None:
        after(output)

    first = module.register_forward_pre_hook(ModuleHook(begin), prepend=True, with_kwargs=True)
    last = module.register_forward_hook(ModuleHook(end), prepend=True, always_call=True)

    def remove() -> None:
        first.remove()
        last.remove()

    return remove


def run_again(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Runs the forward of `module` again, with the layers of its compiled call that take part in reruns, and no hooks.

    A module that `module.compile()` has compiled has its hooks inside of the compiled code.
    """
    compiled = module._compiled_call_impl
    if not is_compiled_function(compiled):
        module.forward(*args, **kwargs)
        return
    layers: list[_Layer] | None = vars(compiled).get(_LAYERS)
    if layers is None:
        compiled(*args, **kwargs)
    else:
        _run([layer for layer in layers if layer.in_reruns], vars(compiled)["__wrapped__"], args, kwargs)


class GuardHook:
    """Calls a function whenever Dynamo has checked the guards of compiled code, until `close`, if torch can.

    Dynamo has one hook for the process, which serves all open objects and the hook of other code that it replaces. It
    is called on the thread that calls compiled code.
    """

    _open: "ClassVar[list[GuardHook]]" = []
    _replaced: ClassVar[Callable[[bool], bool] | None] = None
    """The hook of other code."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        if not self._open:
            GuardHook._replaced = internals.set_guard_hook(_on_guards)
        self._open.append(self)

    def close(self) -> None:
        """Ends the calls, which cost the host a call of Python for each check of guards."""
        if self not in self._open:
            return
        self._open.remove(self)
        if not self._open:
            present = internals.set_guard_hook(GuardHook._replaced)
            if present is not _on_guards:  # other code has replaced ours since
                internals.set_guard_hook(present)


def _on_guards(found: bool) -> bool:
    """Calls the functions of all open objects, and returns the answer of the hook that this one has replaced."""
    for hook in tuple(GuardHook._open):
        hook._action()
    return found if GuardHook._replaced is None else GuardHook._replaced(found)


def count_cuda_graphs(device: torch.device) -> int:
    """Returns the number of compiled functions that have CUDA graphs on `device`, as with `mode="reduce-overhead"`."""
    return _cuda_graph_functions(device)[0]


def runs_cuda_graphs(device: torch.device, count_before: int) -> bool:
    """Returns whether the first forward of a training ran code with CUDA graphs, be they new or of an earlier training.

    Called before its backward, on the training thread, which runs the compiled forwards.

    Args:
        device: the training device.
        count_before: result of `count_cuda_graphs` before the training.
    """
    count, awaits_backward = _cuda_graph_functions(device)
    return awaits_backward or count != count_before


def _cuda_graph_functions(device: torch.device) -> tuple[int, bool]:
    if device.type != "cuda":
        return 0, False
    return internals.cuda_graph_functions(torch.cuda.current_device() if device.index is None else device.index)


def check_no_cuda_graphs(module: nn.Module, device: torch.device) -> None:
    """Refuses modules that are compiled with CUDA graphs, in a training whose weights are offloaded.

    A recorded graph reads weights at the addresses that they had when it was recorded. Offloaded weights have another
    address after each prefetch. Functions that `training_step` compiles itself are not found.

    Args:
        device: the training device. Only on a GPU are graphs recorded.

    Raises:
        ValueError: a part of `module` is compiled with CUDA graphs, as with `mode="reduce-overhead"`.
    """
    if device.type != "cuda":
        return
    for name, part in module.named_modules():
        if any(config.get("triton.cudagraphs") for config in _configs(part)):
            raise ValueError(
                f"{name or type(module).__name__} is compiled with CUDA graphs (`mode='reduce-overhead'`), which need "
                "weights at fixed addresses, and addresses of offloaded weights change. Compile without that mode, or "
                "set `states='gpu'`."
            )


def _configs(part: nn.Module) -> list[dict[str, Any]]:
    """Returns Inductor's settings for the calls and methods of `part`, as far as they are compiled by it."""
    functions = [value for value in vars(part).values() if isinstance(value, FunctionType)]
    readers = [vars(part).get("get_compiler_config"), *(vars(one).get("get_compiler_config") for one in functions)]
    configs = [reader() for reader in readers if reader is not None]
    return [one for one in configs if isinstance(one, dict)]
