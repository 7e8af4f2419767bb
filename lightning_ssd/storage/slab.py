"""A slab: page-aligned host memory of an exact size, page-locked for the GPU on request."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from lightning_ssd.sizes import format_bytes_exactly
from lightning_ssd.storage.errors import StorageError, StorageFullError

_HUGE_PAGE = 2 * 2**20
_SMALL_PAGE = 4096
_PIECE = 64 * 2**20
"""Bytes that a thread commits at once."""
MOST_THREADS = 16
"""Threads of `commit`."""
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every CUDA context of the process
_REMEDY = "Lower the budget of host memory (arguments `host_memory` and `staging_memory`)."


class Slab:
    """Anonymous memory, 2 MiB aligned, on huge pages where the kernel has them.

    PyTorch's own pinned allocator rounds sizes to powers of two; a slab has exactly the requested size. The memory is
    mapped as long as a tensor on it lives. `close` unlocks the pages and drops the slab's own tensor: the owner calls
    it after the last copy to or from the GPU.

    Args:
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
        start = -torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
        whole = start + nbytes // _HUGE_PAGE * _HUGE_PAGE
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
            # The last huge page would take up to 2 MiB more than the slab.
            mapping.madvise(mmap.MADV_NOHUGEPAGE, whole, len(mapping) - whole)
        with torch.inference_mode(False):  # other threads may not write a tensor that was made in inference mode
            # Not a slice of the whole: `is_pinned` asks CUDA about the address at which a tensor's storage begins.
            self.tensor = torch.frombuffer(mapping, dtype=torch.uint8, offset=start, count=nbytes)
        self._pinned = False
        if pin:
            commit([self], pin=True)

    @classmethod
    def over(cls, memory: torch.Tensor) -> Slab:
        """Returns a slab over `memory`, bytes from the begin of its storage that the caller has mapped."""
        slab = cls.__new__(cls)
        slab.tensor, slab._pinned = memory, False
        return slab

    def close(self) -> None:
        """Unlocks and drops the memory, after the last copy to or from the GPU. Idempotent."""
        self.unpin()
        self.tensor = torch.empty(0, dtype=torch.uint8)

    def unpin(self) -> None:
        """Unlocks the memory, after the last copy to or from the GPU. Idempotent."""
        if self._pinned:
            self._pinned = False
            # Buffers are released when the host is done with them; the GPU may still be a few copies behind.
            torch.cuda.synchronize()
            address = self.tensor.data_ptr()
            torch.cuda.check_error(int(_cuda_runtime().cudaHostUnregister(address)))
            del _page_locked[address]  # from now on only views of the tensor keep the memory mapped

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked."""
        return self._pinned

    def pin(self) -> None:
        """Page-locks the memory for the GPU; its bytes do not change. Idempotent. `commit` is faster.

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


def commit(slabs: Sequence[Slab], *, pin: bool) -> None:
    """Commits all pages of slabs, and page-locks them on request, on several cores; their bytes do not change.

    The kernel clears a page on the core that touches it first, and CUDA would have one core touch all of them.

    Raises:
        StorageError: they can't be page-locked.
    """
    pieces = [piece for slab in slabs for piece in slab.tensor.split(_PIECE)]
    with _commit_threads(len(pieces)) as threads:
        for touched in [threads.submit(_touch, piece) for piece in pieces]:
            touched.result()
    if pin:
        page_lock(slabs)


def page_lock(slabs: Sequence[Slab]) -> None:
    """Page-locks slabs on several cores; CUDA locks pages on the calling thread. Their memory may be in use.

    After an error, those are page-locked that were before.

    Raises:
        StorageError: they can't be page-locked.
    """
    before = [slab for slab in slabs if not slab.pinned]
    with _commit_threads(len(before)) as threads:
        locked = [threads.submit(slab.pin) for slab in before]
    try:
        for future in locked:
            future.result()
    except BaseException:
        for slab in before:
            slab.unpin()
        raise


def _commit_threads(most: int) -> ThreadPoolExecutor:
    number = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)), most))
    return ThreadPoolExecutor(number, "lightning_ssd-commit", device_setter())


def device_setter() -> Callable[[], None]:
    """Returns a function that gives a thread the caller's CUDA device.

    A new thread has the first one, on which page-locking would allocate memory for a context.
    """
    if not torch.cuda.is_initialized():
        return lambda: None
    use_device: Callable[[int], None] = torch.cuda.set_device
    return partial(use_device, torch.cuda.current_device())


def _touch(piece: torch.Tensor) -> None:
    """Writes a byte of each page, which keeps its value: the kernel commits the pages."""
    piece[::_SMALL_PAGE].add_(0)


# Memory that CUDA has page-locked must not be unmapped: the memory of slabs that were never closed is kept here.
_page_locked: dict[int, torch.Tensor] = {}


def _cuda_runtime() -> Any:
    cudart: Callable[[], Any] = torch.cuda.cudart  # PyTorch leaves it untyped
    return cudart()
