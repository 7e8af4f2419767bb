"""How much memory there is: of the host, and of a device."""

from pathlib import Path

import torch

__all__ = ["CUDAMemory", "available_memory", "device_memory", "usable_memory"]

_SHARE = 0.85


def usable_memory() -> int:
    """Returns the bytes of RAM that may be planned with: the rest is for what nobody counts."""
    return int(_SHARE * available_memory())


def available_memory() -> int:
    """Returns the bytes of RAM that this process could still take."""
    with open("/proc/meminfo") as lines:
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        # The cache of files counts as used, and is given up when memory is asked for.
        stat = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        cached = int(stat["active_file"]) + int(stat["inactive_file"])
        available = min(available, int(text) - int(used.read_text()) + cached)
    return available


def device_memory(device: torch.device) -> float:
    """Returns the bytes of a CUDA device that this process may have, whoever has them now."""
    total: int = torch.cuda.get_device_properties(device).total_memory
    return total * torch.cuda.get_per_process_memory_fraction(device)


class CUDAMemory:
    """What torch's allocator has of a CUDA device; all numbers are bytes."""

    #: Share of the device that may be allocated: the rest is for fragments and for libraries that allocate themselves.
    ALLOCATED = 0.92

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def limit(self) -> float:
        """Returns what this process may allocate."""
        return self.ALLOCATED * device_memory(self._device)

    def allocated(self) -> int:
        """Returns what is allocated now."""
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """Returns the most that was allocated since `reset_peak`, or ever."""
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        """Begins a new peak."""
        torch.cuda.reset_peak_memory_stats(self._device)
