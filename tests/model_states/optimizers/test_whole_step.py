"""Optimizers whose parameters depend on each other, or that are wrapped, hooked or overridden, in whole trainings."""

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import lightning_ssd
from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.model_states.optimizers import user_optimizers
from lightning_ssd.model_states.optimizers.user_optimizers import registered_class, steps_whole
from tests.support import trainings
from tests.support.compare import assert_same
from tests.support.models import BlocksModel
from tests.support.optimizers import Coupled, Program
from tests.support.states import offloading
from tests.support.trainings import fit, rows

STEPS = 4


class Model(BlocksModel):
    """Two groups of parameters, each a part of every block."""

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return self.make_optimizer([{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 2e-2}])


def train(path: Path, strategy: Any, model: Model, **arguments: Any) -> Model:
    trained: Model = trainings.train(path, strategy, model, rows(STEPS), **arguments)
    return trained


def compare(path: Path, make: Callable[[Any], Any], strategy: SSDOffloadStrategy, **arguments: Any) -> Model:
    """Asserts that plain Lightning gives the same numbers, and returns the model that was trained with offload."""
    model = Model(make)
    actual = train(path, strategy, model, **arguments)
    assert_same(actual, train(path, "auto", model, **arguments))
    return actual


OPERATIONS = ["elementwise", "momentum", "parameter_norm", "group_norm", "clipped", "trust_ratio", "attribute", "decay",
              "again"]  # fmt: skip
PROGRAMS = dict(
    operations=st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=4),
    states=st.sampled_from(["host", "ssd"]),
    min_bytes=st.sampled_from([1, 100]),
    clip=st.sampled_from([None, 0.1]),
)


