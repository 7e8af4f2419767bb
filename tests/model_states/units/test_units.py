"""Units: every parameter in exactly one, blocks first, sharing respected."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from lightning_ssd.model_states import is_compiled
from lightning_ssd.model_states.units import units as units_module
from lightning_ssd.model_states.units.compiled_modules import compiled_regions
from lightning_ssd.model_states.units.units import Unit, find_units


def names(units: list[Unit]) -> list[str]:
    return [unit.name for unit in units]


def check(module: nn.Module, units: list[Unit]) -> None:
    """Asserts that each parameter is in one unit, one of whose modules contains its owner."""
    members = [parameter for unit in units for _, parameter in unit.parameters]
    assert len(members) == len(set(members))
    assert set(members) == set(module.parameters())
    assert len(set(names(units))) == len(units)
    for unit in units:
        inside = [{child for child in hooked.modules()} for hooked in unit.modules]
        for _, parameter in unit.parameters:
            owners = [
                child for child in module.modules() if any(parameter is own for own in child._parameters.values())
            ]
            assert all(any(owner in found for found in inside) for owner in owners)


def test_gpt() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=8, n_head=2, vocab_size=20, n_positions=8))
    units = find_units(model)
    check(model, units)
    assert names(units) == [
        "transformer.wte", "transformer.wpe", *(f"transformer.h.{i}" for i in range(3)), "transformer.ln_f",
    ]  # fmt: skip
    assert units[0].modules == (model.transformer.wte, model.lm_head)  # tied


def test_bert_and_t5() -> None:
    config = BertConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=20)
    bert = BertModel(config)
    check(bert, find_units(bert))
    assert {"encoder.layer.0", "encoder.layer.1"} <= set(names(find_units(bert)))
    t5 = T5ForConditionalGeneration(T5Config(num_layers=2, d_model=8, d_kv=4, d_ff=8, num_heads=2, vocab_size=20))
    units = find_units(t5)
    check(t5, units)
    shared = next(unit for unit in units if any(p is t5.shared.weight for _, p in unit.parameters))
    assert set(shared.modules) >= {t5.shared, t5.lm_head}
    assert sum("block" in unit.name for unit in units) == 4


def test_repeated_children_are_blocks() -> None:
    model = nn.ModuleDict(
        {
            "stem": nn.Linear(2, 2),
            "body": nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))),
        }
    )
    assert names(find_units(model)) == ["stem", "body.0", "body.1"]


def test_a_block_used_twice_and_parts_shared_by_blocks() -> None:
    shared = nn.Linear(2, 2)
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), shared), nn.Sequential(nn.Linear(2, 2), shared)])
    blocks.append(blocks[0])
    units = find_units(blocks)
    check(blocks, units)
    assert len(units) == 3
    assert units[1].modules == (blocks[0], blocks[1])
    assert {id(p) for _, p in units[1].parameters} == {id(p) for p in shared.parameters()}


def test_modules_that_bypass_their_children_are_whole() -> None:
    model = nn.ModuleDict({"a": nn.MultiheadAttention(4, 2), "b": parametrizations.weight_norm(nn.Linear(2, 2))})
    assert names(find_units(model)) == ["a", "b"]


def test_own_parameters_and_lists_of_them() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.zeros(2))
            self.many = nn.ParameterList([torch.zeros(2), torch.zeros(3)])
            self.layer = nn.Linear(2, 2)

    net = Net()
    units = find_units(net)
    check(net, units)
    assert names(units) == ["Net", "layer"]
    assert len(units[0].parameters) == 3


def test_a_compiled_list_is_no_region() -> None:
    """torch ignores its `compile()`: it is never called."""
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(2, 2) for _ in range(2))})
    model["blocks"].compile(backend="eager")
    assert names(find_units(model)) == ["blocks.0", "blocks.1"]
    model["blocks"][0].compile(backend="eager")
    assert list(compiled_regions(model)) == [model["blocks"][0]]


class Held(nn.Module):
    """Blocks, and functions among the attributes of the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x)  # type: ignore[no-any-return]


class Helper:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)  # type: ignore[no-any-return]


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def hold(model: Any, function: Callable[..., Any]) -> None:
    model.function = function


def replace_by_disabled(model: Any) -> None:
    model.blocks[0] = torch.compiler.disable(model.blocks[0])


