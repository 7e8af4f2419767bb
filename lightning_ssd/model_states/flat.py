"""A flat: parameters that move and step together, side by side in one buffer.

They belong to one unit, have one compute dtype and one parameter group. On the device the flat has one storage, which
every parameter is a view of. Evicted, the storage has no memory, and the parameters keep their shapes and strides;
fetched, it has memory again. A tensor of other code that still refers to the storage at eviction keeps its bytes: the
storage is left to it, and the flat takes another one.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_ssd.activations.record import check_version
from lightning_ssd.activations.weights import SavedWeight, mark_offloaded, unmark_offloaded
from lightning_ssd.model_states.shared_memory import SharedMemory

ALIGNMENT = 64
"""Elements: each parameter begins at a multiple, so that kernels meet aligned memory in every dtype."""


@dataclass(frozen=True)
class ParamView:
    """One parameter of a flat.

    Attributes:
        name: its qualified name.
        parameter: the module's parameter.
        start: where it begins in the flat, in elements.
        dtype: of the parameter as the model was built.
        shape: of the parameter.
        stride: of the parameter, where its elements lie in memory without gaps, else that of a contiguous one.
    """

    name: str
    parameter: nn.Parameter
    start: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.shape.numel()

    def of(self, flat: Tensor) -> Tensor:
        """Returns the parameter's view of `flat`, a contiguous tensor with one element for each of the flat's."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.start)

    def flatten(self, values: Tensor) -> Tensor:
        """Returns the elements of `values`, which has the parameter's shape, in the order in which the flat has them.

        Returns:
            A contiguous one-dimensional tensor of `numel` elements; a view where `values` lies in memory as they do.
        """
        if values.stride() != self.stride:
            laid = torch.empty_strided(self.shape, self.stride, dtype=values.dtype, device=values.device)
            values = laid.copy_(values)
        return values.as_strided((self.numel,), (1,))


