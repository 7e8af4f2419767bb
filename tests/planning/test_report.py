"""Reports on plans."""

from dataclasses import replace

import pytest

from lightning_ssd.planning import (
    FixedPlacement,
    make_plan,
    make_report,
    render_report,
    render_summary,
    render_what_ifs,
    simulate,
)
from lightning_ssd.planning.holistic import min_memory_plan
from lightning_ssd.planning.report import breakeven_tokens, find_what_ifs, largest_samples
from lightning_ssd.planning.stages import cut_stages
from lightning_ssd.types import Tier
from tests.support.profiles import GB, GIB, H100, make_model
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
    """Throughput, wear and cost are computed from the simulation."""
    plan = make_plan(GPT, SMALL, "fuyou")
    prediction = simulate(GPT, SMALL, plan)
    report = make_report(GPT, SMALL, plan, endurance=1e15, price_per_hour=3.6)
    assert report.fits
    assert report.prediction == prediction
    assert report.tokens_per_second == pytest.approx(GPT.tokens / prediction.step_seconds)
    assert report.ssd_bytes_per_day == pytest.approx(prediction.ssd_written_bytes / prediction.step_seconds * 86400)
    assert report.required_write_bandwidth == pytest.approx(2 * GPT.saved_bytes / prediction.step_seconds)
    assert report.ssd_years is not None
    assert report.ssd_years * 365 * report.ssd_bytes_per_day == pytest.approx(1e15)
    assert report.cost == pytest.approx(1000 / report.tokens_per_second)


def test_plans_and_budgets_that_do_not_fit() -> None:
    """The report says that the plan does not fit, and by how many bytes."""
    report = make_report(GPT, SMALL, make_plan(GPT, SMALL, "ssdtrain"))
    assert not report.fits
    assert report.excess_bytes == report.prediction.gpu_peak_bytes - SMALL.gpu_bytes
    assert "does not fit" in render_report(report)


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


def test_hidden_tokens() -> None:
    """At that many tokens the GPU and the SSDs take the same time."""
    plan = make_plan(GPT, SMALL, "fuyou")
    machine = replace(SMALL, ssd_read=20e9, ssd_write=20e9, ssd_mixed=20e9)
    tokens = breakeven_tokens(GPT, machine, plan)
    assert tokens is not None
    stages = cut_stages(GPT, plan)
    compute = tokens / GPT.tokens * sum(stage.forward + stage.backward + stage.remat_seconds for stage in stages)
    activations = tokens / GPT.tokens * sum(stage.to_ssd for stage in stages)
    assert compute == pytest.approx((30 * GPT.parameters + 2 * activations) / 20e9)
    # Without SSDs any step hides them; activations slower than the computation are never hidden.
    assert breakeven_tokens(GPT, machine, make_plan(GPT, SMALL, "ssdtrain")) == 0
    slow = replace(SMALL, ssd_read=1e6, ssd_write=1e6, ssd_mixed=1e6)
    assert breakeven_tokens(GPT, slow, plan) is None


@pytest.mark.parametrize("micro_batches", [1, 3, 8])
@pytest.mark.parametrize("budget", [None, 0, 2 * GB, 100 * GB])
def test_hidden_tokens_are_those_of_the_simulated_transfers(micro_batches: int, budget: int | None) -> None:
    """Each micro-batch reads weights from SSDs twice, or once if memory keeps them from forward to backward."""
    model = replace(GPT, micro_batches=micro_batches, param_budget_bytes=budget)
    plan = make_plan(model, SMALL, "fuyou")
    units = {name: replace(unit, weights="ssd", states="ssd", parts={}) for name, unit in plan.units.items()}
    plan = replace(plan, units=units)
    machine = replace(SMALL, ssd_read=20e9, ssd_write=20e9, ssd_mixed=20e9)
    tokens = breakeven_tokens(model, machine, plan)
    assert tokens is not None
    stages = cut_stages(model, plan)
    factor = tokens / model.tokens
    compute = factor * sum(stage.forward + stage.backward + stage.remat_seconds for stage in stages)
    activations = 2 * (factor - micro_batches) * sum(stage.to_ssd for stage in stages)
    prediction = simulate(model, machine, plan)
    simulated = prediction.ssd_read_bytes + prediction.ssd_written_bytes
    assert compute == pytest.approx((simulated + activations) / 20e9)


def test_lifts_name_the_bound() -> None:
    """If SSDs bound the step, faster ones are a gain. If the GPU is always busy, no change is."""
    bound = find_what_ifs(GPT, SMALL, make_plan(GPT, SMALL, "fuyou"))
    assert "SSDs twice as fast" in dict(bound)
    assert [gain for _, gain in bound] == sorted((gain for _, gain in bound), reverse=True)
    text = render_what_ifs(bound)
    assert all(f"x as fast with {change}" in text for change, _ in bound[:2])
    model = make_model(8)
    assert find_what_ifs(model, H100, make_plan(model, H100)) == ()
    assert render_what_ifs(()) == ""


def test_rendered() -> None:
    """The text has the figures of the report."""
    text = render_report(make_report(GPT, SMALL, min_memory_plan(GPT), endurance=1e15, price_per_hour=2.0))
    for words in (
        "It fits",
        "tokens/s",
        "bound by",
        "optimizer states",
        "largest micro-batch",
        "write bandwidth",
        "years",
        "million tokens",
    ):
        assert words in text
