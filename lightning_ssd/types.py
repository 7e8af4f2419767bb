"""Names of choices that plans, the strategy and the runtime share. Imports nothing of the package."""

from typing import Literal, get_args

Tier = Literal["gpu", "host", "ssd"]
"""Memory in which weights and optimizer states are stored, the fastest first."""

OffloadTierName = Literal["host", "ssd"]
"""Memory to which bytes of the training device are offloaded."""

Choice = Literal["keep", "host", "ssd", "recompute"]
"""Treatment of the saved tensors of an operator."""

Saving = Literal["nothing", "weights", "all"]
"""Saved tensors that the hooks of an offloader treat in a part of a forward."""

InputChoice = Literal["keep", "host", "ssd"]
"""Treatment of the saved input of a unit, which can't be recomputed."""

ClipMode = Literal["off", "deferred", "speculative"]
"""Time of optimizer steps whose gradients are clipped or scaled, in a plan."""

Clip = Literal["auto", "deferred", "speculative"]
"""Argument `clip` of the strategy."""

StateFormat = Literal["fp32", "split", "bf16", "8bit"]
"""Argument `state_format` of the strategy."""

Overlap = Literal["none", "naive", "optimized"]
"""Overlap of the CPU optimizer with backward and with I/O."""

BackendName = Literal["auto", "posix", "kvikio"]
"""I/O library of the scratch files; "auto" chooses one (`storage/choice.py`)."""

TIERS, OFFLOAD_TIERS, CHOICES, INPUT_CHOICES, CLIP_MODES, BACKENDS = (
    get_args(kind) for kind in (Tier, OffloadTierName, Choice, InputChoice, ClipMode, BackendName)
)

EVICT_MARGIN = 0.03
"""Delay of an eviction after the predicted end of its copy, as a share of that end (seconds since the forward began).

The runtime delays evictions by it, and the simulator models the delay.
"""