class FlatParameter:
    """The device's side of some parameters of a unit.

    Threads: the training thread, and autograd's while the training thread waits in `backward`.

    Args:
        name: for messages, unique.
        parameters: with their qualified names; the caller points them to the flat with `attach`.
        dtype: of the compute weights.
        device: where they compute.
    """

    def __init__(
        self, name: str, parameters: Sequence[tuple[str, nn.Parameter]], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.name = name
        self.dtype = dtype
        self.device = device
        self.slices: list[ParamView] = []
        self.numel = 0
        for qualified_name, parameter in parameters:
            shape, stride = parameter.shape, _dense_stride(parameter)
            self.slices.append(ParamView(qualified_name, parameter, self.numel, parameter.dtype, shape, stride))
            self.numel += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        self.nbytes = self.numel * dtype.itemsize
        self.mixed = any(item.dtype != dtype for item in self.slices)
        """Whether the compute weights have another dtype than the parameters of the model as it was built."""
        self.attached = False
        """Whether the parameters are views of the flat."""
        self.resident = False
        """Whether the compute weights are on the device, or on their way there."""
        self.users = 0
        """Forwards of the unit and operators that are running and have been given the compute weights."""
        self.summoned = False
        """Whether the parameters are whole tensors of their own, for a while (`whole_weights`, `load_state_dict`)."""
        self.shared: dict[int, SharedMemory] = {}
        """Of parameters, by index, memory that user code may share with them."""
        self.fetch: Callable[[], None] = self.refuse_fetch
        """Makes the flat resident for backward or for an operator; set by the owner of the flat."""
        self._starts = [item.start for item in self.slices]
        self._make_storage()

    def allocate(self) -> Tensor:
        """Gives the storage memory, of the compute stream, and returns its bytes; their contents are undefined."""
        self._storage.resize_(self.nbytes)
        self.resident = True
        return self._bytes

    def release(self) -> None:
        """Takes the storage's memory away; the compute stream may go on reading it till it meets the next owner."""
        self.resident = False
        own = self._references + (len(self.slices) if self.attached else 0)
        if torch._C._storage_Use_Count(self._storage._cdata) <= own:
            self._storage.resize_(0)
            return
        unmark_offloaded(self._storage)
        self._make_storage()
        if self.attached:
            self.attach()

    def attach(self) -> None:
        """Makes the parameters views of the flat."""
        with torch._C.DisableTorchFunctionSubclass():
            for item, view in zip(self.slices, self._views, strict=True):
                item.parameter.data = view
        self.attached = True

    def adopt(self) -> None:
        """Makes the parameters views of the flat, whose store has their values; user code may share their memory."""
        memories = {index: SharedMemory(item.parameter) for index, item in enumerate(self.slices)}
        before = {index: item.parameter.device for index, item in enumerate(self.slices)}
        self.attach()
        self.shared = {
            index: memory for index, memory in memories.items() if before[index] == self.device and memory.referenced
        }

    def memory(self, index: int) -> Tensor | None:
        """Returns the memory that user code shares with parameter `index`, if any."""
        return self.shared[index].tensor() if index in self.shared else None

    def view(self, index: int) -> Tensor:
        """Returns the compute weights of parameter `index`; the flat is resident."""
        return self._views[index].detach()

    def save(self, tensor: Tensor) -> SavedWeight:
        """Returns what autograd keeps of `tensor`, a view of a parameter of the flat."""
        offset = tensor.storage_offset() * tensor.itemsize // self.dtype.itemsize
        return _SavedView(self, bisect_right(self._starts, offset) - 1, tensor)

    def load(self, dtype: torch.dtype, offset: int, size: torch.Size, stride: Sequence[int]) -> Tensor:
        """Returns a view of the storage, which is resident."""
        with torch._C._DisableTorchDispatch():
            return torch.empty(0, dtype=dtype, device=self.device).set_(self._storage, offset, size, stride)

    def _make_storage(self) -> None:
        """Makes a storage without memory. It is marked: a saved tensor that shares it is a weight of this flat."""
        # It may be called in a forward, which user code follows, and in an evaluation: it is used after them, too.
        with torch._C._DisableTorchDispatch(), torch.inference_mode(False):
            weights = torch.empty(self.numel, dtype=self.dtype, device=self.device)
            self._views = [item.of(weights) for item in self.slices]
            self._storage = weights.untyped_storage()
            self._bytes = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self._storage)
            del weights
        self._references = torch._C._storage_Use_Count(self._storage._cdata)
        """Of the storage, all but those of parameters that are views of it."""
        self._storage.resize_(0)
        mark_offloaded(self._storage, self)

    def refuse_fetch(self) -> None:
        """Raises RuntimeError: the training of the flat has ended."""
        raise RuntimeError(
            f"backward wants the weights of {self.name} after the training that they were offloaded in has ended. Call "
            "backward inside of it, or don't keep the loss after `Trainer.fit`."
        )


class _SavedView(SavedWeight):
    """A view of a parameter, as autograd has saved it. It holds no memory; what it needs again it fetches."""

    __slots__ = ("_dtype", "_flat", "_index", "_offset", "_size", "_stride", "_version")

    def __init__(self, flat: FlatParameter, index: int, tensor: Tensor) -> None:
        self._flat = flat
        self._index = index
        self._dtype = tensor.dtype
        self._offset = int(tensor.storage_offset())
        self._size = tensor.size()
        self._stride = tensor.stride()
        # Of the parameter: what shares its memory need not share its counter (`.data`).
        with torch._C.DisableTorchFunctionSubclass():
            self._version = flat.slices[index].parameter._version

    def load(self) -> Tensor:
        flat = self._flat
        flat.fetch()
        with torch._C.DisableTorchFunctionSubclass():
            check_version(flat.slices[self._index].parameter, self._version, self._dtype, self._size)
        return flat.load(self._dtype, self._offset, self._size, self._stride)


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Returns the strides of `tensor` if its elements fill their memory without gaps, else contiguous ones."""
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()
