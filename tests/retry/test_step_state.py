"""The state before a micro-batch is restored, whatever has changed in it."""

import os
import weakref
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_ssd.retry.step_state import StepState


class Counts:
    """An object of the user."""

    def __init__(self) -> None:
        self.calls = 0


class Block(nn.Module):
    """A module with attributes of several kinds."""

    def __init__(self, shared: Counts) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.shared, self.scale, self.names, self.marks, self.items = shared, 1.5, {1}, set[int](), [1]


class Model(nn.Module):
    """Blocks, one of which is in the tree twice."""

    def __init__(self) -> None:
        super().__init__()
        shared = Counts()
        self.blocks = nn.ModuleList([Block(shared), Block(shared)])
        self.again = self.blocks[0]
        self.drop = nn.Dropout()


def describe(value: Any, seen: dict[int, Any]) -> Any:
    """Returns the state of an object, with the identity of all others."""
    if id(value) in seen or isinstance(value, str | int | float | type(None)):
        return value
    seen[id(value)] = value  # also keeps other objects from having the same identity
    if isinstance(value, torch.Tensor):
        return id(value), value.requires_grad, value.detach().clone().flatten().tolist()
    if isinstance(value, dict):
        return id(value), [(key, id(one), describe(one, seen)) for key, one in value.items()]
    if isinstance(value, list | set):
        return id(value), [(id(one), describe(one, seen)) for one in value]
    if isinstance(value, nn.Module | Counts):
        return id(value), describe(vars(value), seen)
    return id(value)


def _rename(module: nn.Module, index: int) -> None:
    """Gives the last attribute another name, so that the values are the same in the same order."""
    name = next(reversed(vars(module)))
    if not name.startswith("_"):
        module.__dict__[f"{name}_"] = module.__dict__.pop(name)


def _hook(module: nn.Module, index: int) -> None:
    module.register_forward_pre_hook(lambda *_: None, prepend=True)


def _unhook(module: nn.Module, index: int) -> None:
    module._forward_pre_hooks.clear()


def _add_buffer(module: nn.Module, index: int) -> None:
    module.register_buffer("another", torch.ones(1), persistent=index % 2 == 0)


def _write_buffers(module: nn.Module, index: int) -> None:
    for buffer in module.buffers(recurse=False):
        buffer.add_(1)


def _replace_module(module: nn.Module, index: int) -> None:
    for name in list(module._modules):
        setattr(module, name, nn.Linear(2, 2))


def _replace_parameters(module: nn.Module, index: int) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(parameter.detach().clone()))


def _replace_modules(module: nn.Module, index: int) -> None:
    module._modules = dict(module._modules)


def _delete(module: nn.Module, index: int) -> None:
    if isinstance(module, Block) and "scale" in vars(module):
        del module.scale


def _append(module: nn.Module, index: int) -> None:
    if isinstance(module, Block) and "items" in vars(module):
        module.items.append(index)
        module.names.add(index + 2)
        module.marks.add(len(module.marks))


def _count(module: nn.Module, index: int) -> None:
    if isinstance(module, Block):
        module.shared.calls += 1


def _scale(module: nn.Module, index: int) -> None:
    module.scale = index / 3


def _train(module: nn.Module, index: int) -> None:
    module.requires_grad_(index % 2 == 1)


CHANGES: list[Callable[[nn.Module, int], None]] = [
    lambda module, index: setattr(module, "items", [index]),
    lambda module, index: setattr(module, "extra", torch.ones(2)),
    lambda module, index: setattr(module, "child", nn.Dropout()),
    lambda module, index: module.train(index % 2 == 0) and None,
    lambda module, index: setattr(module, "_buffers", dict(module._buffers)),
    _rename, _hook, _unhook, _add_buffer, _write_buffers, _replace_module, _replace_parameters, _replace_modules,
    _delete, _append, _count, _scale, _train,
]  # fmt: skip


def record(model: nn.Module) -> StepState:
    return StepState(model, (), None, set())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(CHANGES)), max_size=3))
@example([(2, _append), (2, _count)])
@example([(2, _replace_module), (3, _train)])
def test_any_change_is_restored(changes: list[tuple[int, Callable[[nn.Module, int], None]]]) -> None:
    torch.manual_seed(0)
    model = Model()
    objects: dict[int, Any] = {}
    before = describe(model, objects)
    state = record(model)
    assert {id(one) for one in state.leaves} >= {id(one) for one in model.parameters()}
    for index, (number, function) in enumerate(changes):
        modules = list(model.modules())
        function(modules[number % len(modules)], index)
    if state.obstacle() is None:
        state.restore()
        assert describe(model, {}) == before


def test_replaced_values_are_freed_with_the_state() -> None:
    model = Model()
    model.drop.value = torch.ones(1)
    tensor = weakref.ref(model.drop.value)
    state = record(model)
    model.drop.value = None
    assert tensor() is not None
    del state
    assert tensor() is None


class CountsForwards(pl.Callback):
    """Counts the forwards of a module in a hook."""

    def __init__(self, module: nn.Module) -> None:
        self.forwards = 0
        self.log = open(os.devnull)  # noqa: SIM115
        module.register_forward_pre_hook(self.count)

    def count(self, *_: Any) -> None:
        self.forwards += 1


class CountsBackwards(CountsForwards):
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        self.forwards += 100


def test_attributes_of_a_callback_with_hooks_are_restored_and_its_files_are_no_obstacle() -> None:
    model = Model()
    callback = CountsForwards(model.drop)
    state = record(model)
    model.drop(torch.ones(1))
    assert state.obstacle() is None
    state.restore()
    assert callback.forwards == 0


def test_a_callback_that_counts_forwards_and_backwards_is_an_obstacle() -> None:
    """A second attempt repeats the forward alone."""
    model = Model()
    CountsBackwards(model.drop)
    state = record(model)
    assert "CountsBackwards" in str(state.obstacle())


def test_what_hooks_that_are_closures_have_changed_is_restored() -> None:
    """Most user code collects the outputs of layers so."""
    model, found, calls = Model(), list[torch.Tensor](), 0

    def collect(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        found.append(output)

    model.drop.register_forward_hook(collect)
    state = record(model)
    model.drop(torch.ones(1))
    assert len(found) == calls == 1
    state.restore()
    assert found == [] and calls == 0


class Writer:
    """An object of a package that logs on threads of its own."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.file = open(os.devnull)  # noqa: SIM115


Writer.__module__ = "wandb.run"


def test_loggers_are_no_obstacle_and_keep_what_was_written() -> None:
    model = Model()
    model.drop.writer = writer = Writer()
    state = record(model)
    writer.lines.append("loss")
    assert state.obstacle() is None
    state.restore()
    assert writer.lines == ["loss"]
