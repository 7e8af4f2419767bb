"""Residency: the choice of parameters that are kept on the device with their gradients and optimizer states."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from lightning_ssd.model_states.optimizers import Groups
from lightning_ssd.model_states.stores import WHOLE_DTYPES
from lightning_ssd.model_states.units import Unit, UnitPart
from lightning_ssd.model_states.weights import MasteredParameter
from lightning_ssd.types import OffloadTierName, Tier
from lightning_ssd.uncopied import takes_hooks

MASTERED_DTYPES = (torch.bfloat16,)
"""Dtypes of weights that have fp32 master weights, on the device and off it."""


@dataclass(frozen=True)
class UnitTiers:
    """Tiers (compute weights, other values) of a unit.

    Attributes:
        unit: tiers of the parts that `parts` does not name.
        parts: tiers of parts by name.
    """

    unit: tuple[Tier, Tier]
    parts: Mapping[str, tuple[Tier, Tier]] = field(default_factory=dict)

    def of(self, part: UnitPart) -> tuple[Tier, Tier]:
        """Returns the tiers of a part."""
        return self.parts.get(part.name, self.unit)


PlanTiers = Mapping[str, UnitTiers]
"""Tiers of each unit, by name."""


def bytes_on_device(module: nn.Module, *, fitting: bool) -> int:
    """Returns a model's bytes on the device: weights, and with `fitting` gradients, two states and 16-bit copies."""
    return sum(
        parameter.numel() * (parameter.element_size() * (4 if fitting and parameter.requires_grad else 1) + 2)
        for parameter in module.parameters()
        if not isinstance(parameter, UninitializedParameter)
    )


def offloaded_parameters(module: nn.Module, min_bytes: int, *, fitting: bool) -> set[nn.Parameter]:
    """Returns the parameters to offload: dense ones that are large enough, and that no module of TorchScript owns.

    fp32 parameters without dimensions are kept: they save no memory, and torch clips their gradients by norm in fp64 if
    another gradient is in fp64, which the optimizer steps of offloaded parameters do not.

    Args:
        min_bytes: bytes of the smallest fp32, fp64 or fp16 parameter to offload. bf16 parameters of all sizes are
            offloaded, because only offloaded ones have fp32 master weights.
        fitting: whether the model is trained: fp64 and fp16 parameters are kept then, because steps are computed in
            fp32.
    """
    whole = (torch.float32,) if fitting else (*WHOLE_DTYPES, torch.float16)
    resident: set[nn.Parameter] = set()
    for owner in module.modules():
        # The gradient of a sparse embedding is no dense tensor, and no hook can prefetch weights of TorchScript.
        if getattr(owner, "sparse", False) or not takes_hooks(owner):
            resident.update(owner.parameters(recurse=False))
    return {
        parameter
        for parameter in module.parameters()
        if parameter not in resident
        and type(parameter) in (nn.Parameter, MasteredParameter)
        and parameter.layout is torch.strided
        and (
            (parameter.dtype in whole and parameter.nbytes >= max(1, min_bytes) and parameter.dim() > 0)
            or (parameter.dtype in MASTERED_DTYPES and parameter.numel() > 0)
        )
    }


def _element_bytes(parameter: nn.Parameter, groups: Groups, compute: torch.dtype) -> int:
    """Returns the bytes of an element on the device: fp32 master, gradient and two states, and a 16-bit copy."""
    if parameter in groups:
        return 16 + (2 if compute.itemsize == 2 else 0)
    return parameter.element_size() + (2 if compute != parameter.dtype else 0)


def residents_within(
    units: Sequence[Unit],
    offloaded: set[nn.Parameter],
    groups: Groups,
    budget: int,
    dtypes: Mapping[nn.Parameter, torch.dtype],
    *,
    defer_to_user_hooks: bool,
) -> tuple[set[nn.Parameter], int]:
    """Returns parameters of parts of units that fit on the device with prefetched weights, and their bytes.

    The first units of the forward are chosen first: their gradients are complete last and their weights are needed
    first, so a step on the CPU would overlap with nothing.

    Args:
        offloaded: parameters to choose from.
        groups: parameter groups; parameters outside of them need no gradients and states.
        budget: bytes of the device.
        defer_to_user_hooks: as in `whole_parts`.
    """

    def own(unit: Unit | UnitPart) -> list[nn.Parameter]:
        return [parameter for _, parameter in unit.parameters if parameter in offloaded]

    sizes = sorted((sum(dtypes[p].itemsize * p.numel() for p in own(unit)) for unit in units), reverse=True)
    used, most = 0, budget - sum(sizes[:3])  # one unit computes, one is prefetched, one is evicted
    resident: set[nn.Parameter] = set()
    for part in (part for unit in units for part in unit.parts):
        needed = sum(_element_bytes(p, groups, dtypes[p]) * p.numel() for p in own(part))
        if defer_to_user_hooks and not whole_parts([part], offloaded, defer_to_user_hooks=True):
            continue
        if used + needed > most:
            break
        used += needed
        resident.update(own(part))
    return resident, used


