"""`CompiledPlan`: trainings with compiled code are planned where memory is short, with plain numbers."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch._dynamo
import torch._functorch.config as functorch
from torch import Tensor, nn

from lightning_ssd import PrefetchScheduler, SSDOffloadStrategy
from lightning_ssd.activations import OffloadExcess, PlannedExcess
from lightning_ssd.autoplan import compiled_plan, obstacles
from tests.support.compare import assert_same
from tests.support.compiled import INDUCTOR, fresh_dynamo  # noqa: F401
from tests.support.compiled_blocks import See, Ticks, compile_again, train
from tests.support.meter import Meter, use
from tests.support.plans import BOTH
from tests.support.slow_records import LONG, record_slowly

pytestmark = pytest.mark.timeout(300)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.thorough), "aot_eager", INDUCTOR])
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_compiled_code_is_planned_and_compiled_as_under_plain_lightning(
    backend: str, accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames, graphs, graph breaks, recompilations and numbers are plain Lightning's."""
    how: dict[str, Any] = {"accumulate_grad_batches": accumulate, "steps": 20}
    plain, expected = train(backend, "auto", tmp_path, **how)
    see = See()
    use(Meter(1e6, 980_000), monkeypatch)
    numbers, counters = train(backend, SSDOffloadStrategy(**BOTH), tmp_path, callbacks=[see], **how)
    assert counters == expected
    assert_same(numbers, plain)
    assert see.outcome == "plan" and see.compiled.decided
    assert see.placements[-1] is PlannedExcess and set(see.placements) == {OffloadExcess, PlannedExcess}
    plan = see.compiled.plan
    assert 0 < plan.offloaded_bytes < sum(plan.sizes)
    assert see.stored[-1] - see.stored[-2] == plan.offloaded_bytes
    assert set(see.settings) == {1.0}


