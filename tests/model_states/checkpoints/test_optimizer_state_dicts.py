"""`load_state_dict` of optimizers: a state dict that user code has changed is loaded as by torch, or refused whole."""

import copy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ssd import SSDOffloadStrategy
from tests.support.compare import assert_same, same
from tests.support.models import Block, BlocksModel, Model
from tests.support.states import offloading, some_stay, train
from tests.support.trainings import fit, rows

MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
}
"""Steps in chunks, with a state of its own, and by the class's own `step`."""

StateDict = dict[str, Any]


def mapped(state: StateDict, change: Callable[[Tensor], Tensor]) -> StateDict:
    """Returns a state dict whose tensors of parameters' shapes are changed."""
    states = {
        number: {
            name: change(value) if isinstance(value, Tensor) and value.dim() else value for name, value in one.items()
        }
        for number, one in state["state"].items()
    }
    return {**state, "state": states}


def halved(optimizer: Optimizer, state: StateDict) -> StateDict:
    return mapped(state, lambda value: value * 0.5)


def renumbered(state: StateDict) -> StateDict:
    groups = [{**group, "params": [100 - number for number in group["params"]]} for group in state["param_groups"]]
    return {"state": {100 - number: one for number, one in state["state"].items()}, "param_groups": groups}


def exchanged(state: StateDict) -> StateDict:
    """Gives two parameters of one shape each other's states, by the order of their numbers in the group."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    shapes = [next(v for k, v in state["state"][n].items() if k != "step").shape for n in numbers]
    one, other = next(
        (a, b) for a in numbers for b in numbers if a < b and shapes[a] == shapes[b] and len(shapes[a]) > 1
    )
    swap = {one: other, other: one}
    groups = [{**group, "params": [swap.get(n, n) for n in group["params"]]} for group in state["param_groups"]]
    return {"state": state["state"], "param_groups": groups}


LOADED: dict[str, Callable[[StateDict], StateDict]] = {
    "other numbers": renumbered,
    "another order": exchanged,
    "double": lambda state: mapped(state, Tensor.double),
    "bfloat16": lambda state: mapped(state, Tensor.bfloat16),
    "none": lambda state: {**state, "state": {}},
    "scaled": lambda state: mapped(state, lambda value: value * 3),
}


class Loads(pl.Callback):
    """Loads a changed copy of the optimizer's state dict once, as user code might do between two steps."""

    def __init__(self, load: Callable[[Optimizer, StateDict], object]) -> None:
        self.load = load

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            self.load(trainer.optimizers[0], copy.deepcopy(trainer.optimizers[0].state_dict()))


def trained(path: Path, strategy: Any, maker: str, load: Callable[[Optimizer, StateDict], object]) -> Any:
    return train(path, strategy, Model(MAKERS[maker]), callbacks=[Loads(load)], max_epochs=1)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("change", LOADED)
def test_a_changed_state_dict_is_loaded_as_by_torch(tmp_path: Path, change: str, maker: str) -> None:
    def load(optimizer: Optimizer, state: StateDict) -> None:
        optimizer.load_state_dict(LOADED[change](state))

    plain, mine = (trained(tmp_path, strategy, maker, load) for strategy in ("auto", offloading()))
    assert_same(mine, plain)


@pytest.mark.parametrize("maker", MAKERS)
def test_a_state_dict_of_another_model_changes_nothing(tmp_path: Path, maker: str) -> None:
    def load(optimizer: Optimizer, state: StateDict) -> None:
        changed = halved(optimizer, state)
        changed["param_groups"][0]["params"].pop()
        with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
            optimizer.load_state_dict(changed)

    plain, mine = (trained(tmp_path, strategy, maker, load) for strategy in ("auto", offloading()))
    assert_same(mine, plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: mapped(state, lambda value: value[:1]), "the shape .*, and the parameter has"),
        (lambda state: mapped(state, lambda value: value.sum()), "the shape .*, and the parameter has"),
        (
            lambda state: {**state, "state": {n: {"step": one["step"]} for n, one in state["state"].items()}},
            "lacks exp_avg, exp_avg_sq",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    tmp_path: Path, change: Callable[[StateDict], StateDict], message: str
) -> None:
    def load(optimizer: Optimizer, state: StateDict) -> None:
        with pytest.raises(ValueError, match=f"{message}.*checkpoint\\['optimizer_states'\\]"):
            optimizer.load_state_dict(change(halved(optimizer, state)))

    mine = trained(tmp_path, offloading(), "AdamW", load)
    assert_same(mine, trained(tmp_path, "auto", "AdamW", lambda optimizer, state: None))


