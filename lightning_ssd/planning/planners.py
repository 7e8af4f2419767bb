"""Planners by name: each makes a plan from a model's profile and a machine's."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from lightning_ssd.planning.hardware import HardwareProfile
from lightning_ssd.planning.holistic import plan_holistic
from lightning_ssd.planning.model import ModelProfile
from lightning_ssd.planning.placement import Settled
from lightning_ssd.planning.plan import Plan
from lightning_ssd.planning.published import plan_fuyou, plan_lohan, plan_ssdtrain
from lightning_ssd.planning.simulator import simulate

Planner = Callable[[ModelProfile, HardwareProfile, Settled | None], Plan]


def _with_states(plan: Callable[[ModelProfile, HardwareProfile], Plan]) -> Planner:
    """Returns the planner of a paper, which has its own idea of where states are, for those that are elsewhere."""

    def planner(model: ModelProfile, hardware: HardwareProfile, settled: Settled | None) -> Plan:
        made = plan(model, hardware)
        return made if settled is None else settled.apply(made)

    return planner


SLACK = 0.02
"""Share of a step's time that less memory may cost."""

CLOSE_BYTES = 0.01
"""Share of the memory that is not looked for any more."""

CORRECTIONS = 8
"""Attempts to explain a step's time."""

MOST = 1.5
"""Factor by which a step may be off for its time to be explained so."""

QUICKEST = 0.5
"""Of the host's time to follow a plan, what is left at least in a first correction."""

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
    model: ModelProfile, hardware: HardwareProfile, planner: str = "holistic", settled: Settled | None = None
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
    model: ModelProfile, hardware: HardwareProfile, planner: str = "holistic", settled: Settled | None = None
) -> Plan:
    """Returns the plan that takes least of the GPU's memory, of those that take no more than `SLACK` more time.

    Args:
        model: as profiled.
        hardware: as measured.
        planner: as in `make_plan`.
        settled: as in `make_plan`.
    """
    best = make_plan(model, hardware, planner, settled)
    prediction = simulate(model, hardware, best)
    limit = (1 + SLACK) * prediction.step_seconds
    low, high = 0, min(hardware.gpu_bytes, prediction.gpu_peak_bytes)
    while high - low > CLOSE_BYTES * high:
        budget = (low + high) // 2
        plan = make_plan(model, replace(hardware, gpu_bytes=max(1, budget)), planner, settled)
        prediction = simulate(model, hardware, plan)
        if prediction.gpu_peak_bytes <= budget and prediction.step_seconds <= limit:
            best, high = plan, prediction.gpu_peak_bytes
        else:
            low = budget
    return best


def correct(
    model: ModelProfile, hardware: HardwareProfile, plan: Plan, step_seconds: float
) -> tuple[ModelProfile, HardwareProfile] | None:
    """Returns the profiles under which `plan` takes as long as it was measured to take.

    What bounds the step is faster or slower than it was measured to be alone: the GPU, the link, the SSDs, the CPU, or
    the host's thread that gives the GPU its work. Where following the plan was foretold to make that thread late, and a
    step takes less than foretold, it is that in the first place.

    Args:
        model: as profiled.
        hardware: as measured.
        plan: that was in force.
        step_seconds: of its steps.

    Returns:
        None: that explains nothing, or there is nothing to explain, or too much.
    """
    foretold = simulate(model, hardware, plan).step_seconds
    if not 1 / MOST < step_seconds / foretold < MOST:
        return None
    corrected = model, hardware
    if step_seconds < (1 - CLOSE_SECONDS) * foretold and not plan.keeps_all:
        corrected = model, _less_late(model, hardware, plan, foretold, step_seconds)
    for _ in range(CORRECTIONS):
        prediction = simulate(*corrected, plan)
        ratio = step_seconds / prediction.step_seconds
        if abs(ratio - 1) < CLOSE_SECONDS:
            return None if corrected == (model, hardware) else corrected
        corrected = _slow_down(*corrected, plan, prediction.bound, ratio)
    return None


def _less_late(
    model: ModelProfile, hardware: HardwareProfile, plan: Plan, foretold: float, step_seconds: float
) -> HardwareProfile:
    """Returns the machine with a host that follows a plan as quickly as a step takes that was foretold to take longer.

    If that changes anything. What its own forward takes the host was measured in training, what following a plan does,
    apart from it.
    """

    def seconds(factor: float) -> float:
        return simulate(model, hardware.with_launches(factor), plan).step_seconds

    slow, quick = 1.0, QUICKEST
    while slow - quick > CLOSE_SECONDS:
        middle = (slow + quick) / 2
        if seconds(middle) > step_seconds:
            slow = middle
        else:
            quick = middle
    return hardware.with_launches(quick) if seconds(quick) < (1 - CLOSE_SECONDS) * foretold else hardware


def _slow_down(
    model: ModelProfile, hardware: HardwareProfile, plan: Plan, resource: str, factor: float
) -> tuple[ModelProfile, HardwareProfile]:
    match resource:
        case "compute":
            return model.with_time(factor), hardware
        case "cpu":
            return model, replace(hardware, cpu_step_rate=hardware.cpu_step_rate / factor)
        case "ssd":
            return model, hardware.with_ssds(1 / factor)
        case "launch":
            # Where nothing is followed, nothing is learnt of what that takes.
            return model.with_launches(factor), hardware if plan.keeps_all else hardware.with_launches(factor)
        case _:
            return model, hardware.with_link(1 / factor)
