"""Recognizes weights among saved tensors. They are on the device anyway, so offloading them would free no memory."""

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_ssd import torch_internals as internals
from lightning_ssd.storage_tags import OFFLOADED_WEIGHTS, WEIGHT


class SavedWeight(ABC):
    """Autograd's reference to a saved weight that may be evicted. It holds no memory."""

    __slots__ = ()

    @abstractmethod
    def load(self) -> Tensor:
        """Returns the weight, made resident; the compute stream is ordered after its prefetch.

        Raises:
            RuntimeError: the weight was changed in place after it was saved.
        """


class OffloadedWeights(Protocol):
    """Weights that share a storage, whose memory is freed when they are evicted."""

    def save(self, tensor: Tensor) -> SavedWeight:
        """Returns a reference to `tensor`, a view of the storage."""


def mark_weights(module: nn.Module) -> None:
    """Marks the storages of the parameters and buffers of `module` as weights."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter):
            setattr(tensor.untyped_storage(), WEIGHT, True)


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Returns the storage of `tensor` itself, where the class of an offloaded weight would refuse or replace it."""
    with internals.without_torch_function():
        return tensor.untyped_storage()


def mark_offloaded(storage: torch.UntypedStorage, weights: OffloadedWeights) -> None:
    """Marks the storage of weights that may be evicted: autograd keeps references to them instead of tensors."""
    setattr(storage, OFFLOADED_WEIGHTS, weights)


def unmark_offloaded(storage: torch.UntypedStorage) -> None:
    """Makes a marked storage an ordinary one, for the tensors that still reference it."""
    delattr(storage, OFFLOADED_WEIGHTS)


def offloaded_weights(storage: torch.UntypedStorage) -> OffloadedWeights | None:
    """Returns the weights with which `mark_offloaded` has marked `storage`, or None."""
    return getattr(storage, OFFLOADED_WEIGHTS, None)


def weights_of(tensor: Tensor) -> OffloadedWeights | None:
    """Returns the offloaded weights of which a tensor of any class is a part, or None."""
    with internals.without_any_torch_function():
        return offloaded_weights(tensor.untyped_storage()) if tensor.layout is torch.strided else None


def is_weight(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    """Returns whether `tensor`, over `storage`, is a parameter or buffer, a view of one, or autocast's cast of one.

    Casts count as weights because autocast caches them for the whole forward and shares them among all uses.
    """
    if hasattr(storage, WEIGHT):
        return True
    base = internals.base_of(tensor)
    if base is None:
        base = tensor
    # The type is checked first because `isinstance` of a plain tensor is slow: `Parameter` has its own instance check.
    if (type(base) is not Tensor and isinstance(base, nn.Parameter)) or _is_cast_of_parameter(base):
        setattr(storage, WEIGHT, True)  # other views are recognized by this mark
        return True
    return False


def _is_cast_of_parameter(tensor: Tensor) -> bool:
    node = tensor.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    return isinstance(getattr(node.next_functions[0][0], "variable", None), nn.Parameter)
