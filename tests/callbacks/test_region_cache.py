"""Plans of compiled code of earlier trainings: reused for the same training, checked, replaced if they are wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch._functorch.config as functorch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.callbacks import plan_cache
from lightning_ssd.callbacks.cached_regions import CachedRegions
from lightning_ssd.callbacks.region_planner import RegionPlanner
from lightning_ssd.planning import StoragePlan
from tests.support.compiled import INDUCTOR, fresh_dynamo  # noqa: F401
from tests.support.meter import Meter, use
from tests.support.plans import BOTH
from tests.support.products import thorough
from tests.support.regions import See, Ticks, lower_budgets, tick, train

pytestmark = pytest.mark.timeout(300)

FIRST, LATER = 3, 1
"""Trials of a training: without a plan, with one, and with code that saves less; or with the stored plan alone."""


@pytest.fixture(autouse=True)
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    """Each plan stalls, and code that saves less is compiled once: each step takes a second."""
    lower_budgets(monkeypatch)
    return tick(monkeypatch)


def fit(path: Path, monkeypatch: pytest.MonkeyPatch, memory: tuple[float, int] = (1e6, 980_000), **how: Any) -> See:
    """Trains; `memory` is that of the process, and the peak without saved tensors, in bytes."""
    see = See()
    with monkeypatch.context() as patch:
        use(Meter(*memory), patch)
        train(
            **{"backend": "aot_eager", "steps": 28} | how,
            strategy=SSDOffloadStrategy(**BOTH),
            path=path,
            callbacks=[see],
        )
    assert see.regions.decided
    return see


def trials(see: See) -> int:
    planner: RegionPlanner = see.regions
    return len(planner.trials)


def stored() -> Path:
    (path,) = plan_cache.plans_directory().iterdir()
    return path


def edit(change: Callable[[Any], object]) -> None:
    path = stored()
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_a_second_training_compiles_once_and_has_the_plan_of_the_first(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = fit(tmp_path, monkeypatch, backend=backend)
    with caplog.at_level("INFO"):
        second = fit(tmp_path, monkeypatch, backend=backend)
    assert (trials(first), trials(second)) == (FIRST, LATER)
    assert second.settings[-1] == first.settings[-1] < 1.0 and len(set(second.settings)) == 2
    assert second.settings.index(second.settings[-1]) < first.settings.index(first.settings[-1])
    assert second.regions.applied.plan == first.regions.applied.plan
    assert "an earlier training with the same compiled code was planned" in caplog.text
    assert functorch.activation_memory_budget == 1.0


@pytest.mark.thorough
def test_an_environment_variable_switches_the_cache_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(tmp_path, monkeypatch)
    monkeypatch.setenv("LIGHTNING_SSD_PLAN_CACHE", "0")
    assert trials(fit(tmp_path, monkeypatch)) == FIRST


def slower(content: Any) -> None:
    content["seconds"] *= 2


def other_storage(content: Any) -> None:
    content["plan"]["sizes"][0] += 4


def other_index(content: Any) -> None:
    content["plan"]["early"].append(1000)


@pytest.mark.thorough
@pytest.mark.parametrize("change", [slower, thorough(other_storage), thorough(other_index)])
def test_a_wrong_plan_is_ignored_with_one_line_and_replaced(
    change: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planned = fit(tmp_path, monkeypatch).regions.applied.plan.sizes
    edit(change)
    with caplog.at_level("WARNING", "lightning_ssd"):
        assert trials(fit(tmp_path, monkeypatch, steps=40)) == FIRST
    assert len([line for line in caplog.messages if "planned anew" in line]) == 1
    content = json.loads(stored().read_text())
    assert content["seconds"] == 1.0 and content["plan"]["sizes"] == list(planned)
    assert max(content["plan"]["early"]) < len(planned)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("memory", "expected"), [((1.1e6, 1_080_000), FIRST), ((1e6, 997_000), LATER)], ids=["more", "less"]
)
def test_another_limit_of_memory(
    memory: tuple[float, int], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more memory budgets are tried again; with less another plan is made for the stored budget."""
    first = fit(tmp_path, monkeypatch)
    second = fit(tmp_path, monkeypatch, memory)
    assert trials(second) == expected
    assert second.settings[-1] == first.settings[-1]
    offloaded = [see.regions.applied.plan.offloaded_bytes for see in (first, second)]
    assert (offloaded[1] > offloaded[0]) == (expected == LATER)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "setting", [{"activation_memory_budget": 0.5}, {"activation_memory_budget_solver": "greedy"}], ids=str
)
def test_other_settings_of_the_partitioner_are_other_trainings(
    setting: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tmp_path, monkeypatch)
    with functorch.patch(setting):
        fit(tmp_path, monkeypatch)
    assert len(list(plan_cache.plans_directory().iterdir())) == 2


@pytest.mark.thorough
def test_no_value_is_set_by_a_plan_where_the_training_may_not_set_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stored plan whose budget is another one than the user's does not apply there."""
    with functorch.patch(activation_memory_budget=0.5):
        fit(tmp_path, monkeypatch)
        edit(lambda content: content.update(memory_budget=0.3))
        assert set(fit(tmp_path, monkeypatch).settings) == {0.5}


ENTRY = CachedRegions(
    StoragePlan((1, 2, 3), frozenset({0, 2}), ("keep", "keep", "host"), frozenset({1}), 10, 0.5, 0.0),
    0.5,
    1.0,
    10.0,
    5,
    1.5,
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_content_of_a_file_is_an_error(data: st.DataObject) -> None:
    cache = plan_cache.PlanCache()
    cache.save("key", ENTRY)
    assert cache.load("key", CachedRegions) == ENTRY
    path = stored()
    text = path.read_text()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 40)))
    path.write_bytes(text[:start].encode() + data.draw(st.binary(max_size=8)) + text[end:].encode())
    found = cache.load("key", CachedRegions)
    assert found is None or isinstance(found, CachedRegions)


@pytest.mark.parametrize("name", ["sizes", "movable", "choices", "early"])
@pytest.mark.parametrize("value", [None, 1, [-1], ["ram"], [True], [[]]])
def test_wrong_entries_are_not_read(name: str, value: object) -> None:
    plan_cache.PlanCache().save("key", ENTRY)
    edit(lambda content: content["plan"].update({name: value}))
    assert plan_cache.PlanCache().load("key", CachedRegions) is None
