"""Steps under a plan that become slower or faster for good have the training planned again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import Tensor

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.callbacks import plan_cache, plan_runner, step_drift
from lightning_ssd.callbacks.step_drift import MEDIAN_STEPS, StepDrift
from tests.support.compiled import fresh_dynamo  # noqa: F401
from tests.support.meter import Meter, use
from tests.support.plans import BOTH, planner
from tests.support.regions import See, Ticks, tick, train
from tests.support.trainings import SmallModel, batches, make_trainer


@pytest.mark.parametrize(
    ("medians", "drifts"),
    [
        ([1.0, 1.09, 0.91], []),
        ([1.0, 1.2, 1.0, 1.2], []),
        ([1.0, 1.2, 1.3], [2]),
        ([1.0, 1.2, 0.8, 1.3, 1.3], [2]),
        ([1.0, 0.8, 1.0, 0.8, 0.8], [4]),
    ],
)
def test_two_medians_in_a_row_are_a_drift(medians: Sequence[float], drifts: list[int]) -> None:
    drift, steps = StepDrift(), 0
    found = []
    for number, seconds in enumerate(medians):
        assert not drift.is_due(steps + MEDIAN_STEPS - 1)
        steps += MEDIAN_STEPS
        assert drift.is_due(steps)
        if drift.add(steps, seconds):
            found.append(number)
    assert found == drifts and drift.usual == medians[0]


@pytest.mark.quick_cases(1)
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("step_seconds", [1.05, 2.0])
def test_compiled_code_whose_steps_drift_is_planned_again(
    step_seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps take a second, and later `step_seconds`."""
    clock, see = tick(monkeypatch), See()

    class Slower(pl.Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            clock.seconds += step_seconds - 1 if trainer.global_step > 28 else 0

    use(Meter(1e6, 980_000), monkeypatch)
    monkeypatch.setattr(step_drift, "MEDIAN_STEPS", MEDIAN_STEPS)
    with caplog.at_level("INFO"):
        train("aot_eager", SSDOffloadStrategy(**BOTH), tmp_path, 64, callbacks=[see, Slower()])
    assert see.regions.decided
    assert len([line for line in caplog.messages if "planning again" in line]) == (1 if step_seconds == 2 else 0)
    assert [trial.seconds for trial in see.regions.trials] == [step_seconds if step_seconds == 2 else 1.0] * 2
    (path,) = plan_cache.plans_directory().iterdir()
    assert f'"seconds": {see.regions.trials[0].seconds}' in path.read_text()


def test_operators_whose_steps_drift_are_planned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, swaps = Ticks(), planner()

    class Slower(pl.Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            clock.seconds += trainer.global_step > 40

    monkeypatch.setattr(plan_runner, "make_clock", lambda device: clock)
    callbacks = [swaps, Slower()]
    with caplog.at_level("INFO"):
        make_trainer(tmp_path, SSDOffloadStrategy(**BOTH), max_steps=80, callbacks=callbacks).fit(
            SmallModel(), batches(80)
        )
    assert len([line for line in caplog.messages if "planning again" in line]) == 1
