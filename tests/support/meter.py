"""Statistics of an allocator that a test sets."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lightning_ssd.activations import config
from lightning_ssd.autoplan import plan_cycle
from lightning_ssd.planning import HardwareProfile

MACHINE = Path(__file__).parents[2] / "configs/machines/h100.json"


@dataclass(eq=False)
class Meter:
    """Statistics of an allocator: a limit, the bytes before each micro-batch, and the peak of each, in bytes."""

    most: float
    highest: int
    level: int = 0

    def limit(self) -> float:
        return self.most

    def allocated(self) -> int:
        return self.level

    def peak(self) -> int:
        return self.highest

    def unreserved(self) -> int:
        return int(self.most) - self.highest

    def reset_peak(self) -> None:
        return None


def use(meter: Meter, patch: pytest.MonkeyPatch) -> None:
    """Makes trainings on the CPU read `meter`, and plan for an H100 without a comparison of predicted times."""
    patch.setattr(config, "allocator_memory", lambda device: meter)
    patch.setattr(plan_cycle, "measure_training_machine", lambda *_: HardwareProfile.from_json(MACHINE))
    patch.setattr(plan_cycle, "COMPARED_STEPS", 10**6)


def use_slow_transfers(patch: pytest.MonkeyPatch) -> None:
    """Makes trainings plan for a machine whose copies and drives take longer than any computation, after `use`."""
    rates = ("copy_out", "copy_in", "copy_out_both", "copy_in_both", "ssd_read", "ssd_write", "ssd_mixed")
    slow = replace(HardwareProfile.from_json(MACHINE), **dict.fromkeys(rates, 1e5))
    patch.setattr(plan_cycle, "measure_training_machine", lambda *_: slow)
