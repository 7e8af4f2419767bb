"""The time of a phase of a step as the maximum over its resources, which work at the same time."""

from dataclasses import dataclass

from lightning_ssd.planning.hardware import HardwareProfile


@dataclass(frozen=True)
class PhaseWork:
    """The work of a forward or backward for each resource of a machine.

    Attributes:
        compute: seconds of the GPU.
        copy_in: bytes from host memory to the GPU.
        copy_out: bytes from the GPU to host memory.
        ssd_read: bytes from SSDs.
        ssd_written: bytes to SSDs.
        cpu: seconds of the optimizer on the CPU.
    """

    compute: float
    copy_in: float
    copy_out: float
    ssd_read: float
    ssd_written: float
    cpu: float = 0.0

    def times(self, hardware: HardwareProfile) -> dict[str, float]:
        """Returns the seconds that each resource is busy.

        The two directions of the link to the GPU work at the same time; reads and writes of SSDs share one path, so
        their times add up (LoHan IV-D, Fuyou 4.5).
        """
        return {
            "compute": self.compute,
            "copy_in": self.copy_in / hardware.copy_in,
            "copy_out": self.copy_out / hardware.copy_out,
            "ssd": self.ssd_read / hardware.ssd_read + self.ssd_written / hardware.ssd_write,
            "cpu": self.cpu,
        }

    def seconds(self, hardware: HardwareProfile) -> float:
        """Returns the seconds of the phase if everything overlaps: those of the busiest resource."""
        return max(self.times(hardware).values())


def step_phases(
    *,
    forward: float,
    backward: float,
    cpu: float,
    weights: float,
    gradients: float,
    read: float,
    written: float,
    swapped: float,
    swapped_to_ssd: float,
    weights_on_ssd: float | None = None,
) -> tuple[PhaseWork, PhaseWork]:
    """Returns the forward and the backward of a step whose model states and activations are offloaded.

    The transfers are those of LoHan's table II and equations 2 and 5: weights are prefetched twice, gradients are
    offloaded once, optimizer states are read and written in backward, swapped activations are offloaded in forward and
    prefetched in backward.

    Args:
        forward: GPU seconds of the forward.
        backward: GPU seconds of the backward, including recomputation.
        cpu: seconds of the CPU optimizer.
        weights: bytes of offloaded compute weights.
        gradients: bytes of offloaded gradients.
        read: bytes of states that the optimizer reads from SSDs.
        written: bytes of states and compute weights that the optimizer writes to SSDs.
        swapped: bytes of swapped activations.
        swapped_to_ssd: part of these bytes that is swapped to SSDs.
        weights_on_ssd: part of `weights` that is on SSDs; None: all of them.
    """
    fetched = weights if weights_on_ssd is None else weights_on_ssd
    return (
        PhaseWork(forward, weights, swapped, fetched, swapped_to_ssd),
        PhaseWork(backward, weights + swapped, gradients, fetched + read + swapped_to_ssd, written, cpu),
    )


def iteration_seconds(hardware: HardwareProfile, forward: PhaseWork, backward: PhaseWork) -> float:
    """Returns T_iter = T_f + T_b (equation 1 of LoHan and of Fuyou), each the maximum over its resources."""
    return forward.seconds(hardware) + backward.seconds(hardware)
