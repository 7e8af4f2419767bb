"""A backend that takes device buffers, as kvikio does where GPUDirect Storage is available."""

import threading

import torch
from torch import Tensor

from lightning_ssd.storage import Backend
from tests.support.faults import Move, Operation, WrappingBackend


class DirectBackend(WrappingBackend):
    """Takes device buffers, records transfers, and blocks those of an operation at a gate, which is open at first.

    Args:
        log: list that others may share, to which (operation, name of this backend) of each transfer is added.
        name: name of the backend.

    Attributes:
        addresses: for each operation, the addresses of the buffers.
        offsets: for each operation, the offsets in the file.
    """

    device_buffers = True

    def __init__(
        self, inner: Backend | None = None, *, log: list[tuple[Operation, str]] | None = None, name: str = "direct"
    ) -> None:
        super().__init__(inner)
        self.name = name
        self.log = [] if log is None else log
        self.addresses: dict[Operation, list[int]] = {"read": [], "write": []}
        self.offsets: dict[Operation, list[int]] = {"read": [], "write": []}
        self._gates: dict[Operation, threading.Event] = {"read": threading.Event(), "write": threading.Event()}
        for gate in self._gates.values():
            gate.set()
        self._arrived = threading.Condition()

    def hold(self, operation: Operation) -> None:
        """Closes the gate."""
        self._gates[operation].clear()

    def release(self, operation: Operation) -> None:
        """Opens the gate."""
        self._gates[operation].set()

    def until(self, operation: Operation, times: int) -> None:
        """Returns when there were so many transfers, those at the gate included."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.addresses[operation]) >= times, 60)

    def clear(self) -> None:
        """Forgets the transfers so far."""
        with self._arrived:
            for recorded in (*self.addresses.values(), *self.offsets.values()):
                recorded.clear()
            self.log.clear()

    def transfer(self, operation: Operation, call: Move, buffer: Tensor, offset: int) -> int:
        with self._arrived:
            self.addresses[operation].append(buffer.data_ptr())
            self.offsets[operation].append(offset)
            self.log.append((operation, self.name))
            self._arrived.notify_all()
        assert self._gates[operation].wait(timeout=60)
        if operation == "write":
            return call(buffer, offset)
        read = torch.empty_like(buffer)  # NumPy's view of `buffer` would forbid to resize its storage
        nbytes = call(read, offset)
        buffer.copy_(read)
        return nbytes