def run_program(path: Path, operations: list[str], states: str, min_bytes: int, clip: float | None) -> None:
    compare(
        path,
        lambda groups: Program(groups, operations),
        offloading(states, min_bytes=min_bytes),
        gradient_clip_val=clip,
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@given(**PROGRAMS)
@settings(max_examples=5, deadline=None)
def test_programs(path: Path, **how: Any) -> None:
    """Steps of random operations that depend on a parameter, a group, all parameters, or earlier steps."""
    run_program(path, **how)


@pytest.mark.thorough
@given(**PROGRAMS)
@settings(max_examples=60, deadline=None)
def test_programs_thoroughly(path: Path, **how: Any) -> None:
    run_program(path, **how)


class Initialized(torch.optim.AdamW):
    """AdamW with other defaults and an additional method."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, lr=3e-3, weight_decay=0.2)

    def largest(self) -> float:
        return max(group["lr"] for group in self.param_groups)


class Lookahead(Optimizer):
    """Slow weights, and an optimizer for the fast ones."""

    def __init__(self, groups: Any) -> None:
        self.inner = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.inner.param_groups]
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self.inner.step(closure)
        self.calls += 1
        if self.calls % 2 == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for p, average in zip(group["params"], slow, strict=True):
                    p.copy_(average.lerp_(p, 0.5))
        return loss


class Delegating(Optimizer):
    """Groups and states are those of an inner optimizer."""

    def __init__(self, groups: Any) -> None:
        self.inner = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        self.defaults = self.inner.defaults
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._patch_step_function()

    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.inner.state)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)


def lbfgs(groups: Any) -> Optimizer:
    return torch.optim.LBFGS([p for group in groups for p in group["params"]], lr=0.1, max_iter=3)


def with_scheduler(groups: Any) -> Any:
    optimizer = Coupled(groups)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def with_wrapped_step(groups: Any) -> Optimizer:
    optimizer = torch.optim.AdamW(groups)
    step = optimizer.step

    def wrapped(closure: Any = None) -> Any:
        loss = step(closure)
        for group in optimizer.param_groups:
            group["lr"] *= 0.8
        return loss

    optimizer.step = wrapped  # type: ignore[method-assign]
    return optimizer


NAMED = [Coupled, Initialized, Lookahead, Delegating, lbfgs, with_scheduler, with_wrapped_step]


@pytest.mark.parametrize("make", NAMED)
def test_named_optimizers(tmp_path: Path, make: Callable[[Any], Any], recwarn: pytest.WarningsRecorder) -> None:
    compare(tmp_path, make, offloading(), accumulate_grad_batches=2 if make is Coupled else 1)
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", [{"gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}, {"max_epochs": 2}])
@pytest.mark.parametrize("states", ["host", "ssd"])
@pytest.mark.parametrize("make", NAMED)
def test_named_optimizers_thoroughly(
    tmp_path: Path, make: Callable[[Any], Any], states: str, arguments: dict[str, Any]
) -> None:
    if make is lbfgs and "gradient_clip_val" not in arguments:
        pytest.skip("Lightning runs its closure alike in all of them")
    compare(tmp_path, make, offloading(states), **arguments)


def test_hooks_run_once_a_step_and_read_the_same_values_as_in_plain_lightning(tmp_path: Path) -> None:
    seen: list[Any] = []

    def look(when: str, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norms = [None if p.grad is None else p.grad.norm().item() for p in parameters]
        seen.append((when, norms, [p.norm().item() for p in parameters]))

    def make(groups: Any) -> Optimizer:
        optimizer = torch.optim.AdamW(groups)
        optimizer.register_step_pre_hook(lambda optimizer, *_: look("before", optimizer))
        optimizer.register_step_post_hook(lambda optimizer, *_: look("after", optimizer))
        return optimizer

    of_all = register_optimizer_step_post_hook(lambda optimizer, *_: look("all", optimizer))
    try:
        compare(tmp_path, make, offloading())
    finally:
        of_all.remove()
    half = len(seen) // 2
    assert seen[:half] == seen[half:] and [when for when, *_ in seen[:3]] == ["before", "after", "all"]


def test_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    """The checkpoint is of either strategy, and is resumed under either."""
    model = Model(Coupled)
    expected = train(tmp_path, "auto", model, max_epochs=2)
    for first, second in (("auto", offloading()), (offloading("ssd"), "auto")):
        begun = Model(Coupled)
        saved = tmp_path / f"{isinstance(first, str)}.ckpt"

        class Save(pl.Callback):
            def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any, saved: Path = saved) -> None:
                if trainer.current_epoch == 0:
                    trainer.save_checkpoint(saved)

        begun = train(tmp_path, first, begun, max_epochs=1, callbacks=[Save()])
        resumed = train(tmp_path, second, Model(Coupled), ckpt_path=saved, max_epochs=2)
        resumed.losses = begun.losses + resumed.losses
        assert_same(resumed, expected)


def test_a_registered_class_is_stepped_during_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(user_optimizers, "_REGISTERED", set(user_optimizers._REGISTERED))

    class Sign(Optimizer):
        def __init__(self, groups: Any) -> None:
            super().__init__(groups, {"lr": 1e-3})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            loss = None if closure is None else torch.enable_grad()(closure)()
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        average = self.state[p].setdefault("average", torch.zeros_like(p))
                        p.sub_(average.lerp_(p.grad, 0.1).sign(), alpha=group["lr"])
            return loss

    compare(tmp_path, Sign, offloading())
    assert "Sign is stepped whole" in caplog.text and "register_optimizer(Sign)" in caplog.text
    caplog.clear()
    lightning_ssd.register_optimizer(Sign)
    compare(tmp_path, Sign, offloading())
    assert "stepped whole" not in caplog.text


def test_which_classes_are_registered() -> None:
    parameters = [nn.Parameter(torch.zeros(2, 2))]
    assert registered_class(Initialized) is torch.optim.AdamW and registered_class(Coupled) is None
    assert not steps_whole(Initialized(parameters)) and steps_whole(Coupled(parameters))
    assert steps_whole(lbfgs([{"params": parameters}])) and steps_whole(Lookahead(parameters))
    for name in ("Adam", "AdamW", "SGD", "RMSprop", "Muon", "Adafactor"):
        assert not steps_whole(getattr(torch.optim, name)(parameters))

    class Grouped(torch.optim.SGD):
        def _init_group(self, group: Any, *lists: Any) -> Any:
            return super()._init_group(group, *lists)

    assert steps_whole(Grouped(parameters))


@pytest.mark.parametrize(
    "change", ["look up", "get", "assign", "replace", "read all", "clear", "delete", "pop any", "update"]
)
def test_states_of_offloaded_parameters_are_not_looked_up(tmp_path: Path, change: str) -> None:
    """`Optimizer.state` raises an error for offloaded states, in place of looking empty."""

    class Looking(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            (optimizer,) = trainer.optimizers
            parameter = pl_module.blocks[0].up.weight
            if change == "look up":
                optimizer.state[parameter]["exp_avg"].norm()
            elif change == "get":
                pl_module.optimizers().state.get(parameter)
            elif change == "assign":
                optimizer.state[parameter] = {}
            elif change == "read all":
                for state in optimizer.state.values():
                    state["exp_avg"].mul_(0.5)
            elif change == "clear":
                optimizer.state.clear()
            elif change == "delete":
                del optimizer.state[parameter]
            elif change == "pop any":
                optimizer.state.popitem()
            elif change == "update":
                optimizer.state.update({parameter: {}})
            else:
                optimizer.state = copy.deepcopy(optimizer.state)

    model = Model(torch.optim.AdamW)
    with pytest.raises(RuntimeError, match="load_state_dict.*states='gpu'"):
        train(tmp_path, offloading(), model, callbacks=[Looking()])
    train(tmp_path, "auto", model, callbacks=[Looking()])


@pytest.mark.parametrize("states", ["host", "ssd"])
def test_copies_of_an_optimizer_have_its_states(tmp_path: Path, states: Any) -> None:
    """Copies that are made amid training have copies of the offloaded states, which later steps do not change."""

    class CopiedOptimizers(pl.Callback):
        def __init__(self) -> None:
            self.copies: list[Any] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            (optimizer,) = trainer.optimizers
            self.copies += [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]

    plain, offloaded = CopiedOptimizers(), CopiedOptimizers()
    for strategy, callback in (("auto", plain), (offloading(states), offloaded)):
        train(tmp_path, strategy, Model(torch.optim.AdamW), callbacks=[callback])
    for one, other in zip(plain.copies, offloaded.copies, strict=True):
        expected, actual = one.state_dict()["state"], other.state_dict()["state"]
        assert expected.keys() == actual.keys() and expected
        for number, state in expected.items():
            assert all(torch.equal(value, actual[number][name]) for name, value in state.items())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_keys_of_optimizer_states_are_plain(tmp_path: Path, momentum: float) -> None:
    """`Optimizer.state` has the keys of plain training: none before the first step, or without momentum."""

    class Keys(pl.Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            state = trainer.optimizers[0].state
            names = [name for name, parameter in pl_module.named_parameters() if parameter in state]
            assert len(state) == len(list(state)) == len(state.keys()) == len(state.items()) == len(names)
            assert {id(key) for key, _ in state.items()} == {id(key) for key in state}
            self.seen.append(names)

    plain, offloaded = Keys(), Keys()
    for strategy, keys in (("auto", plain), (offloading(), offloaded)):
        model = Model(lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=momentum))
        train(tmp_path, strategy, model, callbacks=[keys])
    assert plain.seen == offloaded.seen and not plain.seen[0] and bool(plain.seen[-1]) == bool(momentum)


def test_a_scheduler_is_made_amid_the_training(tmp_path: Path) -> None:
    """Its constructor wraps the function of the method `optimizer.step`, as does that of LearningRateFinder."""

    class Warms(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.warm_up = torch.optim.lr_scheduler.LinearLR(self.trainer.optimizers[0], 0.1, total_iters=2)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx > 1:
                self.warm_up.step()

    def trained(make_strategy: Callable[[], Any]) -> Model:
        model = Warms(Coupled)
        for _ in range(2):
            fit(tmp_path, make_strategy(), model, rows(STEPS))
        return model

    assert_same(trained(offloading), trained(lambda: "auto"))
