"""Base class of the parameters that have additional state during a training, and the hook on their gradients."""

import contextlib
import multiprocessing.context
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_ssd import torch_internals as internals


def hook_gradient(parameter: nn.Parameter, hook: Callable[[nn.Parameter], None]) -> RemovableHandle:
    """Registers `hook` for accumulated gradients, also on a frozen parameter, which may require gradients later.

    It runs before the parameter's other hooks: those read and assign the gradient by `Tensor.grad`, which is the sum
    with earlier micro-batches only once `hook` has stored the new gradient.
    """
    with internals.without_torch_function():
        required = parameter.requires_grad
        parameter.requires_grad_(True)  # torch refuses the hook otherwise
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
        parameter.requires_grad_(required)
        hooks = parameter._post_accumulate_grad_hooks
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)
    return handle


class TrainedParameter(nn.Parameter):
    """Base class of parameters with additional state during a training. Copies and pickles are ordinary parameters."""

    _OWN: tuple[str, ...]
    """Names of the attributes that a parameter has during a training only. All others are of user code."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = self._plain()
        return cast(nn.Parameter, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        if multiprocessing.context.get_spawning_popen() is not None:
            raise RuntimeError(
                "a new process, such as a worker of a DataLoader, is given a model that trains with offloaded states: "
                "it can't share the memory of its weights, as torch's processes do. Give it a `copy.deepcopy` of the "
                "model."
            )
        plain = self._plain()
        vars(plain).update((name, value) for name, value in vars(self).items() if name not in self._OWN)
        return plain.__reduce_ex__(protocol)

    def _plain(self) -> nn.Parameter:
        with torch.inference_mode(False), torch.no_grad():
            return nn.Parameter(self.detach().clone(), self.requires_grad)


@contextlib.contextmanager
def ordinary(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Makes every `TrainedParameter` of `parameters` an ordinary one, while compiled code uses it."""
    classes = {parameter: type(parameter) for parameter in parameters if isinstance(parameter, TrainedParameter)}
    for parameter in classes:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    try:
        yield
    finally:
        for parameter, own in classes.items():
            parameter.__class__ = own
