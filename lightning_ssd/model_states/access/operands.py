"""Arguments and results of operators on offloaded tensors, for `access`.

Trees of tensors, the memory that tensors share, and derivatives with respect to offloaded parameters.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lightning_ssd import torch_internals as internals
from lightning_ssd.model_states.access.parameter import OffloadedParameter, map_tensors, offloaded_in


def offset_in(value: Tensor, base: Tensor) -> int | None:
    """Returns the offset of `value` in `base` in bytes, or None if it lies elsewhere in their storage."""
    offset = int(value.storage_offset() * value.itemsize - base.storage_offset() * base.itemsize)
    same = internals.storage_key(value.untyped_storage()) == internals.storage_key(base.untyped_storage())
    return offset if same and 0 <= offset < max(1, base.nbytes) else None


def geometry(tensor: Tensor) -> tuple[object, ...]:
    """Returns dtype, shape, strides and memory, which no function may change of an offloaded tensor."""
    return (
        tensor.dtype,
        tensor.size(),
        tensor.stride(),
        tensor.storage_offset(),
        internals.storage_key(tensor.untyped_storage()),
    )


def substitute(value: Any, values: Mapping[int, Any]) -> Any:
    """Returns a tree of arguments with offloaded tensors replaced by `values`, which are keyed by identity."""
    return map_tensors(lambda tensor: values.get(id(tensor), tensor), value)


def differentiate(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Runs `torch.autograd.grad` or `backward` with respect to offloaded parameters.

    Torch takes their nodes in place of them, so that user code which backward calls (hooks, autograd functions,
    recomputation) may use offloaded tensors: `func` calls no `__torch_function__` by itself.
    """
    inputs: Any = args[1] if func is torch.autograd.grad else kwargs["inputs"]
    given = list(offloaded_in(inputs).values())
    trained = all([isinstance(tensor, OffloadedParameter) and tensor.requires_grad for tensor in given])
    materialize = kwargs.get("materialize_grads", False)
    if not trained or offloaded_in(args[0]) or (materialize and kwargs["allow_unused"] is False):
        return func(*args, **kwargs)
    options = {**kwargs, "inputs": substitute(inputs, {id(tensor): get_gradient_edge(tensor) for tensor in given})}
    if materialize:  # which torch refuses for nodes
        options |= {"materialize_grads": False, "allow_unused": True}
    with internals.with_torch_function():
        result = func(args[0], **options)
    if not materialize:
        return result
    return tuple(
        torch.zeros_like(tensor, dtype=getattr(tensor, "plain_dtype", None), requires_grad=bool(kwargs["create_graph"]))
        if gradient is None
        else gradient
        for gradient, tensor in zip(result, inputs, strict=True)
    )
