"""A flat parameter: parameters that are transferred and stepped together, contiguous in one buffer.

They belong to one unit, and have one compute dtype and one parameter group. On the device the flat parameter has one
storage, of which every parameter is a view. Evicting frees the storage's memory, and the parameters keep their shapes
and strides; prefetching allocates it again. If a tensor of user code still references the storage at eviction, it keeps
the storage and its bytes, and the flat parameter makes another storage.
"""

import hashlib
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations import SavedWeight, check_version, mark_offloaded, unmark_offloaded
from lightning_ssd.device import allow_access, refuse_access
from lightning_ssd.model_states.units.shared_memory import SharedMemory

ALIGNMENT = 64
"""Least alignment of each parameter in elements, so that kernels get aligned memory in every dtype."""


@dataclass(frozen=True)
class ParamView:
    """One parameter of a flat parameter.

    Attributes:
        start: offset of the parameter in the flat parameter, elements.
        dtype: dtype of the parameter when the model was built.
        stride: strides of the parameter if it is dense (its elements are in memory without gaps), else contiguous ones.
    """

    name: str
    parameter: nn.Parameter
    start: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    @cached_property
    def numel(self) -> int:
        """Number of elements of the parameter."""
        return self.shape.numel()

    def of(self, flat: Tensor) -> Tensor:
        """Returns the parameter's view of `flat`, a contiguous tensor with as many elements as the flat parameter."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.start)

    @cached_property
    def random_key(self) -> int:
        """Key of the random numbers by which states of this parameter are rounded: 64 bits, signed, of its name."""
        return int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=8).digest(), "little", signed=True)

    def unflatten(self, elements: Tensor) -> Tensor:
        """Returns the parameter's view of its elements alone, which are contiguous, in the order of `flatten`."""
        return elements.as_strided(self.shape, self.stride, elements.storage_offset())

    def flatten(self, values: Tensor) -> Tensor:
        """Returns the elements of `values`, of the parameter's shape, in their order in the flat parameter.

        Returns:
            A contiguous one-dimensional tensor of `numel` elements; a view if `values` has the parameter's strides.
        """
        return in_memory_order(values, self.stride)


