"""Memory that offloaded parameters share with tensors of user code, such as after `p.data = t`.

In plain training such a parameter and its tensors are the same bytes. The values of an offloaded parameter are in a
store, and the tensors are ordinary ones, whose writes call no hook. So both are compared before every use of the
parameter, which adopts changes of the tensors. Every change of the parameter, including optimizer steps, is copied to
the tensors before user code runs again. This costs time as long as one of the tensors exists.
"""

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations import offloaded_weights
from lightning_ssd.storage_tags import SHARERS


class SharedMemory:
    """The memory of one parameter in plain training, kept as long as tensors of user code share it.

    Args:
        tensor: a tensor over the memory, with the parameter's shape, dtype and device.
    """

    def __init__(self, tensor: Tensor) -> None:
        with internals.without_torch_function():
            storage = tensor.untyped_storage()
            self._tensor = over(storage, tensor)
        if not hasattr(storage, SHARERS):
            setattr(storage, SHARERS, weakref.WeakSet())
        self._users: weakref.WeakSet[SharedMemory] = getattr(storage, SHARERS)
        """All `SharedMemory` objects over the same storage."""
        self._users.add(self)
        self._storage = internals.storage_key(storage)
        reach = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        self._of_array = not storage.resizable()
        """Whether the memory belongs to a NumPy array, which may outlive its tensors. Arrays that are made of a tensor,
        such as by `Tensor.numpy`, keep a tensor instead."""
        self._begin = int(tensor.storage_offset()) * tensor.itemsize
        self._end = self._begin + (1 + reach if tensor.numel() else 0) * tensor.itemsize

    @property
    def foreign(self) -> bool:
        """Whether code other than torch's in this process may write the memory: NumPy, or another process."""
        return self._of_array or self.of_processes

    @property
    def of_processes(self) -> bool:
        """Whether other processes may have the memory (`share_memory_`)."""
        storage = self._tensor.untyped_storage()
        return storage.device.type == "cpu" and storage.is_shared()

    @property
    def referenced(self) -> bool:
        """Whether a tensor of user code shares the memory, or another offloaded parameter shares a part of it."""
        storage = self._tensor.untyped_storage()  # adds one to the use count
        if internals.storage_use_count(internals.storage_key(storage)) > len(self._users) + 1:
            return True
        return any([self.overlaps(other) for other in self._users if other is not self])

    def tensor(self) -> Tensor:
        """Returns a tensor over the memory."""
        return over(self._tensor.untyped_storage(), self._tensor)

    def overlaps(self, other: "SharedMemory") -> bool:
        """Returns whether both have a byte in common."""
        return self._storage == other._storage and self._begin < other._end and other._begin < self._end


def over(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """Returns an ordinary tensor over `storage` with the geometry, dtype and device of `like`."""
    with torch.inference_mode(False), torch.no_grad(), internals.without_dispatch():
        empty = torch.empty(0, dtype=like.dtype, device=like.device)
        return empty.set_(storage, like.storage_offset(), like.size(), like.stride())


def check_shareable(tensor: Tensor, name: str) -> None:
    """Raises RuntimeError if the memory of `tensor` is that of a unit's resident weights."""
    if offloaded_weights(tensor.untyped_storage()) is not None:
        raise RuntimeError(
            f"`.data` of {name}, which is offloaded, can't share memory with weights that are fetched for a forward. "
            "Set a `.clone()` of them."
        )


def check_apart(parameters: Iterable[tuple[str, Tensor]], device: torch.device) -> None:
    """Raises ValueError if two of the parameters to offload are on `device` and share memory."""
    begun: dict[int, list[tuple[str, SharedMemory]]] = {}
    for name, parameter in parameters:
        if parameter.device != device:
            continue  # they are moved to the device one by one, apart from each other
        memory = SharedMemory(parameter)
        others = begun.setdefault(memory._storage, [])
        for other, of_other in others:
            if memory.overlaps(of_other):
                raise ValueError(
                    f"{other} and {name} are two parameters that share memory, which can't be offloaded. Make them one "
                    "parameter, which both modules have, or set `states='gpu'`."
                )
        others.append((name, memory))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Returns whether two CPU tensors of one shape and dtype have equal bytes: NaN equals NaN, 0 differs from -0."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def same_stride(tensor: Tensor, stride: Sequence[int]) -> bool:
    """Returns whether `tensor` has the strides `stride`, ignoring dimensions of size 1."""
    pairs = zip(tensor.shape, tensor.stride(), stride, strict=True)
    return not tensor.numel() or all([size == 1 or one == other for size, one, other in pairs])
