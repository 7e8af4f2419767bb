"""A slab: page-aligned host memory of an exact size, page-locked for the GPU on request."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from typing import Any

import torch

from lightning_ssd.sizes import format_bytes_exactly
from lightning_ssd.storage.errors import StorageError, StorageFullError

__all__ = ["Slab"]

_HUGE_PAGE = 2 * 2**20
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every CUDA context of the process
_REMEDY = "Lower the budget of host memory (arguments `host_memory` and `staging_memory`)."


class Slab:
    """Anonymous memory, 2 MiB aligned, on huge pages where the kernel has them.

    PyTorch's own pinned allocator rounds sizes to powers of two; a slab has exactly the requested size. The memory is
    mapped as long as a tensor on it lives. `close` unlocks the pages and drops the slab's own tensor: the owner calls
    it after the last copy to or from the GPU.

    Args:
        nbytes: bytes of the slab.
        pin: page-lock the memory for the GPU, which also commits all pages now; else pages are committed when they
            are first touched.

    Raises:
        StorageError: the memory cannot be allocated or page-locked.
    """

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        try:
            # Private, because the kernel puts only private anonymous memory on huge pages by default.
            mapping = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise StorageFullError(
                f"could not allocate {format_bytes_exactly(nbytes)} of host memory: {error.strerror}. {_REMEDY}"
            ) from error
        # A forked process (a DataLoader worker) must not share these pages: copy-on-write would replace them during
        # a transfer, and the bytes read would be lost.
        mapping.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        start = -torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
        # Not a slice of the whole: `is_pinned` asks CUDA about the address at which a tensor's storage begins.
        self.tensor = torch.frombuffer(mapping, dtype=torch.uint8, offset=start, count=nbytes)
        self._pinned = False
        if pin:
            # Commits the pages on all cores. CUDA would commit them on one core, four times slower (1.5 s for 8 GiB).
            self.tensor.fill_(0)
            self.pin()

    @classmethod
    def over(cls, memory: torch.Tensor) -> Slab:
        """Returns a slab over `memory`, bytes from the begin of its storage that the caller has mapped."""
        slab = cls.__new__(cls)
        slab.tensor, slab._pinned = memory, False
        return slab

    def close(self) -> None:
        """Unlocks and drops the memory, after the last copy to or from the GPU. Idempotent."""
        tensor, self.tensor = self.tensor, torch.empty(0, dtype=torch.uint8)
        if self._pinned:
            self._pinned = False
            # Buffers are released when the host is done with them; the GPU may still be a few copies behind.
            torch.cuda.synchronize()
            torch.cuda.check_error(int(_cuda_runtime().cudaHostUnregister(tensor.data_ptr())))
            del _page_locked[tensor.data_ptr()]  # from now on only views of the tensor keep the memory mapped

    def pin(self) -> None:
        """Page-locks the memory for the GPU; its bytes do not change. Idempotent.

        Raises:
            StorageError: it can't be page-locked.
        """
        if self._pinned:
            return
        size = self.tensor.numel()
        if not torch.cuda.is_available():
            raise StorageError("cannot page-lock host memory: PyTorch sees no CUDA device. Use pin=False.")
        try:
            failure = _cuda_runtime().cudaHostRegister(self.tensor.data_ptr(), size, _PORTABLE)
            torch.cuda.check_error(int(failure))
        except RuntimeError as error:
            raise StorageFullError(
                f"could not page-lock {format_bytes_exactly(size)} of host memory: {error}. {_REMEDY}"
            ) from error
        self._pinned = True
        _page_locked[self.tensor.data_ptr()] = self.tensor


# Memory that CUDA has page-locked must not be unmapped: the memory of slabs that were never closed is kept here.
_page_locked: dict[int, torch.Tensor] = {}


def _cuda_runtime() -> Any:
    cudart: Callable[[], Any] = torch.cuda.cudart  # PyTorch leaves it untyped
    return cudart()
