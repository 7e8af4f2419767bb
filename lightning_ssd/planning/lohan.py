"""LoHan's cost model and its choice of the activations to swap.

The paper is "LoHan: Low-Cost High-Performance Framework to Fine-Tune 100B Model on a Consumer GPU", section IV-D.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """A layer whose output may be swapped instead of recomputed.

    Attributes:
        flops: FLOP to recompute the output.
        nbytes: bytes of the output.
    """

    flops: float
    nbytes: float

    @property
    def benefit(self) -> float:
        """FLOP of recomputation saved for each byte swapped: OB_layer of equation 6."""
        return self.flops / self.nbytes if self.nbytes else float("inf")


def bytes_to_ssd(swapped: float, host: float) -> float:
    """Returns the part of the `swapped` bytes that exceeds `host` bytes of memory (equation 3)."""
    return max(0.0, swapped - host)


def choose_swaps(
    layers: Sequence[Layer], base_bytes: float, iteration: Callable[[float, float], float]
) -> tuple[int, ...]:
    """Returns the indices of the layers to swap, in falling benefit, by Algorithm 1.

    The algorithm descends the convex T_iter to its minimum: no swapping reduces T_iter (case 1), swapping everything
    does (case 2), or the minimum is between (case 3).

    The paper's guard against running out of memory checks only the swapped bytes. Here the inter-block inputs, without
    which nothing can be recomputed, are always swapped: they are `base_bytes`, and not among the layers. The descent
    begins with them, and ends when T_iter rises.

    Args:
        layers: layers whose outputs are swapped or recomputed.
        base_bytes: bytes that are swapped in any case, A_interBlock.
        iteration: T_iter in seconds from the bytes swapped and the FLOP recomputed.
    """
    order = sorted(range(len(layers)), key=lambda index: -layers[index].benefit)
    swapped, flops = base_bytes, sum(layer.flops for layer in layers)
    best = iteration(swapped, flops)
    chosen: list[int] = []
    for index in order:
        swapped += layers[index].nbytes
        flops -= layers[index].flops
        seconds = iteration(swapped, max(0.0, flops))
        if seconds >= best:
            break
        best = seconds
        chosen.append(index)
    return tuple(chosen)
