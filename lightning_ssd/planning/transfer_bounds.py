"""Bounds of a step by its transfers: no plan that recomputes nothing and steps no unit on the CPU is faster."""

import numpy as np

from lightning_ssd.planning.lifetimes import LifetimeProfile
from lightning_ssd.planning.migration import MigrationMachine

PARTS = 96
"""Parts of a step, between whose begins transfers are added up."""


def least_score(profile: LifetimeProfile, machine: MigrationMachine) -> tuple[int, float]:
    """Returns the least `MigrationPrediction.score`: bytes that do not fit, and the seconds of a step."""
    excess = 0 if machine.drives else max(0, max(profile.total) - machine.gpu_bytes - machine.host_bytes)
    return (excess, profile.step_seconds) if excess else (0, least_step_seconds(profile, machine))


def least_step_seconds(profile: LifetimeProfile, machine: MigrationMachine) -> float:
    """Returns the seconds that a step takes at least if memory fits.

    Operators of an interval use tensors that exist at its begin. Those beyond the GPU's capacity are prefetched in the
    interval, and those beyond the capacities of GPU and host memory are read from drives. The same holds for offloads
    of tensors that exist at its end. The step is divided into intervals for the largest sum of such bounds.
    """
    uses = _uses(profile)
    if not uses:
        return profile.step_seconds
    count = len(profile.operators)
    operators = profile.operators
    # The optimizer needs the most bytes per second, with many operators: parts have equal numbers of operators.
    phases = [index for index in range(1, count) if operators[index].phase != operators[index - 1].phase]
    bounds = np.array(sorted({part * count // PARTS for part in range(PARTS)}.union(phases, (0, count))))
    size = len(bounds)
    before, use, after, nbytes = (np.array(column) for column in zip(*uses, strict=True))
    earlier, begin, end = (np.searchsorted(bounds, one, "right") for one in (before, use, after))
    used, left = np.zeros((2, size + 1, size + 1))
    """Bytes used between the bounds of a row and a column, of tensors that exist at its begin, or at its end."""
    np.add.at(used, (earlier, begin), nbytes)
    np.add.at(used, (begin, begin), -nbytes)
    # Offloads at the end of a step may take time of the next one: intervals until the end have no bound by them.
    end = np.minimum(end, size - 1)
    np.add.at(left, (begin - 1, begin), nbytes)
    np.add.at(left, (begin - 1, end), -nbytes)
    used = used.cumsum(0).cumsum(1)[:size, :size]
    left = left[::-1].cumsum(0)[::-1].cumsum(1)[:size, :size]
    times = np.array([*(one.start for one in operators), profile.step_seconds])[bounds]
    seconds = times - times[:, None]
    for rate, link, transferred in (
        (machine.rate("ssd", "in"), machine.link_in, used),
        (machine.rate("ssd", "out"), machine.link_out, left),
    ):
        beyond = np.maximum(0.0, transferred - machine.gpu_bytes)
        on_drives = np.maximum(0.0, beyond - machine.host_bytes)
        seconds = np.maximum(seconds, beyond / link)
        seconds = np.maximum(seconds, on_drives / rate if rate else np.where(on_drives > 0, np.inf, 0.0))
    least = np.zeros(size)
    for index in range(1, size):
        least[index] = (least[:index] + seconds[:index, index]).max()
    return float(least[-1])


def _uses(profile: LifetimeProfile) -> list[tuple[int, int, int, int]]:
    """Returns the operator before a use of a tensor that uses or allocates it, the use, the next one, and the bytes.

    The last use of a tensor that is freed then has itself as the next one.
    """
    found: list[tuple[int, int, int, int]] = []
    for tensor in profile.tensors:
        before = -1 if tensor.allocated is None else tensor.allocated
        after = tensor.uses[-1:] if tensor.freed is not None else (len(profile.operators),)
        for use, following in zip(tensor.uses, (*tensor.uses[1:], *after), strict=False):
            found.append((before, use, following, tensor.nbytes))
            before = use
    return found
