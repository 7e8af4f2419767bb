"""A backend that takes device buffers, as kvikio does where GPUDirect Storage is available."""

import torch
from torch import Tensor

from lightning_ssd.storage import Backend
from tests.support.faults import Move, Operation, WrappingBackend


class DirectBackend(WrappingBackend):
    """Takes device buffers, and records transfers.

    Attributes:
        addresses: for each operation, the addresses of the buffers.
    """

    device_buffers = True
    name = "direct"

    def __init__(self, inner: Backend | None = None) -> None:
        super().__init__(inner)
        self.addresses: dict[Operation, list[int]] = {"read": [], "write": []}

    def transfer(self, operation: Operation, call: Move, buffer: Tensor, offset: int) -> int:
        self.addresses[operation].append(buffer.data_ptr())
        if operation == "write":
            return call(buffer, offset)
        read = torch.empty_like(buffer)  # NumPy's view of `buffer` would forbid to resize its storage
        nbytes = call(read, offset)
        buffer.copy_(read)
        return nbytes
