"""Recognizes tensors that a `torch.autograd.Function` saves and references no more, such as those of compiled regions.

A storage can be offloaded once only its record references it. An eager operator drops its local variables soon after
autograd has saved them. A `Function` saves all its tensors when its forward has ended, and until the last one is saved,
the tuple of `save_for_backward` holds them all. No hook is called when it drops them: the next one is that of the next
region, whose kernels are launched by then, so that a copy that is issued there begins a whole region late.
"""

import sys

import torch
from torch import Tensor

from lightning_ssd.activations.untraced import untraced

__all__ = ["is_dropped"]

_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]  # it is a class method

_Counts = tuple[int, int, int]


def is_dropped(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    """Returns whether a `Function` that is saving `tensor` now drops it then, and nothing else references its bytes.

    Then the bytes can't change any more. Tensors that are inputs or outputs of the function, and those that user code
    has kept, count as referenced. The references of the calls in between are known, so it is called only by the method
    that an `untraced` pack hook calls.

    Args:
        tensor: the argument of the pack hook.
        storage: its storage, which has no record.
    """
    return sys._getframe(4).f_code is _APPLY and _counts(tensor, storage) == _COUNTS_IF_DROPPED


def _counts(tensor: Tensor, storage: torch.UntypedStorage) -> _Counts:
    """Returns the references to a tensor and its storage, and the use count of the storage."""
    return sys.getrefcount(tensor), sys.getrefcount(storage), torch._C._storage_Use_Count(storage._cdata)


class _Hooks:
    """Counts the references to the saved tensor in the calls in which the offloader asks for them."""

    counts: _Counts

    @untraced
    def pack(self, tensor: Tensor) -> Tensor:
        return self._pack(tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._count(tensor, storage)
        return tensor

    def _count(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        self.counts = _counts(tensor, storage)

    def unpack(self, tensor: Tensor) -> Tensor:
        return tensor


class _Drop(torch.autograd.Function):
    """Saves a tensor that it has made."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor.clone())
        return tensor.sum()


def _counts_if_dropped() -> _Counts:
    """Returns the counts for such a tensor, which depend on the versions of Python and torch."""
    hooks = _Hooks()
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        _Drop.apply(torch.empty(1, device="cpu", requires_grad=True))  # type: ignore[no-untyped-call]
    return hooks.counts


_COUNTS_IF_DROPPED = _counts_if_dropped()
