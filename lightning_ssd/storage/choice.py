"""The choice of a backend: made once per store, and logged with its reason."""

from __future__ import annotations

import logging

import torch

from lightning_ssd.storage.backend import Backend
from lightning_ssd.storage.kvikio_backend import KvikioBackend, why_no_gds
from lightning_ssd.storage.posix_backend import PosixBackend
from lightning_ssd.types import BackendName

_log = logging.getLogger(__name__)


def choose_backend(name: BackendName | Backend, device: torch.device, *, checksum: bool) -> Backend:
    """Returns the backend that `name` selects, and logs the choice with its reason.

    Args:
        name: ``"posix"``; ``"kvikio"``; ``"auto"``, which selects kvikio only where GPUDirect Storage is
            available; or a backend, which is returned as it is.
        device: device of the data that will be offloaded.
        checksum: True if transfers are hashed in host memory. GPUDirect Storage bypasses host memory, so ``"auto"``
            selects POSIX then.

    Raises:
        StorageError: `name` is ``"kvikio"``, which cannot be used here.
        ValueError: `name` is no backend's name.
    """
    backend: Backend
    if isinstance(name, Backend):
        backend, why = name, "given as an object"
    elif name == "posix":
        backend, why = PosixBackend(), "selected by name"
    elif name == "kvikio":
        backend = KvikioBackend()
        why = "selected by name"
        if not backend.gds:
            why += "; in compatibility mode, through pinned memory: GPUDirect Storage is not available"
        elif checksum:
            why += "; through host memory, where checksum=True hashes bytes: checksum=False transfers them directly"
    elif name == "auto":
        reason = why_no_gds(device)
        if reason is None and checksum:
            reason = "checksum=True hashes bytes in host memory; checksum=False would use it"
        backend = KvikioBackend() if reason is None else PosixBackend()
        why = "GPUDirect Storage is available, which bypasses host memory"
        if reason is not None:
            why = f"through host memory; no GPUDirect Storage: {reason}"
    else:
        raise ValueError(f"backend must be 'auto', 'posix', 'kvikio' or a Backend, not {name!r}")
    _log.info("storage backend: %s (%s)", backend.name, why)
    return backend
