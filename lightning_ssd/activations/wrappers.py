"""Saved tensors of subclasses that wrap other tensors, such as `DTensor`: the wrapped tensors are offloaded.

By PyTorch's protocol for such classes, `__tensor_flatten__` and `__tensor_unflatten__`, the wrapped tensors and a
context describe a tensor completely. `torch.compile` saves them for backward in the same way.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations.record import check_version


class SavedWrapper:
    """A saved tensor subclass, which `is_wrapper` accepts: its wrapped tensors, packed, and the context to rebuild it.

    The version counters of the wrapped tensors do not count changes of the wrapper. Its probe does: a wrapper around
    empty tensors that shares the saved wrapper's counter.
    """

    def __init__(self, tensor: Tensor, pack: Callable[[Tensor], Any]) -> None:
        names, self._context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        wrapped = {name: getattr(tensor, name) for name in names}
        self._packed = {name: pack(value) for name, value in wrapped.items() if _is_packed(value)}
        self._others = {name: value for name, value in wrapped.items() if name not in self._packed}
        self._type = type(tensor)
        self._size, self._stride, self._dtype = tensor.size(), tensor.stride(), tensor.dtype
        self._version = internals.version_of(tensor)
        self._probe = tensor.detach()
        for name in self._packed:
            setattr(self._probe, name, torch.empty(0, dtype=wrapped[name].dtype, device=wrapped[name].device))

    def rebuild(self, unpack: Callable[[Any], Tensor]) -> Tensor:
        """Returns the saved tensor; `unpack` is the inverse of `pack`.

        Raises:
            RuntimeError: the tensor was changed after it was saved.
        """
        check_version(self._probe, self._version, self._dtype, self._size)
        wrapped: dict[str, Any] = {name: unpack(packed) for name, packed in self._packed.items()}
        tensor: Tensor = self._type.__tensor_unflatten__(  # type: ignore[attr-defined]
            wrapped | self._others, self._context, self._size, self._stride
        )
        return tensor.detach()


def is_wrapper(tensor: Tensor) -> bool:
    """Returns whether `tensor` is described completely by wrapped tensors and a context."""
    # An asynchronous result is still being written, and the sizes of a jagged tensor refer to the identity of its
    # offsets tensor.
    not_unwrapped = (internals.AsyncCollectiveTensor, internals.NestedTensor)
    return internals.is_wrapper(tensor) and not isinstance(tensor, not_unwrapped)


def _is_packed(value: Any) -> bool:
    """Returns whether `value` is a tensor that may be packed: one made in inference mode has no version counter."""
    return isinstance(value, Tensor) and not value.is_inference()
