"""Plans for a step that is bound by the host's launches: memory is freed with the least work for the host.

Any unit that does not keep all of its saved tensors has its operations intercepted, and each tensor that is swapped or
recomputed takes the host the same time, whatever its size. So few units free large tensors, and all others run as in
plain training. A checkpointed unit is not intercepted: it frees all of its saved tensors for another launch of its
forward.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_ssd.planning.hardware import HardwareProfile
from lightning_ssd.planning.model import ModelProfile, OperatorProfile, UnitProfile
from lightning_ssd.planning.plan import Plan
from lightning_ssd.types import Choice


@dataclass(frozen=True)
class _Freed:
    """A saved tensor that a plan may free in forward.

    Attributes:
        operator: name of the operator that saves it.
        nbytes: its bytes.
        choice: "host" or "recompute", whichever takes less.
        seconds: what the choice takes, above 0.
    """

    operator: str
    nbytes: int
    choice: Choice
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds


def plan_few_launches(
    model: ModelProfile, hardware: HardwareProfile, base: Plan, nbytes: int, device_weight: float
) -> Plan:
    """Returns the plan that frees `nbytes` of saved tensors on the GPU with little time of the host.

    Bytes per second of the host are maximized greedily: for a checkpointed unit; for a unit with its first tensors,
    which also takes the interception of its operations; and for each further tensor of it. Inputs of units are kept.

    Args:
        model: profile of the model.
        hardware: profile of the machine.
        base: plan whose placement of model states and windows are used.
        nbytes: bytes to free; all that can be freed are if they are fewer.
        device_weight: factor on the seconds of copies and of recomputation on the device, which count in addition.
    """
    tensors = [_largest_first(unit, hardware, device_weight) for unit in model.units]
    choices: list[dict[str, Choice]] = [{operator.name: "keep" for operator in unit.operators} for unit in model.units]
    checkpointed: set[int] = set()
    queue: list[tuple[float, int, int, int]] = []
    """What each unit frees next: negative bytes per second, unit, begin and end of its tensors; all of them and a begin
    of `_CHECKPOINT`: the unit is checkpointed. Of equal units the first frees first, because backward needs its tensors
    last."""
    for index, unit in enumerate(model.units):
        options = []
        if tensors[index]:
            interception = 0.0 if base.offloads_states else _interception(unit, hardware)
            rate, count = _best_first(tensors[index], interception)
            options.append((-rate, index, 0, count))
        if unit.checkpoint_bytes is not None and unit.saved_bytes > unit.checkpoint_bytes:
            options.append((-_checkpoint_rate(unit, hardware, device_weight), index, _CHECKPOINT, len(tensors[index])))
        queue += sorted(options)[:1]
    heapq.heapify(queue)
    while queue and nbytes > 0:
        _, index, begin, end = heapq.heappop(queue)
        if begin == _CHECKPOINT:
            checkpointed.add(index)
            nbytes -= _freed_by_checkpoint(model.units[index])
            continue
        for freed in tensors[index][begin:end]:
            choices[index][freed.operator] = freed.choice
            nbytes -= freed.nbytes
        if end < len(tensors[index]):
            heapq.heappush(queue, (-tensors[index][end].rate, index, end, end + 1))
    units = {
        unit.name: replace(base.units[unit.name], input="keep", operators=of_unit, checkpoint=index in checkpointed)
        for index, (unit, of_unit) in enumerate(zip(model.units, choices, strict=True))
    }
    return replace(base, units=units)


_NO_TIME = 1e-12
"""Seconds in place of none, by which bytes can be divided."""

_CHECKPOINT = -1
"""Begin of the tensors that a checkpointed unit frees, which are all."""


def _interception(unit: UnitProfile, hardware: HardwareProfile) -> float:
    """Returns the host's seconds to intercept the operations and saved tensors of a unit's forward."""
    operations = sum(operator.operations for operator in unit.operators)
    saved = sum(operator.saved_bytes > 0 for operator in unit.operators) + (unit.input_bytes > 0)
    return hardware.host_overhead.dispatch * operations + hardware.host_overhead.pack * saved


def _freed_by_checkpoint(unit: UnitProfile) -> int:
    """Returns the bytes on the GPU that a unit frees from its forward to its backward if it is checkpointed."""
    return unit.saved_bytes - (unit.checkpoint_bytes or 0) + unit.cast_bytes


def _checkpoint_rate(unit: UnitProfile, hardware: HardwareProfile, device_weight: float) -> float:
    """Returns the bytes per second that a unit frees if it is checkpointed."""
    on_host = unit.launch_seconds + hardware.host_overhead.checkpoint * unit.num_saved
    seconds = max(on_host + device_weight * unit.forward_seconds, _NO_TIME)
    return _freed_by_checkpoint(unit) / seconds


def _largest_first(unit: UnitProfile, hardware: HardwareProfile, device_weight: float) -> list[_Freed]:
    """Returns the tensors of a unit in falling order of bytes per second."""

    def freed(operator: OperatorProfile) -> _Freed:
        overhead, nbytes = hardware.host_overhead, operator.saved_bytes
        swapped = overhead.offload + overhead.prefetch + device_weight * nbytes / hardware.copy_out_both
        options: list[tuple[float, Choice]] = [(swapped, "host")]
        if operator.recompute_seconds is not None:
            recomputed = (overhead.record + overhead.replay) * operator.recompute_operations
            options.append((recomputed + device_weight * operator.recompute_seconds, "recompute"))
        seconds, choice = min(options)
        return _Freed(operator.name, nbytes, choice, max(seconds, _NO_TIME))

    tensors = [freed(operator) for operator in unit.operators if operator.saved_bytes]
    return sorted(tensors, key=lambda tensor: tensor.rate, reverse=True)


def _best_first(tensors: Sequence[_Freed], interception: float) -> tuple[float, int]:
    """Returns how many of a unit's first tensors free the most bytes per second: the rate, and that number."""
    nbytes, seconds = 0, interception
    rates = []
    for tensor in tensors:
        nbytes += tensor.nbytes
        seconds += tensor.seconds
        rates.append(nbytes / seconds)
    best = max(rates)
    return best, rates.index(best) + 1
