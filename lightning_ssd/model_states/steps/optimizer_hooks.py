"""Hooks on the user's optimizers: `step` steps the parameters on the device, `zero_grad` drops all gradients.

All hooks run on the thread that calls the optimizer, which is the training thread.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_ssd import torch_internals as internals
from lightning_ssd.model_states.access import GradientAccess
from lightning_ssd.model_states.optimizers import zeroes_otherwise
from lightning_ssd.sizes import show_argument, show_value


def hook_step(
    optimizer: Optimizer,
    grads: GradientAccess,
    begin: Callable[[Optimizer], None],
    closure_runs: Callable[[Optimizer], AbstractContextManager[None]],
    end: Callable[[Optimizer], None],
) -> list[RemovableHandle]:
    """Surrounds `optimizer.step`, which steps the parameters on the device and finds no offloaded gradients.

    Args:
        optimizer: the user's optimizer.
        grads: hides the offloaded gradients while `step` runs, except within its closure.
        begin: called before `step`.
        closure_runs: surrounds each call of the closure within `step`.
        end: called after `step`.

    Returns:
        The handles of the hooks before and after `step`. The first one raises ValueError if `step` is given an argument
        other than a closure, which steps of offloaded parameters would not know.
    """

    def before(stepping: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if stepping is not optimizer:  # Lightning's wrapper: once it was copied, torch calls the hooks for it, too
            return None
        _check_arguments(optimizer, args[1:], kwargs)
        begin(optimizer)

        def with_grads(closure: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                with grads.hide(False), closure_runs(optimizer):
                    return closure()

            return run

        if len(args) > 1 and args[1] is not None:
            args = (args[0], with_grads(args[1]), *args[2:])
        elif kwargs.get("closure") is not None:
            kwargs = {**kwargs, "closure": with_grads(kwargs["closure"])}
        grads.hidden = True
        return args, kwargs

    def after(stepping: Optimizer, *_: object) -> None:
        if stepping is optimizer:
            grads.hidden = False
            end(optimizer)

    return [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]


def _check_arguments(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    others = [show_value(one) for index, one in enumerate(args) if one is not None and (index or not callable(one))]
    others += [show_argument(name, one) for name, one in kwargs.items() if one is not None and name != "closure"]
    if others:
        name = type(optimizer).__name__
        raise ValueError(
            f"{name}.step was given {', '.join(others)}, but offloaded parameters are stepped unit by unit, without "
            f"arguments. Set an option of the parameter groups instead, do not register {name}, so that it is stepped "
            "whole, or set `states='gpu'`."
        )


def keep_last(optimizer: Optimizer, handle: RemovableHandle) -> Callable[[], None]:
    """Keeps the hook of `hook_step` before `step` the last one: hooks that are registered later find gradients, too.

    Returns:
        A function that ends that.
    """
    register = optimizer.register_step_pre_hook

    def register_before(hook: Any) -> RemovableHandle:
        registered = register(hook)
        hooks: Any = optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(handle.id)
        return registered

    optimizer.register_step_pre_hook = register_before  # type: ignore[method-assign]
    return partial(delattr, optimizer, "register_step_pre_hook")


def hook_zero_grad(
    optimizer: Optimizer, grads: GradientAccess, zero: Callable[[Optimizer, bool], None]
) -> list[Callable[[], None]]:
    """Makes torch's own `zero_grad` drop the gradients of a flat parameter together.

    If other code has replaced `zero_grad`, nothing is hooked: each `Tensor.grad` that it sets drops that gradient.

    Args:
        optimizer: the user's optimizer.
        grads: hides the offloaded gradients from torch's `zero_grad`.
        zero: drops the offloaded gradients of an optimizer; called with the optimizer and `set_to_none`.

    Returns:
        Functions that remove the hook.
    """
    if zeroes_otherwise(optimizer):
        return []
    zero_grad = optimizer.zero_grad

    def zero_all(set_to_none: bool = True) -> None:
        zero(optimizer, set_to_none)
        # Without the functions of `OffloadedParameter`, whose hidden `.grad` is torch's own: None.
        with grads.hide(), internals.without_torch_function():
            zero_grad(set_to_none)

    optimizer.zero_grad = zero_all  # type: ignore[method-assign]
    return [partial(delattr, optimizer, "zero_grad")]
