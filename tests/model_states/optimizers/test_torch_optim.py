"""Every class of torch.optim, in whole trainings on a CPU: offloaded states give plain Lightning's bits."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_ssd import SSDOffloadStrategy
from tests.support.models import ManualSteps
from tests.support.trainings import make_trainer

# Below, at and above the widths of vectors.
LENGTHS = (1, 7, 15, 17, 63, 65, 1000, 4099)
STEPS = 4

optim = torch.optim
OTHERS = (optim.LBFGS, optim.SparseAdam)  # `test_whole_step` has the first, and below is the second
CLASSES: dict[str, Callable[[Any], optim.Optimizer]] = {
    cls.__name__: cls for cls in vars(optim).values() if isinstance(cls, type) and cls not in (optim.Optimizer, *OTHERS)
}
VARIANTS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW, fused": lambda groups: optim.AdamW(groups, fused=True),
    "AdamW, foreach": lambda groups: optim.AdamW(groups, foreach=True),
    "AdamW, amsgrad": lambda groups: optim.AdamW(groups, amsgrad=True),
    "AdamW, maximize": lambda groups: optim.AdamW(groups, maximize=True),
    "AdamW, tensor lr": lambda groups: optim.AdamW(groups, lr=torch.tensor(1e-2)),
    "AdamW, fused, tensor lr": lambda groups: optim.AdamW(groups, lr=torch.tensor(1e-2), fused=True),
    "AdamW, betas below a half": lambda groups: optim.AdamW(groups, betas=(0.3, 0.4)),
    "AdamW, tensor betas": lambda groups: optim.AdamW(groups, betas=(torch.tensor(0.9), torch.tensor(0.999))),
    "Adam, weight decay": lambda groups: optim.Adam(groups, weight_decay=0.1),
    "Adam, fused, weight decay": lambda groups: optim.Adam(groups, weight_decay=0.1, fused=True),
    "Adam, fused, amsgrad": lambda groups: optim.Adam(groups, fused=True, amsgrad=True),
    "Adagrad, fused": lambda groups: optim.Adagrad(groups, fused=True),
    "SGD, momentum": lambda groups: optim.SGD(groups, momentum=0.9),
    "SGD, nesterov": lambda groups: optim.SGD(groups, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD, nesterov, foreach": lambda groups: optim.SGD(groups, momentum=0.9, nesterov=True, foreach=True),
    "SGD, fused": lambda groups: optim.SGD(groups, momentum=0.9, dampening=0.1, fused=True),
    "SGD, maximize": lambda groups: optim.SGD(groups, maximize=True),
    "SGD, tensor lr": lambda groups: optim.SGD(groups, lr=torch.tensor(1e-2), momentum=0.9),
    "RMSprop, foreach, momentum": lambda groups: optim.RMSprop(groups, foreach=True, momentum=0.9, centered=True),
    "NAdam, foreach": lambda groups: optim.NAdam(groups, foreach=True, weight_decay=0.1),
    "RAdam, foreach": lambda groups: optim.RAdam(groups, foreach=True),
    "Adamax, maximize": lambda groups: optim.Adamax(groups, maximize=True, weight_decay=0.1),
    "Adafactor, maximize": lambda groups: optim.Adafactor(groups, maximize=True, weight_decay=0.1),
}
KINDS = CLASSES | VARIANTS


class Part(nn.Module):
    def __init__(self, length: int, columns: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(length, 1) if columns else torch.randn(length))
        self.more = nn.Parameter(torch.randn(length + 3, 2) if columns else torch.randn(length + 3))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.weight.dim() == 1 else self.weight[:, 0]
        more = self.more if self.more.dim() == 1 else self.more.sum(1)
        return (weight * x - 1).square().mean() + (more * x).sin().mean() * weight.tanh().mean()


class Odd(pl.LightningModule):
    """Parameters of odd lengths, two in a unit, in two groups."""

    def __init__(self, make: Callable[[Any], optim.Optimizer], *, columns: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make = make
        self.parts = nn.ModuleList(Part(length, columns) for length in LENGTHS)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = torch.stack([part(batch[0]) for part in self.parts]).sum()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> optim.Optimizer:
        parameters = list(self.parameters())
        return self.make([{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 3e-2}])


def train(path: Path, strategy: Any, model: Odd, clip: float | None, **arguments: Any) -> tuple[Odd, Any]:
    """Trains a copy of `model`; returns it and the state dict of its optimizer at the end."""
    model = copy.deepcopy(model)
    batches = torch.linspace(-1, 1, STEPS)
    trainer = make_trainer(path, strategy, gradient_clip_val=clip, **arguments)
    ends: list[Any] = []

    class End(pl.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            ends.append(copy.deepcopy(trainer.optimizers[0].state_dict()))

    trainer.callbacks.append(End())
    trainer.fit(model, torch.utils.data.DataLoader(batches))
    return model, ends[0]


def differences(one: tuple[Odd, Any], other: tuple[Odd, Any]) -> dict[str, float]:
    """Returns the differing losses, weights and optimizer states, with the largest difference of each."""
    found = {}
    if one[0].losses != other[0].losses:
        found["loss"] = max(abs(a - b) for a, b in zip(one[0].losses, other[0].losses, strict=True))
    for (name, mine), theirs in zip(one[0].named_parameters(), other[0].parameters(), strict=True):
        if not torch.equal(mine, theirs):
            found[name] = float((mine - theirs).abs().max())
    states, others = one[1]["state"], other[1]["state"]
    assert list(states) == list(others)
    for number, state in states.items():
        assert list(state) == list(others[number]), number
        for name, value in state.items():
            expected = others[number][name]
            same = torch.equal(value, expected) if isinstance(value, Tensor) else value == expected
            if not same:
                found[f"{name} of {number}"] = float((value - expected).abs().max())
    return found


def check(path: Path, name: str, states: str, clip: float | None) -> None:
    model = Odd(KINDS[name], columns=name == "Muon")
    strategy = SSDOffloadStrategy(states=states, min_bytes=1, offload="none", ssd_capacity="8MiB")  # type: ignore[arg-type]
    found = differences(train(path, strategy, model, clip), train(path, "auto", model, clip))
    assert found == {}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", CLASSES)
def test_default_constructors(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, "host", 0.5 if name in ("Adam", "SGD", "Rprop") else None)


@pytest.mark.thorough
@pytest.mark.parametrize(("states", "clip"), [("host", 0.5), ("ssd", None)])
@pytest.mark.parametrize("name", KINDS)
def test_settings(tmp_path: Path, name: str, states: str, clip: float | None) -> None:
    check(tmp_path, name, states, clip)


@pytest.mark.parametrize("name", ["AdamW, amsgrad", "SGD, nesterov, foreach"])
def test_settings_with_states_on_ssd(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, "ssd", None)


class Sparse(Odd):
    """A resident embedding with sparse gradients, and frozen weights."""

    def __init__(self) -> None:
        super().__init__(lambda groups: optim.SparseAdam(groups[0]["params"], lr=1e-2), columns=False)
        self.requires_grad_(False)
        self.embedding = nn.Embedding(32, 8, sparse=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        rows = self.embedding(torch.arange(batch_idx, batch_idx + 4))
        return super().training_step(batch, batch_idx) * rows.square().sum()

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.SparseAdam(self.embedding.parameters(), lr=1e-2)


def test_sparse_adam(tmp_path: Path) -> None:
    strategy = SSDOffloadStrategy(states="host", min_bytes=1, offload="none")
    assert differences(train(tmp_path, strategy, Sparse(), None), train(tmp_path, "auto", Sparse(), None)) == {}


class Manual(ManualSteps, Odd):
    """Steps within autocast, which casts matrix products of the optimizer, too."""


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_matrix_products_of_an_optimizer_in_manual_optimization(tmp_path: Path, precision: str) -> None:
    strategy = SSDOffloadStrategy(states="host", min_bytes=1, offload="none")
    model = Manual(KINDS["Adafactor"], columns=True)
    found, expected = (train(tmp_path, kind, model, None, precision=precision) for kind in (strategy, "auto"))
    assert differences(found, expected) == {}
