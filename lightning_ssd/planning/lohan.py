"""LoHan's cost model and its choice of the activations to swap.

The paper is "LoHan: Low-Cost High-Performance Framework to Fine-Tune 100B Model on a Consumer GPU", section IV-D.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Layer:
    """A layer whose output may be swapped instead of recomputed.

    Attributes:
        flops: FLOP to recompute it.
        nbytes: bytes of its activations.
    """

    flops: float
    nbytes: float

    @property
    def benefit(self) -> float:
        """FLOP of recomputation saved for each byte swapped: OB_layer of equation 6."""
        return self.flops / self.nbytes if self.nbytes else float("inf")


def bytes_to_ssd(swapped: float, host: float) -> float:
    """Returns how many of the `swapped` bytes do not fit in `host` bytes of memory: equation 3, never below 0."""
    return max(0.0, swapped - host)


Case = Literal["transfers", "compute", "optimum"]


@dataclass(frozen=True)
class SwapChoice:
    """The result of Algorithm 1.

    Attributes:
        layers: indices of the layers to swap, in falling benefit.
        seconds: T_iter with them.
        case: "transfers": swapping more never helps (case 1); "compute": it always does (case 2); "optimum": it helps
            up to a point (case 3).
    """

    layers: tuple[int, ...]
    seconds: float
    case: Case


def choose_swaps(layers: Sequence[Layer], base_bytes: float, iteration: Callable[[float, float], float]) -> SwapChoice:
    """Returns the layers to swap: Algorithm 1, which walks the convex T_iter down to its lowest point.

    The paper's guard against running out of memory looks at the size swapped only. Here the inter-block inputs, without
    which nothing can be recomputed, are swapped whatever else is: they are `base_bytes`, not among the layers. So the
    walk begins there, and ends at the first rise.

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
            return SwapChoice(tuple(chosen), best, "optimum" if chosen else "transfers")
        best = seconds
        chosen.append(index)
    return SwapChoice(tuple(chosen), best, "compute")
