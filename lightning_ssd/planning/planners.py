"""Planners by name: each makes a plan from a model's profile and a machine's."""

from collections.abc import Callable, Mapping

from lightning_ssd.planning.hardware import HardwareProfile
from lightning_ssd.planning.holistic import plan_holistic
from lightning_ssd.planning.model import ModelProfile
from lightning_ssd.planning.plan import Plan
from lightning_ssd.planning.published import plan_fuyou, plan_lohan, plan_ssdtrain

Planner = Callable[[ModelProfile, HardwareProfile], Plan]

PLANNERS: Mapping[str, Planner] = {
    "holistic": plan_holistic,
    "lohan": plan_lohan,
    "fuyou": plan_fuyou,
    "ssdtrain": plan_ssdtrain,
}
"""All planners; the first is the default."""


def make_plan(model: ModelProfile, hardware: HardwareProfile, planner: str = "holistic") -> Plan:
    """Returns the plan of a named planner.

    Args:
        model: as profiled.
        hardware: as measured.
        planner: "holistic", "lohan", "fuyou" or "ssdtrain".

    Raises:
        ValueError: there is no such planner.
    """
    if planner not in PLANNERS:
        raise ValueError(f"`planner={planner!r}` must be one of {', '.join(map(repr, PLANNERS))}.")
    return PLANNERS[planner](model, hardware)
