"""Bandwidth over time of planned steps: no byte of a step's transfers is lost or counted twice."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ssd.planning import make_plan, simulate
from lightning_ssd.replay import DIRECTIONS, Traffic, planned_traffic
from lightning_ssd.replay.traffic import Transfer
from tests.support.profiles import GB, H100, machines, make_model, models, plans


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_no_interval_carries_more_than_its_bandwidth(data: st.DataObject) -> None:
    model, machine = data.draw(models()), data.draw(machines())
    found = planned_traffic(model, machine, data.draw(plans(model)))
    rates = {"copy out": machine.copy_out, "copy in": machine.copy_in}
    rates |= {"SSD write": machine.ssd_write, "SSD read": machine.ssd_read}
    for name, row in found.transfers.items():
        assert all(0 <= one.start <= one.end <= found.seconds * (1 + 1e-9) for one in row)
        assert all(one <= rates[name] * (1 + 1e-6) for one in found.bandwidth(name, 20))


@pytest.mark.parametrize("planner", ["ssdtrain", "fuyou", "teraio"])
def test_a_simulated_step_has_the_bytes_of_its_prediction(planner: str) -> None:
    """Transfers that end in the next step count with those that the step before has begun."""
    model = make_model(8, forward=0.1, saved=GB, inputs=GB // 4, parameters=10**8)
    machine = replace(H100, gpu_bytes=8 * GB)
    plan = make_plan(model, machine, planner)
    found, prediction = planned_traffic(model, machine, plan), simulate(model, machine, plan)
    nbytes = {name: sum(one.nbytes for one in row) for name, row in found.transfers.items()}
    assert found.seconds == pytest.approx(prediction.step_seconds)
    assert nbytes["copy out"] + nbytes["copy in"] == pytest.approx(prediction.copied_bytes) and prediction.copied_bytes
    assert nbytes["SSD write"] == pytest.approx(prediction.ssd_written_bytes)
    assert nbytes["SSD read"] == pytest.approx(prediction.ssd_read_bytes)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9), st.integers(1, 10**9)), max_size=9),
    st.integers(1, 70),
)
def test_intervals_have_all_bytes(spans: list[tuple[float, float, int]], count: int) -> None:
    row = [Transfer(min(one, other), max(one, other), nbytes) for one, other, nbytes in spans]
    found = Traffic(9.0, dict.fromkeys(DIRECTIONS, row))
    total = sum(found.bandwidth("copy in", count)) * 9.0 / count
    assert total == pytest.approx(sum(nbytes for _, _, nbytes in spans))
    assert found.mean("copy in") == pytest.approx(total / 9.0)
