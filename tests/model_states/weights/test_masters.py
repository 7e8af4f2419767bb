"""User code on resident bf16 parameters with fp32 masters, against offloaded ones, bit for bit."""

import copy
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ssd import register_optimizer
from lightning_ssd.model_states.weights.masters import MasteredParameter, MasterWeights
from tests.support.compare import assert_same
from tests.support.models import Model
from tests.support.products import thorough
from tests.support.states import some_stay, ssd, train

Write = Callable[[nn.Parameter], object]


def _set_data(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 0.75


def _scale_gradient(parameter: nn.Parameter) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


def _assign_gradient(parameter: nn.Parameter) -> None:
    if parameter.grad is not None:
        parameter.grad = torch.full_like(parameter, 0.25)


def _drop_gradient(parameter: nn.Parameter) -> None:
    parameter.grad = None


def _clip_gradient(parameter: nn.Parameter) -> None:
    if parameter.grad is not None:
        nn.utils.clip_grad_value_([parameter], 0.001953125)


def _load(parameter: nn.Parameter) -> None:
    holder = nn.Module()
    holder.weight = parameter
    with torch.no_grad():
        holder.weight.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))


WRITES: dict[str, Write] = {
    "clamp_": lambda parameter: parameter.clamp_(-0.1, 0.1),
    "mul_": lambda parameter: parameter.mul_(0.5),
    "add_": lambda parameter: parameter.add_(0.125),
    "a slice": lambda parameter: parameter[0].zero_(),
    "setitem": lambda parameter: parameter.__setitem__(slice(0, 2), 0.5),
    "nn.init": lambda parameter: nn.init.constant_(parameter, 0.3),
    "detach": lambda parameter: parameter.detach().mul_(0.5),
    "data": lambda parameter: parameter.data.add_(0.25),
    "data = ": _set_data,
    "copy_": _load,
    "_foreach": lambda parameter: torch._foreach_mul_([parameter], 0.5),
    "nothing": lambda parameter: parameter.clamp_(-100, 100),
    "grad.mul_": _scale_gradient,
    "grad = ": _assign_gradient,
    "grad = None": _drop_gradient,
    "clip_grad_value_": _clip_gradient,
}


class Program(Model):
    """Runs writes before and after batches, on random parameters of the blocks, and records the results.

    Two batches are a step. With these hooks parameters may be resident, unlike with hooks that Lightning calls between
    backward and step.
    """

    def __init__(self, names: list[str], seed: int) -> None:
        super().__init__()
        self.names, self.seed = names, seed
        self.mastered = 0
        self.saved: list[dict[str, Tensor]] = []

    def on_train_start(self) -> None:
        self.random = random.Random(self.seed)
        self.mastered = sum(isinstance(parameter, MasteredParameter) for parameter in self.blocks.parameters())
        self.left = list(self.names)
        self.chosen = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.run_some(batch_idx % 2 * 2)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.run_some(batch_idx % 2 * 2 + 1)

    def run_some(self, place: int) -> None:
        """Writes weights once between two steps: a second write that reverses the first would not change a master."""
        parameters = list(self.blocks.parameters())
        gradients = place in (1, 2)
        if place == 3:  # a step was made
            self.chosen = self.random.randrange(4)
        of_weights = [name for name in self.left if "grad" not in name][: place == self.chosen]
        of_gradients = [name for name in self.left if "grad" in name][:gradients]
        for name in of_weights + of_gradients:
            self.left.remove(name)
            with torch.no_grad():
                for parameter in self.random.sample(parameters, len(parameters) // 2):
                    WRITES[name](parameter)
            if self.random.random() < 0.3:
                self.saved.append({name: value.clone() for name, value in self.state_dict().items()})
        for parameter in parameters:
            self.losses.append(float(parameter.detach().float().sum()))
            if gradients:
                gradient = parameter.grad
                self.losses.append(0.0 if gradient is None else float(gradient.float().abs().sum()))


@pytest.mark.parametrize("seed", [0, thorough(2)])
def test_writes_and_gradients_count_as_those_of_offloaded_parameters(tmp_path: Path, seed: int) -> None:
    names = sorted(WRITES)
    random.Random(seed).shuffle(names)
    how: Any = dict(precision="bf16-true", limit_val_batches=0, max_epochs=2, accumulate_grad_batches=2, batches=12)
    expected: Any = train(tmp_path, ssd(states="host"), Program(names, seed), **how)
    actual: Any = train(tmp_path, some_stay(), Program(names, seed), **how)
    assert actual.mastered > 0 and expected.mastered == 0
    assert not actual.left and len(actual.saved) == len(expected.saved) > 0
    assert_same(actual, expected)
    for one, other in zip(actual.saved, expected.saved, strict=True):
        for name, value in one.items():
            assert torch.equal(value, other[name]), name


class ThroughTheOptimizer(Model):
    """Changes the parameters of the optimizer's groups, which are the masters."""

    data = False

    def on_train_batch_end(self, *_: Any) -> None:
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            for parameter in group["params"]:
                with torch.no_grad():
                    (parameter.data if self.data else parameter).clamp_(-0.05, 0.05)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx and not self.data:
            assert all(parameter.abs().max() < 0.051 for parameter in self.blocks.parameters())
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("data", [False, True])
def test_writes_to_masters_in_the_optimizers_groups_count(tmp_path: Path, data: bool) -> None:
    class Clamped(ThroughTheOptimizer):
        pass

    Clamped.data = data
    model = train(tmp_path, ssd(states="auto", gpu_memory="1MB"), Clamped(), precision="bf16-true", max_epochs=1)
    assert all(parameter.abs().max() < 0.0601 for parameter in model.blocks.parameters())


def _masters() -> tuple[MasteredParameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4).bfloat16())
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    MasterWeights([parameter], [optimizer])
    assert isinstance(parameter, MasteredParameter)
    return parameter, optimizer


