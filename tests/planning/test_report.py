"""Reports on plans."""

from dataclasses import replace

import pytest

from lightning_ssd.planning import (
    FixedPlacement,
    make_plan,
    make_report,
    render_answer,
    render_report,
    render_summary,
    simulate,
)
from lightning_ssd.planning.holistic import min_memory_plan
from lightning_ssd.planning.report import largest_samples, largest_transient
from lightning_ssd.sizes import format_bytes
from lightning_ssd.types import Tier
from tests.support.profiles import GB, GIB, H100
from tests.support.transformer import transformer_profile

SMALL = replace(H100, gpu_bytes=12 * GIB, host_bytes=24 * GIB)
GPT = transformer_profile(SMALL, hidden=4096, layers=6, heads=16, sequence=1024, batch=8, vocabulary=50257)


def test_bytes_are_accounted_for() -> None:
    """Each class of bytes is in the tiers completely."""
    plan = make_plan(GPT, SMALL, "lohan")
    report = make_report(GPT, SMALL, plan)
    rows = {row.name: row.gpu + row.host + row.ssd + row.recomputed for row in report.placed}
    assert rows["compute weights"] == 2 * GPT.parameters
    assert rows["optimizer states"] == 12 * GPT.parameters
    assert rows["gradients"] == 2 * GPT.parameters
    assert rows["inputs of units"] == GPT.input_bytes
    assert rows["inputs of units"] + rows["activations"] == GPT.saved_bytes


def test_figures_agree_with_the_simulation() -> None:
    """Throughput and wear are computed from the simulation."""
    plan = make_plan(GPT, SMALL, "fuyou")
    prediction = simulate(GPT, SMALL, plan)
    report = make_report(GPT, SMALL, plan, endurance=1e15)
    assert report.fits
    assert report.prediction == prediction
    assert report.tokens_per_second == pytest.approx(GPT.tokens / prediction.step_seconds)
    assert report.ssd_bytes_per_day == pytest.approx(prediction.ssd_written_bytes / prediction.step_seconds * 86400)
    assert report.ssd_years is not None
    assert report.ssd_years * 365 * report.ssd_bytes_per_day == pytest.approx(1e15)


def test_plans_and_budgets_that_do_not_fit() -> None:
    """The report says that the plan does not fit, and by how many bytes."""
    plan = make_plan(GPT, SMALL, "ssdtrain")
    report = make_report(GPT, SMALL, plan)
    assert not report.fits
    assert report.excess_bytes == report.prediction.gpu_peak_bytes - SMALL.gpu_bytes
    assert "does not fit" in render_report(report)
    answer = render_answer(GPT, SMALL, plan, more_host=plan)
    lacked = format_bytes(report.excess_bytes)
    assert answer.startswith(f"It does not fit: it lacks {lacked} of GPU memory.\n")
    assert "would help  a smaller micro-batch" in answer


@pytest.mark.parametrize(("planner", "exceeds"), [("ssdtrain", True), ("holistic", False)])
def test_a_summary_names_an_exceeded_budget(planner: str, exceeds: bool) -> None:
    """A training may be planned whose model states alone exceed the budget of the GPU."""
    plan = make_plan(GPT, SMALL, planner)
    summary = render_summary(GPT, SMALL, plan, simulate(GPT, SMALL, plan))
    assert ("of the device (which exceeds the budget of 12.00 GiB)" in summary) == exceeds
    assert "host memory (which" not in summary


def test_largest_samples() -> None:
    """The largest number fits and one more does not; without memory no sample fits."""
    most = largest_samples(GPT, SMALL)
    assert most > 8
    for samples, fits in ((most, True), (most + 1, False)):
        model = GPT.with_samples(samples)
        assert (
            simulate(model, SMALL, min_memory_plan(model, ssd_bytes=SMALL.ssd_bytes)).excess_bytes(SMALL) == 0
        ) == fits
    model = GPT.with_samples(most)
    assert simulate(model, SMALL, make_plan(model, SMALL)).excess_bytes(SMALL) == 0
    assert largest_samples(GPT, replace(SMALL, gpu_bytes=GB // 10)) == 0


def test_largest_samples_with_states_that_stay() -> None:
    """They are not offloaded to make room."""
    tiers: tuple[Tier, ...] = ("gpu",) * len(GPT.parts)
    fixed = FixedPlacement(tiers, tiers)
    machine = replace(H100, gpu_bytes=40 * GIB)
    most = largest_samples(GPT, machine, fixed)
    assert 0 < most < largest_samples(GPT, machine)
    assert make_report(GPT, machine, make_plan(GPT, machine, fixed=fixed), fixed=fixed).largest_samples == most


def test_an_answer_names_wear_and_the_best_improvement() -> None:
    """The drive bounds the step, and twice its bandwidth, or twice the RAM, shortens it most."""
    slow = replace(SMALL.with_ssds(0.1), host_bytes=8 * GIB)
    plan, more_host = min_memory_plan(GPT), make_plan(GPT, replace(slow, host_bytes=16 * GIB))
    prediction = simulate(GPT, slow, plan)
    text = render_answer(GPT, slow, plan, more_host=plan, endurance=1e15)
    written = prediction.ssd_written_bytes / prediction.step_seconds * 86400 / 1e12
    assert f"SSD writes  {written:.1f} TB a day" in text and "years" in text and "bound by    ssd" in text
    assert "would help  SSDs of twice the bandwidth" in text
    assert "would help  twice the RAM" in render_answer(GPT, slow, plan, more_host=more_host)


def test_rendered() -> None:
    """The text has the figures of the report."""
    text = render_report(make_report(GPT, SMALL, min_memory_plan(GPT), endurance=1e15))
    for words in (
        "It fits",
        "tokens/s",
        "bound by",
        "optimizer states",
        "largest micro-batch",
        "years",
    ):
        assert words in text


def test_the_largest_temporary_tensors_have_the_name_of_their_unit() -> None:
    unit = GPT.units[2]
    operators = (*unit.operators[:-1], replace(unit.operators[-1], first_use_bytes=3 * GIB, backward_bytes=5 * GIB))
    units = (*GPT.units[:2], replace(unit, operators=operators), *GPT.units[3:])
    assert largest_transient(replace(GPT, units=units)) == (unit.name, 5 * GIB)
