"""Plans in which each unit is kept or freed as a whole, so that the host launches little more than in plain training.

If a unit swaps or recomputes any saved tensor, all of its operations are intercepted. A checkpointed unit is not:
freeing all of its saved tensors costs the host another launch of its forward.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection
from dataclasses import replace

from lightning_ssd.planning.model import ModelProfile
from lightning_ssd.planning.plan import Plan, UnitPlan


def keep_all(base: Plan) -> Plan:
    """Returns the plan that keeps all saved tensors, with the other choices of `base`."""
    return keep_units(base, base.units)


def keep_units(base: Plan, names: Collection[str]) -> Plan:
    """Returns `base` with all saved tensors of the units `names` kept."""
    return replace(base, units={name: _kept(unit) if name in names else unit for name, unit in base.units.items()})


def keep_most(base: Plan, fits: Callable[[Plan], bool]) -> Plan:
    """Returns the plan with the fewest units that free memory, as they do in `base`, that fits; if none fits, `base`.

    The first units free memory first, as backward needs their tensors last. Fewer such units need more memory, so that
    a few calls of `fits` find the number.
    """
    freeing = [name for name, unit in base.units.items() if not unit.keeps_all]

    def with_units(count: int) -> Plan:
        return keep_units(base, freeing[count:])

    return with_units(bisect_left(range(len(freeing)), True, key=lambda count: fits(with_units(count))))


def checkpoint(base: Plan, names: Collection[str]) -> Plan:
    """Returns `base` with the units `names` checkpointed, which keep their inputs if they were not checkpointed."""
    return replace(
        base,
        units={
            name: replace(_kept(unit), checkpoint=True) if name in names and not unit.checkpoint else unit
            for name, unit in base.units.items()
        },
    )


def checkpoint_all(model: ModelProfile, base: Plan) -> Plan | None:
    """Returns `base` with all units checkpointed that may be; None: none may be."""
    names = [unit.name for unit in model.units if unit.checkpoint_bytes is not None]
    return checkpoint(base, names) if names else None


def offload_inputs(base: Plan) -> Plan:
    """Returns `base` with the input of each checkpointed unit that follows one in host memory.

    Others stay where they are: the operations that make them would have to be intercepted.
    """
    units: dict[str, UnitPlan] = {}
    after_checkpointed = False
    for name, unit in base.units.items():
        units[name] = replace(unit, input="host") if unit.checkpoint and after_checkpointed else unit
        after_checkpointed = unit.checkpoint
    return replace(base, units=units)


def _kept(unit: UnitPlan) -> UnitPlan:
    return replace(unit, input="keep", operators=dict.fromkeys(unit.operators, "keep"), checkpoint=False)
