"""What planners share: which tensors there are to place, and the plan that a placement makes."""

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_ssd.planning.model import ModelProfile
from lightning_ssd.planning.plan import Choice, ClipMode, Plan, Tier, UnitPlan, Where

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
    saved: Mapping[tuple[int, int], Where],
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
    window = default_window(model) if window_bytes is None else window_bytes
    return Plan(units, window, 2 * window, clip or ("deferred" if model.clip_norm else "off"))


def default_window(model: ModelProfile) -> int:
    """Returns bytes that hold the weights of the largest unit, and what the next two stages of backward want."""
    weights = max(unit.weight_bytes for unit in model.units)
    saved = max(max([unit.input_bytes, *(operator.saved_bytes for operator in unit.operators)]) for unit in model.units)
    return 2 * weights + 2 * saved
