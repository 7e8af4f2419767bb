"""Aliases of weights that user code keeps after a training share memory with the parameters, as in plain torch."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ssd import SSDOffloadStrategy
from tests.support.access import Toy, compare, loader
from tests.support.compare import assert_same
from tests.support.trainings import make_trainer

ALIASES: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "detach": lambda weight: weight.detach(),
    "a part of data": lambda weight: weight.data[2:5].t(),
    "view of a view": lambda weight: weight.detach().view(-1)[3:40].chunk(2)[1],
}


class Keeping(Toy):
    """A toy that keeps an alias of a trained and of a frozen weight, writes to them, and reads them between steps."""

    def __init__(self, alias: str, hook: str) -> None:
        super().__init__(momentum=0.9)
        self.alias = alias
        self.kept: list[Tensor] = []
        self.at(hook, type(self).read)
        self.at("on_validation_start", type(self).read)

    def read(self) -> Any:
        if not self.kept:
            self.kept = [ALIASES[self.alias](block.up.weight) for block in (self.blocks[0], self.target)]
        self.kept[1].mul_(0.9)
        return [*self.kept, self.blocks[0].up.weight, self.target.up.weight]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.loss(batch[0]).item())


def between(module: Keeping) -> None:
    """Changes weights by torch after a training, each kind of which finds or leaves the aliases."""
    with torch.no_grad():
        module.blocks[0].up.weight[2:4] += 1
        module.kept[0].mul_(0.5)
    module.seen += [value.clone() for value in (*module.kept, module.blocks[0].up.weight)]
    assert all(type(alias) is Tensor for alias in module.kept) and pickle.dumps(module.kept)


def run(path: Path, module: Keeping, states: list[str | None], *, one_trainer: bool) -> Keeping:
    """Trains a module once for each of `states`, by one Trainer with the first of them or by new ones."""
    trainer: Any = None
    for number, where in enumerate(states):
        if trainer is None or not one_trainer:
            strategy: Any = "auto"
            if where is not None:
                small = {"ssd_capacity": "1MiB", "staging_memory": "16MiB"} if where == "ssd" else {}
                arguments: dict[str, Any] = {"states": where, "min_bytes": 1, "gpu_memory": "1B"}
                strategy = SSDOffloadStrategy(**arguments | small)
            trainer = make_trainer(path, strategy, max_epochs=1, num_sanity_val_steps=0)
        else:
            trainer.fit_loop.max_epochs = number + 1
        trainer.fit(module, loader(), loader(1))
        between(module)
        trainer.validate(module, loader(1), verbose=False)
    return module


@pytest.mark.parametrize(
    ("states", "alias", "one_trainer"),
    [("host", "detach", True), ("ssd", "a part of data", False), ("host", "view of a view", False)],
)
def test_aliases_follow_weights_in_later_trainings(tmp_path: Path, states: str, alias: str, one_trainer: bool) -> None:
    hook = "on_train_batch_end" if one_trainer else "on_before_zero_grad"
    runs = [run(tmp_path, Keeping(alias, hook), [where] * 2, one_trainer=one_trainer) for where in (states, None)]
    assert_same(*runs)


def test_aliases_follow_weights_that_are_offloaded_elsewhere(tmp_path: Path) -> None:
    """They are in other tiers in each training, and on the device in one."""
    runs = [
        run(tmp_path, Keeping("detach", "on_train_batch_end"), states, one_trainer=False)
        for states in (["host", None, "ssd"], [None] * 3)
    ]
    assert_same(*runs)


class Doubled(torch.autograd.Function):
    """Saves a second argument, whose sum backward needs."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return 2 * values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0].sum(), None


class SavingData(Toy):
    """A toy whose `data` of a weight autograd saves in training, after a tensor with a graph was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.kept:
            alias, values = self.blocks[0].up.weight.data, torch.ones(3, requires_grad=True)
            alias.mul_(torch.ones(8, 8, requires_grad=True))
            self.kept = [values, Doubled.apply(values, alias)]
        return super().training_step(batch, batch_idx)


def test_data_that_autograd_has_saved_is_read_after_the_training(tmp_path: Path) -> None:
    found = []
    for states in ("host", None):
        module = SavingData()
        strategy: Any = "auto" if states is None else SSDOffloadStrategy(states="host", min_bytes=1, gpu_memory="1B")
        make_trainer(tmp_path, strategy, max_epochs=1, num_sanity_val_steps=0).fit(module, loader(), loader(1))
        module.kept[1].sum().backward()
        found.append(module.kept[0].grad)
    assert_same(*found)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "conversion": lambda module: module.double(),
    "data": lambda module: setattr(module.blocks[0].up.weight, "data", torch.ones(8, 8)),
    "load": lambda module: module.blocks[0].up.weight.detach().fill_(0.25),
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_are_changed_after_a_training_have_plain_aliases(tmp_path: Path, change: str) -> None:
    runs = []
    for states in ("host", None):
        module = run(tmp_path, Keeping("detach", "on_train_batch_end"), [states], one_trainer=False)
        CHANGES[change](module)
        module.seen += [value.clone() for value in module.kept]
        runs.append(module)
    assert_same(*runs)


def test_aliases_follow_weights_whose_states_are_moved(tmp_path: Path) -> None:
    """A parameter group that is added divides flat parameters anew."""

    def make() -> Any:
        module = Keeping("a part of data", "on_train_batch_end")

        def add_group(module: Any) -> None:
            if module.global_step == 1:
                module.target.requires_grad_(True)
                module.optimizers().add_param_group({"params": list(module.target.parameters()), "lr": 0.2})

        module.at("on_train_batch_end", add_group)
        return module

    compare(tmp_path, make, "host", max_epochs=2)