def in_memory_order(values: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Returns the elements of `values` in the order in which a dense tensor with the strides `stride` has them.

    Returns:
        A contiguous one-dimensional tensor of `values.numel()` elements; a view if `values` has these strides.
    """
    return with_stride(values, stride).as_strided((values.numel(),), (1,))


def with_stride(values: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Returns `values` if they have the strides `stride`, else a copy that has them."""
    if values.stride() == stride:
        return values
    return torch.empty_strided(values.shape, stride, dtype=values.dtype, device=values.device).copy_(values)


class FlatParameter:
    """The device memory of several parameters of a unit.

    Threads: the training thread, and autograd's while the training thread waits in `backward`; others are refused.

    Args:
        name: unique name, for messages.
        parameters: qualified names and parameters; the caller makes them views by `attach`.
        alignment: alignment of each parameter in elements, a multiple of `ALIGNMENT`.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[tuple[str, nn.Parameter]],
        dtype: torch.dtype,
        device: torch.device,
        alignment: int = ALIGNMENT,
    ) -> None:
        self.name = name
        self.dtype = dtype
        self.device = device
        self.param_views: list[ParamView] = []
        self.numel = 0
        for qualified_name, parameter in parameters:
            shape, stride = parameter.shape, _dense_stride(parameter)
            self.param_views.append(ParamView(qualified_name, parameter, self.numel, parameter.dtype, shape, stride))
            self.numel += -(-parameter.numel() // alignment) * alignment
        self.nbytes = self.numel * dtype.itemsize
        self.mixed = any(item.dtype != dtype for item in self.param_views)
        """Whether a parameter had another dtype than the compute weights when the model was built."""
        self.attached = False
        """Whether the parameters are views of the flat parameter."""
        self.has_own_storages = False
        """Whether the parameters have storages of their own (`use_own_storages`)."""
        self._own_storages: list[weakref.ref[torch.UntypedStorage]] = []
        """Such storages since the weights became resident."""
        self.resident = False
        """Whether the compute weights are on the device, or being copied there."""
        self.users = 0
        """Number of running forwards of the unit and running operators that use the compute weights."""
        self.thread = 0
        """Identity of the thread on which the last of them began."""
        self.recomputed_by = 0
        """Identity of the thread whose last recomputation has used the weights of this unit. They stay on the device
        until that thread uses another unit. 0: there is none."""
        self.forwards = 0
        """Number of running forwards of the unit."""
        self.summoned = False
        """Whether the parameters are temporarily plain tensors (`whole_weights`, `load_state_dict`)."""
        self.shared: dict[int, SharedMemory] = {}
        """Memory that user code may share with parameters, by index of the parameter."""
        self.forward_values: dict[int, Tensor] = {}
        """Whole weights of running forwards that have 16 bits on the device, by index of the parameter."""
        self.backed_views: list[weakref.ref[Any]] = []
        """Views (`OffloadedView`) that use memory of the weights until the running forward ends."""
        self.unshard: Callable[[], None] = self.refuse_unshard
        """Makes the flat resident for backward or for an operator; set by the owner of the flat."""
        self._starts = [item.start for item in self.param_views]
        self._numels = [item.numel for item in self.param_views]
        self._make_storage()

    def allocate(self) -> Tensor:
        """Allocates the storage's memory on the compute stream and returns its bytes, whose contents are undefined.

        Raises:
            torch.OutOfMemoryError: the device has no memory; the flat parameter stays evicted.
        """
        allow_access(self._storage)
        try:
            self._storage.resize_(self.nbytes)
        except BaseException:
            refuse_access(self._storage, self.name)
            raise
        self.resident = True
        return self._bytes

    def evict(self) -> None:
        """Frees the storage's memory. Kernels on the compute stream that still read it run before its next owner's."""
        self.resident = False
        self.release_views()
        for reference in self._own_storages:
            if (storage := reference()) is not None:  # of a result of compiled code
                unmark_offloaded(storage)
        self._own_storages.clear()
        if not self.aliased and self._storage.resizable():  # a storage that NumPy has shared is not resizable
            self._free()
            return
        unmark_offloaded(self._storage)
        self._make_storage()
        if self.attached:
            self.attach()

    @property
    def aliased(self) -> bool:
        """Whether a tensor of other code refers to the storage."""
        own = self._references + (len(self.param_views) if self.attached else 0)
        return internals.storage_use_count(internals.storage_key(self._storage)) > own

    def numel_of(self, chosen: Sequence[bool]) -> int:
        """Returns the number of elements of some of the parameters, without those that align others."""
        return sum(compress(self._numels, chosen))

    def versions(self) -> list[int]:
        """Returns the version counters of the parameters, which their views share."""
        with internals.without_torch_function():
            return [internals.version_of(item.parameter) for item in self.param_views]

    def attach(self) -> None:
        """Makes the parameters views of the flat parameter."""
        with internals.without_torch_function():
            for item, view in zip(self.param_views, self._views, strict=True):
                item.parameter.data = view
        self.attached, self.has_own_storages = True, False

    def use_own_storages(self) -> None:
        """Makes each parameter the only view of a storage of its own, over its part of the memory, until `attach`.

        The flat parameter must be resident. Parameters that share a storage are aliases to `torch.compile`.
        """
        self.has_own_storages = True
        with internals.without_torch_function(), internals.without_dispatch(), torch.inference_mode(False):
            for item in self.param_views:
                first = item.start * self.dtype.itemsize
                own = from_dlpack(to_dlpack(self._bytes[first : first + item.numel * self.dtype.itemsize]))
                storage = own.untyped_storage()
                mark_offloaded(storage, _FlatReferences(self, item.start))
                self._own_storages.append(weakref.ref(storage))
                view = torch.empty(0, dtype=self.dtype, device=self.device)
                item.parameter.data = view.set_(storage, 0, item.shape, item.stride)

    def adopt(self) -> None:
        """Makes the parameters views of the flat parameter, whose store has their values already.

        Memory of the parameters that tensors of user code still reference, or other processes, becomes shared memory.
        """
        memories = {index: SharedMemory(item.parameter) for index, item in enumerate(self.param_views)}
        before = {index: item.parameter.device for index, item in enumerate(self.param_views)}
        self.attach()
        self.shared = {
            index: memory
            for index, memory in memories.items()
            if before[index] == self.device and (memory.referenced or memory.of_processes)
        }

    def memory(self, index: int) -> Tensor | None:
        """Returns the memory that user code shares with parameter `index`, if any.

        Tensors in state dicts are on the CPU, with the bits of master weights, whatever the parameter is in plain
        training.
        """
        return self.shared[index].tensor() if index in self.shared else None

    def share(self, index: int, masters: Tensor) -> Tensor:
        """Returns CPU memory with the values of parameter `index`, which user code shares with it from now on.

        The values are those of `masters`, its present master weights.
        """
        if index not in self.shared:
            with torch.inference_mode(False), torch.no_grad():
                self.shared[index] = SharedMemory(masters.clone())
        return self.shared[index].tensor()

    def release_views(self, *, keep: bool = False) -> None:
        """Ends the use of the weights' memory by views of user code; `keep`: views keep the memory."""
        self.forward_values.clear()
        references, self.backed_views = self.backed_views, []
        for reference in references:
            if (view := reference()) is not None:
                view.release(keep=keep)

    def refresh(self, index: int, masters: Tensor) -> None:
        """Copies changed master weights of parameter `index` to the device, if its weights are resident."""
        if index in self.forward_values:
            self.forward_values[index].copy_(masters)
        if self.resident:
            self.view(index).copy_(masters)

    def view(self, index: int) -> Tensor:
        """Returns the compute weights of parameter `index`. The flat parameter must be resident."""
        return self._views[index].detach()

    def save(self, tensor: Tensor, start: int = 0) -> SavedWeight:
        """Returns the reference that autograd saves in place of a parameter or a view of one.

        Args:
            start: offset of the tensor's storage in the flat parameter, elements.
        """
        if isinstance(tensor, nn.Parameter) and tensor.dtype != self.dtype:  # saved by a function that read fp32 values
            return tensor.save()  # type: ignore[attr-defined,no-any-return]
        with internals.without_torch_function():
            offset = int(tensor.storage_offset()) + start * self.dtype.itemsize // tensor.itemsize
            index = bisect_right(self._starts, offset * tensor.itemsize // self.dtype.itemsize) - 1
            return _SavedView(self, index, tensor, offset)

    def load(self, dtype: torch.dtype, offset: int, size: torch.Size, stride: Sequence[int]) -> Tensor:
        """Returns a view of the storage, which must be resident."""
        with internals.without_dispatch():
            return torch.empty(0, dtype=dtype, device=self.device).set_(self._storage, offset, size, stride)

    def _make_storage(self) -> None:
        """Makes a storage without memory, tagged so that saved tensors that share it are recognized as weights."""
        # These operators are hidden from dispatch modes of user code, and their results are no inference tensors.
        with internals.without_dispatch(), torch.inference_mode(False):
            weights = torch.empty(self.numel, dtype=self.dtype, device=self.device)
            self._views = [item.of(weights) for item in self.param_views]
            self._storage = weights.untyped_storage()
            self._bytes = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self._storage)
            del weights
        self._references = internals.storage_use_count(internals.storage_key(self._storage))
        """References to the storage, without those of parameters that are views of it."""
        self._free()
        mark_offloaded(self._storage, _FlatReferences(self))

    def _free(self) -> None:
        allow_access(self._storage)  # `resize_` reads the address
        self._storage.resize_(0)
        refuse_access(self._storage, self.name)

    def refuse_unshard(self) -> None:
        """Raises RuntimeError, because the training of the flat parameter has ended."""
        raise RuntimeError(
            f"backward needs the weights of {self.name}, which were offloaded in a training that has ended. Call "
            "backward inside of it, or don't keep the loss after `Trainer.fit`."
        )


class _FlatReferences:
    """Makes the references that autograd saves in place of weights, from element `start` of their flat parameter.

    The flat parameter is not kept alive: this object belongs to its storage, and the garbage collector does not see
    that the storage belongs to tensors of the flat parameter.
    """

    __slots__ = ("_flat", "_start")

    def __init__(self, flat: FlatParameter, start: int = 0) -> None:
        self._flat = weakref.ref(flat)
        self._start = start

    def save(self, tensor: Tensor) -> SavedWeight:
        flat = self._flat()
        if flat is None:
            raise RuntimeError(
                "autograd can't save weights of a training that has ended. Take a `.clone()` inside of it."
            )
        return flat.save(tensor, self._start)


class _SavedView(SavedWeight):
    """A view of a parameter that autograd has saved. It holds no memory; unpacking makes the weights resident."""

    __slots__ = ("_dtype", "_flat", "_index", "_offset", "_size", "_stride", "_version")

    def __init__(self, flat: FlatParameter, index: int, tensor: Tensor, offset: int) -> None:
        self._flat = flat
        self._index = index
        self._dtype = tensor.dtype
        self._offset = offset
        self._size = tensor.size()
        self._stride = tensor.stride()
        # The parameter's version: tensors that share its memory need not share its counter (`.data`).
        self._version = internals.version_of(flat.param_views[index].parameter)

    def load(self) -> Tensor:
        flat = self._flat
        flat.unshard()
        with internals.without_torch_function():
            item = flat.param_views[self._index]
            check_version(item.parameter, self._version, self._dtype, self._size, lambda: _remedy(item.name))
        return flat.load(self._dtype, self._offset, self._size, self._stride)


def _remedy(name: str) -> str:
    return (
        f" It is {name}, which is offloaded: an assignment to its `.data` counts as such a change, and in mixed "
        "precision each write does. Change it after backward, as in `on_before_optimizer_step`, or set `states='gpu'`."
    )


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Returns the strides of `tensor` if it is dense (without gaps in memory), else contiguous ones."""
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()
