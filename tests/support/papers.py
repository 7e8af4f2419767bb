"""The papers' phases of a step, in the papers' formats, for comparison with `step_phases`."""

from dataclasses import dataclass

from lightning_ssd.planning.lohan import bytes_to_ssd
from lightning_ssd.planning.phase import PhaseWork, step_phases


def fuyou_phases(
    *,
    forward: float,
    recompute: float,
    optimizer: float,
    parameters: float,
    swapped: float,
) -> tuple[PhaseWork, PhaseWork]:
    """Returns the forward and the overlapped backward of Fuyou's equations 3, 4 and 6 to 8 (16-bit formats).

    Args:
        forward: seconds of GPU time, T_f^comp; the backward takes twice that.
        recompute: seconds of recomputation, RC(D_f).
        optimizer: seconds of the optimizer on the CPU, T_o^comp.
        parameters: count of them, p.
        swapped: bytes of activations swapped to SSDs, D_f.
    """
    return step_phases(
        forward=forward,
        backward=2 * forward + recompute,
        cpu=optimizer,
        weights=2 * parameters,
        gradients=2 * parameters,
        read=12 * parameters,
        written=14 * parameters,
        swapped=swapped,
        swapped_to_ssd=swapped,
    )


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


def lohan_phases(
    *,
    flops: float,
    recomputed_flops: float,
    throughput: float,
    states: StateSizes,
    swapped: float,
    host: float,
    cpu: float = 0.0,
) -> tuple[PhaseWork, PhaseWork]:
    """Returns the forward of LoHan's equation 4 and the backward of equation 5.

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
