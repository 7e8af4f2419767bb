"""A backend: how bytes get between memory and a file. Two exist, POSIX and kvikio; tests add failing ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch

__all__ = ["Backend", "BackendFile"]


class BackendFile(ABC):
    """One open file. Thread-safe: several I/O threads transfer at once.

    Buffers are contiguous one-dimensional uint8 tensors. The caller keeps them alive and unchanged during a
    call; the file keeps nothing after it.
    """

    @abstractmethod
    def write(self, buffer: torch.Tensor, offset: int) -> int:
        """Writes `buffer` at `offset` (bytes); returns the bytes really written, where fewer is an error.

        Raises:
            OSError: the transfer failed.
        """

    @abstractmethod
    def read(self, buffer: torch.Tensor, offset: int) -> int:
        """Fills `buffer` from `offset` (bytes); returns the bytes really read, where fewer is an error.

        Raises:
            OSError: the transfer failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the file. No transfer is running, and none follows."""


class Backend(ABC):
    """A way to do I/O.

    Attributes:
        name: what logs and benchmarks call it.
        device_buffers: whether it reads into and writes from CUDA memory, besides host memory.
    """

    name: str
    device_buffers: bool

    @abstractmethod
    def open(self, path: Path) -> BackendFile:
        """Opens an existing file for reading and writing.

        Args:
            path: the file, named by a descriptor of this process (`/proc/self/fd/...`), which no other user can
                redirect; `path.resolve()` is its name, for messages.

        Raises:
            OSError: the file cannot be opened.
        """
