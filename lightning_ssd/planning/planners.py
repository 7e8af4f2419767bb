"""Planners by name: each makes a plan from a model's profile and a machine's."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import log

from lightning_ssd.planning.hardware import HardwareProfile
from lightning_ssd.planning.holistic import plan_holistic
from lightning_ssd.planning.model import ModelProfile
from lightning_ssd.planning.placement import FixedPlacement
from lightning_ssd.planning.plan import Plan
from lightning_ssd.planning.published import plan_fuyou, plan_lohan, plan_ssdtrain
from lightning_ssd.planning.simulator import simulate

Planner = Callable[[ModelProfile, HardwareProfile, FixedPlacement | None], Plan]


def _with_states(plan: Callable[[ModelProfile, HardwareProfile], Plan]) -> Planner:
    """Returns the planner of a paper, which has its own idea of where states are, for those that are elsewhere."""

    def planner(model: ModelProfile, hardware: HardwareProfile, settled: FixedPlacement | None) -> Plan:
        made = plan(model, hardware)
        return made if settled is None else settled.apply(made)

    return planner


SLACK = 0.02
"""Share of a step's time that less memory may cost."""

CAUTION = 1.5
"""Factor by which the host may take longer to follow plans, and one that takes less memory still costs no more: the
host's pace comes and goes, and what stays on the GPU does not depend on it."""

CLOSE_BYTES = 0.01
"""Share of the memory that is not looked for any more."""

CORRECTIONS = 8
"""Attempts to explain a step's time."""

MOST = 1.5
"""Factor by which a step may be off for its time to be explained so."""

QUICKEST, SLOWEST = 0.5, 3.0
"""Of the host's time to follow a plan, what one correction may make it: it is the least certain of all times."""

FOLLOWING_DOUBT, BOUND_DOUBT = 2.0, 1.05
"""Factors by which it, and what bounds a step, are as likely to be off."""

CLOSE_SECONDS = 0.005
"""Share of a step's time that needs no explanation."""

PLANNERS: Mapping[str, Planner] = {
    "holistic": plan_holistic,
    "lohan": _with_states(plan_lohan),
    "fuyou": _with_states(plan_fuyou),
    "ssdtrain": _with_states(plan_ssdtrain),
}
"""All planners; the first is the default."""


def make_plan(
    model: ModelProfile, hardware: HardwareProfile, planner: str = "holistic", settled: FixedPlacement | None = None
) -> Plan:
    """Returns the plan of a named planner.

    Args:
        model: as profiled.
        hardware: as measured.
        planner: "holistic", "lohan", "fuyou" or "ssdtrain".
        settled: where model states are; None: that is planned, too.

    Raises:
        ValueError: there is no such planner.
    """
    if planner not in PLANNERS:
        raise ValueError(f"`planner={planner!r}` must be one of {', '.join(map(repr, PLANNERS))}.")
    return PLANNERS[planner](model, hardware, settled)


def plan_for_least_memory(
    model: ModelProfile, hardware: HardwareProfile, planner: str = "holistic", settled: FixedPlacement | None = None
) -> Plan:
    """Returns the plan that takes least of the GPU's memory, of those that take no more than `SLACK` more time.

    Args:
        model: as profiled.
        hardware: as measured.
        planner: as in `make_plan`.
        settled: as in `make_plan`.
    """
    best = make_plan(model, hardware, planner, settled)
    slower = hardware.with_launches(CAUTION)
    prediction, cautious = (simulate(model, machine, best) for machine in (hardware, slower))
    limits = (1 + SLACK) * prediction.step_seconds, (1 + SLACK) * cautious.step_seconds
    low, high = 0, min(hardware.gpu_bytes, prediction.gpu_peak_bytes)
    while high - low > CLOSE_BYTES * high:
        budget = (low + high) // 2
        plan = make_plan(model, replace(slower, gpu_bytes=max(1, budget)), planner, settled)
        prediction, cautious = (simulate(model, machine, plan) for machine in (hardware, slower))
        quick = prediction.step_seconds <= limits[0] and cautious.step_seconds <= limits[1]
        if prediction.gpu_peak_bytes <= budget and quick:
            best, high = plan, prediction.gpu_peak_bytes
        else:
            low = budget
    return best