def test_epochs_that_are_shorter_than_an_accumulation_are_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps have two micro-batches of four."""
    how: dict[str, Any] = {"accumulate_grad_batches": 4, "limit_train_batches": 2, "steps": 20}
    plain, _ = train("aot_eager", "auto", tmp_path, **how)
    see = See()
    use(Meter(1e6, 980_000), monkeypatch)
    numbers, _ = train("aot_eager", SSDOffloadStrategy(**BOTH), tmp_path, callbacks=[see], **how)
    assert_same(numbers, plain)
    assert see.compiled.decided and see.compiled.plan is not None


def test_times_in_which_states_are_recorded_are_no_part_of_timelines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, see, timelines = Ticks(), See(), []
    plan_storages = compiled_plan.plan_storages

    def plan(timeline: Any, *args: Any, **how: Any) -> Any:
        timelines.append(timeline)
        return plan_storages(timeline, *args, **how)

    use(Meter(1e6, 980_000), monkeypatch)
    monkeypatch.setattr(compiled_plan, "make_clock", lambda device: clock)
    monkeypatch.setattr(compiled_plan, "plan_storages", plan)
    times = record_slowly(clock, monkeypatch)
    train("aot_eager", SSDOffloadStrategy(**BOTH), tmp_path, 20, callbacks=[see])
    assert see.compiled.decided and len(times) > 16
    assert timelines and all(0 < one.forward_seconds < LONG / 100 for one in timelines)


def test_the_window_stays_that_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a larger one was not measured, although backward waits for loads."""
    windows: list[int] = []

    class Windows(pl.Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            windows.append(trainer.strategy.offloader.policy.window_bytes)

    class Growing(PrefetchScheduler):
        PATIENCE, TOLERATED_STALL = 3, -1.0

        def _grow(self, smallest: int, share: float) -> None:
            assert self._window is not None
            self._window += 1

    see = See()
    use(Meter(1e6, 980_000), monkeypatch)
    train("aot_eager", SSDOffloadStrategy(**BOTH), tmp_path, 24, callbacks=[see, Windows(), Growing()])
    assert see.compiled.decided
    assert windows[12:] == [see.compiled.followed.window_bytes] * 12


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_code_that_stalls_is_compiled_once_to_save_less(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = train(backend, "auto", tmp_path)
    see = See()
    use(Meter(1e6, 980_000), monkeypatch)
    compile_again(monkeypatch)
    with caplog.at_level("INFO"):
        numbers, counters = train(backend, SSDOffloadStrategy(**BOTH), tmp_path, callbacks=[see])
    for mine, theirs in zip(numbers, plain, strict=True):
        if backend == "aot_eager":
            assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert "graph_break" not in counters
    assert see.settings[0] == 1.0 and set(see.settings[see.settings.index(0.5) :]) == {0.5}
    assert see.compiled.decided
    assert see.saved[-1] - see.saved[-2] < see.saved[2] - see.saved[1]
    assert caplog.text.count("code is compiled again with activation_memory_budget=0.5") == 1
    assert functorch.activation_memory_budget == 1.0


class Refuse(pl.Callback):
    """Lets no code be compiled again."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 2:
            torch.compiler.set_stance("fail_on_recompile")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        torch.compiler.set_stance("default")


@pytest.mark.parametrize(
    "reason",
    [
        "set",
        "stance",
        *(pytest.param(one, marks=pytest.mark.thorough) for one in ("deterministic", "no time", "eager")),
    ],
)
def test_code_is_not_compiled_again_where_it_may_not(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The user has set the budget or a stance, or asks for deterministic algorithms; there is no time; backward is not
    compiled."""
    see = See()
    use(Meter(1e6, 980_000), monkeypatch)
    compile_again(monkeypatch)
    if reason == "deterministic":
        request.getfixturevalue("deterministic")
    elif reason == "no time":
        monkeypatch.setattr(compiled_plan, "MAX_COMPILE_SECONDS", -1.0)
    backend = "eager" if reason == "eager" else "aot_eager"
    with functorch.patch(activation_memory_budget=0.5 if reason == "set" else 1.0):
        callbacks = [see, Refuse()] if reason == "stance" else [see]
        _, counters = train(backend, SSDOffloadStrategy(**BOTH), tmp_path, 20, callbacks=callbacks)
    assert see.compiled.decided and see.placements[-1] is PlannedExcess
    assert set(see.settings) == ({0.5} if reason == "set" else {1.0})
    assert counters["stats"]["unique_graphs"] == 2  # the input of the first block requires no gradient


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("stance", ["fail_on_recompile", "eager_on_recompile", "force_eager"])
def test_a_stance_that_is_set_after_code_was_compiled_again_stays_in_force(
    stance: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No code is discarded from then on, also not at the end of training."""
    stances: list[str] = []

    class SetLater(See):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Tensor, batch_idx: int) -> None:
            if not stances and self.settings and self.settings[-1] < 1.0:
                torch.compiler.set_stance(stance)
            if stances or torch._dynamo.eval_frame._stance.stance != "default":
                stances.append(torch._dynamo.eval_frame._stance.stance)

    see = SetLater()
    use(Meter(1e6, 980_000), monkeypatch)
    compile_again(monkeypatch)
    try:
        train("aot_eager", SSDOffloadStrategy(**BOTH), tmp_path, callbacks=[see])
        assert torch._dynamo.eval_frame._stance.stance == stance
    finally:
        torch.compiler.set_stance("default")
    assert len(stances) > 10 and set(stances) == {stance}
    assert set(see.settings[-len(stances) :]) == {see.settings[-len(stances)]} != {1.0}
    assert functorch.activation_memory_budget == 1.0


def test_the_setting_is_restored_when_training_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(pl.Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            if functorch.activation_memory_budget < 1.0:
                raise KeyError("of the user")

    use(Meter(1e6, 980_000), monkeypatch)
    compile_again(monkeypatch)
    with pytest.raises(KeyError, match="of the user"):
        train("aot_eager", SSDOffloadStrategy(**BOTH), tmp_path, callbacks=[Fails()])
    assert functorch.activation_memory_budget == 1.0


def test_the_setting_is_restored_when_a_hook_skips_the_rest_of_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Skip(pl.Callback):
        settings: list[float] = []  # noqa: RUF012

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            def skip(batch: Any, batch_idx: int) -> int | None:
                if functorch.activation_memory_budget == 1.0 or self.settings:
                    return None
                self.settings.append(functorch.activation_memory_budget)
                return -1

            pl_module.on_train_batch_start = skip

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if len(self.settings) == 1:
                self.settings.append(functorch.activation_memory_budget)

    use(Meter(1e6, 980_000), monkeypatch)
    compile_again(monkeypatch)
    skip = Skip()
    train("aot_eager", SSDOffloadStrategy(**BOTH), tmp_path, callbacks=[skip])
    assert skip.settings[0] < 1.0 and skip.settings[1:] == [1.0]


@pytest.mark.parametrize("compiled", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_saved_tensors_of_cuda_graphs_are_kept_from_the_step_on_that_records_them(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A training without compiled code is planned, although another one of the process has recorded graphs."""

    class Hooks(pl.Callback):
        enabled: list[bool] = []  # noqa: RUF012

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            self.enabled.append(trainer.strategy.offloader.policy.hooks_enabled)

    hooks, see = Hooks(), See()
    use(Meter(1e6, 980_000), monkeypatch)
    monkeypatch.setattr(obstacles, "records_cuda_graphs", lambda device: True)
    if not compiled:
        monkeypatch.setattr(nn.Module, "compile", lambda *_, **__: None)
    with caplog.at_level("INFO"):
        train("aot_eager", SSDOffloadStrategy(**BOTH), tmp_path, 6, callbacks=[hooks, see])
    assert see.outcome == ("keep" if compiled else "plan")
    assert hooks.enabled == [True] + [not compiled] * 5
    assert ("records CUDA graphs (`mode='reduce-overhead'`)" in caplog.text) == compiled
