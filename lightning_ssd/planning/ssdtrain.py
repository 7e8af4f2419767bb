"""SSDTrain's formula of the bytes to offload (III-A, figure 3)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

TierT = TypeVar("TierT", bound=str)


@dataclass(frozen=True)
class TierSpeed:
    """Bandwidth and capacity of a tier.

    Attributes:
        write: bandwidth from the device to the tier, bytes/s.
        read: bandwidth from the tier to the device, bytes/s.
        capacity: bytes that fit into the tier.
    """

    write: float
    read: float
    capacity: float = float("inf")


def offload_amounts(
    saved_bytes: int, forward_seconds: float, backward_seconds: float, speeds: Mapping[TierT, TierSpeed]
) -> dict[TierT, int]:
    """Returns the bytes of a micro-batch that can be offloaded to each tier without slowing it.

    These are the bytes that the tier can write during the forward and read during the backward, up to its capacity. The
    tiers share the link to the device, which is as fast as the fastest of them.

    Args:
        saved_bytes: bytes of all tensors that may be offloaded.
        forward_seconds: seconds of the forward, without stalls.
        backward_seconds: seconds of the backward, without stalls.
        speeds: bandwidth of each tier, in the order in which they are filled.

    Returns:
        Bytes for each tier, at most `saved_bytes` in all.
    """
    forward, backward = max(0.0, forward_seconds), max(0.0, backward_seconds)
    link = min(
        forward * max(speed.write for speed in speeds.values()), backward * max(speed.read for speed in speeds.values())
    )
    left = min(float(saved_bytes), link)
    amounts: dict[TierT, int] = {}
    for tier, speed in speeds.items():
        amounts[tier] = int(min(left, speed.capacity, forward * speed.write, backward * speed.read))
        left -= amounts[tier]
    return amounts
