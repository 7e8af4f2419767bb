"""The interface of I/O backends. Two exist, POSIX and kvikio; tests add failing ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch


class BackendFile(ABC):
    """One open file. Thread-safe: several I/O threads transfer at once.

    Buffers are contiguous one-dimensional uint8 tensors. The caller keeps them alive and unchanged during a
    call; the file keeps no reference after it.
    """

    @abstractmethod
    def write(self, buffer: torch.Tensor, offset: int) -> int:
        """Writes `buffer` at `offset` (bytes) and returns the bytes written. The caller treats fewer as an error.

        Raises:
            OSError: the transfer failed.
        """

    @abstractmethod
    def read(self, buffer: torch.Tensor, offset: int) -> int:
        """Fills `buffer` from `offset` (bytes) and returns the bytes read. The caller treats fewer as an error.

        Raises:
            OSError: the transfer failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the file. No transfer is running, and none follows."""


class Backend(ABC):
    """An I/O library or set of system calls.

    Attributes:
        device_buffers: whether CUDA buffers can be transferred, besides host buffers.
    """

    name: str
    device_buffers: bool

    @abstractmethod
    def open(self, path: Path) -> BackendFile:
        """Opens an existing file for reading and writing.

        Args:
            path: path of the file by a descriptor of this process (`/proc/self/fd/...`), which no other user can
                redirect. `path.resolve()` is its name, for messages.

        Raises:
            OSError: the file cannot be opened.
        """
