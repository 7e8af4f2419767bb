"""The host memory that a training takes: one sum over all of the package that allocates it."""

from dataclasses import dataclass

from lightning_ssd.activations import ActivationOffloader
from lightning_ssd.model_states import ModelStates


@dataclass(frozen=True)
class HostMemory:
    """Host memory of a training in bytes, beside that of plain Lightning.

    Not counted: copies of a micro-batch's state for a second attempt (at most 64 MiB, see `retry.step_state`), and what
    a checkpoint holds while it is written. Memory that is not page-locked is committed when it is first written.

    Attributes:
        total: allocated bytes: of offloaded weights and optimizer states, second versions included, of gradients and
            their sums, of saved tensors, also of profiled steps until it is freed, and of the memory that stages all of
            these from and to SSDs.
        limit: most bytes that may be allocated.
    """

    total: int
    limit: int


def host_memory_of(states: ModelStates | None, offloader: ActivationOffloader) -> HostMemory:
    """Returns the host memory of a training at present.

    Args:
        states: offloaded model states; None: all are on the device.
    """
    tiers = offloader.tiers.values()
    return HostMemory(
        total=(0 if states is None else states.nbytes.host) + offloader.host_bytes,
        limit=(0 if states is None else states.nbytes.host_limit) + sum(tier.host_limit for tier in tiers),
    )
