"""The effect of each function of torch on its tensor arguments, by which operators on offloaded tensors are run."""

from collections.abc import Callable, Mapping
from enum import Enum, auto
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from lightning_ssd import torch_internals as internals


class Kind(Enum):
    """The effect of a function on its tensor arguments."""

    METADATA = auto()
    """Reads no element, and acts on the tensor object itself."""
    DTYPE = auto()
    """Reads no element; the result depends on the dtype with which the model was built."""
    MATMUL = auto()
    """Computes, writes no argument, returns no view, and autocast casts its arguments to 16 bits on each device."""
    KERNEL = auto()
    """Computes, writes no argument and returns no view."""
    NORMALIZATION = auto()
    """Computes, writes no argument but running statistics, and returns no view."""
    OPERATOR = auto()
    """An operator of autograd: the result may be a view, which autograd records if it records the argument."""
    COMPUTE = auto()
    """Any other function: it may return a view, and may write to its arguments unnoticed by autograd."""
    STRIDED = auto()
    """Addresses elements by their offset in the storage (`as_strided`)."""
    WRITE = auto()
    """Changes its arguments in place."""
    ALIAS = auto()
    """`Tensor.detach` and `Tensor.data`."""
    SET_DATA = auto()
    """Sets `Tensor.data`."""
    GET_GRAD = auto()
    """Reads `Tensor.grad`."""
    SET_GRAD = auto()
    """Sets or deletes `Tensor.grad`."""
    HOOK = auto()
    """Registers a hook that may read gradients."""
    EXPORT = auto()
    """Passes memory to code outside of torch."""
    ADDRESS = auto()
    """Returns an address, which is valid until the forward of the unit ends."""
    STORAGE = auto()
    """Returns the storage."""
    OFFSET = auto()
    """`Tensor.storage_offset`."""
    FREEZE = auto()
    """Sets whether autograd records operators on the tensor (`requires_grad`, `requires_grad_`)."""


def kind_of(func: Callable[..., Any]) -> Kind:
    """Returns the kind of a function for which torch has called `__torch_function__`."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        kinds = _GETTERS if name == "__get__" else _SETTERS
        kind = kinds.get(cast(Any, func).__self__.__name__, Kind.METADATA)
    elif name in _NAMES:
        kind = _NAMES[name]
    elif (name.endswith("_") and not name.endswith("__")) or name in _WRITING_DUNDERS:
        kind = Kind.WRITE
    else:
        kind = Kind.COMPUTE if isinstance(func, FunctionType) else Kind.OPERATOR
    KINDS[func] = kind
    return kind


def running_statistics(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the running statistics that a function writes, most without an increment of their version counters."""
    if func not in _STATISTICS:
        return []
    training = kwargs.get("training", kwargs.get("use_input_stats", func is torch.nn.functional.instance_norm))
    if not (args[5] if len(args) > 5 else training):
        return []
    return [*args[_STATISTICS[func]], kwargs.get("running_mean"), kwargs.get("running_var")]


_STATISTICS = {
    torch.nn.functional.batch_norm: slice(1, 3),
    torch.nn.functional.instance_norm: slice(1, 3),
    torch.batch_norm: slice(3, 5),
    torch.instance_norm: slice(3, 5),
    torch.native_batch_norm: slice(3, 5),
    torch.cudnn_batch_norm: slice(3, 5),
}
"""Functions of `Kind.NORMALIZATION`, and the positions of running statistics among their arguments."""

_GETTERS = {
    "data": Kind.ALIAS,
    "grad": Kind.GET_GRAD,
    "_grad": Kind.GET_GRAD,
    "dtype": Kind.DTYPE,
    "itemsize": Kind.DTYPE,
    "nbytes": Kind.DTYPE,
    "__cuda_array_interface__": Kind.ADDRESS,
    **dict.fromkeys(("T", "mT", "H", "mH", "real", "imag"), Kind.COMPUTE),
}
"""Attributes whose values depend on elements or on the dtype; all others are metadata."""

_SETTERS = {"data": Kind.SET_DATA, "grad": Kind.SET_GRAD, "requires_grad": Kind.FREEZE}

_NAMES = {
    **dict.fromkeys(("numpy", "__array__", "__dlpack__"), Kind.EXPORT),
    **dict.fromkeys(("data_ptr", "const_data_ptr", "mutable_data_ptr"), Kind.ADDRESS),
    **dict.fromkeys(("untyped_storage", "storage", "_typed_storage"), Kind.STORAGE),
    **dict.fromkeys(("as_strided", "as_strided_copy", "as_strided_scatter"), Kind.STRIDED),
}
"""Functions of torch and methods of tensors that have the same names."""

_WRITING_DUNDERS = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ifloordiv__",
                    "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
                    "__imatmul__")  # fmt: skip

KINDS: dict[Any, Kind] = {
    Tensor.detach: Kind.ALIAS,
    Tensor.register_hook: Kind.HOOK,
    Tensor.register_post_accumulate_grad_hook: Kind.HOOK,
    Tensor.element_size: Kind.DTYPE,
    Tensor.requires_grad_: Kind.FREEZE,
    Tensor.storage_offset: Kind.OFFSET,
    # Functions that read no element. A function that is missing here is slower, but correct.
    **dict.fromkeys(
        (
            Tensor.dim,
            Tensor.get_device,
            Tensor.is_complex,
            Tensor.is_contiguous,
            Tensor.is_floating_point,
            Tensor.nelement,
            Tensor.numel,
            Tensor.retain_grad,
            Tensor.size,
            Tensor.stride,
            Tensor.__hash__,
            Tensor.__len__,
            torch.is_floating_point,
            torch.is_complex,
            torch.numel,
            torch.is_same_size,
            *internals.assignment_queries(),
        ),
        Kind.METADATA,
    ),
    **dict.fromkeys(
        (
            torch.nn.functional.linear,
            torch.nn.functional.conv1d,
            torch.nn.functional.conv2d,
            torch.nn.functional.conv3d,
            torch.nn.functional.conv_transpose1d,
            torch.nn.functional.conv_transpose2d,
            torch.nn.functional.conv_transpose3d,
            torch.conv1d,
            torch.conv2d,
            torch.conv3d,
            torch.matmul,
            Tensor.matmul,
            Tensor.__matmul__,
            Tensor.__rmatmul__,
            torch.mm,
            Tensor.mm,
            torch.bmm,
            Tensor.bmm,
            torch.addmm,
            Tensor.addmm,
            torch.baddbmm,
            Tensor.baddbmm,
        ),
        Kind.MATMUL,
    ),
    **dict.fromkeys(
        (
            torch.nn.functional.layer_norm,
            torch.nn.functional.group_norm,
            torch.nn.functional.rms_norm,
            torch.nn.functional.prelu,
            torch.nn.functional.bilinear,
        ),
        Kind.KERNEL,
    ),
    **dict.fromkeys(_STATISTICS, Kind.NORMALIZATION),
}
"""Kinds of functions that can't be derived from their names, and cached results of `kind_of`."""
