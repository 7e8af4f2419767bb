"""A flat: parameters that move and step together, side by side in one buffer.

They belong to one unit, have one compute dtype and one parameter group. On the device the flat has one storage, which
every parameter is a view of. Released, the storage has no memory, and the parameters keep their shapes; fetched, it has
memory again. What autograd saved of a weight is a view of the same storage, so it is whole again, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ALIGNMENT = 64
"""Elements: each parameter begins at a multiple, so that kernels meet aligned memory in every dtype."""


@dataclass(frozen=True)
class Slice:
    """One parameter of a flat.

    Attributes:
        name: its qualified name.
        parameter: the module's parameter.
        start: where it begins in the flat, in elements.
        dtype: of the parameter as the model was built.
    """

    name: str
    parameter: nn.Parameter
    start: int
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.parameter.numel()

    def of(self, flat: Tensor) -> Tensor:
        """Returns the parameter's view of `flat`, any tensor with one element for each of the flat's."""
        return flat[self.start : self.start + self.numel].view(self.parameter.shape)


class Flat:
    """The device's side of some parameters of a unit.

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
        self.slices: list[Slice] = []
        self.numel = 0
        for qualified_name, parameter in parameters:
            self.slices.append(Slice(qualified_name, parameter, self.numel, parameter.dtype))
            self.numel += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        self.nbytes = self.numel * dtype.itemsize
        self.weights = torch.empty(self.numel, dtype=dtype, device=device)
        """The compute weights on the device; without memory while released."""
        self.attached = False
        """Whether the parameters are views of the flat."""
        self._views = [item.of(self.weights) for item in self.slices]
        self._storage = self.weights.untyped_storage()
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device).set_(self._storage)
        self._storage.resize_(0)

    def allocate(self) -> Tensor:
        """Gives the storage memory, of the compute stream, and returns its bytes; their contents are undefined."""
        self._storage.resize_(self.nbytes)
        return self._bytes

    def release(self) -> None:
        """Takes the storage's memory away; the compute stream may go on reading it till it meets the next owner."""
        self._storage.resize_(0)

    def attach(self) -> None:
        """Makes the parameters views of the flat."""
        for item, view in zip(self.slices, self._views, strict=True):
            item.parameter.data = view
        self.attached = True

    def storage(self) -> torch.UntypedStorage:
        """Returns the storage that the parameters share."""
        return self._storage
