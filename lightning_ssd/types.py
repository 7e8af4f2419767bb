"""Choices that a plan, a strategy and the runtime name by the same words. Imports nothing of the package."""

from typing import Literal, get_args

__all__ = [
    "BACKENDS",
    "CHOICES",
    "CLIP_MODES",
    "EVICT_MARGIN",
    "INPUT_CHOICES",
    "TIERS",
    "BackendName",
    "Choice",
    "Clip",
    "ClipMode",
    "InputChoice",
    "OffloadTierName",
    "Overlap",
    "Tier",
]

Tier = Literal["gpu", "host", "ssd"]
"""Memory that weights and optimizer states are kept in."""

OffloadTierName = Literal["host", "ssd"]
"""Memory that bytes of the training device are offloaded to."""

Choice = Literal["keep", "host", "ssd", "recompute"]
"""Treatment of the saved tensors of an operator."""

InputChoice = Literal["keep", "host", "ssd"]
"""Treatment of the saved input of a unit, which nothing can recompute."""

ClipMode = Literal["off", "deferred", "speculative"]
"""Time of optimizer steps whose gradients are clipped or scaled, in a plan."""

Clip = Literal["auto", "deferred", "speculative"]
"""The same as an argument of the strategy."""

Overlap = Literal["none", "naive", "optimized"]
"""Overlap of the CPU optimizer with backward and with I/O."""

BackendName = Literal["auto", "posix", "kvikio"]
"""I/O library of the scratch files; "auto" chooses one (`storage/choice.py`)."""

TIERS, CHOICES, INPUT_CHOICES, CLIP_MODES, BACKENDS = (
    get_args(kind) for kind in (Tier, Choice, InputChoice, ClipMode, BackendName)
)

EVICT_MARGIN = 0.03
"""Share of a forward by which device memory is released later than its copy to another tier should be done.

The runtime waits so long and the simulator knows it.
"""
