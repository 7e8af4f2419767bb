"""Stochastic rounding to bf16 by random numbers that are a function of parameter, step and element.

So the bits do not depend on the division into flat parameters and threads, or on whether the training was resumed.
adam.c has the same functions.
"""

import torch
from torch import Tensor

_MASK = 2**64 - 1


def step_keys(random_key: int, step: int) -> tuple[int, int]:
    """Returns the two 32-bit keys of a parameter's random numbers in a step: the mixing function of SplitMix64.

    Args:
        random_key: key of the parameter (`ParamView.random_key`).
        step: steps of the parameter after this one.
    """
    mixed = (random_key + step * 0x9E3779B97F4A7C15) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    mixed ^= mixed >> 31
    return mixed & 0xFFFFFFFF, mixed >> 32


def random_bits(first: int, numel: int, keys: tuple[int, int], device: torch.device) -> Tensor:
    """Returns 32 random bits for each of `numel` elements of a parameter, from element `first` on, int64."""
    bits = torch.arange(first, first + numel, dtype=torch.int64, device=device) + keys[0] & 0xFFFFFFFF
    bits = (bits ^ bits >> 16) * 0x7FEB352D & 0xFFFFFFFF
    bits = (bits ^ bits >> 15) + keys[1] & 0xFFFFFFFF
    bits = bits * 0x846CA68B & 0xFFFFFFFF
    return bits ^ bits >> 16


def round_stochastically(values: Tensor, random: Tensor) -> Tensor:
    """Returns fp32 values rounded to a neighbour in bf16, each with the probability of its nearness.

    A value of bf16 remains, as do infinities; every NaN becomes the canonical one.

    Args:
        random: 16 random bits for each, int64.
    """
    bits = values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    rounded = torch.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, bits + random >> 16)
    return rounded.to(torch.int16).view(torch.bfloat16)
