"""References that autograd saves in place of offloaded weights while an operator on them runs."""

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations import SavedWeight, check_version, weights_of


def references_saved() -> contextlib.AbstractContextManager[object]:
    """Makes autograd save references to weights, unless hooks of the training do so already.

    A pack hook of user code may return the weight itself, or a container or a view of it, whose memory is freed when
    the weight is evicted. Within such hooks a reference takes its place, and the unpack hook is given loaded weights.
    """
    if not torch.is_grad_enabled():
        return _UNCHANGED
    hooks = internals.innermost_saved_hooks(False)
    if hooks is None:
        return saved_tensors_hooks(_pack, _unpack)
    pack, unpack = hooks
    if (getattr(pack, "__module__", None) or "").startswith(_KEEP_NO_WEIGHTS):
        return _UNCHANGED

    def pack_for_user(tensor: Tensor) -> Any:
        packed = pack(tensor)
        if not any(
            [isinstance(leaf, Tensor) and weights_of(leaf) is not None for leaf in internals.tree_leaves(packed)]
        ):
            return packed
        return internals.tree_map_only(Tensor, _reference, packed)

    def unpack_for_user(packed: Any) -> Tensor:
        loaded: Tensor = unpack(internals.tree_map_only(SavedWeight, lambda reference: reference.load(), packed))
        return loaded

    return saved_tensors_hooks(pack_for_user, unpack_for_user)


_UNCHANGED = contextlib.nullcontext()

_KEEP_NO_WEIGHTS = (__name__.partition(".")[0] + ".", "torch.utils.checkpoint")
"""Modules whose pack hooks keep no weight that may be evicted."""


def _reference(tensor: Tensor) -> "SavedWeight | Tensor":
    weights = weights_of(tensor)
    return tensor if weights is None else weights.save(tensor)


def _pack(tensor: Tensor) -> "SavedWeight | tuple[Tensor, int]":
    reference = _reference(tensor)
    if isinstance(reference, SavedWeight):
        return reference
    return (tensor if tensor.is_leaf else tensor.detach()), internals.version_of(tensor)


def _unpack(saved: "SavedWeight | tuple[Tensor, int]") -> Tensor:
    if isinstance(saved, SavedWeight):
        return saved.load()
    tensor, version = saved
    check_version(tensor, version, tensor.dtype, tensor.size())
    return tensor
