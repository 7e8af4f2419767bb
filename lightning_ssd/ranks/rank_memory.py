"""Host memory that all ranks of a host map: a file without a name, which the kernel frees with the last rank."""

import contextlib
import mmap
import os

import torch
from torch import Tensor

from lightning_ssd.sizes import format_bytes_exactly
from lightning_ssd.storage import Slab, StorageFullError, align_up
from lightning_ssd.uncopied import Uncopied

_HUGE_PAGE = 2 * 2**20

_MAPPED = 16
"""Size of the mapping, in multiples of the host's memory. A page takes memory when it is first written."""


def make_file() -> tuple[int, int]:
    """Makes the file. Returns its descriptor, which the caller closes, and its size in bytes."""
    nbytes = _MAPPED * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    descriptor = os.memfd_create("lightning_ssd", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, nbytes)
    return descriptor, nbytes


class RankMemory(Uncopied):
    """Allocates shared memory. All ranks make the same calls of `allocate` in the same order, and get the same bytes.

    Threads: the training thread.

    Ownership: the mapping lives as long as a tensor on it. Which rank may write an allocation when, its user says.

    Args:
        descriptor: the file, which may be closed afterwards.
        nbytes: its size.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._map = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED)
        # A forked process (a DataLoader worker) has no part in the training, and its end is not that of a rank.
        self._map.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # a kernel without huge pages in shared memory
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._used = 0
        self._unpinned: list[Slab] = []

    def allocate(self, nbytes: int, *, touch: bool = False, pin: bool = False) -> Slab:
        """Returns zeros, which all ranks share.

        Args:
            nbytes: bytes to allocate, at least one.
            touch: whether this rank commits the pages now, on its NUMA node. Too little memory ends the training here,
                and not at its first step.
            pin: whether `pin` page-locks them.

        Raises:
            StorageFullError: the mapping is used up.
        """
        start = -(-self._used // _HUGE_PAGE) * _HUGE_PAGE if nbytes >= _HUGE_PAGE else align_up(self._used)
        if start + nbytes > len(self._map):
            raise StorageFullError(
                f"could not allocate {format_bytes_exactly(nbytes)} of host memory: {_MAPPED} times the memory of this "
                "host are in use. Take a smaller model or fewer devices."
            )
        self._used = start + nbytes
        slab = Slab.over(torch.frombuffer(self._map, dtype=torch.uint8, offset=start, count=nbytes))
        if touch:
            slab.tensor.fill_(0)
        if pin:
            self._unpinned.append(slab)
        return slab

    def floats(self, numel: int) -> Tensor:
        """Returns `numel` fp32 zeros, which all ranks share, and whose pages are committed when they are written."""
        return self.allocate(torch.float32.itemsize * numel).tensor.view(torch.float32)

    def pin(self) -> None:
        """Page-locks the allocations made with `pin`, whose pages all ranks have touched.

        Raises:
            StorageError: they can't be page-locked.
        """
        while self._unpinned:
            self._unpinned.pop().pin()
