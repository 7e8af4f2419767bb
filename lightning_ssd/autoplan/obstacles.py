"""Trainings that can't be planned: those whose weights are sharded, and those with compiled code that is no unit."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations import (
    GuardHook,
    UnitDispatchMode,
    around_call,
    calls_are_compiled,
)
from lightning_ssd.autoplan.protocol import Training
from lightning_ssd.model_states import compiled_functions, is_compiled
from lightning_ssd.uncopied import Uncopied

BLOCKS = "compile the model's blocks instead: `for block in model.blocks: block.compile()`"
"""Remedy for compiled code that is no unit."""

COMPILED = f"`torch.compile` compiles code that is no block of the model, whose operations can't be planned ({BLOCKS})"
"""The obstacle to planning in trainings with such code."""


class CompiledCode(Uncopied):
    """Notices code that `torch.compile` compiles, from now on, without that of compiled units.

    Code that was compiled earlier, such as in another training of this process, is noticed when Dynamo checks its
    guards, until `close` is called, and under dispatch modes of plans and profiles, if torch has
    `set_guard_complete_hook`.

    Args:
        units: modules of compiled units, whose calls are not counted.
    """

    def __init__(self, units: Iterable[nn.Module] = ()) -> None:
        self._inside = 0
        """Running calls of compiled units."""
        self._count_before = 0
        """Value of `count_compiled` when the outermost of them began."""
        self._removals = [around_call(unit, self._begin_unit, self._end_unit) for unit in units]
        self._count = internals.count_compiled()
        """Value of `count_compiled` at the begin, plus what compiled units have added."""
        self._counts = True
        """Whether a difference from this value shows compiled code."""
        self._under_modes = UnitDispatchMode.num_compiled
        self._not_compiled = UnitDispatchMode.num_not_compiled
        self._called = False
        self._hook = GuardHook(self._on_call) if self._count else None

    @property
    def ran(self) -> bool:
        """Whether code was compiled, or compiled code was called."""
        return self._called or self.ran_under_mode or (self._counts and internals.count_compiled() != self._count)

    @property
    def ran_under_mode(self) -> bool:
        """Whether code that is compiled, or to be compiled, ran under a dispatch mode of a plan or profile."""
        return UnitDispatchMode.num_compiled != self._under_modes or self._ran_eagerly

    @property
    def _ran_eagerly(self) -> bool:
        """Whether older torch ran such code uncompiled."""
        return UnitDispatchMode.num_not_compiled != self._not_compiled

    def forget(self, inform: Callable[[str], None]) -> None:
        """Has all code of the process compiled anew, if some ran uncompiled: Dynamo skips such code for ever.

        Args:
            inform: logs a line about it.
        """
        if self._ran_eagerly:
            torch.compiler.reset()
            inform(
                "This version of torch ran code uncompiled in a step whose operators were recorded or planned. It is "
                "compiled from now on, and so is all other compiled code of the process, anew."
            )

    def close(self) -> None:
        """Ends the notice outside of modes: of earlier compiled code, and of all code if there are compiled units."""
        if self._removals:
            self._called, self._counts = self.ran, False
        for remove in self._removals:
            remove()
        self._removals.clear()
        if self._hook is not None:
            self._hook.close()

    def _on_call(self) -> None:
        self._called = self._called or not self._inside

    def _begin_unit(self, args: object, kwargs: object) -> None:
        if not self._inside:
            self._count_before = internals.count_compiled()
        self._inside += 1

    def _end_unit(self, output: object) -> None:
        self._inside = max(0, self._inside - 1)  # torch calls it also if another hook has raised an error before
        if not self._inside:
            self._count += internals.count_compiled() - self._count_before
            self._count_before = internals.count_compiled()


def obstacle_to_planning(training: Training) -> str | None:
    """Returns why no plan can be applied to the training; `None`: one can, as far as its modules show."""
    if not training.replicated:
        return "other processes have a part of the weights, and plans are for processes that have all (DDP)"
    inside = {part for unit in compiled_units(training) for part in unit.modules()}
    for name, part in training.module.named_modules():
        if part not in inside and is_compiled(part):
            return (
                f"{name or type(training.module).__name__} is compiled, and is no block of the model, so that its "
                f"operations can't be planned ({BLOCKS})"
            )
    return None


def compiled_units(training: Training) -> list[nn.Module]:
    """Returns the modules of units whose calls are compiled, and none of their other methods."""
    return [
        module
        for unit in training.units()
        for module in unit.modules
        if calls_are_compiled(module) and {"forward", "_compiled_call_impl"}.issuperset(compiled_functions(module))
    ]
