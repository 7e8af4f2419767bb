"""Log lines, reports and metrics of `SwapPlanner`'s plans."""

import logging

from lightning_ssd.autoplan.plan_runner import Comparison, PlanRunner
from lightning_ssd.autoplan.protocol import Training
from lightning_ssd.device import process_ram
from lightning_ssd.planning import (
    Plan,
    Prediction,
    largest_samples,
    largest_transient,
    make_report,
    render_report,
    swap_coefficient,
)
from lightning_ssd.remedies import CHUNKED_LOSS
from lightning_ssd.sizes import format_bytes

log = logging.getLogger(__name__)

LARGE_TRANSIENT = 0.1
"""Share of the device's memory from which on temporary tensors of one unit are reported."""


def report_large_transient(training: Training, runner: PlanRunner) -> None:
    """Logs the largest temporary tensors, and what would reduce them, if the plan in force saves memory.

    If not even that plan fits, it also names the largest micro-batch that would.
    """
    unit, nbytes = largest_transient(runner.profile)
    if runner.plan is None or runner.plan.keeps_all or nbytes < LARGE_TRANSIENT * runner.hardware.gpu_bytes:
        return
    smaller = "A smaller micro-batch does"
    if runner.prediction is not None and runner.prediction.excess_bytes(runner.hardware):
        fitting, samples = largest_samples(runner.profile, runner.hardware, runner.placement), runner.profile.samples
        if fitting < samples:  # else another plan fits
            smaller += f" (it has {samples} samples, and {fitting or 'none'} would fit)"
    training.inform(
        f"SwapPlanner: temporary tensors of `{unit}` need {format_bytes(nbytes)} of the device at once, which no plan "
        f"reduces. {smaller}; if they are logits, so does {CHUNKED_LOSS}."
    )


def report_comparison(training: Training, comparison: Comparison) -> None:
    """Logs the first comparison of a plan's prediction with measured steps."""
    predicted = comparison.predicted
    peak = f"predicted {format_bytes(predicted.gpu_peak_bytes)}"
    if comparison.gpu_peak_bytes:
        peak += f", {format_bytes(comparison.gpu_peak_bytes)} measured"
    seconds = f"predicted {predicted.step_seconds:.3f} s a step, measured {comparison.step_seconds:.3f}"
    host = f"predicted {format_bytes(predicted.host_peak_bytes)}, {format_bytes(comparison.host_peak_bytes)} measured"
    beside = format_bytes(max(0, process_ram() - comparison.host_peak_bytes))
    training.inform(
        f"SwapPlanner: {seconds}. Peak of the device: {peak}; of host memory: {host}, and {beside} of the process "
        "beside it."
    )


def log_metrics(training: Training, runner: PlanRunner, comparison: Comparison) -> None:
    """Gives each comparison to the Trainer's loggers."""
    predicted = comparison.predicted
    metrics = {
        "predicted_step_s": predicted.step_seconds,
        "measured_step_s": comparison.step_seconds,
        "predicted_host_bytes": predicted.host_peak_bytes,
        "measured_host_bytes": comparison.host_peak_bytes,
        "swap_coefficient": swap_coefficient(runner.profile, comparison.plan),
    }
    if comparison.gpu_peak_bytes:
        metrics["predicted_device_bytes"] = predicted.gpu_peak_bytes
        metrics["measured_device_bytes"] = comparison.gpu_peak_bytes
    training.log_metrics({f"SwapPlanner/{name}": float(value) for name, value in metrics.items()})


def report_move(training: Training, plan: Plan, predicted: Prediction) -> None:
    """Logs that model states are moved to their tiers in `plan`, for which `predicted` is the prediction."""
    whole = [unit.states for unit in plan.units.values() if not unit.parts]
    divided = len(plan.units) - len(whole)
    also = f", and those of {divided} units, part by part, in several tiers" if divided else ""
    training.inform(
        f"SwapPlanner: a step should take {predicted.step_seconds:.3f} s with the states of {whole.count('gpu')} units "
        f"on the GPU, of {whole.count('host')} in host memory and of {whole.count('ssd')} on SSDs{also}: they are "
        "moved."
    )


def report_last_plan(runner: PlanRunner, plan: Plan) -> None:
    """Logs a report on the plan in force at the end of a training."""
    # Only at the end, not between two steps: a report takes many simulations.
    if log.isEnabledFor(logging.INFO):
        report = make_report(runner.profile, runner.hardware, plan, fixed=runner.placement)
        log.info("report on the last plan:\n%s", render_report(report))