class Hooked(Model):
    """Registers hooks of state dicts in `configure_optimizers`, which see and change the states of all parameters."""

    def configure_optimizers(self) -> Any:
        optimizers, schedulers = super().configure_optimizers()
        self.seen: list[Tensor] = []
        optimizers[0].register_state_dict_post_hook(halved)
        optimizers[0].register_load_state_dict_pre_hook(halved)
        optimizers[0].register_load_state_dict_post_hook(self.see)
        return optimizers, schedulers

    def see(self, optimizer: Optimizer) -> None:
        for _, state in sorted(optimizer.state_dict()["state"].items()):
            self.seen += [state[name].clone() for name in sorted(state)]


@pytest.mark.parametrize("maker", MAKERS)
def test_hooks_of_state_dicts_find_all_states(tmp_path: Path, maker: str) -> None:
    loads = Loads(lambda optimizer, state: optimizer.load_state_dict(state))
    plain, mine = (
        train(tmp_path, strategy, Hooked(MAKERS[maker]), callbacks=[loads], max_epochs=1)
        for strategy in ("auto", offloading())
    )
    assert_same(mine, plain)


def test_a_hook_that_would_miss_states_is_refused(tmp_path: Path) -> None:
    def load(optimizer: Optimizer, state: StateDict) -> None:
        optimizer.register_load_state_dict_pre_hook(halved)
        optimizer.load_state_dict(state)

    with pytest.raises(RuntimeError, match="Register it in `configure_optimizers`, or with `prepend=True`"):
        trained(tmp_path, offloading(), "AdamW", load)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("strategy", [lambda: offloading(min_bytes=300), some_stay], ids=["small stay", "units stay"])
def test_states_have_the_order_of_plain_lightning(tmp_path: Path, strategy: Callable[[], Any], maker: str) -> None:
    """Where some states are on the device and others are not, also after a checkpoint was loaded."""
    saved: dict[str, list[Any]] = {}
    for name, make in (("plain", lambda: "auto"), ("mine", strategy)):
        checkpoint, resumed = tmp_path / f"{name}.ckpt", tmp_path / f"{name} resumed.ckpt"
        model = Model(MAKERS[maker])
        train(tmp_path, make(), model, max_epochs=1, callbacks=[SavesAtEnd(checkpoint)])
        train(tmp_path, make(), model, max_epochs=2, callbacks=[SavesAtEnd(resumed)], ckpt_path=checkpoint)
        saved[name] = [torch.load(file)["optimizer_states"] for file in (checkpoint, resumed)]
    assert_same(saved["mine"], saved["plain"])


@pytest.mark.parametrize("strategy", [lambda: offloading(min_bytes=300), some_stay], ids=["small stay", "units stay"])
def test_states_have_the_order_of_plain_lightning_after_fit(tmp_path: Path, strategy: Callable[[], Any]) -> None:
    orders = []
    for make in (lambda: "auto", strategy):
        trained_model = train(tmp_path, make(), Model(MAKERS["AdamW"]), max_epochs=1)
        orders.append(list(trained_model.trainer.optimizers[0].state_dict()["state"]))
    assert orders[1] == orders[0]


class SavesAtEnd(pl.Callback):
    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        trainer.save_checkpoint(self.file)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end", "on_train_end"])
