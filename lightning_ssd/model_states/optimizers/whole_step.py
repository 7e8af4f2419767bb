"""Optimizers whose parameters may depend on each other are stepped whole: once, by their own `step`, on the CPU.

`step` has the same view as in plain training: all parameters of the optimizer with whole fp32 weights and gradients,
its own `state`, its attributes and hooks, and a closure that it may call more than once. Weights are offloaded while a
closure runs. Nothing overlaps with backward.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ssd import torch_internals as internals
from lightning_ssd.model_states.optimizers.user_optimizers import parameters_of
from lightning_ssd.spans import OPTIMIZER, span

Summon = Callable[[], contextlib.AbstractContextManager[None]]


class WholeStep:
    """Replaces the `step` of one optimizer.

    Args:
        optimizer: the user's optimizer, whose `step` is replaced until `restore`.
        summon: returns a context in which offloaded parameters have whole weights and gradients on the CPU, and
            changes of both count.
    """

    def __init__(self, optimizer: Optimizer, summon: Summon) -> None:
        self._optimizer = optimizer
        self._step = optimizer.step
        self._own = vars(optimizer).get("step")
        self._summon = summon
        self._summoned = contextlib.ExitStack()
        """Open while `step` runs, except within a closure."""
        self._restored = False

        # Schedulers read attributes that they have set on `step`, and wrap its `__func__`.
        @functools.wraps(optimizer.step)
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._run(*args, **kwargs)

        self._method = types.MethodType(step, optimizer)
        optimizer.step = self._method  # type: ignore[method-assign]

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._restored:
            return self._step(*args, **kwargs)
        if args and callable(args[0]):
            args = (self._offloaded(args[0]), *args[1:])
        elif callable(kwargs.get("closure")):
            kwargs = {**kwargs, "closure": self._offloaded(kwargs["closure"])}
        with self._summoned:
            self._open()
            return self._step(*args, **kwargs)

    def restore(self) -> None:
        """Restores the optimizer's own `step`."""
        self._restored = True  # other code may still call the method
        if vars(self._optimizer).get("step") is not self._method:
            return
        if self._own is None:
            del self._optimizer.step
        else:
            self._optimizer.step = self._own  # type: ignore[method-assign]

    def _open(self) -> None:
        self._summoned.enter_context(self._summon())
        self._summoned.enter_context(_on_cpu(self._optimizer))
        self._summoned.enter_context(span(OPTIMIZER + type(self._optimizer).__name__))

    def _offloaded(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Returns a closure that runs with offloaded weights."""

        def run() -> Any:
            self._summoned.close()
            result = closure()
            self._open()
            return result

        return run


@contextlib.contextmanager
def _on_cpu(optimizer: Optimizer) -> Iterator[None]:
    """Moves the optimizer's resident parameters, their gradients and all its states to the CPU, within the context."""
    moved: list[tuple[nn.Parameter, Tensor]] = []
    for parameter in parameters_of(optimizer):
        if parameter.device.type != "cpu":
            grad, resident = parameter.grad, parameter.data
            parameter.grad = None
            parameter.data = resident.cpu()
            parameter.grad = None if grad is None else grad.cpu()
            moved.append((parameter, resident))
    for owner, state in optimizer.state.items():
        # Loading a checkpoint moves states to the parameter's device.
        if any(isinstance(value, Tensor) and value.device.type != "cpu" for value in internals.tree_leaves(state)):
            optimizer.state[owner] = internals.tree_map_only(Tensor, Tensor.cpu, state)
    try:
        yield
    finally:
        for parameter, resident in moved:
            grad, parameter.grad = parameter.grad, None
            resident.copy_(parameter.data)
            parameter.data = resident
            parameter.grad = None if grad is None else grad.to(resident.device)
