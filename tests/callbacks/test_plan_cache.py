"""Plans of earlier trainings: reused for the same training, and for no other."""

import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ssd import SSDOffloadStrategy, SwapPlanner
from lightning_ssd.callbacks import plan_cache, step_drift
from lightning_ssd.profiling import profiler
from tests.support.compare import assert_same
from tests.support.meter import Meter, use
from tests.support.parity import TinyGPT, train
from tests.support.plans import BOTH, planner, quiet_trainer
from tests.support.products import thorough

pytestmark = pytest.mark.timeout(180)


class Small(pl.LightningModule):
    """Two layers, whose options are other trainings."""

    def __init__(self, layers: int = 2, frozen: int = 0, optimizer: Any = torch.optim.SGD) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(layers)))
        self.layers[:frozen].requires_grad_(False)
        self.optimizer = optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch).tanh().sin()
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.1)


class Begin(pl.Callback):
    """Records the step from which on the planner's own plan is in force."""

    def __init__(self, swaps: SwapPlanner) -> None:
        self._swaps = swaps
        self.step: int | None = None

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        swaps = self._swaps
        if self.step is None and swaps.plan is not None and not swaps.measuring and not swaps.calibrating:
            self.step = trainer.global_step


def fit(root: Path, model: Any = Small, rows: int = 4, steps: int = 14, swaps: Any = None, **how: Any) -> int | None:
    """Trains; returns the number of steps before the plan was in force."""
    torch.manual_seed(1)
    swaps = swaps or planner()
    begin = Begin(swaps)
    trainer = quiet_trainer(root, strategy=SSDOffloadStrategy(**BOTH), callbacks=[swaps, begin], max_steps=steps, **how)
    trainer.fit(model(), DataLoader([torch.randn(rows, 16) for _ in range(100)], batch_size=None))  # type: ignore[arg-type]
    return begin.step


def stored() -> list[Path]:
    folder = plan_cache.plans_directory()
    return sorted(folder.iterdir()) if folder.exists() else []


FIRST, LATER = 7, 3
"""Steps before the plan is in force: two of warm-up and one checked step; one timed and three calibrating steps."""


def test_a_second_training_has_its_plan_without_timed_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert fit(tmp_path) == FIRST
    with caplog.at_level("INFO"):
        swaps = planner()
        assert fit(tmp_path, swaps=swaps) == LATER
    assert "no steps are timed: its plan is applied" in caplog.text
    (path,) = stored()
    assert swaps.plan is not None and swaps.plan.to_content() == json.loads(path.read_text())["plan"]
    assert fit(tmp_path, swaps=planner(cache=False)) == FIRST


def test_the_default_reuses_plans_with_the_numbers_of_plain_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    use(Meter(1e6, 900_000), monkeypatch)
    how: dict[str, Any] = {"model": TinyGPT, "steps": 18}
    plain = train("auto", **how)
    begins = []

    class See(pl.Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            auto = next(one for one in trainer.callbacks if type(one).__name__ == "AutoPlanner")
            swaps = auto.planner
            if swaps is not None and swaps.plan is not None and not swaps.measuring and not swaps.calibrating:
                begins.append(trainer.global_step)

    found = []
    for _ in range(2):
        begins.clear()
        assert_same(plain, train(SSDOffloadStrategy(**BOTH), callbacks=[See()], **how))
        found.append(begins[0])
    assert found[0] - found[1] == 3 + 2 + 3  # timed, and under the calibration plan


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 5},
        {"model": lambda: Small(frozen=1)},
        thorough({"accumulate_grad_batches": 2}),
        thorough({"gradient_clip_val": 1.0}),
        thorough({"model": lambda: Small(layers=3)}),
        thorough({"model": lambda: Small(optimizer=torch.optim.AdamW)}),
        thorough({"swaps": planner(gpu_memory="least")}),
    ],
    ids=["batch", "frozen", "accumulation", "clipping", "layers", "optimizer", "budget"],
)
def test_another_training_does_not_use_it(change: dict[str, Any], tmp_path: Path) -> None:
    fit(tmp_path, steps=8)
    assert fit(tmp_path, **change) != LATER
    assert len(stored()) == 2


