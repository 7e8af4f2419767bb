"""Recognizes tensors that a compiled region saves and references no more.

A storage can be offloaded once only its record references it. An eager operator drops its local variables soon after
autograd has saved them. A compiled region is a `torch.autograd.Function`, which saves all its tensors when its forward
has ended, and until the last one is saved, the tuple of `save_for_backward` holds them all. No hook is called when it
drops them: the next one is that of the next region, whose kernels are launched by then, so that a copy that is issued
there begins a whole region late.

The frame that calls the region tells its tensors from those of eager operators, whose references may count the same
while user code still reaches them.
"""

import sys
from types import FrameType

import torch
from torch import Tensor

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations.untraced import untraced

_FUNCTION_FILE = torch.autograd.function.__file__

Counts = tuple[int, int, int, int]
"""References to a tensor and its storage: of each the Python object's, and its C++ object's."""


def is_dropped(tensor: Tensor, storage: torch.UntypedStorage, counts: Counts) -> bool:
    """Returns whether a region drops `tensor` once its tensors are saved, and nothing else references the bytes.

    The bytes of such a tensor can't change any more. Tensors that are inputs or outputs of the region, and those that
    a backend or a running collective has kept, count as referenced. The references of the calls in between are known,
    so it is called only by the method that an `untraced` pack hook calls.

    Args:
        storage: its storage, which has no record.
    """
    caller: FrameType | None = sys._getframe(4)
    if caller is not None and caller.f_code.co_filename == _FUNCTION_FILE:
        caller = caller.f_back  # before torch 2.14, `Function.apply` is a function of Python
    if caller is None or not caller.f_code.co_filename.startswith(internals.COMPILED_CALLS):
        return False
    return _counts(tensor, storage) == counts


def _counts(tensor: Tensor, storage: torch.UntypedStorage) -> Counts:
    """Returns the references to a tensor and its storage."""
    uses: int = internals.use_count(tensor)
    storage_uses = internals.storage_use_count(internals.storage_key(storage))
    return sys.getrefcount(tensor), uses, sys.getrefcount(storage), storage_uses


class _Hooks:
    """Counts the references to the saved tensor in the calls in which the offloader asks for them."""

    counts: Counts

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


def counts_if_dropped() -> Counts:
    """Returns the counts for such a tensor, which depend on the versions of Python and torch, and on Dynamo.

    While no compiled code runs, Python keeps no reference to the arguments of a call, but it does for good once an
    error has ended a trace of Dynamo. So each offloader counts before its first forward.
    """
    hooks = _Hooks()
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        internals.without_dispatch_modes(),
        torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack),
    ):
        _Drop.apply(torch.empty(1, device="cpu", requires_grad=True))  # type: ignore[no-untyped-call]
    return hooks.counts