def planned_residents(
    tiers: PlanTiers,
    units: Sequence[Unit],
    parts_of: Callable[[Unit], Sequence[UnitPart]],
    movable: set[nn.Parameter],
    *,
    defer_to_user_hooks: bool,
    host_alone: bool,
) -> set[nn.Parameter]:
    """Returns the parameters that a plan keeps on the device.

    Args:
        parts_of: returns the parts of a unit that may be on tiers of their own.
        movable: parameters that may be offloaded.
        defer_to_user_hooks: as in `whole_parts`.
        host_alone: whether `tier="host"` excludes SSDs.

    Raises:
        ValueError: the plan does not match these units.
    """
    _check_plan(tiers, units, parts_of, movable, host_alone=host_alone)
    kept = UnitTiers(("gpu", "gpu"))
    chosen = [part for unit in units for part in parts_of(unit) if tiers.get(unit.name, kept).of(part)[0] == "gpu"]
    return whole_parts(chosen, movable, defer_to_user_hooks=defer_to_user_hooks)


def whole_parts(
    parts: Sequence[UnitPart], movable: set[nn.Parameter], *, defer_to_user_hooks: bool
) -> set[nn.Parameter]:
    """Returns the parameters of parts that may be kept on the device as a whole.

    Args:
        parts: parts of units to choose from.
        movable: parameters to choose from.
        defer_to_user_hooks: whether user code may read gradients: on the device, those of parts with 16-bit parameters
            would be fp32.
    """
    chosen: set[nn.Parameter] = set()
    for part in parts:
        own = {parameter for _, parameter in part.parameters if parameter in movable}
        if not defer_to_user_hooks or all(parameter.dtype == torch.float32 for parameter in own):
            chosen |= own
    return chosen


def needs_master(resident: set[nn.Parameter], groups: Groups) -> list[nn.Parameter]:
    """Returns which of the resident parameters have fp32 master weights on the device."""
    return [parameter for parameter in resident if parameter in groups and parameter.dtype in MASTERED_DTYPES]


def off_device(tiers: tuple[Tier, Tier]) -> tuple[OffloadTierName, OffloadTierName]:
    """Returns the tiers of flat parameters of a part, with host memory in place of the GPU."""
    weights, opt_state = tiers
    return ("host" if weights == "gpu" else weights), ("host" if opt_state == "gpu" else opt_state)


def _check_plan(
    tiers: PlanTiers,
    units: Sequence[Unit],
    parts_of: Callable[[Unit], Sequence[UnitPart]],
    movable: set[nn.Parameter],
    *,
    host_alone: bool,
) -> None:
    by_name = {unit.name: unit for unit in units if unit.parameters}
    for name, of_unit in tiers.items():
        every = {f"unit `{name}`": of_unit.unit}
        every |= {f"part `{part}` of the unit `{name}`": of_part for part, of_part in of_unit.parts.items()}
        for what, (weights, opt_state) in every.items():
            if (weights == "gpu") != (opt_state == "gpu"):
                raise ValueError(
                    f"the plan has weights of the {what} on `{weights}` and its states on `{opt_state}`. It is on the "
                    "GPU with both of them, or with neither: change one of the two."
                )
            if host_alone and "ssd" in (weights, opt_state):
                raise ValueError(f"the plan has the {what} on SSDs, and `tier='host'` rules that out. Change one.")
        if name not in by_name:
            raise ValueError(f"the plan places the unit `{name}`, which the model does not have. Plan again for it.")
        parts = {part.name for part in parts_of(by_name[name])}
        for part in of_unit.parts:
            if part not in parts:
                raise ValueError(
                    f"the plan places the part `{part}` of the unit `{name}`, which the model does not have. Plan "
                    "again for it."
                )
    for unit in units:
        if unit.name not in tiers and any(parameter in movable for _, parameter in unit.parameters):
            raise ValueError(f"the plan does not place the unit `{unit.name}`. Plan again for this model.")
