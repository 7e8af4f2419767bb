"""Host memory that all ranks of a host map: files without names, which the kernel frees with the last rank.

Each rank commits and frees pages of a file of its own, because the kernel commits and frees those of one file one after
the other, whichever process asks for it.
"""

import contextlib
import mmap
import os
import weakref

import torch
from torch import Tensor

from lightning_ssd.sizes import format_bytes_exactly
from lightning_ssd.storage import Slab, StorageFullError, align_up
from lightning_ssd.uncopied import Uncopied

_HUGE_PAGE = 2 * 2**20

_MAP_NORESERVE = 0x4000

_MAPPED = 16
"""Size of a mapping, in multiples of the host's memory. A page takes memory when it is first written."""

_ADDRESSES = 2**46
"""Most bytes of all mappings of a process, half of its addresses."""


def make_files(number: int) -> list[int]:
    """Makes a file for each of a number of ranks. Returns the descriptors, which the caller closes."""
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    nbytes = align_up(min(_MAPPED * ram, _ADDRESSES // number))
    descriptors = [os.memfd_create("lightning_ssd", os.MFD_CLOEXEC) for _ in range(number)]
    for descriptor in descriptors:
        os.ftruncate(descriptor, nbytes)
    return descriptors


class RankMemory(Uncopied):
    """Allocates the shared memory of one rank. All ranks make the same calls of `allocate` in the same order, and get
    the same bytes.

    Threads: the training thread; `release` on any.

    Ownership: the mapping lives as long as a tensor on it. Which rank may write an allocation when, its user says.

    Args:
        descriptor: the file, which may be closed afterwards.
    """

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size, flags=mmap.MAP_SHARED)
        # A forked process (a DataLoader worker) has no part in the training, and its end is not that of a rank.
        self._map.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # a kernel without huge pages in shared memory
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._address = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()
        self._descriptor = os.dup(descriptor)  # for `private`
        weakref.finalize(self, os.close, self._descriptor)
        self._private: mmap.mmap | None = None
        self._used = 0

    def allocate(self, nbytes: int) -> Slab:
        """Returns zeros, at least one byte, which all ranks share, and whose pages are committed when they are written.

        Raises:
            StorageFullError: the mapping is used up.
        """
        start = -(-self._used // _HUGE_PAGE) * _HUGE_PAGE if nbytes >= _HUGE_PAGE else align_up(self._used)
        if start + nbytes > len(self._map):
            raise StorageFullError(
                f"could not allocate {format_bytes_exactly(nbytes)} of host memory: the address space of a rank is in "
                "use. Take a smaller model or fewer devices."
            )
        self._used = start + nbytes
        return Slab.over(torch.frombuffer(self._map, dtype=torch.uint8, offset=start, count=nbytes))

    def floats(self, numel: int) -> Tensor:
        """Returns `numel` fp32 zeros, as `allocate` does."""
        return self.allocate(torch.float32.itemsize * numel).tensor.view(torch.float32)

    def release(self, memory: Tensor) -> None:
        """Frees the pages of an allocation, which no rank uses any more."""
        with contextlib.suppress(OSError):  # a kernel that frees no parts of a file
            self._map.madvise(mmap.MADV_REMOVE, memory.data_ptr() - self._address, align_up(memory.nbytes))

    def private(self, values: Tensor) -> Tensor | None:
        """Returns a tensor with the bytes of `values`, which keeps them if other ranks' tensors change, and vice versa.

        It takes memory where it is written. The memory of all allocations is kept as long as one such tensor lives.

        Args:
            values: a dense tensor in this memory, which no rank writes any more; not empty.

        Returns:
            The tensor, with a storage of its own; None: the kernel allows no such mapping.
        """
        if self._private is None:
            try:
                flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
                self._private = mmap.mmap(self._descriptor, align_up(self._used), flags=flags)
            except OSError:
                return None
        start = values.data_ptr() - self._address
        own = torch.frombuffer(self._private, dtype=values.dtype, count=values.numel(), offset=start)
        return own.as_strided(values.shape, values.stride())
