"""A parameter whose weights are fetched whenever something computes with them, be it outside of its unit's forward."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_ssd.activations.weights import fetch_of


def hook_gradient(parameter: nn.Parameter, hook: Callable[[nn.Parameter], None]) -> RemovableHandle:
    """Has `hook` called when autograd has accumulated a gradient of `parameter`, be it frozen now, as it may thaw."""
    wants = parameter.requires_grad
    parameter.requires_grad_(True)  # torch takes the hook of no other
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(wants)
    return handle


class StreamedParameter(nn.Parameter):
    """What a parameter's class is while its weights are elsewhere.

    Most uses are inside a unit's forward, whose hook has fetched them already. Others (a tied head's `x @ w`, a penalty
    on weights) come through here alone.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if not _is_metadata(func):
                for value in (*args, *(kwargs or {}).values()):
                    for tensor in value if isinstance(value, list | tuple) else (value,):
                        if isinstance(tensor, cls) and (fetch := fetch_of(tensor.untyped_storage())) is not None:
                            fetch()
            return func(*args, **(kwargs or {}))


def _is_metadata(func: Callable[..., Any]) -> bool:
    """Whether `func` looks at no element of its tensors."""
    if func in _METADATA:
        return True
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return cast(Any, func).__self__.__name__ not in _VALUES
    return name in ("__set__", "__delete__")


_VALUES = ("data", "T", "mT", "H", "mH", "real", "imag")
"""Attributes that show elements."""

_METADATA = {
    Tensor.detach,  # a view without memory of its own: the state dict's, which takes the values from elsewhere
    Tensor.dim,
    Tensor.element_size,
    Tensor.get_device,
    Tensor.is_complex,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    Tensor.nelement,
    Tensor.numel,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.requires_grad_,
    Tensor.size,
    Tensor.storage_offset,
    Tensor.stride,
    Tensor.untyped_storage,
    Tensor.__hash__,
    Tensor.__len__,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