def test_a_parameter_and_its_master_are_not_both_written() -> None:
    parameter, optimizer = _masters()
    with torch.no_grad():
        parameter.mul_(0.5)
        parameter.master.mul_(0.5)
    with pytest.raises(RuntimeError, match="its fp32 master .* were both changed"):
        optimizer.step()


def test_an_assigned_gradient_that_was_converted_is_not_written_afterwards() -> None:
    parameter, optimizer = _masters()
    gradient = torch.ones_like(parameter)
    parameter.grad = gradient
    gradient.mul_(0.5)
    with pytest.raises(RuntimeError, match="was changed afterwards"):
        optimizer.step()


def test_a_closure_that_is_called_again_reads_weights_that_the_step_has_changed() -> None:
    """The step uses values that the closure writes to the parameter."""
    parameter = nn.Parameter(torch.full((4,), 3.0).bfloat16())
    optimizer = torch.optim.LBFGS([parameter], lr=1.0, max_iter=10)
    masters = MasterWeights([parameter], [optimizer])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (parameter.float() - 1).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)
    assert torch.equal(parameter.detach(), torch.ones(4).bfloat16())
    masters.close()
    assert type(parameter) is nn.Parameter and optimizer.param_groups[0]["params"][0] is parameter


def test_copies_are_ordinary_parameters() -> None:
    parameter, _ = _masters()
    for other in (copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter))):
        assert type(other) is nn.Parameter and torch.equal(other, parameter) and not vars(other)


class Regrouped(Model):
    """Divides the optimizer's group between two micro-batches of a step."""

    divides = True

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        groups = self.trainer.optimizers[0].param_groups
        if self.divides and len(groups) == 1:
            groups.append({**groups[0], "params": groups[0]["params"][1:]})
            groups[0]["params"] = groups[0]["params"][:1]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def test_gradients_are_kept_when_parameter_groups_change(tmp_path: Path) -> None:
    how: Any = dict(precision="bf16-true", limit_val_batches=0, accumulate_grad_batches=2, max_epochs=1)
    other = Regrouped()
    other.divides = False
    assert_same(train(tmp_path, some_stay(), Regrouped(), **how), train(tmp_path, some_stay(), other, **how))


class NoticesDtypes(torch.optim.ASGD):
    """Notes the default dtype at each of its steps: ASGD makes tensors of that dtype."""

    seen: set[torch.dtype] = set()

    def step(self, closure: Any = None) -> Any:
        NoticesDtypes.seen.add(torch.get_default_dtype())
        result = super().step(closure)
        NoticesDtypes.seen.add(torch.get_default_dtype())
        return result


def test_steps_do_not_have_the_default_dtype_of_forwards(tmp_path: Path) -> None:
    """`bf16-true` changes the default dtype of all threads while a forward runs, beside steps of the one before."""
    register_optimizer(NoticesDtypes)
    how: Any = {"precision": "bf16-true", "gradient_clip_val": 0.5}
    makers: list[Any] = [lambda p: torch.optim.ASGD(p, 1e-2), lambda p: NoticesDtypes(p, 1e-2)]
    resident = train(tmp_path, some_stay(), Model(makers[0]), **how)
    NoticesDtypes.seen.clear()
    assert_same(train(tmp_path, ssd(), Model(makers[1]), **how), resident)
    assert NoticesDtypes.seen == {torch.float32}
