"""Profiles of models, measured and calculated."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given

from lightning_ssd.planning import ModelProfile
from tests.support.profiles import GIB, H100, make_model, models
from tests.support.transformer import transformer_profile


@given(models())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, model: ModelProfile) -> None:
    """A loaded profile equals the saved one."""
    path = tmp_path_factory.mktemp("profile") / "model.json"
    model.to_json(path)
    assert ModelProfile.from_json(path) == model


def test_wrong_files_name_the_operator(tmp_path: Path) -> None:
    """The message names unit, operator and field."""
    path = tmp_path / "model.json"
    content = json.loads(json.dumps(asdict(make_model())))
    del content["units"][1]["operators"][0]["flops"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="the operator `work` of the unit `unit1` of .* lacks the field `flops`"):
        ModelProfile.from_json(path)
    content["units"][1]["operators"] = 3
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="`operators` of the unit `unit1` of .* must be a list, not int"):
        ModelProfile.from_json(path)


def test_wrong_values_are_named() -> None:
    """The message names the entry and what to do."""
    model = make_model()
    with pytest.raises(ValueError, match="`micro_batches=0`"):
        replace(model, micro_batches=0)
    with pytest.raises(ValueError, match="`units` is empty. Give at least one"):
        replace(model, units=())
    with pytest.raises(ValueError, match="The name `unit0` occurs twice"):
        replace(model, units=(model.units[0], model.units[0]))
    with pytest.raises(ValueError, match="`unit0.parameters=-1`"):
        replace(model.units[0], parameters=-1)
    with pytest.raises(ValueError, match="unit `unit0` has no operators"):
        replace(model.units[0], operators=())
    with pytest.raises(ValueError, match="`work.saved_bytes=-1`"):
        replace(model.units[0].operators[0], saved_bytes=-1)
    with pytest.raises(ValueError, match="forward_seconds` of all operators is 0"):
        make_model(forward=0.0)


def test_samples_scale_activations_and_times() -> None:
    """Twice the samples have twice the time and activations, and the same states."""
    model = make_model()
    twice = model.with_samples(2)
    assert twice.forward_seconds == 2 * model.forward_seconds
    assert twice.saved_bytes == 2 * model.saved_bytes
    assert twice.tokens == 2 * model.tokens
    assert twice.units[0].state_bytes_read == model.units[0].state_bytes_read


def gpt(hidden: int, layers: int, heads: int, batch: int) -> ModelProfile:
    return transformer_profile(
        H100, hidden=hidden, layers=layers, heads=heads, sequence=1024, batch=batch, vocabulary=50257
    )


def test_sizes_of_gpt() -> None:
    """GPT-3 13B has 12.9 G parameters; a block's forward takes 24 b s h^2 FLOP and, causal, 2 b s^2 h."""
    model = gpt(5120, 40, 40, 32)
    assert model.parameters == pytest.approx(13.1e9, rel=0.01)
    block = model.units[1]
    tokens = 32 * 1024
    products = 24 * tokens * 5120**2 + 2 * tokens * 1024 * 5120
    pointwise = {"norm1", "norm2", "gelu"}
    assert sum(item.flops for item in block.operators if item.name not in pointwise) == products
    assert block.input_bytes == 2 * tokens * 5120


def test_lohan_activation_sizes() -> None:
    """LoHan III-B, III-C: of a 13B model at batch 32, 12.5 GB inter-block and 200 GB intra-block; 213 GB in all.

    Our profile is one without dropout. Its two masks, a byte for each element, take half an inter-block tensor each.
    """
    model = gpt(5120, 40, 40, 32)
    blocks = model.units[1:-1]
    inputs = sum(unit.input_bytes for unit in blocks)
    statistics = 40 * 4 * 32 * 1024 * 40  # of flash attention, which the paper doesn't count
    intra = sum(item.saved_bytes for unit in blocks for item in unit.operators) - statistics
    masks = 2 * inputs // 2
    assert inputs / GIB == 12.5
    assert (intra + masks) / GIB == 200
    assert (inputs + intra + masks) / GIB == pytest.approx(213, abs=0.5)


def test_a_description_has_one_line_for_each_unit() -> None:
    """One line for each unit."""
    model = make_model(3)
    assert len(model.describe().splitlines()) == 2 + 3
