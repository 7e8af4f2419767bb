"""Memory that offloaded parameters share with tensors of user code, such as after `p.data = t`.

In plain training such a parameter and its tensors are the same bytes. The values of an offloaded parameter are
elsewhere, and the tensors are ordinary ones, which no hook sees. So both are compared before every use of the
parameter, which takes over the changes of the tensors, and every change of the parameter, its optimizer steps
included, is written to the tensors before user code runs again. That takes time, and ends with the last of the tensors.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_ssd.activations.weights import offloaded_weights


class SharedMemory:
    """The memory that one parameter has in plain training. The parameter itself does not keep it alive.

    Args:
        tensor: has the memory, and the parameter's shape, dtype and device.
    """

    def __init__(self, tensor: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            storage = tensor.untyped_storage()
            self._storage = StorageWeakRef(storage)
            self._kept: torch.UntypedStorage | None = None
            self._dtype, self._device = tensor.dtype, tensor.device
            self._size, self._stride, self._offset = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        reach = sum((size - 1) * stride for size, stride in zip(self._size, self._stride, strict=True))
        self._begin = self._offset * self._dtype.itemsize
        self._end = self._begin + (1 + reach if self._size.numel() else 0) * self._dtype.itemsize

    @property
    def kept(self) -> bool:
        """Whether the memory is kept alive for owners that torch does not count."""
        return self._kept is not None

    def keep(self, kept: bool) -> None:
        """Keeps the memory alive, or no longer."""
        self._kept = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata) if kept else None

    def tensor(self) -> Tensor | None:
        """Returns a tensor over the memory; None: no tensor has it any more."""
        storage: torch.UntypedStorage | None = self._kept or torch.UntypedStorage._new_with_weak_ptr(
            self._storage.cdata
        )
        if storage is None:
            return None
        with torch.inference_mode(False), torch._C._DisableTorchDispatch():
            empty = torch.empty(0, dtype=self._dtype, device=self._device)
            return empty.set_(storage, self._offset, self._size, self._stride)

    def overlaps(self, other: "SharedMemory") -> bool:
        """Whether a byte belongs to both."""
        same = self._storage.cdata == other._storage.cdata
        return same and self._begin < other._end and other._begin < self._end


def keep_alive(memories: Sequence[SharedMemory]) -> None:
    """Keeps memory alive that more than one parameter has, or that others than tensors of this process may write."""
    for memory in memories:
        tensor = memory.tensor()
        if tensor is not None:
            storage = tensor.untyped_storage()
            foreign = not storage.resizable() or (storage.device.type == "cpu" and storage.is_shared())
            memory.keep(foreign or any(memory.overlaps(other) for other in memories if other is not memory))


def check_shareable(tensor: Tensor, name: str) -> None:
    """Raises RuntimeError if `tensor` has memory that belongs to the weights of a unit while they are fetched."""
    if offloaded_weights(tensor.untyped_storage()) is not None:
        raise RuntimeError(
            f"`.data` of {name}, which is offloaded, can't share memory with weights that are fetched for a forward. "
            "Set a `.clone()` of them."
        )


def check_apart(parameters: Iterable[tuple[str, Tensor]], device: torch.device) -> None:
    """Raises ValueError if two parameters on `device`, of those that are to be offloaded, share memory."""
    begun: dict[int, list[tuple[str, SharedMemory]]] = {}
    for name, parameter in parameters:
        if parameter.device != device:
            continue  # they are moved to the device one by one, apart from each other
        memory = SharedMemory(parameter)
        others = begun.setdefault(memory._storage.cdata, [])
        for other, of_other in others:
            if memory.overlaps(of_other):
                raise ValueError(
                    f"{other} and {name} are two parameters that share memory, which can't be offloaded. Make them one "
                    "parameter, which both modules have, or set `states='gpu'`."
                )
        others.append((name, memory))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype on the CPU have the same bytes: NaN equals NaN, and 0 is not -0."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def same_stride(tensor: Tensor, stride: Sequence[int]) -> bool:
    """Whether the elements of `tensor` lie in memory as `stride` says."""
    pairs = zip(tensor.shape, tensor.stride(), stride, strict=True)
    return not tensor.numel() or all(size == 1 or one == other for size, one, other in pairs)
