"""Compiled code whose saved tensors have no room is compiled again, once, so that it saves less."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch._functorch.config as functorch
from torch import Tensor

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.autoplan import recompilation
from lightning_ssd.autoplan.recompilation import sufficient_budget
from tests.support.compiled import INDUCTOR, fresh_dynamo  # noqa: F401
from tests.support.compiled_blocks import Blocks, See, train
from tests.support.meter import Meter, use, use_slow_transfers
from tests.support.plans import BOTH
from tests.support.profiles import make_model

pytestmark = pytest.mark.timeout(300)

SHORT = {"aot_eager": 190_000, "inductor": 175_000}
"""Limit of memory without room for all saved tensors of code of a backend, in bytes."""


def limit(backend: str, monkeypatch: pytest.MonkeyPatch) -> Meter:
    meter = Meter(SHORT[backend], SHORT[backend] - 10_000)
    use(meter, monkeypatch)
    use_slow_transfers(monkeypatch)
    return meter


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory is short, transfers are slow, and code is compiled again whatever a plan would cost."""
    limit("aot_eager", monkeypatch)
    monkeypatch.setattr(recompilation, "MIN_PLAN_LOSS", -1.0)
    yield
    torch.compiler.set_stance("default")
    functorch.activation_memory_budget = 1.0


class Settings(See):
    """Also records the budget of each micro-batch, and the bytes saved before it."""

    def __init__(self) -> None:
        super().__init__()
        self.budgets: list[float] = []
        self.totals: list[int] = []
        self.hooks = True

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        super().on_before_backward(trainer, pl_module, loss)
        self.budgets.append(functorch.activation_memory_budget)
        self.totals.append(trainer.strategy.offloader.stats().saved)
        self.hooks = trainer.strategy.offloader.policy.hooks_enabled


def set_stance(*_: Any) -> None:
    torch.compiler.set_stance("fail_on_recompile")


class OnBudget(pl.Callback):
    """Calls a function in the first step after a recompilation."""

    def __init__(self, action: Any) -> None:
        self.action = action

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if functorch.activation_memory_budget < 1.0 and self.action is not None:
            action, self.action = self.action, None
            action()


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_code_that_is_compiled_again_saves_what_has_room(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After the profile of the first code there is one other budget, and a plan for the second code."""
    limit(backend, monkeypatch)
    plain, expected = train(backend, "auto", tmp_path)
    see = Settings()
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        numbers, counts = train(backend, SSDOffloadStrategy(**BOTH), tmp_path, callbacks=[see])
    torch.testing.assert_close(numbers, plain, rtol=1e-5, atol=1e-6)
    assert counts["stats"]["unique_graphs"] == 2 * expected["stats"]["unique_graphs"]
    first, second = sorted(set(see.budgets), reverse=True)
    begun = see.budgets.index(second)
    assert first == 1.0 and see.budgets[begun:] == [second] * (len(see.budgets) - begun)
    assert see.totals[begun] - see.totals[begun - 1] < see.totals[1] - see.totals[0]
    assert see.outcome == "plan" and see.planner.plan.keeps_all
    lines = [line for line in caplog.messages if "activation_memory_budget" in line]
    assert len(lines) == 1 and f"activation_memory_budget={second:g}, so that it saves less" in lines[0]
    assert functorch.activation_memory_budget == 1.0


def test_where_the_second_code_has_room_all_is_kept_without_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter, see = limit("aot_eager", monkeypatch), Settings()

    def use_less() -> None:
        meter.highest //= 2

    train("aot_eager", SSDOffloadStrategy(**BOTH), tmp_path, callbacks=[see, OnBudget(use_less)])
    assert see.outcome == "keep" and see.planner is None and not see.hooks


THOROUGH = [pytest.param(one, marks=pytest.mark.thorough) for one in ("deterministic", "recovered", "cheap plan")]


@pytest.mark.parametrize("reason", ["set by the user", "stance", *THOROUGH])
def test_code_is_compiled_once_where_digits_may_not_change_or_nothing_is_gained(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    see = Settings()
    functorch.activation_memory_budget = budget = 0.9 if reason == "set by the user" else 1.0
    if budget < 1.0:
        limit("inductor", monkeypatch)  # it saves less, and more than this
    if reason == "deterministic":
        request.getfixturevalue("deterministic")
    if reason == "cheap plan":
        monkeypatch.setattr(recompilation, "MIN_PLAN_LOSS", 1e9)
    callbacks: list[pl.Callback] = [see]
    if reason == "stance":
        callbacks.append(pl.callbacks.LambdaCallback(on_before_zero_grad=set_stance))
    recovers = {"path": tmp_path, "states": "ssd", "recover": True} if reason == "recovered" else {}
    _, counts = train("aot_eager", SSDOffloadStrategy(**BOTH | recovers), tmp_path, 20, callbacks=callbacks)
    assert see.outcome == "plan" and not see.planner.measuring
    assert set(see.budgets) == {budget} and functorch.activation_memory_budget == budget
    assert counts["stats"]["unique_graphs"] == 2  # the input of the first block requires no gradient


def test_the_setting_is_restored_when_training_fails(tmp_path: Path) -> None:
    def fail() -> None:
        raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user"):
        train("aot_eager", SSDOffloadStrategy(**BOTH), tmp_path, callbacks=[OnBudget(fail)])
    assert functorch.activation_memory_budget == 1.0


def test_what_the_user_sets_afterwards_stays(tmp_path: Path) -> None:
    """A budget is not restored to the default, and under a stance no code is discarded."""

    def choose() -> None:
        functorch.activation_memory_budget = 0.25
        set_stance()

    module, see, callback = Blocks("aot_eager"), See(), OnBudget(choose)
    train("aot_eager", SSDOffloadStrategy(**BOTH), tmp_path, callbacks=[see, callback], build=lambda _: module)
    assert callback.action is None and functorch.activation_memory_budget == 0.25
    module.blocks[0](torch.ones(16, 32))  # an error if it had to be compiled


@pytest.mark.parametrize(
    ("missing", "compiled_units", "budget"),
    [
        (0, 4, None),
        (1, 4, 0.9),
        (1110, 4, 0.9),
        (1120, 4, 0.6),
        (2160, 4, 0.3),
        (2700, 4, 0.1),
        (2710, 4, None),  # checkpointed units save as little
        (740, 3, 0.9),
        (750, 3, 0.6),
        (1, 2, None),  # half of the bytes are not those of compiled units
    ],
)
def test_the_budget_is_the_largest_one_that_frees_enough(
    missing: int, compiled_units: int, budget: float | None
) -> None:
    """Four units save 1000 bytes each; one unit has all of its bytes while its backward runs."""
    model = make_model(4, saved=1000)
    units = list(model.units)
    for index in range(compiled_units):
        (operator,) = units[index].operators
        units[index] = replace(units[index], operators=(replace(operator, name="blocks.0:compiled.1"),))
    assert sufficient_budget(replace(model, units=tuple(units)), missing) == budget
