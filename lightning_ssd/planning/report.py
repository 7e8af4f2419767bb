"""Reports on plans before the first step: fit, speed, bottleneck, and wear of the SSDs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_ssd.planning.endurance import (
    YEAR,
    bytes_per_day,
    lifetime_seconds,
)
from lightning_ssd.planning.hardware import HardwareProfile
from lightning_ssd.planning.holistic import min_memory_plan
from lightning_ssd.planning.model import ModelProfile, UnitProfile
from lightning_ssd.planning.plan import Plan
from lightning_ssd.planning.resident import resident_by_kind
from lightning_ssd.planning.saved_groups import FixedPlacement
from lightning_ssd.planning.simulator import Prediction, simulate
from lightning_ssd.sizes import format_bytes, format_seconds


@dataclass(frozen=True)
class TierBytes:
    """Bytes of one class of tensors in each tier; activations are those of one micro-batch.

    Attributes:
        name: name of the class.
        gpu: bytes on the GPU.
        host: bytes in host memory.
        ssd: bytes on SSDs.
        recomputed: bytes that are dropped and recomputed.
    """

    name: str
    gpu: int
    host: int
    ssd: int
    recomputed: int = 0


@dataclass(frozen=True)
class Report:
    """A report on a plan.

    Attributes:
        prediction: result of the simulation.
        fits: whether the plan fits the budgets of all tiers.
        excess_bytes: bytes by which the plan exceeds the budgets of the tiers, or the daily limit of SSD writes.
        lacking: these bytes by the name of the exceeded limit.
        placed: bytes of each class in each tier.
        swap_coefficient: bytes of intra-block activations swapped over all of them (Fuyou 5.6).
        counted: name of the counted items, "tokens", or "samples" where each sample of a batch counts as one token.
        tokens_per_second: predicted throughput.
        largest_samples: samples of the largest micro-batch that fits with the plan of least memory; 0: none fits.
        ssd_bytes_per_day: bytes written to SSDs in a day of training.
        ssd_years: lifetime of the SSDs in years; None: no endurance is given.
    """

    prediction: Prediction
    fits: bool
    excess_bytes: int
    lacking: Mapping[str, int]
    placed: tuple[TierBytes, ...]
    swap_coefficient: float
    counted: str
    tokens_per_second: float
    largest_samples: int
    ssd_bytes_per_day: float
    ssd_years: float | None


def make_report(
    model: ModelProfile,
    hardware: HardwareProfile,
    plan: Plan,
    *,
    fixed: FixedPlacement | None = None,
    endurance: float | None = None,
) -> Report:
    """Returns the report on `plan`.

    Args:
        model: the profile.
        hardware: the machine.
        plan: a plan for the model.
        fixed: as in `largest_samples`.
        endurance: bytes that may be written to all SSDs together in large writes (see `large_write_endurance`).
    """
    prediction = simulate(model, hardware, plan)
    throughput = _throughput(model, prediction)
    years = None
    if endurance is not None:
        years = lifetime_seconds(endurance, prediction.ssd_written_bytes, prediction.step_seconds) / YEAR
    lacking = prediction.lacking_bytes(hardware)
    placed, coefficient = _bytes_by_tier(model, plan)
    return Report(
        prediction=prediction,
        fits=not lacking,
        excess_bytes=sum(lacking.values()),
        lacking=lacking,
        placed=placed,
        swap_coefficient=coefficient,
        counted="samples" if model.tokens == model.samples else "tokens",
        tokens_per_second=throughput,
        largest_samples=largest_samples(model, hardware, fixed),
        ssd_bytes_per_day=bytes_per_day(prediction.ssd_written_bytes, prediction.step_seconds),
        ssd_years=years,
    )


def largest_samples(model: ModelProfile, hardware: HardwareProfile, fixed: FixedPlacement | None = None) -> int:
    """Returns the samples of the largest micro-batch that fits with the plan of least memory, 0 if none fits.

    Args:
        model: the profile.
        hardware: the machine.
        fixed: tiers of model states; None: those that need the least GPU memory.
    """
    memory_alone = replace(hardware, ssd_bytes_per_day=None)

    def fits(samples: int) -> bool:
        scaled = model.with_samples(samples)
        plan = min_memory_plan(scaled, ssd_bytes=hardware.ssd_bytes)
        if fixed is not None:
            plan = fixed.apply(scaled, plan)
        return simulate(scaled, hardware, plan).excess_bytes(memory_alone) == 0

    if not fits(1):
        return 0
    low, high = 1, 2
    # Without activation bytes any micro-batch fits: the search is bounded.
    while fits(high) and high < 1 << 20:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_transient(model: ModelProfile) -> tuple[str, int]:
    """Returns the unit whose temporary tensors take the most GPU memory at once, and their bytes."""

    def transient_bytes(unit: UnitProfile) -> int:
        of_operators = (max(one.forward_bytes, one.first_use_bytes, one.backward_bytes) for one in unit.operators)
        return max(unit.forward_bytes, unit.backward_bytes, *of_operators)

    unit = max(model.units, key=transient_bytes)
    return unit.name, transient_bytes(unit)


def render_report(report: Report) -> str:
    """Returns the report as text."""
    prediction = report.prediction
    busy = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in prediction.busy_seconds.items())
    throughput, counted = report.tokens_per_second, report.counted
    lines = [
        _fit(report.lacking),
        f"step               {format_seconds(prediction.step_seconds)}, {throughput:.0f} {counted}/s",
        f"peak               GPU {format_bytes(prediction.gpu_peak_bytes)}, host "
        f"{format_bytes(prediction.host_peak_bytes)}, SSD {format_bytes(prediction.ssd_peak_bytes)}",
        f"busy               {busy}",
        f"bound by           {prediction.bound}; the GPU waits for {format_seconds(prediction.stall_seconds)}",
    ]
    lines.append(f"{'':<18} {'GPU':>12} {'host':>12} {'SSD':>12} {'recomputed':>12}")
    for row in report.placed:
        sizes = (format_bytes(nbytes) for nbytes in (row.gpu, row.host, row.ssd, row.recomputed))
        lines.append(f"{row.name:<18} " + " ".join(f"{size:>12}" for size in sizes))
    lines += [
        f"swap coefficient   {report.swap_coefficient:.2f}",
        f"largest micro-batch: {report.largest_samples} samples",
    ]
    if not report.ssd_bytes_per_day:
        lines.append("SSD writes         none")
    else:
        lines.append(f"SSD writes         {format_bytes(report.ssd_bytes_per_day)} a day")
    if report.ssd_years is not None and report.ssd_bytes_per_day:
        lines.append(f"SSD life           {report.ssd_years:.1f} years of training without a pause")
    return "\n".join(lines)


def render_answer(
    model: ModelProfile, hardware: HardwareProfile, plan: Plan, *, more_host: Plan, endurance: float | None = None
) -> str:
    """Returns the answer of a plan as text: fit, speed, wear, the bound, and the best improvement.

    Args:
        model: the profile.
        hardware: the machine.
        plan: a plan for the model.
        more_host: the plan for the machine with twice its host memory.
        endurance: as in `make_report`.
    """
    prediction = simulate(model, hardware, plan)
    seconds = prediction.step_seconds
    counted = "samples" if model.tokens == model.samples else "tokens"
    written = bytes_per_day(prediction.ssd_written_bytes, seconds)
    lines = [
        _fit(prediction.lacking_bytes(hardware)),
        f"memory      GPU {format_bytes(prediction.gpu_peak_bytes)} of {format_bytes(hardware.gpu_bytes)}, RAM "
        f"{format_bytes(prediction.host_peak_bytes)} of {format_bytes(hardware.host_bytes)}, SSD "
        f"{format_bytes(prediction.ssd_peak_bytes)}",
        f"step        {format_seconds(seconds)}, {_throughput(model, prediction):.0f} {counted}/s",
        f"SSD writes  {written / 1e12:.1f} TB a day of training" if written else "SSD writes  none",
        f"bound by    {prediction.bound}; the GPU waits for {format_seconds(prediction.stall_seconds)} of a step",
        f"would help  {_best_improvement(model, hardware, plan, more_host, prediction)}",
    ]
    if endurance is not None and written:
        years = lifetime_seconds(endurance, prediction.ssd_written_bytes, seconds) / YEAR
        lines.insert(4, f"SSD life    {years:.2f} years of training without a pause")
    return "\n".join(lines)


def _fit(lacking: Mapping[str, int]) -> str:
    parts = ", ".join(f"{format_bytes(nbytes)} of {name}" for name, nbytes in lacking.items())
    return f"It does not fit: it lacks {parts}." if lacking else "It fits."


def _best_improvement(
    model: ModelProfile, hardware: HardwareProfile, plan: Plan, more_host: Plan, now: Prediction
) -> str:
    """Returns the doubled resource with which a step is shortest, and its time; none if it saves less than 5 %.

    `now` is the prediction for the plan; the other arguments are those of `render_answer`.
    """
    memory = hardware.host_memory_bandwidth
    faster = replace(
        hardware,
        cpu_step_rate=2 * hardware.cpu_step_rate,
        host_memory_bandwidth=None if memory is None else 2 * memory,
    )
    larger = replace(hardware, host_bytes=2 * hardware.host_bytes)
    steps = {
        "SSDs of twice the bandwidth": simulate(model, hardware.with_ssds(2), plan),
        "a link to the GPU of twice the bandwidth": simulate(model, hardware.with_link(2), plan),
        "a CPU and RAM of twice the speed": simulate(model, faster, plan),
        "twice the RAM": simulate(model, larger, more_host),
    }
    best = min(steps, key=lambda name: steps[name].step_seconds)
    least = steps[best].step_seconds
    if least > 0.95 * now.step_seconds:
        if now.excess_bytes(hardware):
            return "a smaller micro-batch, or more of the memory that it lacks"
        return "a faster GPU: no other doubled resource makes the step 5 % shorter"
    return f"{best}: {format_seconds(least)} a step"


def render_summary(model: ModelProfile, hardware: HardwareProfile, plan: Plan, prediction: Prediction) -> str:
    """Returns a plan and its prediction in two lines. Unlike a report it takes little time: no other plans are made."""
    placed, _ = _bytes_by_tier(model, plan)
    shares = {
        "kept": sum(row.gpu for row in placed[-2:]),
        "to host memory": sum(row.host for row in placed[-2:]),
        "to SSDs": sum(row.ssd for row in placed[-2:]),
        "recomputed": sum(row.recomputed for row in placed[-2:]),
    }
    where = ", ".join(f"{format_bytes(nbytes)} {name}" for name, nbytes in shares.items() if nbytes)
    if count := sum(unit.checkpoint for unit in plan.units.values()):
        where += f" by checkpointing {count} of {len(plan.units)} units"
    peaks = (
        _peak(prediction.gpu_peak_bytes, hardware.gpu_bytes, "the device"),
        _peak(prediction.host_peak_bytes, hardware.host_bytes, "host memory"),
    )
    return (
        f"saved tensors of a micro-batch: {where or 'none is large'}.\n"
        f"  A step should take {format_seconds(prediction.step_seconds)}, bound by {prediction.bound}; "
        f"{', '.join(peaks)}."
    )


def _peak(nbytes: int, budget: int, memory: str) -> str:
    """Returns a peak as text, with the budget that it exceeds, if it does."""
    peak = f"{format_bytes(nbytes)} of {memory}"
    return peak if nbytes <= budget else f"{peak} (which exceeds the budget of {format_bytes(budget)})"


def _throughput(model: ModelProfile, prediction: Prediction) -> float:
    """Returns tokens per second."""
    return model.micro_batches * model.tokens / prediction.step_seconds


def swap_coefficient(model: ModelProfile, plan: Plan) -> float:
    """Returns the bytes of intra-block activations that a plan swaps over all of them (Fuyou 5.6)."""
    return _bytes_by_tier(model, plan)[1]


def _bytes_by_tier(model: ModelProfile, plan: Plan) -> tuple[tuple[TierBytes, ...], float]:
    """Returns the bytes of each class in each tier, and the swap coefficient."""
    inputs, inner = ({"gpu": 0, "host": 0, "ssd": 0, "recomputed": 0} for _ in range(2))
    for profile in model.units:
        unit = plan.units[profile.name]
        inputs[_TIER_OF[unit.input]] += profile.input_bytes
        for operator in profile.operators:
            choice = "recompute" if unit.checkpoint else unit.operators[operator.name]
            inner[_TIER_OF[choice]] += operator.saved_bytes
    total = sum(inner.values())
    coefficient = (inner["host"] + inner["ssd"]) / total if total else 0.0
    states = [TierBytes(name, **sizes) for name, sizes in resident_by_kind(model, plan).items()]
    return (*states, TierBytes("inputs of units", **inputs), TierBytes("activations", **inner)), coefficient


_TIER_OF = {"keep": "gpu", "host": "host", "ssd": "ssd", "recompute": "recomputed"}
