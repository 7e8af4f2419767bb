"""Host memory and GPU memory that this process may use, in bytes."""

import contextlib
import ctypes
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from lightning_ssd.device.cgroups import CGROUPS, PROC, VERSION_2, cgroup_folders, read_text
from lightning_ssd.sizes import GPU_USABLE

_SHARE = 0.85
"""Share of the available RAM that budgets may use. The rest is for other allocations of the process."""

FRAGMENTS = 2**28
"""Least bytes that budgets leave for the allocator's fragments, which matters on a small GPU."""


_CGROUP_FILES = {
    VERSION_2: ("memory.max", "memory.current", ("active_file", "inactive_file")),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
}
"""By the version of cgroups: the files of a cgroup's limit and of its used bytes, and the fields of `memory.stat` that
count its page cache. All include the cgroup's descendants."""


def usable_memory() -> int:
    """Returns the bytes of RAM that budgets may use: `_SHARE` of the available bytes."""
    return int(_SHARE * available_memory())


def available_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Returns the bytes of RAM that this process can still allocate: on this machine, and in each of its cgroups.

    Args:
        proc: folder of the kernel's files about processes and memory.
        cgroups: folder where cgroups are mounted, of version 1 or 2; it need not exist.
    """
    with open(proc / "meminfo") as lines:
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    for version, (limit, used, cached) in _CGROUP_FILES.items():
        for folder in cgroup_folders(version, proc, cgroups):
            if not (text := read_text(folder / limit).strip()).isdecimal():  # "max", or no file
                continue
            # The kernel counts the page cache as used, but frees it when memory is needed.
            stat = dict(line.split() for line in read_text(folder / "memory.stat").splitlines())
            nbytes = max(0, int(read_text(folder / used) or 0) - sum(int(stat.get(name, 0)) for name in cached))
            available = min(available, int(text) - nbytes)
    return max(0, available)


def process_ram(proc: Path = PROC) -> int:
    """Returns the bytes of RAM of this process: its proportional set size, in which shared pages are divided.

    Sandboxes (gVisor) and hardened kernels have no file of it: then it is the resident set size.

    Args:
        proc: folder of the kernel's files about processes.
    """
    folder = proc / "self"
    fields = [line.split() for name in ("smaps_rollup", "status") for line in read_text(folder / name).splitlines()]
    return 1024 * next((int(field[1]) for field in fields if field and field[0] in ("Pss:", "VmRSS:")), 0)


def trim_heap() -> None:
    """Returns memory of freed tensors to the kernel that the C library has kept for later allocations.

    glibc keeps a tensor's memory if the tensor has at most as many bytes as one that was freed before, up to 32 MiB,
    and if anything that was allocated later is still in use.
    """
    with contextlib.suppress(AttributeError):  # another C library, such as musl
        ctypes.CDLL(None).malloc_trim(0)


def process_gpu_memory(device: torch.device) -> int:
    """Returns the bytes of a CUDA device that torch's allocator may reserve in this process.

    This is the smaller of two numbers: the bytes that are free on the device or already reserved by this process's
    allocator, and the process's fraction of the device (`torch.cuda.set_per_process_memory_fraction`).
    """
    free, total = torch.cuda.mem_get_info(device)
    return min(free + torch.cuda.memory_reserved(device), int(_memory_fraction(device) * total))


def usable_gpu_memory(device: torch.device) -> int:
    """Returns the bytes of a CUDA device that this process's budgets may use.

    This is `GPU_USABLE` of `process_gpu_memory`, or less if that would leave less than `FRAGMENTS`. Every "auto" budget
    of GPU memory is this number or a share of it.
    """
    return _usable(process_gpu_memory(device))


def _usable(nbytes: int) -> int:
    return max(0, min(int(GPU_USABLE * nbytes), nbytes - FRAGMENTS))


def _memory_fraction(device: torch.device) -> float:
    index = torch.cuda.current_device() if device.index is None else device.index
    return float(torch.cuda.get_per_process_memory_fraction(index))


def allocator_memory(device: torch.device) -> "CUDAMemory | None":
    """Returns the allocator's state of `device`, without evictable bytes; None: a CPU, whose memory has no limit."""
    return CUDAMemory(device, evictable=_evictable) if device.type == "cuda" else None


_evictable: Counter[torch.device] = Counter()
"""Bytes of each device that are evictable."""

_peaks: Counter[torch.device] = Counter()
"""Peak of each device's allocated bytes, without evictable ones, from the last reset to the last `count_evictable`."""


def count_evictable(device: torch.device, nbytes: int) -> None:
    """Adds `nbytes` to the evictable bytes, which are in use until a micro-batch may need them.

    One thread calls, before it allocates them, and after it has freed them. Any may read, a moment before or after the
    allocator's statistics change.
    """
    if device.type == "cuda":  # whose allocator's peak does not tell how many of its bytes were evictable then
        _peaks[device] = max(_peaks[device], torch.cuda.max_memory_allocated(device) - _evictable[device])
        torch.cuda.reset_peak_memory_stats(device)
    _evictable[device] += nbytes


class CUDAMemory:
    """The state of torch's allocator on a CUDA device, in bytes.

    Nothing else in the package but `count_evictable` reads or resets peaks.

    Args:
        device: the device.
        evictable: bytes by device that are not counted as allocated.
    """

    def __init__(self, device: torch.device, *, evictable: Mapping[torch.device, int] = MappingProxyType({})) -> None:
        self._device = device
        self._evictable = evictable
        self._most_reserved = process_gpu_memory(device)  # asks the driver, which takes longer than the allocator
        self._limit = _usable(self._most_reserved)

    def limit(self) -> float:
        """Returns `usable_gpu_memory` as it was when this object was made."""
        return self._limit

    def allocated(self) -> int:
        """Returns the bytes that are allocated now."""
        return self._read("allocated_bytes", "current") - self._evictable.get(self._device, 0)

    def reserved(self) -> int:
        """Returns the bytes that the allocator holds now, for tensors and cached."""
        return self._read("reserved_bytes", "current")

    def unreserved(self) -> int:
        """Returns the bytes that the allocator does not hold and may reserve, and evictable ones."""
        return self._most_reserved - self.reserved() + self._evictable.get(self._device, 0)

    def peak(self) -> int:
        """Returns the peak of allocated bytes since the last `reset_peak`, without bytes that were evictable then."""
        return max(_peaks[self._device], self._read("allocated_bytes", "peak") - self._evictable.get(self._device, 0))

    def reset_peak(self) -> None:
        """Resets the peak to the bytes that are allocated now."""
        _peaks[self._device] = 0
        torch.cuda.reset_peak_memory_stats(self._device)

    def _read(self, name: str, statistic: str) -> int:
        # `torch.cuda.memory_allocated` would flatten about a hundred statistics to return one of them.
        nested = torch.cuda.memory_stats_as_nested_dict(self._device)
        return int(nested[name]["all"][statistic]) if nested else 0
