"""Which saved tensors are weights: they live on the device anyway, so storing them would free nothing."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def mark_weights(module: nn.Module) -> None:
    """Marks the storages of the parameters and buffers of `module` as weights."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter):
            setattr(tensor.untyped_storage(), _WEIGHT, True)


def mark_streamed(storage: torch.UntypedStorage, fetch: Callable[[], None]) -> None:
    """Marks the storage of weights that leave: `fetch` is called before backward uses what was saved of it."""
    setattr(storage, _FETCH, fetch)


def fetch_of(storage: torch.UntypedStorage) -> Callable[[], None] | None:
    """Returns what brings the memory of `storage` back, if it is one of `mark_streamed`."""
    return getattr(storage, _FETCH, None)


def is_weight(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether `tensor`, a tensor over `storage`, is a parameter or buffer, a view of one, or autocast's cast of one.

    A cast counts because autocast keeps it for the whole forward, and shares it among all uses of the weight.
    """
    if hasattr(storage, _WEIGHT):
        return True
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter) or _is_cast_of_parameter(base):
        setattr(storage, _WEIGHT, True)  # its other views are found at once
        return True
    return False


def _is_cast_of_parameter(tensor: Tensor) -> bool:
    node = tensor.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    return isinstance(getattr(node.next_functions[0][0], "variable", None), nn.Parameter)


# On the storage's Python object, which lives as long as the storage (see `record.attach_record`).
_WEIGHT = "_lightning_ssd_weight"
_FETCH = "_lightning_ssd_fetch"