def test_the_best_plan_of_a_training_that_has_none_that_fits_is_used_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = planner(gpu_memory="1B"), planner(gpu_memory="1B")
    fit(tmp_path, swaps=first)
    with caplog.at_level("INFO"):
        assert fit(tmp_path, swaps=second) == LATER
    assert first.prediction is not None and first.hardware is not None
    assert first.prediction.excess_bytes(first.hardware) and second.plan == first.plan
    assert "its plan is applied" in caplog.text


@pytest.mark.parametrize(("before", "now"), [("1GiB", "1KiB"), ("1KiB", "1GiB")], ids=["less", "more"])
def test_with_another_limit_of_memory_a_plan_is_made_from_the_measurements(
    before: str, now: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = planner(gpu_memory=before), planner(gpu_memory=now)
    fit(tmp_path, swaps=first)
    with caplog.at_level("INFO"):
        assert fit(tmp_path, swaps=second) == LATER
    for swaps, limit in ((first, before), (second, now)):
        assert swaps.plan is not None and swaps.plan.keeps_all == (limit == "1GiB")
    assert "a plan for the present limits of memory is made and applied" in caplog.text


@pytest.mark.parametrize("change", ["more", "same", "less"])
def test_a_plan_is_made_again_where_other_tensors_take_more_memory(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a second copy of the weights. With it, all saved tensors would exceed the limit by a byte."""
    meter, reused = Meter(1e9, 0, 10_000), change != "more"
    monkeypatch.setattr(profiler, "allocator_memory", lambda device: meter)
    first, second, third = (planner(gpu_memory="1GiB") for _ in range(3))
    fit(tmp_path, swaps=first)
    assert first.plan is not None and first.plan.keeps_all and first.prediction is not None
    meter.level += {"more": 2**30 - first.prediction.gpu_peak_bytes + 1, "same": 0, "less": -5000}[change]
    with caplog.at_level("INFO"):
        assert fit(tmp_path, swaps=second) == LATER
    assert second.plan is not None and second.plan.keeps_all == reused
    assert ("its plan is applied" in caplog.text) == reused
    assert fit(tmp_path, swaps=third) == LATER and third.plan == second.plan


def test_an_environment_variable_switches_the_cache_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("LIGHTNING_SSD_PLAN_CACHE", "0")
        fit(tmp_path, steps=8)
        assert not stored()
    fit(tmp_path, steps=8)
    monkeypatch.setenv("LIGHTNING_SSD_PLAN_CACHE", "0")
    assert len(stored()) == 1 and fit(tmp_path, steps=8) == FIRST


def edit(path: Path, change: Any) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def other_forward(content: Any) -> None:
    content["profile"]["units"][0]["operators"][0]["saved_bytes"] += 4


def other_machine(content: Any) -> None:
    content["machine"]["copy_in"] /= 3
    content["machine"]["copy_in_both"] /= 3


def unknown_operator(content: Any) -> None:
    next(iter(content["plan"]["units"].values()))["operators"]["other"] = "keep"


@pytest.mark.parametrize("change", [other_forward, thorough(other_machine), thorough(unknown_operator)])
def test_a_wrong_plan_is_ignored_with_one_line_and_replaced(
    change: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, steps=8)
    (path,) = stored()
    edit(path, change)
    with caplog.at_level("WARNING", "lightning_ssd"):
        assert fit(tmp_path, steps=8) == FIRST
    assert len([line for line in caplog.messages if "planned anew" in line]) == 1
    assert fit(tmp_path, steps=4) == LATER


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The path and the content of a stored plan."""
    root = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_cache, "plans_directory", lambda: root / "plans")
        fit(root, steps=8)
        (path,) = stored()
    return path, path.read_text()


def load(path: Path) -> plan_cache.CachedPlan | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_cache, "plans_directory", lambda: path.parent)
        return plan_cache.PlanCache().load(path.stem, plan_cache.CachedPlan)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(format=0),
        lambda content: content.update(key="other"),
        lambda content: content.pop("plan"),
        lambda content: content.update(fragment_reserve="much"),
        lambda content: content.update(confirmed=1),
        lambda content: content.pop("allocated_bytes"),
        lambda content: content["hardware"].update(copy_in=float("nan")),
    ],
)
def test_a_file_with_other_content_is_not_read(
    change: Any, written: tuple[Path, str], caplog: pytest.LogCaptureFixture
) -> None:
    path, text = written
    path.write_text(text)
    assert load(path) is not None
    edit(path, change)
    assert load(path) is None
    assert len([line for line in caplog.messages if "planned anew" in line]) == 1


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_content_of_a_file_is_an_error(data: st.DataObject, written: tuple[Path, str]) -> None:
    path, text = written
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 40)))
    path.write_bytes(text[:start].encode() + data.draw(st.binary(max_size=8)) + text[end:].encode())
    found = load(path)
    assert found is None or isinstance(found, plan_cache.CachedPlan)