@pytest.mark.parametrize("states", ["host", "ssd"])
def test_states_that_are_reset_by_an_assignment_are_an_error(tmp_path: Path, states: str, hook: str) -> None:
    """Also after the last step: plain Lightning would begin the next `fit` with new states."""

    def reset(trainer: pl.Trainer, *_: Any) -> None:
        trainer.optimizers[0].state = defaultdict(dict)

    callback = pl.callbacks.LambdaCallback(**{hook: reset})
    with pytest.raises(RuntimeError, match=r"`state` of AdamW was assigned during training.*reset all of them with"):
        train(tmp_path, offloading(states), Model(), max_epochs=1, callbacks=[callback])


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end", "on_before_optimizer_step"])
@pytest.mark.parametrize("states", ["host", "ssd"])
def test_states_are_reset_as_the_error_says(tmp_path: Path, states: str, hook: str) -> None:
    """The remedy has the effect of the assignment in plain training."""

    def reset(trainer: pl.Trainer, *_: Any) -> None:
        optimizer = trainer.optimizers[0]
        if trainer.global_step == 2 and isinstance(trainer.strategy, SSDOffloadStrategy):
            optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})
        elif trainer.global_step == 2:
            optimizer.state = defaultdict(dict)

    runs = []
    for strategy in (offloading(states), "auto"):
        callback = pl.callbacks.LambdaCallback(**{hook: reset})
        runs.append(train(tmp_path, strategy, Model(), max_epochs=2, callbacks=[callback]))
    assert_same(*runs)


def thaw(model: Any, first: Optimizer, second: Optimizer) -> None:
    model.frozen.requires_grad_(True)
    first.add_param_group({"params": list(model.frozen.parameters()), "lr": 1e-3})


def move_to_another_optimizer(model: Any, first: Optimizer, second: Optimizer) -> None:
    second.add_param_group({"params": [first.param_groups[0]["params"].pop()]})


def replace_parameter(model: Any, first: Optimizer, second: Optimizer) -> None:
    """Replaces a parameter, whose states the new one gets when the state dict is loaded."""
    old = model.blocks[0].up.weight
    model.blocks[0].up.weight = torch.nn.Parameter(old.detach() * 0.5)
    parameters = first.param_groups[0]["params"]
    parameters[[one is old for one in parameters].index(True)] = model.blocks[0].up.weight


class ChangesGroups(BlocksModel):
    """Makes and loads state dicts of two optimizers, whose groups it changes between two steps."""

    def __init__(self, change: Callable[[Any, Optimizer, Optimizer], None], loads: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.frozen, self.head = Block(8, 8).requires_grad_(False), Block(8, 8)
        self.change, self.loads = change, loads
        self.shown: list[StateDict] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(super().forward(x)))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.blocks.parameters(), 1e-2), torch.optim.RMSprop(self.head.parameters(), 1e-3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx != 2:
            return
        first, second = self.trainer.optimizers
        before = copy.deepcopy(first.state_dict())
        self.change(self, first, second)
        if self.change is replace_parameter:
            first.load_state_dict(before)
        self.show()
        if self.loads:
            second.load_state_dict(self.shown[-1])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()

    def on_train_end(self) -> None:
        self.show()

    def show(self) -> None:
        optimizers = self.trainer.optimizers
        if self.change is move_to_another_optimizer:  # torch makes no state dict of the first one, which has a state
            optimizers = optimizers[1:]
        for optimizer in optimizers:
            state = copy.deepcopy(optimizer.state_dict())
            self.shown.append({**state, "state": dict(sorted(state["state"].items()))})


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("change", [thaw, move_to_another_optimizer, replace_parameter])
@pytest.mark.parametrize("states", ["host", "ssd"])
def test_state_dicts_after_a_change_of_groups_are_those_of_plain_lightning(
    tmp_path: Path, states: str, change: Any, loads: bool
) -> None:
    def trained(strategy: Any) -> ChangesGroups:
        return fit(tmp_path, strategy, ChangesGroups(change, loads), rows(5), max_epochs=1)  # type: ignore[no-any-return]

    found, expected = trained(offloading(states)), trained("auto")
    assert_same(found, expected)
    assert found.losses == expected.losses
    assert same(found.shown, expected.shown)
