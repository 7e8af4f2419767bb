"""Fuyou's cost model and its choice of the activations to swap.

The paper is "Adding NVMe SSDs to Enable and Accelerate 100B Model Fine-tuning on a Single GPU", section 4.5.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_ssd.planning.hardware import HardwareProfile
from lightning_ssd.planning.phase import PhaseWork


def largest_swap(hardware: HardwareProfile, backward: PhaseWork) -> float:
    """Returns D_max: the bytes that can be swapped while the GPU is the bottleneck (equations 9 and 10).

    The bandwidths are those of all SSDs, BW N.

    Args:
        hardware: the machine.
        backward: the backward with D_start swapped and everything else recomputed.
    """
    times = backward.times(hardware)
    slack = times["compute"] - max(times["copy_in"], times["copy_out"], times["ssd"])
    return max(0.0, slack) * min(hardware.copy_in, hardware.copy_out, hardware.ssd_read, hardware.ssd_write)


def swap_benefit_factor(flops: float, swap_seconds: float) -> float:
    """Returns SBF = FLOP / ST (equation 12, table 2): FLOP of recomputation saved for each second of swapping."""
    return flops / swap_seconds if swap_seconds else float("inf")


@dataclass(frozen=True)
class SwapCandidate:
    """An activation that may be swapped instead of recomputed.

    Attributes:
        nbytes: bytes of the activation.
        flops: FLOP to recompute it.
        seconds: GPU seconds to recompute it.
    """

    nbytes: float
    flops: float
    seconds: float


def priority_queues(candidates: Sequence[SwapCandidate], bandwidth: float) -> tuple[list[int], list[int]]:
    """Returns the indices of the high-priority and of the low-priority queue, each in the order given.

    In the paper's table 2 one layer's factor stands out, 4 against 1, and its layers make the high queue. In general
    the high queue has the activations with at least half of the best factor.

    Args:
        candidates: activations, in the order of the forward.
        bandwidth: bytes/s of swapping.
    """
    factors = [swap_benefit_factor(item.flops, item.nbytes / bandwidth) for item in candidates]
    best = max(factors, default=0.0)
    high = [index for index, factor in enumerate(factors) if factor >= best / 2]
    low = [index for index, factor in enumerate(factors) if factor < best / 2]
    return high, low


def choose_swaps(
    candidates: Sequence[SwapCandidate],
    start_bytes: float,
    largest_bytes: float,
    bandwidth: float,
    iteration: Callable[[float, float], float],
) -> tuple[int, ...]:
    """Returns the indices of the activations to swap: the first i of the queues with the least T_iter (section 4.5).

    Where the text subtracts Tput x FLOP from the computation, FLOP / Tput is meant: seconds.

    Args:
        candidates: activations, in the order of the forward.
        start_bytes: D_start, swapped in any case.
        largest_bytes: D_max: no more than this is swapped in all (equation 11).
        bandwidth: bytes/s of swapping.
        iteration: T_iter in seconds from the bytes swapped and the seconds of recomputation.
    """
    high, low = priority_queues(candidates, bandwidth)
    order = high + low
    swapped, recompute = start_bytes, sum(item.seconds for item in candidates)
    best, count = iteration(swapped, recompute), 0
    for done, index in enumerate(order, start=1):
        swapped += candidates[index].nbytes
        recompute -= candidates[index].seconds
        if swapped > max(start_bytes, largest_bytes):
            break
        seconds = iteration(swapped, max(0.0, recompute))
        if seconds < best:
            best, count = seconds, done
    return tuple(order[:count])
