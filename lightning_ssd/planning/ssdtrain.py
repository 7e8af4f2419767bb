"""SSDTrain's formulas: the amount to offload (III-A, figure 3), its bandwidth and its size (III-D, table III)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

TierT = TypeVar("TierT", bound=str)


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
    saved_bytes: int, forward_seconds: float, backward_seconds: float, speeds: Mapping[TierT, TierSpeed]
) -> dict[TierT, int]:
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
    amounts: dict[TierT, int] = {}
    for tier, speed in speeds.items():
        amounts[tier] = int(min(left, speed.capacity, forward * speed.write, backward * speed.read))
        left -= amounts[tier]
    return amounts


def required_write_bandwidth(activation_bytes: float, step_seconds: float) -> float:
    """Returns the bytes/s at which all activations leave within half a step (SSDTrain III-D): 2 S_act / t_step.

    Args:
        activation_bytes: of a step.
        step_seconds: of the step.
    """
    return 2 * activation_bytes / step_seconds


def activation_bytes(
    *, hidden: int, layers: int, heads: int, sequence: int, batch: int, vocabulary: int, shards: int = 1
) -> float:
    """Returns the bytes of activations of a transformer in 16 bit on one of `shards` GPUs: the estimate of table III.

    The paper extends llm-analysis, whose terms these are, in bytes for each element of a (batch, sequence, hidden)
    plane: the inputs of the QKV product 2, of the output product and the values 8, flash attention 4 and its statistics
    8 heads / hidden, a dropout mask 1, the inputs of the two MLP products 2 and 16, two layer norms in fp32 8. Around
    the
    blocks: the embedding 2, the last norm 4, and the logits 2 for each entry of the vocabulary. Tensor parallelism
    divides all of them, with the sequence divided, too, where tensors aren't.

    Args:
        hidden: size of the hidden dimension.
        layers: count of blocks.
        heads: of attention.
        sequence: tokens in a sample.
        batch: samples.
        vocabulary: entries of it.
        shards: GPUs of tensor parallelism.
    """
    tokens = batch * sequence
    attention = tokens * hidden * (2 + 8 + 4 + 1) + 8 * heads * tokens
    mlp = tokens * hidden * (2 + 16)
    norms = tokens * hidden * 8
    around = tokens * hidden * (2 + 4) + 2 * tokens * vocabulary
    return (layers * (attention + mlp + norms) + around) / shards
