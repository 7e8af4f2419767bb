"""Corrects the profiles of model and machine so that predictions equal measured steps under a plan."""

from collections.abc import Callable
from dataclasses import replace
from math import log

from lightning_ssd.planning.hardware import HardwareProfile
from lightning_ssd.planning.model import ModelProfile
from lightning_ssd.planning.plan import Plan
from lightning_ssd.planning.simulator import simulate

MAX_ITERATIONS = 8
"""Iterations in which the resource that bounds the step is corrected."""

MAX_CORRECTION = 1.5
"""Largest ratio of measured and predicted step time that is corrected: a step may take long for reasons that do not
last. If the device bounds the step, each ratio below 1 is corrected: operators take less time than was recorded."""

MIN_OVERHEAD_FACTOR, MAX_OVERHEAD_FACTOR = 0.5, 3.0
"""Bounds of the factor on the host's overhead, the least certain of all times, in one correction."""

OVERHEAD_DOUBT, LAUNCH_DOUBT, BOUND_DOUBT = 2.0, 1.12, 1.05
"""Equally likely errors, as factors: of the host's overhead, of all its launches, and of the resource that bounds a
step."""

BUSY = 0.9
"""Share of a step for which a link, an SSD or the CPU optimizer has to be busy to rule out the host as the cause of an
error."""

CLOSE_ENOUGH = 0.005
"""Relative error of a step's time that needs no correction."""


def calibrate(
    model: ModelProfile, hardware: HardwareProfile, plan: Plan, step_seconds: float
) -> tuple[ModelProfile, HardwareProfile] | None:
    """Returns profiles under which the simulated step of `plan` takes as long as the measured one.

    One quantity is corrected, the most likely one: the speed of the resource that bounds the step (GPU, link, SSDs, CPU
    or host), or, unless that resource never waits for the host, the host's overhead of the plan or all launches.

    Args:
        model: the profile.
        hardware: the machine.
        plan: the plan of the measured steps.
        step_seconds: measured seconds of a step.

    Returns:
        The corrected profiles, or None if the prediction was right, or its error is too large (`MAX_CORRECTION`), or no
        correction explains the error.
    """
    predicted = simulate(model, hardware, plan)
    off = step_seconds / predicted.step_seconds
    least = 0.0 if predicted.bound == "compute" else 1 / MAX_CORRECTION
    if not least < off < MAX_CORRECTION:
        return None
    corrected = model, hardware
    # If the host bounds the step, all its work is slow, not only the overhead of the plan. A link, SSD or CPU optimizer
    # that is busy nearly all the time does not wait for the host.
    busy = predicted.bound != "compute" and predicted.busy_seconds[predicted.bound] >= BUSY * predicted.step_seconds
    if abs(off - 1) > CLOSE_ENOUGH and predicted.bound != "launch" and not busy:
        candidates: list[tuple[float, Callable[[float], tuple[ModelProfile, HardwareProfile]]]] = []
        if not plan.keeps_all:  # else there is no overhead
            candidates.append((OVERHEAD_DOUBT, lambda factor: (model, hardware.with_host_overhead(factor))))
        if model.synchronizes and off > 1:
            candidates.append(
                (LAUNCH_DOUBT, lambda factor: (model.with_launches(factor), hardware.with_host_overhead(factor)))
            )
        for doubt, scaled in candidates:
            factor = _explain(scaled, plan, step_seconds)
            if factor is not None and abs(log(factor, doubt)) <= abs(log(off, BOUND_DOUBT)):
                corrected = scaled(factor)
                break
    for _ in range(MAX_ITERATIONS):
        prediction = simulate(*corrected, plan)
        ratio = step_seconds / prediction.step_seconds
        if abs(ratio - 1) < CLOSE_ENOUGH:
            return None if corrected == (model, hardware) else corrected
        corrected = _slow_down(*corrected, plan, prediction.bound, ratio)
    return None


def calibrate_step_rate(
    model: ModelProfile, hardware: HardwareProfile, plan: Plan, step_rate: float, step_seconds: float
) -> HardwareProfile:
    """Returns the machine with the CPU optimizer's measured rate, corrected for concurrent copies.

    Copies that run while the optimizer steps share the bandwidth of host memory with it. Their time is subtracted. The
    measured jobs of deferred steps are second halves: those that are made in one piece, because the CPU has no time
    for two halves, are taken for them.

    Args:
        model: the profile.
        hardware: the machine.
        plan: the plan of the measured steps.
        step_rate: measured parameters/s of the optimizer's jobs.
        step_seconds: measured seconds of a step, over which the copies are spread evenly.
    """
    placed = zip(model.parts, plan.parts(model), strict=True)
    stepped = sum(profile.parameters for (_, profile), part in placed if part.offloaded)
    if not stepped:  # only small tensors of resident units are stepped on the CPU
        return hardware
    if plan.clip == "deferred":
        step_rate *= hardware.cpu_rest_later
    seconds = stepped / step_rate
    shared = 0.0
    if hardware.host_memory_bandwidth is not None:
        copied = simulate(model, hardware, plan).copied_bytes
        shared = copied / hardware.host_memory_bandwidth * min(1.0, seconds / step_seconds)
    return replace(hardware, cpu_step_rate=stepped / max(seconds - shared, seconds / 2))


def _explain(
    scaled: Callable[[float], tuple[ModelProfile, HardwareProfile]], plan: Plan, step_seconds: float
) -> float | None:
    """Returns the factor on the host's times with which a step takes `step_seconds`; None: there is none.

    The host's times are uncertain: the overhead of plans was measured on a small model outside of the training, and
    launches in other steps than those of the plan.
    """

    def seconds(factor: float) -> float:
        return simulate(*scaled(factor), plan).step_seconds

    least, most = seconds(MIN_OVERHEAD_FACTOR), seconds(MAX_OVERHEAD_FACTOR)
    close = CLOSE_ENOUGH * step_seconds
    if not least - close < step_seconds <= most or most - least < close:
        return None
    quick, slow = MIN_OVERHEAD_FACTOR, MAX_OVERHEAD_FACTOR
    while slow - quick > CLOSE_ENOUGH:
        middle = (slow + quick) / 2
        if seconds(middle) > step_seconds:
            slow = middle
        else:
            quick = middle
    return quick


def _slow_down(
    model: ModelProfile, hardware: HardwareProfile, plan: Plan, resource: str, factor: float
) -> tuple[ModelProfile, HardwareProfile]:
    """Returns the profiles with a resource that takes `factor` times as long for its work."""
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
            # A plan that keeps everything has no overhead that could be corrected.
            return model.with_launches(factor), hardware if plan.keeps_all else hardware.with_host_overhead(factor)
        case _:
            return model, hardware.with_link(1 / factor)
