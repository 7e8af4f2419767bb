"""The user's optimizers: their parameters and groups, and whether they may be stepped one part of a model at a time."""

import inspect
import logging
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from types import FrameType

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations import is_compiled_function
from lightning_ssd.sizes import show_argument

log = logging.getLogger(__name__)

Groups = Mapping[nn.Parameter, tuple[Optimizer, int]]
"""For each parameter, its optimizer and the index of its parameter group."""

_REGISTERED: set[type[Optimizer]] = {
    cls
    for cls in vars(torch.optim).values()
    if isinstance(cls, type) and cls not in (Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)
}
"""Classes that step each parameter on its own."""

_SHARED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Classes whose states have an element for each weight: several ranks share them, in memory of known size."""


def register_optimizer(cls: type[Optimizer]) -> type[Optimizer]:
    """Registers an optimizer class that steps each parameter on its own, so that its steps overlap with backward.

    Offloaded parameters are stepped one part of the model after the other. That gives the numbers of plain training if
    `step` computes the new values of a parameter from its own weight, gradient and state, and from the settings of its
    group. It does not if `step` computes a norm over several parameters, counts its calls in an attribute, or reads an
    attribute that changes during training. The classes of `torch.optim` are registered, and subclasses of registered
    ones that add methods and override `__init__` alone; all others are stepped whole when backward has ended.

    Args:
        cls: the class. Subclasses that override further methods are not registered with it.

    Returns:
        The class, so that this is a decorator, too.

    Raises:
        TypeError: `cls` is not a class of optimizers.

    Example::

        @lightning_ssd.register_optimizer
        class Lion(torch.optim.Optimizer): ...
    """
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise TypeError(f"{show_argument('cls', cls)} is no subclass of torch.optim.Optimizer. Give the class itself.")
    _REGISTERED.add(cls)
    return cls


def stepped_whole(
    optimizers: Iterable[Optimizer], offloaded: Container[nn.Parameter], *, on_ranks: bool
) -> list[Optimizer]:
    """Returns the optimizers with offloaded parameters that are stepped whole; the log names them.

    Args:
        on_ranks: whether several ranks train the model. Each of them steps optimizers whose states are not in shared
            memory, as under DDP, and so has these states for its state dicts.
    """
    whole = []
    for optimizer in optimizers:
        if not any(parameter in offloaded for parameter in parameters_of(optimizer)):
            continue
        name = type(optimizer).__name__
        if on_ranks and (steps_whole(optimizer) or registered_class(type(optimizer)) not in _SHARED):
            whole.append(optimizer)
            log.warning(
                "%s is stepped whole by each process when backward has ended, with all weights, gradients and states "
                "in host memory of its own: several devices share the states and steps of Adam, AdamW and SGD alone",
                name,
            )
        elif steps_whole(optimizer):
            whole.append(optimizer)
            log.warning(
                "%s is stepped whole when backward has ended, with all weights and gradients in host memory: its "
                "parameters may depend on each other, or hooks look at its steps. If each is stepped on its own, "
                "`lightning_ssd.register_optimizer(%s)` lets steps overlap with backward",
                name,
                name,
            )
    return whole


def check_steps_not_compiled(optimizers: Iterable[Optimizer], offloaded: Container[nn.Parameter]) -> None:
    """Refuses optimizers of offloaded parameters whose `step` is compiled: compiled code has no such parameters.

    Raises:
        ValueError: `torch.compile` has made `step` of an optimizer.
    """
    for optimizer in optimizers:
        if is_compiled_function(getattr(optimizer.step, "__func__", optimizer.step)) and any(
            parameter in offloaded for parameter in parameters_of(optimizer)
        ):
            raise ValueError(
                f"`step` of {type(optimizer).__name__} is compiled, and steps of offloaded weights, which the CPU "
                "makes, can't be. Remove `torch.compile` from the optimizer, or set `states='gpu'`."
            )


def steps_whole(optimizer: Optimizer) -> bool:
    """Returns whether `optimizer` must be stepped whole: its class is not registered, or hooks observe its steps."""
    return bool(
        registered_class(type(optimizer)) is None
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or internals.has_global_optimizer_hooks()
    )


def runs_within_step(optimizers: Iterable[Optimizer]) -> bool:
    """Returns whether the calling code runs within `step` of one of the optimizers, in a closure."""
    steps = {getattr(type(optimizer).step, "__code__", None) for optimizer in optimizers}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in steps:
        frame = frame.f_back
    return frame is not None


def registered_class(cls: type[Optimizer]) -> type[Optimizer] | None:
    """Returns the registered class whose step `cls` makes, or None."""
    for number, base in enumerate(cls.__mro__):
        if base in _REGISTERED:
            subclasses = cls.__mro__[:number]
            changed = any(_differs(subclass, base, name) for subclass in subclasses for name in vars(subclass))
            return None if changed else base
    return None


def _differs(subclass: type, cls: type, name: str) -> bool:
    """Returns whether `subclass` overrides `name`, which the step of `cls` may use."""
    if name.startswith("__") and name != "__setstate__":
        return False
    if not hasattr(cls, name):
        return False
    return inspect.unwrap(vars(subclass)[name]) is not inspect.unwrap(getattr(cls, name))


def unscales_itself(optimizer: Optimizer) -> bool:
    """Returns whether `step` divides gradients by the loss scale, and does nothing if one is not finite."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def zeroes_otherwise(optimizer: Optimizer) -> bool:
    """Returns whether other code has replaced `zero_grad`, in a subclass or on the optimizer: it may drop fewer."""
    return "zero_grad" in vars(optimizer) or type(optimizer).zero_grad is not Optimizer.zero_grad


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Returns the parameters of all groups, in the order in which a state dict numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def groups_of(optimizers: Sequence[Optimizer]) -> tuple[dict[nn.Parameter, tuple[Optimizer, int]], set[nn.Parameter]]:
    """Returns the group of every parameter, and the parameters that two optimizers step."""
    groups: dict[nn.Parameter, tuple[Optimizer, int]] = {}
    twice: set[nn.Parameter] = set()
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if groups.setdefault(parameter, (optimizer, number))[0] is not optimizer:
                    twice.add(parameter)
    return groups, twice
