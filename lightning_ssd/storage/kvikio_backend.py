"""The kvikio backend: direct transfers between GPU memory and SSD where GPUDirect Storage (GDS) is available."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from lightning_ssd.storage.backend import Backend, BackendFile
from lightning_ssd.storage.errors import StorageError

_INSTALL = "Install `lightning-ssd[gds-cu12]` or `lightning-ssd[gds-cu13]` for your CUDA, or backend='posix'."


class KvikioBackend(Backend):
    """Reads and writes host and CUDA buffers. Where GDS is not available, kvikio runs in its compatibility mode.

    kvikio does not order its transfers after any stream: the caller makes sure, with an event, that a CUDA buffer is
    complete before it is written, and that it is not used before it is read. kvikio's own work may wait for the
    default stream.

    kvikio's settings (compatibility mode, threads, O_DIRECT) are global to the process; this constructor sets them.

    Attributes:
        gds: whether transfers bypass host memory.

    Raises:
        StorageError: there is no CUDA device, or kvikio is not installed.
    """

    name = "kvikio"
    device_buffers = True

    def __init__(self) -> None:
        # Without a CUDA driver kvikio transfers nothing, not even host memory, and importing it may hang.
        if not torch.cuda.is_available():
            raise StorageError("backend='kvikio' needs a CUDA device, and PyTorch sees none. Use backend='posix'.")
        try:
            self._kvikio = _import_kvikio()
        except ImportError as error:
            raise StorageError(
                f"backend='kvikio' needs kvikio, and importing it failed: {error}. {_INSTALL}"
            ) from error
        self.gds = _gds_available()
        mode = self._kvikio.CompatMode
        # Never AUTO: without the nvidia-fs driver it registers files successfully and then silently uses POSIX.
        self._kvikio.defaults.set(
            {
                "compat_mode": mode.OFF if self.gds else mode.ON,
                "num_threads": 8,  # each of which transfers one request at a time
                "auto_direct_io_read": True,
                "auto_direct_io_write": True,
            }
        )

    def open(self, path: Path) -> BackendFile:
        """Opens a file. Raises RuntimeError, too, if kvikio or cuFile cannot register it."""
        return _KvikioFile(self._kvikio.CuFile(path, "r+"))


def why_no_gds(device: torch.device) -> str | None:
    """Returns the reason why GPUDirect Storage cannot be used, or None if it can."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "the data is not on a CUDA device"
    try:
        _import_kvikio()
    except ImportError as error:
        return f"kvikio cannot be imported ({error})"
    return None if _gds_available() else "kvikio finds no GPUDirect Storage driver (nvidia-fs)"


class _KvikioFile(BackendFile):
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, buffer: torch.Tensor, offset: int) -> int:
        # kvikio's future keeps neither buffer nor file alive: the caller's frame does until `get` returns. A request
        # is one task of kvikio (`task_size` is its size), because the engine has divided the data already.
        size = buffer.numel()
        return int(self._file.pwrite(_array(buffer), size, offset, size).get())

    def read(self, buffer: torch.Tensor, offset: int) -> int:
        size = buffer.numel()
        return int(self._file.pread(_array(buffer), size, offset, size).get())

    def close(self) -> None:
        self._file.close()


def _array(buffer: torch.Tensor) -> Any:
    """Returns the buffer in a type that kvikio accepts: a CUDA tensor itself, a host tensor as a NumPy array."""
    return buffer if buffer.is_cuda else buffer.numpy()


def _import_kvikio() -> Any:
    kvikio = importlib.import_module("kvikio")
    importlib.import_module("kvikio.defaults")
    importlib.import_module("kvikio.cufile_driver")
    return kvikio


def _gds_available() -> bool:
    try:
        return bool(_import_kvikio().cufile_driver.get("is_gds_available"))
    except RuntimeError:  # libcufile is missing, or its driver does not open
        return False
