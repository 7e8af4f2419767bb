"""Helpers of all planners: groups of saved tensors, and the plan made from a choice for each group."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lightning_ssd.planning.model import ModelProfile
from lightning_ssd.planning.plan import PartPlan, Plan, UnitPlan
from lightning_ssd.types import Choice, ClipMode, InputChoice, Tier

INPUT = -1
"""Index that stands for a unit's saved input."""


@dataclass(frozen=True)
class SavedGroup:
    """Saved tensors that share one choice: a unit's input, or the tensors that an operator saves.

    Attributes:
        unit: index of the unit.
        operator: index of the operator in the unit, or INPUT.
        nbytes: bytes of the group.
        flops: FLOP to recompute the group.
        seconds: GPU seconds to recompute the group; None if it can't be recomputed. Inputs never are.
    """

    unit: int
    operator: int
    nbytes: int
    flops: float
    seconds: float | None

    @property
    def key(self) -> tuple[int, int]:
        """Indices of the unit and of the operator."""
        return self.unit, self.operator


def saved_groups(model: ModelProfile) -> list[SavedGroup]:
    """Returns all groups of one or more bytes, in the order of the forward."""
    tensors = []
    for index, unit in enumerate(model.units):
        if unit.input_bytes:
            tensors.append(SavedGroup(index, INPUT, unit.input_bytes, 0.0, None))
        for position, operator in enumerate(unit.operators):
            if operator.saved_bytes:
                tensors.append(
                    SavedGroup(index, position, operator.saved_bytes, operator.flops, operator.recompute_seconds)
                )
    return tensors


def build_plan(
    model: ModelProfile,
    *,
    weights: list[Tier],
    states: list[Tier],
    saved: Mapping[tuple[int, int], InputChoice],
    clip: ClipMode | None = None,
    window_bytes: int | None = None,
) -> Plan:
    """Returns the plan of a choice for each group of saved tensors.

    Args:
        model: the profile.
        weights: tier of the compute weights of each part in `model.parts`.
        states: tier of the master weights and optimizer states of each part.
        saved: choice for each group that is not recomputed, by its key.
        clip: clip mode; None: "deferred" if gradients are clipped, else "off".
        window_bytes: GPU bytes for prefetching; None: `default_window`.
    """
    units = {}
    parts = map(PartPlan, weights, states)
    for index, unit in enumerate(model.units):
        operators: dict[str, Choice] = {}
        for position, operator in enumerate(unit.operators):
            choice: Choice = saved.get((index, position), "recompute")
            # Operators that save nothing have no choice.
            operators[operator.name] = choice if operator.saved_bytes else "keep"
        where = saved.get((index, INPUT), "keep")
        names = [part.name for part in unit.own_parts]
        units[unit.name] = UnitPlan("gpu", "gpu", where, operators).placed(names, [next(parts) for _ in names])
    window = default_window(model, weights) if window_bytes is None else window_bytes
    return Plan(units, window, 2 * window, clip or ("deferred" if model.clip_norm else "off"))


def host_then_ssd(tensors: Iterable[SavedGroup], capacity: int) -> tuple[dict[tuple[int, int], InputChoice], int]:
    """Offloads groups to host memory as long as they fit, and the others to SSDs.

    Args:
        tensors: groups, in the order in which host memory is reserved for them.
        capacity: bytes of host memory.

    Returns:
        The tier of each group by its key, and the remaining bytes of host memory.
    """
    saved: dict[tuple[int, int], InputChoice] = {}
    for tensor in tensors:
        saved[tensor.key] = "host" if tensor.nbytes <= capacity else "ssd"
        capacity -= tensor.nbytes if saved[tensor.key] == "host" else 0
    return saved, capacity


@dataclass(frozen=True)
class FixedPlacement:
    """Constraints of a planner: tiers of model states that it must not change, and limits of host memory.

    Attributes:
        weights: tier of the compute weights of each part in `ModelProfile.parts`.
        states: tier of the master weights and optimizer states of each part.
        staging_bytes: staging memory of the plan; None: the planner chooses it.
        host_limit: bytes of host memory for activations; None: all host memory that model states do not occupy.
        clip: clip mode in which the training steps now, if it clips or scales gradients; None: the planner chooses it.
    """

    weights: tuple[Tier, ...]
    states: tuple[Tier, ...]
    staging_bytes: int | None = None
    host_limit: int | None = None
    clip: ClipMode | None = None

    @classmethod
    def of(cls, model: ModelProfile, plan: Plan) -> "FixedPlacement":
        """Returns the tiers of model states in a plan."""
        parts = plan.parts(model)
        return cls(tuple(part.weights for part in parts), tuple(part.states for part in parts))

    def apply(self, model: ModelProfile, plan: Plan) -> Plan:
        """Returns the plan with this placement of model states, and clip mode, in place of its own."""
        parts = list(map(PartPlan, self.weights, self.states))
        staging = plan.staging_bytes if self.staging_bytes is None else self.staging_bytes
        return replace(plan.clipped(self.clip).placed(model, parts), staging_bytes=staging)


def default_plan(
    model: ModelProfile, fixed: FixedPlacement, capacity: Mapping[InputChoice, int], window_bytes: int
) -> Plan:
    """Returns the plan that is equivalent to offloading without a planner.

    All saved tensors are offloaded, except the last ones, which backward reads first.

    Args:
        model: the profile.
        fixed: tiers of model states.
        capacity: bytes of each tier, filled in this order; empty: everything is kept.
        window_bytes: GPU bytes for prefetching, and as many bytes of the last saved tensors are kept.
    """
    saved: dict[tuple[int, int], InputChoice] = {}
    left = dict(capacity)
    left_to_keep = window_bytes
    tensors = saved_groups(model)
    for tensor in reversed(tensors):
        if left_to_keep > 0:
            saved[tensor.key] = "keep"
        left_to_keep -= tensor.nbytes
    for tensor in tensors:
        for tier, nbytes in left.items():
            if tensor.nbytes <= nbytes:
                saved.setdefault(tensor.key, tier)
                left[tier] -= tensor.nbytes if saved[tensor.key] == tier else 0
                break
        saved.setdefault(tensor.key, "keep")
    weights, states = list(fixed.weights), list(fixed.states)
    return fixed.apply(model, build_plan(model, weights=weights, states=states, saved=saved, window_bytes=window_bytes))


def default_window(model: ModelProfile, weights: Sequence[Tier] | None = None) -> int:
    """Returns the GPU bytes for prefetching: two of the largest units' weights, and two groups of saved tensors.

    The size of a group is the median over bytes. Larger groups are prefetched one at a time.

    Args:
        model: the profile.
        weights: tier of the weights of each part in `model.parts`; None: none is on the GPU.
    """
    nbytes = [0] * len(model.units)
    for (index, part), tier in zip(model.parts, weights or ["host"] * len(model.parts), strict=True):
        nbytes[index] += 0 if tier == "gpu" else part.weight_bytes
    largest = max(nbytes)
    sizes = sorted(tensor.nbytes for tensor in saved_groups(model))
    half = sum(sizes) / 2
    middle = next((size for size, below in zip(sizes, accumulate(sizes), strict=True) if below >= half), 0)
    return 2 * largest + 2 * middle
