"""What planners share: which tensors there are to place, and the plan that a placement makes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lightning_ssd.planning.hardware import HardwareProfile
from lightning_ssd.planning.model import ModelProfile
from lightning_ssd.planning.plan import Plan, UnitPlan
from lightning_ssd.types import Choice, ClipMode, InputChoice, Tier

INPUT = -1
"""Index that stands for a unit's saved input."""


@dataclass(frozen=True)
class Tensor:
    """Saved tensors that share a decision: a unit's input, or what an operator saves.

    Attributes:
        unit: index of the unit.
        operator: index of the operator in it, or INPUT.
        nbytes: bytes.
        flops: FLOP to compute them again.
        seconds: of GPU time to compute them again; None: they can't be, and inputs aren't.
    """

    unit: int
    operator: int
    nbytes: int
    flops: float
    seconds: float | None

    @property
    def key(self) -> tuple[int, int]:
        """The unit's and the operator's index."""
        return self.unit, self.operator


def tensors_of(model: ModelProfile) -> list[Tensor]:
    """Returns all that has bytes to place, in the order of the forward."""
    tensors = []
    for index, unit in enumerate(model.units):
        if unit.input_bytes:
            tensors.append(Tensor(index, INPUT, unit.input_bytes, 0.0, None))
        for position, operator in enumerate(unit.operators):
            if operator.saved_bytes:
                tensors.append(
                    Tensor(index, position, operator.saved_bytes, operator.flops, operator.recompute_seconds)
                )
    return tensors


def assemble_plan(
    model: ModelProfile,
    *,
    weights: list[Tier],
    states: list[Tier],
    saved: Mapping[tuple[int, int], InputChoice],
    clip: ClipMode | None = None,
    window_bytes: int | None = None,
) -> Plan:
    """Returns a plan.

    Args:
        model: what it is for.
        weights: of each unit, where the compute weights are.
        states: of each unit, where the rest is.
        saved: of each tensor that is not recomputed, where it goes.
        clip: None: "deferred" where gradients are clipped.
        window_bytes: None: `default_window`.
    """
    units = {}
    for index, unit in enumerate(model.units):
        operators: dict[str, Choice] = {}
        for position, operator in enumerate(unit.operators):
            choice: Choice = saved.get((index, position), "recompute")
            # Where there is nothing to save there is nothing to decide.
            operators[operator.name] = choice if operator.saved_bytes else "keep"
        where = saved.get((index, INPUT), "keep")
        units[unit.name] = UnitPlan(weights[index], states[index], where, operators)
    window = default_window(model, weights) if window_bytes is None else window_bytes
    return Plan(units, window, 2 * window, clip or ("deferred" if model.clip_norm else "off"))


def host_first(tensors: Iterable[Tensor], room: int) -> tuple[dict[tuple[int, int], InputChoice], int]:
    """Returns where swapped tensors go: to host memory while there is room, then to SSDs.

    Args:
        tensors: in the order in which they get room.
        room: bytes of host memory.

    Returns:
        Of each tensor, where it goes; and the bytes that are left.
    """
    saved: dict[tuple[int, int], InputChoice] = {}
    for tensor in tensors:
        saved[tensor.key] = "host" if tensor.nbytes <= room else "ssd"
        room -= tensor.nbytes if saved[tensor.key] == "host" else 0
    return saved, room


@dataclass(frozen=True)
class FixedPlacement:
    """What is not to be planned.

    Attributes:
        weights: of each unit, where the compute weights are.
        states: of each unit, where the rest is.
        staging_bytes: of the plan; None: that is planned.
        host_room: bytes of host memory for activations; None: what nothing else takes.
    """

    weights: tuple[Tier, ...]
    states: tuple[Tier, ...]
    staging_bytes: int | None = None
    host_room: int | None = None

    @classmethod
    def of(cls, plan: Plan) -> "FixedPlacement":
        """Returns where a plan has model states."""
        units = plan.units.values()
        return cls(tuple(unit.weights for unit in units), tuple(unit.states for unit in units))

    def apply(self, plan: Plan) -> Plan:
        """Returns the plan with what is settled."""
        units = {
            name: replace(unit, weights=weights, states=states)
            for (name, unit), weights, states in zip(plan.units.items(), self.weights, self.states, strict=True)
        }
        staging = plan.staging_bytes if self.staging_bytes is None else self.staging_bytes
        return replace(plan, units=units, staging_bytes=staging)


