"""Bounds of a step by its transfers: no plan that recomputes nothing and steps no unit on the CPU is faster."""

import itertools

import numpy as np

from lightning_ssd.planning.lifetimes import LifetimeProfile
from lightning_ssd.planning.migration import MigrationMachine

PARTS = 96
"""Parts of a step, between whose begins transfers are added up."""


def least_step_seconds(profile: LifetimeProfile, machine: MigrationMachine) -> float:
    """Returns seconds that a step takes at least if memory fits.

    Tensors that operators of an interval use exceed the memory by bytes that are transferred in the interval, in both
    directions: at its begin, and at its end, the GPU has no more than its capacity, and host memory no more than its
    limit. The bound is that of the intervals into which the step is divided for the largest sum.
    """
    count = len(profile.operators)
    operators = profile.operators
    # Transfers per second are the most in the few operators of the optimizer: parts have equal numbers of operators.
    phases = [index for index in range(1, count) if operators[index].phase != operators[index - 1].phase]
    bounds = np.array(sorted({part * count // PARTS for part in range(PARTS)}.union(phases, (0, count))))
    size = len(bounds)
    before, use, after, nbytes = (np.array(column) for column in zip(*_uses(profile), strict=True))
    earlier, begin, end = (np.searchsorted(bounds, one, "right") for one in (before, use, after))
    used, left = np.zeros((2, size + 1, size + 1))
    """Bytes of tensors that exist at the begin of an interval (rows), or at its end (columns), and are used in it."""
    np.add.at(used, (earlier, begin), nbytes)
    np.add.at(used, (begin, begin), -nbytes)
    # How the step ends is seen in the next one: intervals until its end have no bound by their offloads.
    end = np.minimum(end, size - 1)
    np.add.at(left, (begin - 1, begin), nbytes)
    np.add.at(left, (begin - 1, end), -nbytes)
    used = used.cumsum(0).cumsum(1)[:size, :size]
    left = left[::-1].cumsum(0)[::-1].cumsum(1)[:size, :size]
    times = np.array([*(one.start for one in operators), profile.step_seconds])[bounds]
    seconds = times - times[:, None]
    for rates, link, transferred in (
        ([read for read, _ in machine.drives], machine.link_in, used),
        ([write for _, write in machine.drives], machine.link_out, left),
    ):
        beyond = np.maximum(0.0, transferred - machine.gpu_bytes)
        on_drives = np.maximum(0.0, beyond - machine.host_bytes)
        rate = min(link, sum(rates))
        seconds = np.maximum(seconds, beyond / link)
        seconds = np.maximum(seconds, on_drives / rate if rate else np.where(on_drives > 0, np.inf, 0.0))
    least = np.zeros(size)
    for index in range(1, size):
        least[index] = (least[:index] + seconds[:index, index]).max()
    return float(least[-1])


def _uses(profile: LifetimeProfile) -> list[tuple[int, int, int, int]]:
    """Returns each use of a tensor, after the one before (or its allocation) and before the next one, and its bytes."""
    count = len(profile.operators)
    found: list[tuple[int, int, int, int]] = []
    for tensor in profile.tensors:
        first = -1 if tensor.allocated is None else tensor.allocated
        last = count if tensor.freed is None else -1
        found += zip(
            (first, *tensor.uses), tensor.uses, (*tensor.uses[1:], last), itertools.repeat(tensor.nbytes), strict=False
        )
    return found
