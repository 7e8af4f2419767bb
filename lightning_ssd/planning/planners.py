"""Planners by name: each makes a plan from a model's profile and a machine's, the fastest or that of least memory."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from lightning_ssd.garbage import without_collections
from lightning_ssd.planning.hardware import HardwareProfile
from lightning_ssd.planning.holistic import CAUTION, plan_holistic
from lightning_ssd.planning.model import ModelProfile
from lightning_ssd.planning.papers import plan_fuyou, plan_lohan, plan_ssdtrain
from lightning_ssd.planning.plan import Plan
from lightning_ssd.planning.saved_groups import FixedPlacement
from lightning_ssd.planning.simulator import simulate
from lightning_ssd.planning.unit_lifetimes import plan_units
from lightning_ssd.sizes import check_choice
from lightning_ssd.types import ClipMode

Planner = Callable[[ModelProfile, HardwareProfile, FixedPlacement | None], Plan]

SLACK = 0.02
"""Share of a step's time that a plan for less memory may add, with and without `CAUTION`: the host's speed varies
during a training, and matters more for plans that keep fewer tensors on the GPU."""

CLOSE_BYTES = 0.01
"""Relative precision of GPU bytes at which the search for the least memory ends."""


def _with_states(plan: Callable[[ModelProfile, HardwareProfile], Plan]) -> Planner:
    """Wraps a paper's planner to accept a fixed placement of model states in place of the paper's."""

    def planner(model: ModelProfile, hardware: HardwareProfile, fixed: FixedPlacement | None) -> Plan:
        made = plan(model, hardware)
        return made if fixed is None else fixed.apply(model, made)

    return planner


PLANNERS: Mapping[str, Planner] = {
    "holistic": plan_holistic,
    "lohan": _with_states(plan_lohan),
    "fuyou": _with_states(plan_fuyou),
    "ssdtrain": _with_states(plan_ssdtrain),
    "teraio": plan_units,
}
"""All planners; the first is the default."""


@without_collections()
def make_plan(
    model: ModelProfile,
    hardware: HardwareProfile,
    planner: str = "holistic",
    fixed: FixedPlacement | None = None,
    clip: ClipMode | None = None,
) -> Plan:
    """Returns the plan of a named planner.

    Args:
        model: the profile.
        hardware: the machine.
        planner: "holistic", "lohan", "fuyou", "ssdtrain" or "teraio".
        fixed: tiers of model states; None: the planner chooses them, too.
        clip: clip mode of the training, whatever the plan; None: that of `fixed`, or the planner's choice.

    Raises:
        ValueError: there is no such planner.
    """
    check_choice("planner", planner, PLANNERS)
    if planner == "holistic":
        return plan_holistic(model, hardware, fixed, clip)
    return PLANNERS[planner](model, hardware, fixed).clipped(clip)


def plan_for_least_memory(
    model: ModelProfile, hardware: HardwareProfile, planner: str = "holistic", fixed: FixedPlacement | None = None
) -> Plan:
    """Returns the plan with the least GPU memory among those that are slower than `make_plan`'s by at most `SLACK`.

    Arguments as those of `make_plan`.
    """
    best = make_plan(model, hardware, planner, fixed)
    slow_host = hardware.with_host_overhead(CAUTION)
    prediction, cautious = (simulate(model, machine, best) for machine in (hardware, slow_host))
    limits = (1 + SLACK) * prediction.step_seconds, (1 + SLACK) * cautious.step_seconds
    low, high = 0, min(hardware.gpu_bytes, prediction.gpu_peak_bytes)
    while high - low > max(1, CLOSE_BYTES * high):
        budget = (low + high) // 2
        plan = make_plan(model, replace(hardware, gpu_bytes=max(1, budget)), planner, fixed)
        prediction, cautious = (simulate(model, machine, plan) for machine in (hardware, slow_host))
        fast_enough = prediction.step_seconds <= limits[0] and cautious.step_seconds <= limits[1]
        if prediction.gpu_peak_bytes <= budget and fast_enough:
            best, high = plan, prediction.gpu_peak_bytes
        else:
            low = budget
    return best
