"""Backends that fail or block transfers on purpose. Each wraps a real one."""

from __future__ import annotations

import errno
import os
import threading
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from lightning_ssd.storage import Backend, BackendFile, PosixBackend

Operation = Literal["write", "read"]
Move = Callable[[torch.Tensor, int], int]
"""`BackendFile.write` or `BackendFile.read`: takes a buffer and an offset, returns the bytes transferred."""


class WrappingBackend(Backend):
    """Passes every transfer of another backend through `transfer`.

    Args:
        inner: the backend that does the transfers.
    """

    device_buffers = False

    def __init__(self, inner: Backend | None = None) -> None:
        self._inner = inner or PosixBackend()

    def open(self, path: Path) -> BackendFile:
        return WrappedFile(self._inner.open(path), self.transfer)

    @abstractmethod
    def transfer(self, operation: Operation, call: Move, buffer: torch.Tensor, offset: int) -> int:
        """Makes a transfer by `call`, or skips it; returns the number of bytes that it reports."""


class FaultyBackend(WrappingBackend):
    """Fails as its attributes select, from when they are set, after the store is made.

    Args:
        inner: the backend that does the transfers.

    Attributes:
        error: raised by the next transfers of the operation it is filed under.
        short: operations that transfer half of the bytes.
        flip: whether writes store one wrong bit.
    """

    name = "faulty"

    def __init__(self, inner: Backend | None = None) -> None:
        super().__init__(inner)
        self.error: dict[Operation, Exception] = {}
        self.short: set[Operation] = set()
        self.flip = False

    def transfer(self, operation: Operation, call: Move, buffer: torch.Tensor, offset: int) -> int:
        if operation in self.error:
            raise self.error[operation]
        if operation in self.short:
            return call(buffer[: buffer.numel() // 2], offset)
        if operation == "write" and self.flip:
            buffer = buffer.clone()
            buffer[buffer.numel() // 3] ^= 1
        return call(buffer, offset)


class DeviceBackend(PosixBackend):
    """Also transfers device memory, as kvikio does where GPUDirect Storage works."""

    name = "device"
    device_buffers = True
    gds = True


class CorruptingBackend(Backend):
    """A drive that stores wrong bytes in one of its writes, and reports success.

    Args:
        number: the write that goes wrong, counted from 0; None: none does.
        fault: the bytes that a write of `given` bytes, over `old` ones, leaves in the file.

    Attributes:
        writes: how many there were.
    """

    name = "corrupting"
    device_buffers = False

    def __init__(self, number: int | None, fault: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self._inner = PosixBackend()
        self._number = number
        self._fault = fault
        self._lock = threading.Lock()
        self.writes = 0

    def open(self, path: Path) -> BackendFile:
        file = self._inner.open(path)

        def transfer(operation: Operation, call: Move, buffer: torch.Tensor, offset: int) -> int:
            if operation == "read":
                return call(buffer, offset)
            with self._lock:
                wrong = self.writes == self._number
                self.writes += 1
            if not wrong:
                return call(buffer, offset)
            old = torch.zeros_like(buffer)
            file.read(old, offset)
            return call(self._fault(buffer.clone(), old), offset)

        return WrappedFile(file, transfer)


class FailingAtBackend(WrappingBackend):
    """Fails at one transfer, by its number, and then at none or at all others.

    Args:
        at: number of the first transfer that fails, from 0; those before `arm` don't count.
        operation: transfers that count.
        dead: whether all those after it fail, too.
        armed: whether transfers count from the start.
        number: of the error; None: there is no error, and less than half of the bytes are moved.

    Attributes:
        counted: transfers that counted.
        failed: transfers that failed.
    """

    name = "failing"

    def __init__(
        self, at: int, operation: Operation, *, dead: bool = False, armed: bool = True, number: int | None = errno.EIO
    ) -> None:
        super().__init__()
        self._at = at
        self._operation = operation
        self._dead = dead
        self._armed = armed
        self._number = number
        self.counted = 0
        self._lock = threading.Lock()
        self.failed = 0

    def arm(self) -> None:
        """Transfers count from now on."""
        self._armed = True

    def disarm(self) -> None:
        """Transfers don't count from now on, and none fails."""
        self._armed = False

    def transfer(self, operation: Operation, call: Move, buffer: torch.Tensor, offset: int) -> int:
        with self._lock:
            fails = False
            if self._armed and operation == self._operation:
                fails = self.counted == self._at or (self.counted > self._at and self._dead)
                self.counted += 1
                self.failed += fails
        if fails and self._number is not None:
            raise OSError(self._number, os.strerror(self._number))
        return call(buffer[: buffer.numel() // 8192 * 4096] if fails else buffer, offset)


class GatedBackend(WrappingBackend):
    """Blocks every transfer at a gate, which is open at first.

    Args:
        inner: the backend that does the transfers.

    Attributes:
        served: (operation, offset) of every transfer that passed the gate, in that order.
    """

    name = "gated"

    def __init__(self, inner: Backend | None = None) -> None:
        super().__init__(inner)
        self._gate = threading.Event()
        self._gate.set()
        self._arrived = threading.Semaphore(0)
        self.served: list[tuple[Operation, int]] = []

    def hold(self) -> None:
        """Closes the gate, and clears `served`."""
        self._gate.clear()
        self._arrived = threading.Semaphore(0)
        self.served.clear()

    def wait_for_arrival(self) -> None:
        """Waits until one more transfer waits at the gate."""
        assert self._arrived.acquire(timeout=60)

    def release(self) -> None:
        """Opens the gate."""
        self._gate.set()

    def transfer(self, operation: Operation, call: Move, buffer: torch.Tensor, offset: int) -> int:
        self._arrived.release()
        assert self._gate.wait(timeout=60)
        self.served.append((operation, offset))
        return call(buffer, offset)


class WrappedFile(BackendFile):
    def __init__(
        self,
        inner: BackendFile,
        transfer: Callable[[Operation, Move, torch.Tensor, int], int],
    ) -> None:
        self._inner = inner
        self._transfer = transfer

    def write(self, buffer: torch.Tensor, offset: int) -> int:
        return self._transfer("write", self._inner.write, buffer, offset)

    def read(self, buffer: torch.Tensor, offset: int) -> int:
        return self._transfer("read", self._inner.read, buffer, offset)

    def close(self) -> None:
        self._inner.close()
