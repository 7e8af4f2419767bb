"""Bytes that a plan allocates permanently in each tier."""

from collections import Counter

from lightning_ssd.planning.model import FP32_BYTES, ModelProfile
from lightning_ssd.planning.plan import Plan
from lightning_ssd.shared_gradients import shared_gradient_bytes
from lightning_ssd.types import TIERS, Tier

STATES = ("compute weights", "optimizer states", "gradients")

JOBS_AHEAD = 3
"""Optimizer jobs that have staging memory at once: one reads, one steps, one writes."""


def resident_by_kind(model: ModelProfile, plan: Plan) -> dict[str, dict[Tier, int]]:
    """Returns the permanently allocated bytes of compute weights, optimizer states and gradients in each tier."""
    resident: dict[str, dict[Tier, int]] = {name: {"gpu": 0, "host": 0, "ssd": 0} for name in STATES}
    weights, states, gradients = resident.values()
    placed = list(zip((profile for _, profile in model.parts), plan.parts(model), strict=True))
    for profile, part in placed:
        versions = 2 if plan.clip == "speculative" and part.offloaded else 1  # the GPU makes no speculative steps
        if part.offloaded or not profile.casts:
            weights[part.weights] += versions * profile.weight_bytes
        states[part.states] += versions * profile.state_bytes_on(part.states)
        if not part.offloaded:
            gradients["gpu"] += profile.resident_gradient_bytes
    offloaded = [profile for profile, part in placed if part.offloaded]
    if model.shares_gradients and plan.clip == "off" and weights["ssd"] + states["ssd"]:
        # A part may have several gradients, which share less memory.
        gradients["host"] = shared_gradient_bytes(profile.gradient_bytes for profile in offloaded)
    else:  # each has memory of its own, because all wait for the norm, or because no step waits for a drive
        gradients["host"] = sum(profile.gradient_bytes for profile in offloaded)
    if model.micro_batches > 1:  # their sums, whose memory stays allocated from step to step
        gradients["host"] += FP32_BYTES * sum(profile.parameters for profile in offloaded)
    return resident


def resident_bytes(model: ModelProfile, plan: Plan) -> tuple[int, int, int]:
    """Returns permanently allocated bytes (GPU, host, SSD): weights, states, gradients, memory of optimizer jobs."""
    kinds = resident_by_kind(model, plan).values()
    gpu, host, ssd = (sum(kind[tier] for kind in kinds) for tier in TIERS)
    job_bytes = [
        profile.state_bytes_read + (profile.weight_bytes if part.weights == "ssd" else 0)
        for (_, profile), part in zip(model.parts, plan.parts(model), strict=True)
        if part.states == "ssd"
    ]
    gpu += param_budget(model, plan)
    return gpu, host + sum(sorted(job_bytes, reverse=True)[:JOBS_AHEAD]), ssd


def streamed_weights(model: ModelProfile, plan: Plan) -> list[tuple[int, int]]:
    """Returns the units with offloaded weights: index of the unit, and bytes of these weights."""
    nbytes: Counter[int] = Counter()
    for (index, profile), part in zip(model.parts, plan.parts(model), strict=True):
        if part.weights != "gpu" and profile.weight_bytes:
            nbytes[index] += profile.weight_bytes
    return sorted(nbytes.items())


def param_budget(model: ModelProfile, plan: Plan) -> int:
    """Returns the GPU bytes reserved for streamed parameters: at least the largest unit, at most all of them."""
    sizes = [nbytes for _, nbytes in streamed_weights(model, plan)]
    if model.param_budget_bytes is None or not sizes:
        return 0
    return min(max(model.param_budget_bytes, *sizes), sum(sizes))


def kept_weights(model: ModelProfile, plan: Plan) -> set[int]:
    """Returns the indices of the units whose weights are kept from forward to backward: the last ones that fit."""
    room = param_budget(model, plan)
    kept = set()
    for index, nbytes in reversed(streamed_weights(model, plan)):
        room -= nbytes
        if room < 0:
            break
        kept.add(index)
    return kept
