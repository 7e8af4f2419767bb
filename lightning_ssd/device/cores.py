"""Processor cores that this process may use."""

import contextlib
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

    Quotas of cgroup version 1, and of cgroups within the container, are not read.

    Args:
        quota: file with the quota; it need not exist.
    """
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max" in place of microseconds
        used, period = map(int, quota.read_text().split())
        cores = max(1, min(cores, math.ceil(used / period)))
    return cores


@functools.cache  # so that it costs no Python call in each step
def kernel_threads(cores: int, most: int) -> int:
    """Returns the number of threads for a kernel that runs beside the thread which launches the GPU's work.

    The kernel leaves a sixteenth of the cores to that thread and to those that move bytes, and at least one core if
    there are three or more. With 15 threads on 16 cores, the launching thread never waits for a core. Kernels that are
    bound by memory traffic lose little: steps with 13 to 16 threads differ as much as repeated ones (docs/measured.md).

    Args:
        cores: cores that this process may use.
        most: threads that the user's settings allow.
    """
    return min(most, max(cores - max(1, cores // 16), min(cores, 2)))
