"""Plans for smaller micro-batches than the recorded one."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ssd.planning import FixedPlacement, HardwareProfile, ModelProfile, make_plan, shrink_plan, simulate
from lightning_ssd.planning.whole_units import keep_all
from tests.support.profiles import GB, H100, machines, make_model, models


@settings(max_examples=40, deadline=None)
@given(models(), machines(), st.floats(0.05, 0.99))
def test_a_shrunk_plan_fits_where_the_plan_fits_and_keeps_all_that_has_room(
    model: ModelProfile, machine: HardwareProfile, size: float
) -> None:
    plan = make_plan(model, machine)
    other, small = model.with_size(size), replace(plan, window_bytes=int(size * plan.window_bytes))
    shrunk = shrink_plan(model, machine, plan, size)
    shrunk.check(model)
    assert [one.placement for one in shrunk.units.values()] == [one.placement for one in plan.units.values()]
    excess = {
        name: simulate(other, machine, one).excess_bytes(machine)
        for name, one in (("plan", small), ("kept", keep_all(small)))
    }
    if not min(excess.values()):
        assert not simulate(other, machine, shrunk).excess_bytes(machine)
    if not excess["kept"]:
        assert shrunk == keep_all(small)


def test_smaller_micro_batches_have_fewer_units_that_free_memory() -> None:
    """Four of eight units have room."""
    model = make_model(8, saved=10 * GB, inputs=0)
    machine = replace(H100, gpu_bytes=40 * GB + GB // 10)
    plan = make_plan(model, machine, fixed=FixedPlacement(("host",) * 8, ("host",) * 8))
    counts = []
    for size in (0.4, 0.6, 0.8, 0.95):
        shrunk = shrink_plan(model, machine, plan, size)
        counts.append(sum(not unit.keeps_all for unit in shrunk.units.values()))
    assert counts == [0, 3, 4, 5]
