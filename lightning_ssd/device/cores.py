"""Processor cores that this process may use."""

import contextlib
import functools
import math
import os
from collections.abc import Callable, Sequence, Set
from functools import partial
from pathlib import Path

import torch

from lightning_ssd.device.cgroups import CGROUPS, PROC, VERSION_2, cgroup_folders, read_text

_QUOTA_FILES = {VERSION_2: ("cpu.max",), "cpu": ("cpu.cfs_quota_us", "cpu.cfs_period_us")}
"""By the version of cgroups: the files with the microseconds for which a cgroup's threads may run in each period, and
those of a period."""


@functools.cache
def available_cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Returns the number of cores that this process may use: by its affinity, and by the quota of each of its cgroups.

    Args:
        proc: folder of the kernel's files about processes.
        cgroups: folder where cgroups are mounted, of version 1 or 2; it need not exist.
    """
    cores = len(os.sched_getaffinity(0))
    for version, names in _QUOTA_FILES.items():
        for folder in cgroup_folders(version, proc, cgroups):
            with contextlib.suppress(ValueError):  # no such file, or "max" in place of microseconds
                quota, period = map(int, " ".join(read_text(folder / name) for name in names).split())
                if quota > 0:  # version 1 has -1 for no quota
                    cores = max(1, min(cores, math.ceil(quota / period)))
    return cores


@functools.cache  # so that it costs no Python call in each step
def kernel_threads(cores: int, most: int) -> int:
    """Returns the number of threads for a kernel that runs beside the thread which launches the GPU's work.

    The kernel leaves a sixteenth of the cores to that thread and to those that move bytes, and at least one core if
    there are three or more. With 15 threads on 16 cores, the launching thread never waits for a core. Kernels that are
    bound by memory traffic lose little: steps with 13 to 16 threads differ as much as repeated ones (docs/measured.md).

    Args:
        most: threads that the user's settings allow.
    """
    return min(most, max(cores - max(1, cores // 16), min(cores, 2)))


def share_cores(affinities: Sequence[Set[int]]) -> Callable[[], None]:
    """Gives operators and kernels of this process its share of the cores that it has together with other processes.

    More threads than that would wait for each other's cores, spinning. Processes that a launcher has bound to cores of
    their own share none. A user's `OMP_NUM_THREADS` counts, except for 1, which `torchrun` sets.

    Args:
        affinities: cores that each process of the training on this host may use, this one included.

    Returns:
        A function that restores the number of threads.
    """
    before = torch.get_num_threads()
    sharing = [sum(not own.isdisjoint(cores) for cores in affinities) for own in affinities]
    shares = [len(own) // count for own, count in zip(affinities, sharing, strict=True)]
    share = max(1, min(available_cores() // max(sharing), *shares))
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(kernel_threads(share, share))
    return partial(torch.set_num_threads, before)
