"""Processor cores that this process may use."""

import functools
import math
import os
from pathlib import Path

__all__ = ["available_cores", "kernel_threads"]

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Holds the microseconds for which a container's threads may run in each period, and those of a period."""


@functools.cache
def available_cores(quota: Path = QUOTA) -> int:
    """Returns the number of cores that this process may use: by its affinity, and by the quota of its container.

    Args:
        quota: file with the quota; it need not exist.
    """
    cores = len(os.sched_getaffinity(0))
    used, period = quota.read_text().split() if quota.exists() else ("max", "1")
    return cores if used == "max" else max(1, min(cores, math.ceil(int(used) / int(period))))


@functools.cache  # so that it costs no Python call in each step
def kernel_threads(cores: int, most: int) -> int:
    """Returns the number of threads for a kernel that runs beside the thread which launches the GPU's work.

    It leaves one core of 16, but at least one if there are three or more, for that thread and for those that move
    bytes. If a kernel had a thread on every core, the launching thread would have half of a core, also for some
    milliseconds after the kernel, as idle threads of OpenMP spin, and the GPU would wait for it. Kernels that are bound
    by memory traffic lose little.

    Args:
        cores: cores that this process may use.
        most: threads that the user's settings allow.
    """
    return min(most, max(cores - max(1, cores // 16), min(cores, 2)))
