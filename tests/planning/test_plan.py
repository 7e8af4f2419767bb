"""Plans: their files, their errors and their tables."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from lightning_ssd.planning import ModelProfile, PartPlan, Plan, UnitPlan
from tests.support.profiles import divide, make_model, models, plans


@given(plans())
def test_round_trip(plan: Plan) -> None:
    """A plan is loaded as it was saved, whatever its names are."""
    again = Plan.from_yaml(plan.to_yaml())
    assert again == plan
    assert list(again.units) == list(plan.units)


def test_a_saved_plan_can_be_edited_and_loaded(tmp_path: Path) -> None:
    """A plan can be saved, edited and loaded; sizes may have units."""
    plan = make_plan(make_model(2))
    plan.save(tmp_path / "plan.yaml")
    text = (tmp_path / "plan.yaml").read_text()
    assert Plan.load(tmp_path / "plan.yaml") == plan
    (tmp_path / "plan.yaml").write_text(text.replace("window_bytes: 100", "window_bytes: 2 MiB"))
    assert Plan.load(tmp_path / "plan.yaml") == replace(plan, window_bytes=2 * 2**20)


def make_plan(model: ModelProfile, **changes: Any) -> Plan:
    """Returns a plan with everything on SSDs."""
    unit = UnitPlan("ssd", "ssd", "ssd", {"work": "ssd"})
    return Plan({profile.name: replace(unit, **changes) for profile in model.units}, 100, 100)


@given(st.data())
def test_a_plan_for_a_model_is_accepted(data: st.DataObject) -> None:
    """A valid plan raises no error."""
    model = data.draw(models())
    data.draw(plans(model)).check(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "gpu"}, "`units.unit0` has weights on `gpu` and states on `ssd`"),
        ({"states": "tape"}, "`units.unit0.states='tape'` must be one of 'gpu', 'host', 'ssd'"),
        ({"input": "recompute"}, "`units.unit0.input='recompute'` must be one of 'keep', 'host', 'ssd'"),
        ({"operators": {}}, "`units.unit0.operators.work` is missing. Add it"),
        ({"operators": {"work": "keep", "play": "keep"}}, "`units.unit0.operators.play` is not in the model"),
        ({"parts": {"up": PartPlan("host", "ssd")}}, "`units.unit0.parts.up` is not in the model"),
        ({"parts": {"part1": PartPlan("gpu", "ssd")}}, "`units.unit0.parts.part1` has weights on `gpu` and states on"),
        ({"parts": {"part1": PartPlan("host", "tape")}}, "`units.unit0.parts.part1.states='tape'` must"),  # type: ignore[arg-type]
        ({"operators": {"work": "drop"}}, "`units.unit0.operators.work='drop'` must be one of 'keep'"),
    ],
)
def test_wrong_plans_name_the_entry(changes: dict[str, Any], message: str) -> None:
    """The message names the entry and what to do."""
    model = divide(make_model(2), 2)
    with pytest.raises(ValueError) as error:
        make_plan(model, **changes).check(model)
    assert message in str(error.value)


def test_wrong_plans_for_a_model() -> None:
    """Units of another model, operators that can't be recomputed, missing clipping."""
    model = make_model(2)
    with pytest.raises(ValueError, match="`units.unit2` is not in the model"):
        make_plan(make_model(3)).check(model)
    with pytest.raises(ValueError, match="`units.unit1` is missing"):
        make_plan(make_model(1)).check(model)
    plan = make_plan(model)
    with pytest.raises(ValueError, match="`units` must be in the order of the forward: unit0, unit1"):
        replace(plan, units=dict(reversed(plan.units.items()))).check(model)
    with pytest.raises(ValueError, match="`clip='off'`, but the model's gradients are clipped"):
        plan.check(replace(model, clip_norm=True))
    with pytest.raises(ValueError, match="`window_bytes=-1`"):
        replace(plan, window_bytes=-1).check(model)
    fixed = replace(model.units[0], operators=(replace(model.units[0].operators[0], recompute_seconds=None),))
    with pytest.raises(ValueError, match="`units.unit0.operators.work` can't be recomputed"):
        make_plan(model, operators={"work": "recompute"}).check(replace(model, units=(fixed, model.units[1])))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"checkpoint": True}, {}, None),
        ({"checkpoint": True, "input": "ssd"}, {}, None),
        (
            {"checkpoint": True, "operators": {"work": "recompute"}},
            {},
            "`units.unit0` is checkpointed, which frees all",
        ),
        ({}, {"checkpoint": True}, "`units.unit1` can't be checkpointed"),
    ],
)
def test_a_checkpointed_unit_saves_its_input_alone(
    first: dict[str, Any], second: dict[str, Any], message: str | None
) -> None:
    """Only the first of two units may be checkpointed."""
    model = make_model(2)
    model = replace(model, units=(replace(model.units[0], checkpoint_bytes=0), model.units[1]))
    unit = UnitPlan("gpu", "gpu", "keep", {"work": "keep"})
    plan = Plan({"unit0": replace(unit, **first), "unit1": replace(unit, **second)}, 100, 100)
    if message is None:
        plan.check(model)
        assert not plan.keeps_all and plan.intercepted == [False, False]
        assert Plan.from_yaml(plan.to_yaml()) == plan
        assert "checkpoint" not in yaml.safe_load(plan.to_yaml())["units"]["unit1"]
        assert "checkpointed: its forward is run again in backward" in plan.describe()
    else:
        with pytest.raises(ValueError) as error:
            plan.check(model)
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: plan["units"]["unit0"].update(checkpoint=1), "`units.unit0.checkpoint=1` must be true or false"),
        (lambda plan: plan.pop("clip"), "the plan lacks the entry `clip`. Add it"),
        (lambda plan: plan.update(speed=3), "the plan has an unknown entry `speed`"),
        (lambda plan: plan.update(clip="maybe"), "`clip='maybe'` must be one of"),
        (lambda plan: plan.update(window_bytes="wide"), "`window_bytes='wide'` is not a number of bytes"),
        (lambda plan: plan.update(units=[]), "`units` must be a mapping"),
        (lambda plan: plan["units"].update(unit0=3), "`units.unit0` must be a mapping"),
        (lambda plan: plan["units"]["unit0"].update(weights=3), "`units.unit0.weights=3` must be one of"),
        (lambda plan: plan["units"]["unit0"].update(step="gpu"), "`units.unit0` has an unknown entry `step`. Remove"),
        (
            lambda plan: plan["units"]["unit0"].update(parts={"up": {"weights": "host", "gradients": "gpu"}}),
            "`units.unit0.parts.up` has an unknown entry `gradients`. Remove it; valid entries are: weights, states.",
        ),
        (lambda plan: plan["units"]["unit0"]["operators"].update(work=1), "`units.unit0.operators.work=1`"),
    ],
)
def test_wrong_files_name_the_entry(change: Any, message: str) -> None:
    """The message names the entry."""
    content = yaml.safe_load(make_plan(make_model(2)).to_yaml())
    change(content)
    with pytest.raises(ValueError) as error:
        Plan.from_yaml(yaml.safe_dump(content))
    assert message in str(error.value)


def test_units_with_equal_plans_share_a_line_of_the_description() -> None:
    """Neighbouring units with equal plans share a line."""
    plan = make_plan(make_model(5))
    lines = plan.describe().splitlines()
    assert len(lines) == 3
    assert "unit0 .. unit4" in lines[2]
    assert "ssd: work" in lines[2]
