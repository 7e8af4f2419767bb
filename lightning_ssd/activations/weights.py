"""Which saved tensors are weights: they live on the device anyway, so storing them would free nothing."""

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_ssd.device.storage_tags import OFFLOADED_WEIGHTS, WEIGHT


class SavedWeight(ABC):
    """What autograd keeps in place of a weight that may be evicted: a reference, which holds no memory."""

    __slots__ = ()

    @abstractmethod
    def load(self) -> Tensor:
        """Returns the weight, fetched again; the compute stream is ordered after its arrival.

        Raises:
            RuntimeError: the weight was changed in place after it was saved.
        """


class OffloadedWeights(Protocol):
    """The weights that share a storage which is freed when they are evicted."""

    def save(self, tensor: Tensor) -> SavedWeight:
        """Returns a reference to `tensor`, a view of the storage."""


def mark_weights(module: nn.Module) -> None:
    """Marks the storages of the parameters and buffers of `module` as weights."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter):
            setattr(tensor.untyped_storage(), WEIGHT, True)


def mark_offloaded(storage: torch.UntypedStorage, weights: OffloadedWeights) -> None:
    """Marks the storage of weights that may be evicted: autograd keeps references to them instead of tensors."""
    setattr(storage, OFFLOADED_WEIGHTS, weights)


def unmark_offloaded(storage: torch.UntypedStorage) -> None:
    """Leaves a marked storage to the tensors that still refer to it, as an ordinary one."""
    delattr(storage, OFFLOADED_WEIGHTS)


def offloaded_weights(storage: torch.UntypedStorage) -> OffloadedWeights | None:
    """Returns the weights that `mark_offloaded` named for `storage`, if it is marked."""
    return getattr(storage, OFFLOADED_WEIGHTS, None)


def is_weight(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether `tensor`, a tensor over `storage`, is a parameter or buffer, a view of one, or autocast's cast of one.

    A cast counts because autocast keeps it for the whole forward, and shares it among all uses of the weight.
    """
    if hasattr(storage, WEIGHT):
        return True
    base = tensor._base
    if base is None:
        base = tensor
    # `isinstance` of a plain tensor is slow: the class of parameters looks for an attribute of it.
    if (type(base) is not Tensor and isinstance(base, nn.Parameter)) or _is_cast_of_parameter(base):
        setattr(storage, WEIGHT, True)  # its other views are found at once
        return True
    return False


def _is_cast_of_parameter(tensor: Tensor) -> bool:
    node = tensor.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    return isinstance(getattr(node.next_functions[0][0], "variable", None), nn.Parameter)


# On the storage's Python object, which lives as long as the storage (see `record.attach_saved_storage`).
