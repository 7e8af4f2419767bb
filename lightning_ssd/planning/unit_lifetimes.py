"""Teraio's algorithm for plans of units and their parts: lifetimes from a profile, migrations as tiers of a plan."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from operator import itemgetter

import numpy as np

from lightning_ssd.planning.hardware import HardwareProfile
from lightning_ssd.planning.migration import (
    Migration,
    MigrationMachine,
    MigrationPeriod,
    StepMemory,
    inactive_periods,
    sum_ranges,
)
from lightning_ssd.planning.model import ModelProfile
from lightning_ssd.planning.plan import Plan
from lightning_ssd.planning.saved_groups import INPUT, FixedPlacement, build_plan
from lightning_ssd.planning.simulator import simulate
from lightning_ssd.planning.teraio import plan_in_time
from lightning_ssd.types import InputChoice, Tier

MAX_PLANS = 6
"""Most plans, each for less GPU memory than the one before: the lifetimes do not include the prefetch window."""


def plan_units(
    model: ModelProfile, hardware: HardwareProfile, fixed: FixedPlacement | None = None, most_seconds: float = inf
) -> Plan:
    """Returns Teraio's plan: tensors with the best ratio of benefit and cost migrate, and nothing is recomputed.

    A part of a unit is kept on the GPU unless its weights or states migrate. The CPU steps migrating parts, unlike in
    Teraio, and their gradients are offloaded.

    Args:
        model: profile of the model.
        hardware: profile of the machine.
        fixed: tiers of model states; None: weights and states migrate, too.
        most_seconds: `Prediction.cost_seconds` from which on the search ends, as better plans are known.
    """
    divided = fixed is None and model.undivided is not model
    models = (model, *[model.undivided] * divided)
    found = [_rated_plan(model, planned, hardware, fixed, most_seconds) for planned in models]
    return min(found, key=itemgetter(0, 1))[2]


def _rated_plan(
    model: ModelProfile,
    planned: ModelProfile,
    hardware: HardwareProfile,
    fixed: FixedPlacement | None,
    most_seconds: float,
) -> tuple[int, float, Plan]:
    """Returns the best plan in which the tensors of `planned` migrate, after its excess bytes and step seconds.

    `planned` is `model`, or `model` with units placed as a whole: migrations of its larger tensors may fit better.
    While plans exceed the GPU's memory and take no more than `most_seconds`, others are made for less memory.
    """
    plans: list[tuple[int, float, Plan]] = []
    steps = _StepLifetimes(planned, hardware, fixed)
    step, machine = steps.memory(), _machine(hardware, fixed)
    for tried in range(MAX_PLANS):
        made = steps.plan(plan_in_time(step, machine))
        plan = made if fixed is None else fixed.apply(model, made)
        found = simulate(model, hardware, plan)
        plans.append((found.excess_bytes(hardware), found.cost_seconds, plan))
        less = 2**tried * (found.gpu_peak_bytes - hardware.gpu_bytes)
        if not 0 < less < machine.gpu_bytes or found.cost_seconds > most_seconds:
            break
        machine = replace(machine, gpu_bytes=machine.gpu_bytes - less)
    return min(plans, key=itemgetter(0, 1))


def _machine(hardware: HardwareProfile, fixed: FixedPlacement | None) -> MigrationMachine:
    """Returns the link, the drives and the host memory for tensors that may migrate."""
    machine = MigrationMachine.of(hardware)
    if fixed is not None and fixed.host_limit is not None:
        machine = replace(machine, host_bytes=min(machine.host_bytes, fixed.host_limit))
    return machine


class _StepLifetimes:
    """The operators and tensors of a step of one micro-batch, in which the GPU steps each unit.

    With a fixed placement, states on the GPU are there during the whole step, and those of other units while their unit
    runs.
    """

    def __init__(self, model: ModelProfile, hardware: HardwareProfile, fixed: FixedPlacement | None) -> None:
        self._model = model
        self._bandwidth = hardware.gpu_memory_bandwidth
        self._fixed = fixed
        self._count = sum(2 * len(unit.operators) + 1 for unit in model.units)
        """Operators of a step: of forward and backward, and an optimizer step of each unit."""
        self.keys: list[tuple[str, int, int]] = []
        """Class of each tensor, index of its unit, and index of its operator or part in the unit."""
        self._allocated: list[tuple[int, int, int]] = []
        """First operator with each tensor, the one after the last, and the tensor's bytes."""
        self._candidates: list[MigrationPeriod] = []

    def memory(self) -> StepMemory:
        """Returns the operators' seconds, and the tensors in GPU memory."""
        model = self._model
        seconds: list[float] = []
        fixed = iter(() if self._fixed is None else self._fixed.states)
        forward: dict[tuple[int, int], int] = {}
        backward: dict[tuple[int, int], int] = {}
        for index, unit in enumerate(model.units):
            for position, operator in enumerate(unit.operators):
                forward[index, position] = len(seconds)
                seconds.append(operator.forward_seconds)
        for index, unit in reversed(list(enumerate(model.units))):
            for position, operator in reversed(list(enumerate(unit.operators))):
                backward[index, position] = len(seconds)
                seconds.append(operator.backward_seconds)
        for index, unit in enumerate(model.units):
            moved = unit.state_bytes_read + unit.state_bytes_written + unit.gradient_bytes + unit.weight_bytes
            resident = [next(fixed, None) == "gpu" for _ in unit.own_parts]
            self._add_unit(index, resident, forward, backward, len(seconds))
            seconds.append(moved / self._bandwidth)
        starts, stops, sizes = zip(*self._allocated, strict=True) if self._allocated else ((), (), ())
        # Differences of sums, as of measured times: their rounding breaks ties between equal units. With exact ties,
        # the search leaves memory between the sizes of two units unused.
        seconds = np.diff(np.cumsum(seconds), prepend=0.0).tolist()
        return StepMemory(seconds, sum_ranges(starts, stops, sizes, self._count), self._candidates)

    def plan(self, migrations: Sequence[Migration]) -> Plan:
        """Returns the plan in which the tensors of `migrations` are offloaded."""
        tiers: dict[tuple[str, int, int], InputChoice] = {self.keys[one.tensor]: one.tier for one in migrations}
        weights: list[Tier] = []
        states: list[Tier] = []
        saved: dict[tuple[int, int], InputChoice] = {}
        for index, unit in enumerate(self._model.units):
            for number in range(len(unit.own_parts)):
                of_weights = tiers.get(("weight", index, number))
                of_states = tiers.get(("optimizer state", index, number), of_weights)
                weights.append("gpu" if of_states is None else of_weights or of_states)  # type: ignore[arg-type]
                states.append("gpu" if of_states is None else of_states)  # type: ignore[arg-type]
            for position in (INPUT, *range(len(unit.operators))):
                saved[index, position] = tiers.get(("saved tensor", index, position), "keep")
        return build_plan(self._model, weights=weights, states=states, saved=saved)

    def _add_unit(
        self,
        index: int,
        resident: Sequence[bool],
        forward: dict[tuple[int, int], int],
        backward: dict[tuple[int, int], int],
        step: int,
    ) -> None:
        """Adds the tensors of a unit, whose operators run at indices `forward` and `backward`, and its optimizer step
        at `step`.

        A fixed placement has its `resident` parts on the GPU.
        """
        unit = self._model.units[index]
        count = len(unit.operators)
        runs = [
            *(forward[index, one] for one in range(count)),
            *(backward[index, one] for one in reversed(range(count))),
        ]
        for number, part in enumerate(unit.own_parts):
            if self._fixed is None:
                self._add("weight", index, number, part.weight_bytes, (*runs, step))
                self._add("optimizer state", index, number, part.state_bytes_read, (step,))
                self._add("gradient", index, number, part.gradient_bytes, (*runs[count:], step), runs[count], step)
            elif resident[number]:
                self._add("weight", index, number, part.resident_bytes, ())
            else:
                for uses, nbytes in ((runs[:count], 0), (runs[count:], part.gradient_bytes)):
                    self._add("transient", index, number, part.weight_bytes + nbytes, tuple(uses), uses[0], uses[-1])
        first, last = forward[index, 0], backward[index, 0]
        self._add("saved tensor", index, INPUT, unit.input_bytes, (first, last), first, last)
        for position, operator in enumerate(unit.operators):
            made, read = forward[index, position], backward[index, position]
            self._add("saved tensor", index, position, operator.saved_bytes, (made, read), made, read)
            before = max(operator.first_use_bytes, operator.backward_bytes, 0 if position else unit.backward_bytes)
            self._add("transient", index, position, operator.forward_bytes, (made,), made, made)
            self._add("transient", index, position, before, (read,), read, read)

    def _add(
        self,
        kind: str,
        unit: int,
        position: int,
        nbytes: int,
        uses: tuple[int, ...],
        allocated: int | None = None,
        freed: int | None = None,
    ) -> None:
        """Adds a tensor, unless it has no bytes, by the indices of the operators that use, allocate and free it.

        If no operator allocates it, it exists in every step from begin to end.
        """
        if not nbytes:
            return
        is_global = allocated is None
        stop = self._count if freed is None else freed + 1
        self._allocated.append((allocated or 0, stop, nbytes))
        for after, before in inactive_periods(uses, self._count, is_global=is_global):
            self._candidates.append(MigrationPeriod(len(self.keys), nbytes, after, before))
        self.keys.append((kind, unit, position))
