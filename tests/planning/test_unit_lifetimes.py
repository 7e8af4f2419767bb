"""Teraio's plans of units."""

from dataclasses import replace

from hypothesis import given, settings

from lightning_ssd.planning import HardwareProfile, ModelProfile, make_plan, simulate
from tests.support.profiles import H100, machines, models
from tests.support.transformer import transformer_profile


@given(models(), machines())
@settings(deadline=None, max_examples=20)
def test_plans_of_units_name_every_tensor_and_holistic_is_never_worse(
    model: ModelProfile, machine: HardwareProfile
) -> None:
    plan = make_plan(model, machine, "teraio")
    plan.check(model)
    assert "recompute" not in {choice for unit in plan.units.values() for choice in unit.operators.values()}
    teraio, best = (simulate(model, machine, one) for one in (plan, make_plan(model, machine)))
    scores = [(one.excess_bytes(machine), one.step_seconds) for one in (teraio, best)]
    assert scores[1][0] <= scores[0][0]
    assert scores[1][0] < scores[0][0] or scores[1][1] <= scores[0][1] * (1 + 1e-9)  # additions round


def test_a_plan_of_units_offloads_tensors_without_room_on_the_gpu() -> None:
    model = transformer_profile(H100, hidden=4096, layers=8, heads=32, sequence=1024, batch=16, vocabulary=50304)
    assert make_plan(model, replace(H100, gpu_bytes=10**12), "teraio").keeps_all
    machine = replace(H100, gpu_bytes=50 * 10**9)
    found = simulate(model, machine, make_plan(model, machine, "teraio"))
    assert found.gpu_peak_bytes < 1.1 * machine.gpu_bytes
