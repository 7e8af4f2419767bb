"""LoHan's cost model and its choice of what to swap ("LoHan: Low-Cost High-Performance Framework to Fine-Tune 100B
Model on a Consumer GPU", section IV-D)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_ssd.planning.phase import Phase, step_phases


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


@dataclass(frozen=True)
class StateSizes:
    """Bytes of model states (LoHan's table II).

    Attributes:
        master: of the fp32 weights, P32.
        optimizer: of the optimizer's states, OS32.
        gradients: G16.
        weights: of the compute weights, P16.
    """

    master: float
    optimizer: float
    gradients: float
    weights: float

    @classmethod
    def mixed_precision(cls, parameters: float) -> "StateSizes":
        """Returns the sizes of table II: 4, 8, 2 and 2 bytes for each parameter."""
        return cls(4 * parameters, 8 * parameters, 2 * parameters, 2 * parameters)


def bytes_to_ssd(swapped: float, host: float) -> float:
    """Returns how many of the `swapped` bytes do not fit in `host` bytes of memory: equation 3, never below 0."""
    return max(0.0, swapped - host)


def phases(
    *,
    flops: float,
    recomputed_flops: float,
    throughput: float,
    states: StateSizes,
    swapped: float,
    host: float,
    cpu: float = 0.0,
) -> tuple[Phase, Phase]:
    """Returns the forward of equation 4 and the backward of equation 5.

    Args:
        flops: FLOP of the forward; the backward has twice as many.
        recomputed_flops: FLOP of recomputation in backward.
        throughput: FLOP/s of the GPU.
        states: bytes of model states, all of them on SSDs.
        swapped: bytes of activations that leave the GPU, A_G2M.
        host: bytes of host memory for them, MEM_avail.
        cpu: seconds of the optimizer. LoHan leaves it out: it is shorter than reading and writing the states.
    """
    return step_phases(
        forward=flops / throughput,
        backward=(2 * flops + recomputed_flops) / throughput,
        cpu=cpu,
        weights=states.weights,
        gradients=states.gradients,
        read=states.master + states.optimizer,
        written=states.master + states.optimizer + states.weights,
        swapped=swapped,
        swapped_to_ssd=bytes_to_ssd(swapped, host),
    )


Case = Literal["transfers", "compute", "optimum"]


@dataclass(frozen=True)
class SwapChoice:
    """What Algorithm 1 found.

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
        layers: what may be swapped or recomputed.
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