def test_files_that_others_may_have_written_are_not_read(tmp_path: Path) -> None:
    fit(tmp_path, steps=8)
    (path,) = stored()
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert load(path) is not None
    path.chmod(0o644)
    assert load(path) is None
    path.chmod(0o600)
    path.parent.chmod(0o755)
    assert load(path) is None
    path.parent.chmod(0o700)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert load(path) is None
    path.unlink()
    elsewhere.rename(path)
    assert load(path) is not None


@pytest.mark.parametrize("home", ["file", thorough("missing"), thorough("read-only")])
def test_a_home_that_can_not_be_used_is_no_error(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    place = tmp_path / "home"
    if home == "file":
        place.touch()
    elif home == "read-only":
        place.mkdir(mode=0o500)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place) if home != "missing" else "relative")
    if home == "missing":
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    if home == "read-only" and os.access(place, os.W_OK):  # root may write
        place.rmdir()
        place.symlink_to("/proc/self/nothing")
    assert [fit(tmp_path, steps=8) for _ in range(2)] == [FIRST, FIRST]


def test_the_oldest_files_are_removed(
    written: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, text = written
    path.write_text(text)
    found = load(path)
    assert found is not None
    monkeypatch.setattr(plan_cache, "MOST_FILES", 2)
    cache = plan_cache.PlanCache()
    for number, key in enumerate(("first", "second", "third")):
        cache.save(key, found)
        os.utime(plan_cache.plans_directory() / f"{key}.json", (number, number))
    assert [cache.load(key, plan_cache.CachedPlan) for key in ("first", "second", "third")] == [None, found, found]


def test_measured_steps_correct_the_stored_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_drift, "MEDIAN_STEPS", 1)
    fit(tmp_path, steps=8)
    (path,) = stored()
    before = json.loads(path.read_text())["profile"]
    edit(path, lambda content: content["profile"].update(between_seconds=1e3))
    swaps = planner()
    assert fit(tmp_path, steps=30, swaps=swaps) == LATER
    after = json.loads(path.read_text())["profile"]
    assert before != after and after["between_seconds"] < 1e3
    assert swaps.profile is not None and swaps.profile.between_seconds == after["between_seconds"]


def test_plans_know_both_sets_of_functions_for_the_precision_of_products(tmp_path: Path) -> None:
    """Once user code has used torch's newer settings, the older functions raise errors."""
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("torch before 2.9 has the older functions only")
    torch.set_float32_matmul_precision("highest")
    before = torch.backends.cuda.matmul.fp32_precision
    measured = fit(tmp_path)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert fit(tmp_path) == measured  # not the plan of the training before, which had another precision
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    begin = fit(tmp_path)
    assert begin is not None and measured is not None and begin < measured