@pytest.mark.parametrize(
    ("change", "compiled"),
    [
        (lambda model: hold(model, torch.compile(square)), True),
        (lambda model: hold(model, torch.compile(partial(square))), True),
        (lambda model: hold(model, torch.compiler.disable(model.run)), False),
        (lambda model: hold(model.blocks[1], torch.compile(square)), True),
        (lambda model: model.compile(disable=True), False),
        (lambda model: model.blocks[1].compile(disable=True), False),
        (replace_by_disabled, False),
    ],
)
def test_functions_that_use_no_weights_in_compiled_code_change_no_unit(
    change: Callable[[Any], None], compiled: bool
) -> None:
    model = Held()
    change(model)
    assert len(find_units(model)) == 3 and not list(compiled_regions(model))
    assert any(map(is_compiled, model.modules())) == compiled  # whether operators of the training can be planned


@pytest.mark.parametrize(
    "make",
    [
        lambda model: model.run,
        lambda model: lambda x: model.run(x),
        lambda model: partial(model.blocks[1].forward),
        lambda model: (lambda inner: lambda x: inner[0](x))([lambda x: model(x)]),
        lambda model: (lambda weight: lambda x: x @ weight)(model.blocks[1].weight),
        lambda model: Helper(model).run,
    ],
)
def test_functions_that_use_weights_in_compiled_code_make_their_module_a_unit(make: Callable[[Any], Any]) -> None:
    model = Held()
    hold(model, torch.compile(make(model)))
    assert len(find_units(model)) == 1 and list(compiled_regions(model)) == [model]


def test_blocks_by_name_and_by_function() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.LayerNorm(2))
    assert len(find_units(model, by=["Sequential"])) == 1
    assert len(find_units(model, by=lambda module: isinstance(module, nn.LayerNorm))) == 3
    with pytest.raises(ValueError, match=r"`units` names Block.*LayerNorm, Linear"):
        find_units(model, by=["Block"])
    with pytest.raises(ValueError, match=r"must be a list of class names, such as \['Linear'\]"):
        find_units(model, by="Linear")
    with pytest.raises(ValueError, match="no shape yet"):
        find_units(nn.LazyLinear(3))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_any_tree(seed: int) -> None:
    rng = random.Random(seed)
    pool: list[nn.Module] = []

    def grow(depth: int) -> nn.Module:
        if pool and rng.random() < 0.2:
            return rng.choice(pool)
        module: nn.Module = rng.choice([nn.Module, nn.Sequential, nn.ModuleList])()
        if depth == 0 or rng.random() < 0.3:
            module = nn.Linear(2, 2, bias=rng.random() < 0.5)
        elif type(module) is nn.Module:
            if rng.random() < 0.5:
                module.own = nn.Parameter(torch.zeros(1))
            for index in range(rng.randrange(3)):
                setattr(module, f"child{index}", grow(depth - 1))
        else:
            for index in range(rng.randrange(4)):
                module.add_module(str(index), grow(depth - 1))
        pool.append(module)
        return module

    module = grow(3)
    layers = [child for child in module.modules() if isinstance(child, nn.Linear)]
    if len(layers) > 1 and rng.random() < 0.5:
        layers[0].weight = layers[-1].weight
    check(module, find_units(module))


def test_large_units_have_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter is in one part; parts have enough elements, and small parameters are in the first one."""
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=20, n_positions=8))
    monkeypatch.setattr(units_module, "PART_ELEMENTS", 700)
    units = {unit.name: unit for unit in find_units(model)}
    assert [part.name for part in units["transformer.wte"].parts] == ["weight"]
    first, *others = units["transformer.h.0"].parts
    assert first.name == "attn.c_attn.weight" and len(first.parameters) == 9
    assert [[name.removeprefix("transformer.h.0.") for name, _ in part.parameters] for part in others] == [
        ["attn.c_proj.weight", "mlp.c_fc.weight"],
        ["mlp.c_proj.weight"],
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 100))
def test_parts_of_any_unit(sizes: list[int], least: int) -> None:
    module = nn.ParameterList(torch.zeros(size) for size in sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units_module, "PART_ELEMENTS", least)
        unit = Unit("all", (module,), tuple(module.named_parameters()))
        parts = unit.parts
    numels = [sum(parameter.numel() for _, parameter in part.parameters) for part in parts]
    assert sorted(name for part in parts for name, _ in part.parameters) == sorted(dict(unit.parameters))
    assert len({part.name for part in parts}) == len(parts)
    assert len(parts) == 1 or min(numels) >= least
    small = {name for name, parameter in unit.parameters if units_module.SMALL_SHARE * parameter.numel() < least}
    assert small <= {name for name, _ in parts[0].parameters}