def correct(
    model: ModelProfile, hardware: HardwareProfile, plan: Plan, step_seconds: float
) -> tuple[ModelProfile, HardwareProfile] | None:
    """Returns the profiles under which `plan` takes as long as it was measured to take.

    What bounds the step is faster or slower than it was measured to be alone: the GPU, the link, the SSDs, the CPU, or
    the host's thread that gives the GPU its work. Or that thread takes another time to follow the plan, where this is
    the less surprising of the two.

    Args:
        model: as profiled.
        hardware: as measured.
        plan: that was in force.
        step_seconds: of its steps.

    Returns:
        None: that explains nothing, or there is nothing to explain, or too much.
    """
    foretold = simulate(model, hardware, plan)
    off = step_seconds / foretold.step_seconds
    if not 1 / MOST < off < MOST:
        return None
    corrected = model, hardware
    # Where the host bounds the step, it is slow in all that it does.
    if abs(off - 1) > CLOSE_SECONDS and foretold.bound != "launch" and not plan.keeps_all:
        following = _following(model, hardware, plan, step_seconds)
        if abs(log(following, FOLLOWING_DOUBT)) <= abs(log(off, BOUND_DOUBT)):
            corrected = model, hardware.with_launches(following)
    for _ in range(CORRECTIONS):
        prediction = simulate(*corrected, plan)
        ratio = step_seconds / prediction.step_seconds
        if abs(ratio - 1) < CLOSE_SECONDS:
            return None if corrected == (model, hardware) else corrected
        corrected = _slow_down(*corrected, plan, prediction.bound, ratio)
    return None


def correct_step_rate(
    model: ModelProfile, hardware: HardwareProfile, plan: Plan, step_rate: float, step_seconds: float
) -> HardwareProfile:
    """Returns the machine whose CPU's optimizer steps as quickly under `plan` as it was measured to.

    Beside copies, that is: what they took of the host's memory while it stepped is not the optimizer's.

    Args:
        model: as profiled.
        hardware: as measured.
        plan: that was in force.
        step_rate: parameters/s of the CPU's jobs meanwhile.
        step_seconds: of steps. Copies are made all the time, jobs only for a part of it.
    """
    places = zip(model.units, plan.units.values(), strict=True)
    stepped = sum(profile.parameters for profile, unit in places if unit.states != "gpu")
    if not stepped:  # single small tensors of units that stay
        return hardware
    seconds = stepped / step_rate
    shared = 0.0
    if hardware.host_memory_bandwidth is not None:
        copied = simulate(model, hardware, plan).copied_bytes
        shared = copied / hardware.host_memory_bandwidth * min(1.0, seconds / step_seconds)
    return replace(hardware, cpu_step_rate=stepped / max(seconds - shared, seconds / 2))


def _following(model: ModelProfile, hardware: HardwareProfile, plan: Plan, step_seconds: float) -> float:
    """Returns the factor by which the host takes longer to follow `plan` if a step takes so long; 1: it isn't that.

    What its own forward takes the host was measured in training, what following a plan does, apart from it.
    """

    def seconds(factor: float) -> float:
        return simulate(model, hardware.with_launches(factor), plan).step_seconds

    most = seconds(SLOWEST)
    if most < step_seconds or most - seconds(QUICKEST) < CLOSE_SECONDS * step_seconds:
        return 1.0
    quick, slow = QUICKEST, SLOWEST
    while slow - quick > CLOSE_SECONDS:
        middle = (slow + quick) / 2
        if seconds(middle) > step_seconds:
            slow = middle
        else:
            quick = middle
    return quick


def _slow_down(
    model: ModelProfile, hardware: HardwareProfile, plan: Plan, resource: str, factor: float
) -> tuple[ModelProfile, HardwareProfile]:
    match resource:
        case "compute":
            return model.with_time(factor), hardware
        case "cpu":
            memory = hardware.host_memory_bandwidth
            slower = replace(hardware, cpu_step_rate=hardware.cpu_step_rate / factor)
            return model, slower if memory is None else replace(slower, host_memory_bandwidth=memory / factor)
        case "ssd":
            return model, hardware.with_ssds(1 / factor)
        case "launch":
            # Where nothing is followed, nothing is learnt of what that takes.
            return model.with_launches(factor), hardware if plan.keeps_all else hardware.with_launches(factor)
        case _:
            return model, hardware.with_link(1 / factor)