def unplanned(model: ModelProfile, settled: FixedPlacement, room: Mapping[InputChoice, int], window_bytes: int) -> Plan:
    """Returns what happens where nobody plans: what is saved leaves, but for what backward wants first.

    Args:
        model: as profiled.
        settled: where model states are.
        room: bytes of the tiers, which are filled in this order; none: everything is kept.
        window_bytes: of the plan, and what stays for backward to begin with.
    """
    saved: dict[tuple[int, int], InputChoice] = {}
    left = dict(room)
    stays = window_bytes
    tensors = tensors_of(model)
    for tensor in reversed(tensors):
        if stays > 0:
            saved[tensor.key] = "keep"
        stays -= tensor.nbytes
    for tensor in tensors:
        for tier, nbytes in left.items():
            if tensor.nbytes <= nbytes:
                saved.setdefault(tensor.key, tier)
                left[tier] -= tensor.nbytes if saved[tensor.key] == tier else 0
                break
        saved.setdefault(tensor.key, "keep")
    weights, states = list(settled.weights), list(settled.states)
    return settled.apply(assemble_plan(model, weights=weights, states=states, saved=saved, window_bytes=window_bytes))


def plan_with_coefficient(
    model: ModelProfile, hardware: HardwareProfile, coefficient: float, settled: FixedPlacement
) -> Plan:
    """Returns the plan with a given swap coefficient (Fuyou 5.6): what is not swapped is computed again.

    What takes longest to compute again for its bytes is swapped first; to host memory while there is room.

    Args:
        model: as profiled.
        hardware: gives the room.
        coefficient: 0 to 1, the share of intra-block activations that is swapped at least.
        settled: where model states are.
    """
    tensors = tensors_of(model)
    certain = [tensor for tensor in tensors if tensor.seconds is None]
    choices = [tensor for tensor in tensors if tensor.seconds is not None]
    choices.sort(key=lambda tensor: -(tensor.seconds or 0.0) / tensor.nbytes)
    inner = sum(tensor.nbytes for tensor in tensors if tensor.operator != INPUT)
    left = coefficient * inner - sum(tensor.nbytes for tensor in certain if tensor.operator != INPUT)
    swapped = certain
    for tensor in choices:
        if left > 0:
            swapped.append(tensor)
            left -= tensor.nbytes
    places = list(zip(model.units, settled.weights, settled.states, strict=True))
    host = hardware.host_bytes - sum(
        unit.weight_bytes * (weights == "host") + unit.state_bytes_read * (states == "host") + unit.gradient_bytes
        for unit, weights, states in places
        if states != "gpu"
    )
    if settled.host_room is not None:
        host = min(host, settled.host_room)
    saved, _ = host_first(sorted(swapped, key=lambda tensor: tensor.key), host)
    weights, states = list(settled.weights), list(settled.states)
    return settled.apply(assemble_plan(model, weights=weights, states=states, saved=saved))


def default_window(model: ModelProfile, weights: Sequence[Tier] | None = None) -> int:
    """Returns bytes that hold the next two of what comes in: weights of units, and saved tensors.

    Tensors that are larger than most (a byte in two is in a smaller one) come alone.

    Args:
        model: as profiled.
        weights: of each unit, where they are; None: not on the GPU.
    """
    tiers = weights or ["host"] * len(model.units)
    largest = max(
        (unit.weight_bytes for unit, tier in zip(model.units, tiers, strict=True) if tier != "gpu"), default=0
    )
    sizes = sorted(tensor.nbytes for tensor in tensors_of(model))
    half = sum(sizes) / 2
    middle = next((size for size, below in zip(sizes, accumulate(sizes), strict=True) if below >= half), 0)
    return 2 * largest + 2 * middle
