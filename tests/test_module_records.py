"""The state before a micro-batch is restored, whatever has changed in it and since the micro-batch before."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_ssd.module_records import MAX_CHANGES, ModuleRecords
from lightning_ssd.step_state import StepState


class Counts:
    """An object of the user."""

    def __init__(self) -> None:
        self.calls = 0


class Block(nn.Module):
    """A module with attributes of several kinds."""

    calls = 0

    def __init__(self, shared: Counts) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.shared, self.scale, self.names, self.marks, self.items = shared, 1.5, {1}, set[int](), [1]


class OtherBlock(Block):
    """A class that a module may be given later, with an attribute of its own."""

    steps = 0


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


def _replace_attributes(module: nn.Module, index: int) -> None:
    module.__dict__ = dict(module.__dict__)


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
        Block.calls += 1
    if isinstance(module, OtherBlock):
        OtherBlock.steps += 1


def _change_class(module: nn.Module, index: int) -> None:
    if isinstance(module, Block):
        module.__class__ = OtherBlock


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

WITHIN = st.lists(st.tuples(st.integers(0, 9), st.sampled_from(CHANGES)), max_size=2)
BETWEEN = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from([*CHANGES, _replace_attributes, _change_class])), max_size=2
)


def change(model: nn.Module, changes: list[Any]) -> None:
    for index, (module, function) in enumerate(changes):
        modules = list(model.modules())
        function(modules[module % len(modules)], index)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(WITHIN, BETWEEN), min_size=2, max_size=MAX_CHANGES + 4))
@example([([], [(2, _append)]), ([(2, _append)], [])])
@example([([], [(2, _change_class)]), ([(2, _count)], [])])
@example([([], [(2, _scale)]), ([], [(2, _replace_module)]), ([(3, _train)], [])])
def test_any_change_is_restored(steps: list[tuple[list[Any], list[Any]]]) -> None:
    """Changes of each micro-batch, which are restored, and then changes between it and the next one."""
    torch.manual_seed(0)
    Block.calls = OtherBlock.steps = 0
    model = Model()
    records = ModuleRecords(model)
    for within, between in steps:
        objects: dict[int, Any] = {}
        before = describe(model, objects), Block.calls, OtherBlock.steps
        state = StepState(records, (), None, set())
        assert {id(one) for one in state.leaves} >= {id(one) for one in model.parameters()}
        change(model, within)
        if state.obstacle() is None:
            state.restore()
            assert (describe(model, {}), Block.calls, OtherBlock.steps) == before
        change(model, between)


def test_unchanged_modules_are_recorded_once() -> None:
    model = Model()
    records = ModuleRecords(model)
    records.update()
    first = records.records
    records.update()
    assert records.records is first
    modules = {record.module for record in first}
    assert modules == {one for one in model.modules() if not any(True for _ in one.buffers(recurse=False))}


def test_a_module_that_changes_is_recorded_no_longer_and_others_still_are() -> None:
    model = Model()
    records = ModuleRecords(model)
    records.update()
    before = {record.module: record for record in records.records}
    model.blocks[1].scale = 2.0
    model.drop.register_forward_hook(lambda *_: None)  # hooks are copied for each micro-batch
    records.update()
    after = {record.module: record for record in records.records}
    assert before.keys() - after.keys() == {model.blocks[1]} and model.blocks[1] in records.others
    assert all(after[one] is before[one] for one in after)


@pytest.mark.parametrize("owner", ["tensors", "changing"])
def test_replaced_tensors_are_freed_with_the_state(owner: str) -> None:
    """Records, which outlive a micro-batch, refer to no tensors but parameters, and to nothing that changes often."""
    model = Model()
    records = ModuleRecords(model)
    values = [torch.ones(1) if owner == "tensors" else [torch.ones(1)] for _ in range(3)]
    tensors = [weakref.ref(one if isinstance(one, torch.Tensor) else one[0]) for one in values]
    model.drop.value = values.pop(0)
    for index in range(2):
        state = StepState(records, (), None, set())
        model.drop.value = values.pop(0)
        del state
        assert tensors[index]() is None or (owner, index) == ("changing", 0)
    assert tensors[0]() is None


def test_models_whose_modules_change_often_are_not_recorded() -> None:
    model = Model()
    records = ModuleRecords(model)
    for _ in range(MAX_CHANGES + 1):
        records.update()
        assert records.records
        model.child = nn.Dropout()
    records.update()
    assert not records.records and records.others[0] is model
