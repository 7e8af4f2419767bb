"""Options of parameter groups that optimizers and user code change: each step uses those that plain training uses."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import lightning_ssd
from lightning_ssd.model_states.optimizers import user_optimizers
from tests.support.compare import assert_same
from tests.support.models import BlocksModel, ManualSteps
from tests.support.states import offloading
from tests.support.trainings import rows, train

STEPS = 4


class Counting(Optimizer):
    """Counts its steps in the parameter groups: in a number, a tensor and a list.

    Args:
        parameters: the parameters.
        count_first: whether it counts before it steps the parameters of the group, or after it.
    """

    def __init__(self, parameters: Any, count_first: bool) -> None:
        counts = {"number": 0, "tensor": torch.zeros(()), "past": []}
        super().__init__(parameters, {"lr": 0.1, "count_first": count_first, **counts})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            if group["count_first"]:
                self._count(group)
            rate = group["lr"] / (1 + group["number"] + group["tensor"].item() + len(group["past"]))
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=rate)
            if not group["count_first"]:
                self._count(group)
        return loss

    def _count(self, group: dict[str, Any]) -> None:
        group["number"] += 1
        group["tensor"].add_(1)
        group["past"].append(group["number"])


class Deferred(BlocksModel):
    """Reads gradients after backward, so that no step begins in it."""

    def on_after_backward(self) -> None:
        assert self.blocks[0].up.weight.grad is not None  # type: ignore[union-attr]


class Manual(ManualSteps, BlocksModel):
    pass


class Closure(BlocksModel):
    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            loss: Tensor = super(Closure, self).training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize(
    ("make_model", "count_first"), [(BlocksModel, False), (Deferred, True), (Manual, False), (Closure, True)]
)
def test_an_optimizer_that_counts_in_its_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_model: Any, count_first: bool
) -> None:
    monkeypatch.setattr(user_optimizers, "_REGISTERED", set(user_optimizers._REGISTERED))
    lightning_ssd.register_optimizer(Counting)
    model = make_model(lambda parameters: Counting(parameters, count_first))
    expected = train(tmp_path, "auto", model, rows(STEPS))
    for strategy in (offloading(), offloading(min_bytes=100), offloading(overlap="none")):
        assert_same(train(tmp_path, strategy, model, rows(STEPS)), expected)


class Scaled(Optimizer):
    """Plain gradient descent, whose `step` has an argument of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None, *, factor: float | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] * (1.0 if factor is None else factor))


class Arguments(BlocksModel):
    """Gives `step` arguments.

    Args:
        factor: argument of each step.
    """

    automatic_optimization = False

    def __init__(self, factor: float | None) -> None:
        super().__init__(Scaled)
        self.factor = factor

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss: Tensor = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step(factor=self.factor)


def test_arguments_of_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of steps of whole optimizers; steps of single parameters know none."""
    monkeypatch.setattr(user_optimizers, "_REGISTERED", set(user_optimizers._REGISTERED))
    expected = train(tmp_path, "auto", Arguments(0.5), rows(STEPS))
    assert_same(train(tmp_path, offloading(), Arguments(0.5), rows(STEPS)), expected)
    lightning_ssd.register_optimizer(Scaled)
    for factor in (None, 0.5):
        with pytest.raises(ValueError, match="Scaled.step was given `factor=0.5`") if factor else nullcontext():
            train(tmp_path, offloading(), Arguments(factor), rows(STEPS))


class ChangedInBackward(BlocksModel):
    """Changes an option when backward has passed all blocks but the first.

    Args:
        name: of the option.
        values: its value in each step.
    """

    def __init__(self, name: str, values: list[Any]) -> None:
        super().__init__(lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2)))
        self.name, self.values = name, values

    def on_fit_start(self) -> None:
        self.blocks[1].register_full_backward_hook(self._change)

    def _change(self, *_: Any) -> None:
        self.optimizers().param_groups[0][self.name] = self.values[self.global_step]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("lr", [torch.tensor(1e-2 / (1 + index)) for index in range(STEPS)]),
        ("betas", [(0.9, 0.99), (0.8, 0.99), [0.7, 0.99], [0.6, 0.99]]),
        ("maximize", [False, False, True, True]),
    ],
)
def test_options_that_change_during_backward(tmp_path: Path, name: str, values: list[Any]) -> None:
    model = ChangedInBackward(name, values)
    expected = train(tmp_path, "auto", model, rows(STEPS))
    assert_same(train(tmp_path, offloading(overlap="none"), model, rows(STEPS)), expected)
    with pytest.raises(RuntimeError, match=f"`{name}` of parameter group 0 of AdamW was changed during backward.*none"):
        train(tmp_path, offloading(), model, rows(STEPS))


def test_options_that_are_set_to_equal_values_during_backward(tmp_path: Path) -> None:
    model = ChangedInBackward("lr", [torch.tensor(1e-2) for _ in range(STEPS)])
    expected = train(tmp_path, "auto", model, rows(STEPS))
    assert_same(train(tmp_path, offloading(), model, rows(STEPS)), expected)


def test_options_of_any_type_are_compared(tmp_path: Path) -> None:
    """Tensors of several elements, NaN, and containers of them, as optimizers of user code keep in their groups."""
    nan = float("nan")

    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters)
        for group in optimizer.param_groups:
            tensors = {"ones": torch.ones(2), "nan": torch.tensor([nan, 1.0]), "count": torch.tensor([1, 2])}
            group |= {"tensors": tensors, "nested": [tensors["ones"], (tensors,)], "names": {"a", "b"}, "nan": nan}
        return optimizer

    model = BlocksModel(make_optimizer)
    expected = train(tmp_path, "auto", model, rows(STEPS))
    for strategy in (offloading(), offloading(min_bytes=100)):
        assert_same(train(tmp_path, strategy, model, rows(STEPS)), expected)
