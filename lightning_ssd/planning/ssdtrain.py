"""SSDTrain's rule for the amount to offload (SSDTrain III-A, figure 3): what bandwidth carries behind the compute."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

Tier = TypeVar("Tier", bound=str)


@dataclass(frozen=True)
class TierSpeed:
    """What a tier can carry.

    Attributes:
        write: bytes/s from the device into the tier.
        read: bytes/s from the tier to the device.
        capacity: bytes that the tier holds.
    """

    write: float
    read: float
    capacity: float = float("inf")


def offload_amounts(
    saved_bytes: int, forward_seconds: float, backward_seconds: float, speeds: Mapping[Tier, TierSpeed]
) -> dict[Tier, int]:
    """Returns how many bytes of a micro-batch each tier takes without slowing it.

    A tier takes what it can write during the forward and read during the backward, up to its capacity. The tiers share
    the link to the device, which is as fast as the fastest of them.

    Args:
        saved_bytes: bytes that could go out.
        forward_seconds: of the micro-batch, without stalls.
        backward_seconds: of the micro-batch, without stalls.
        speeds: of each tier, in the order in which they are filled.

    Returns:
        Bytes for each tier, at most `saved_bytes` in all.
    """
    forward, backward = max(0.0, forward_seconds), max(0.0, backward_seconds)
    link = min(
        forward * max(speed.write for speed in speeds.values()), backward * max(speed.read for speed in speeds.values())
    )
    left = min(float(saved_bytes), link)
    amounts: dict[Tier, int] = {}
    for tier, speed in speeds.items():
        amounts[tier] = int(min(left, speed.capacity, forward * speed.write, backward * speed.read))
        left -= amounts[tier]
    return amounts
