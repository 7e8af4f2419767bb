"""Plans for steps that are bound by the host's kernel launches: memory is freed with the least host time.

If a unit swaps or recomputes any saved tensor, all of its operations are intercepted. The host's time for a swapped
tensor does not depend on its size, and that for a recomputed one depends on its operations alone. So `free_tensors`
frees large tensors in few units, and all other units run as in plain training, with or without offloaded model states.
A checkpointed unit is not intercepted: freeing all of its saved tensors costs the host another launch of its forward.
`free_units` checkpoints few units. A greedy search over both would intercept many units first, whose first tensors free
more bytes per second, and be slower by up to 15 % where few checkpointed units suffice.
"""

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from lightning_ssd.planning.hardware import HardwareProfile
from lightning_ssd.planning.model import ModelProfile, OperatorProfile, UnitProfile
from lightning_ssd.planning.plan import Plan, UnitPlan
from lightning_ssd.types import Choice


@dataclass(frozen=True)
class _Freed:
    """A saved tensor that a plan may free in forward, by the choice that takes less time (`seconds`, above 0)."""

    operator: str
    nbytes: int
    choice: Choice
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds


def keep_all(base: Plan) -> Plan:
    """Returns the plan that keeps all saved tensors, with the other choices of `base`."""
    return keep_units(base, base.units)


def keep_units(base: Plan, names: Collection[str]) -> Plan:
    """Returns `base` with all saved tensors of the units `names` kept."""
    return replace(base, units={name: _kept(unit) if name in names else unit for name, unit in base.units.items()})


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


def free_units(
    model: ModelProfile, hardware: HardwareProfile, base: Plan, nbytes: int, device_weight: float
) -> tuple[Plan, int]:
    """Returns a plan that checkpoints the units that free the most bytes per second, and the bytes that it frees.

    Arguments and result are those of `free_tensors`. All other saved tensors are kept.
    """

    def rate(unit: UnitProfile) -> float:
        on_host = unit.launch_seconds + hardware.host_overhead.checkpoint * unit.num_saved
        return _freed_by_checkpoint(unit) / max(on_host + device_weight * unit.forward_seconds, _MIN_SECONDS)

    units = [unit for unit in model.units if unit.checkpoint_bytes is not None and _freed_by_checkpoint(unit) > 0]
    names, freed = [], 0
    for unit in sorted(units, key=rate, reverse=True):
        if freed >= nbytes:
            break
        names.append(unit.name)
        freed += _freed_by_checkpoint(unit)
    return checkpoint(keep_all(base), names), freed


def free_tensors(
    model: ModelProfile, hardware: HardwareProfile, base: Plan, nbytes: int, device_weight: float
) -> tuple[Plan, int]:
    """Returns a plan that frees `nbytes` of saved tensors on the GPU with little host time, and the bytes it frees.

    The greedy search repeatedly frees the most bytes per second of host time. A unit's first option is to free its
    first tensors, for which its operations have to be intercepted; then, an option frees one more of its tensors.
    Inputs of units are kept, no tensor is offloaded to SSDs, and the limit of host memory is ignored.

    Args:
        model: profile of the model.
        hardware: profile of the machine.
        base: plan whose placement of model states and windows are used.
        nbytes: bytes to free. A plan frees more if the last option does, and less if no option is left.
        device_weight: weight of the device's seconds (copies, recomputation), which are added to the host's.
    """
    tensors = [_by_rate(unit, hardware, device_weight) for unit in model.units]
    choices: list[dict[str, Choice]] = [{operator.name: "keep" for operator in unit.operators} for unit in model.units]
    queue: list[tuple[float, int, int, int]] = []
    """The next option of each unit: negative bytes per second, unit, begin and end of its tensors to free. Among equal
    options, the first unit is chosen, because backward needs its tensors last."""
    for index, unit in enumerate(model.units):
        if tensors[index]:
            interception = _interception(unit, hardware, packed=not base.offloads_states)
            rate, count = _best_first(tensors[index], interception)
            queue.append((-rate, index, 0, count))
    heapq.heapify(queue)
    freed = 0
    while queue and freed < nbytes:
        _, index, begin, end = heapq.heappop(queue)
        for tensor in tensors[index][begin:end]:
            choices[index][tensor.operator] = tensor.choice
            freed += tensor.nbytes
        if end < len(tensors[index]):
            heapq.heappush(queue, (-tensors[index][end].rate, index, end, end + 1))
    units = {
        unit.name: replace(base.units[unit.name], input="keep", operators=of_unit, checkpoint=False)
        for unit, of_unit in zip(model.units, choices, strict=True)
    }
    return replace(base, units=units), freed


_MIN_SECONDS = 1e-12
"""Least time of an option: bytes are divided by it."""


def _interception(unit: UnitProfile, hardware: HardwareProfile, *, packed: bool) -> float:
    """Returns the host's seconds to intercept the operations of a unit's forward, and, if `packed`, its saved tensors.

    If weights are offloaded, saved tensors are packed in any case.
    """
    operations = sum(operator.operations for operator in unit.operators)
    saved = sum(operator.saved_bytes > 0 for operator in unit.operators) + (unit.input_bytes > 0)
    return hardware.host_overhead.dispatch * operations + hardware.host_overhead.pack * saved * packed


def _freed_by_checkpoint(unit: UnitProfile) -> int:
    """Returns the bytes on the GPU that a unit frees from its forward to its backward if it is checkpointed."""
    return unit.saved_bytes - (unit.checkpoint_bytes or 0) + unit.cast_bytes


def _by_rate(unit: UnitProfile, hardware: HardwareProfile, device_weight: float) -> list[_Freed]:
    """Returns the tensors of a unit in falling order of bytes per second."""

    def freed(operator: OperatorProfile) -> _Freed:
        overhead, nbytes = hardware.host_overhead, operator.saved_bytes
        swapped = overhead.offload + overhead.prefetch + device_weight * nbytes / hardware.copy_out_both
        options: list[tuple[float, Choice]] = [(swapped, "host")]
        if operator.recompute_seconds is not None:
            recomputed = (overhead.record + overhead.replay) * operator.recompute_operations
            options.append((recomputed + device_weight * operator.recompute_seconds, "recompute"))
        seconds, choice = min(options)
        return _Freed(operator.name, nbytes, choice, max(seconds, _MIN_SECONDS))

    tensors = [freed(operator) for operator in unit.operators if operator.saved_bytes]
    return sorted(tensors, key=lambda tensor: tensor.rate, reverse=True)


def _best_first(tensors: Sequence[_Freed], interception: float) -> tuple[float, int]:
    """Returns the most bytes per second that a unit's first tensors free, and the number of these tensors."""
    nbytes, seconds = 0, interception
    rates = []
    for tensor in tensors:
        nbytes += tensor.nbytes
        seconds += tensor.seconds
        rates.append(nbytes / seconds)
    best = max(rates)
    return best, rates.index(best) + 1
