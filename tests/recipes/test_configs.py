"""Every file of model sizes and of machines can be merged into its recipe, and states the model's size."""

import re
from pathlib import Path

import pytest
import torch

from lightning_ssd.planning import HardwareProfile
from lightning_ssd.recipes.models import LanguageModule, RecipeModule
from tests.support.products import thorough
from tests.support.recipes import MACHINES, MODELS, RECIPES, no_arguments, read, recipe_of, trained  # noqa: F401

PLAIN = ("--trainer.strategy=auto",)
# Reading a recipe takes a second or two.
QUICK = {"gpt-1.3b", "bert-large", "t5-3b"}


@pytest.mark.parametrize("file", [file if file.stem in QUICK else thorough(file) for file in MODELS])
def test_model_file(file: Path) -> None:
    built = read(recipe_of(file), file, options=PLAIN)
    assert isinstance(built.model, RecipeModule)
    with torch.device("meta"):
        built.model.configure_model()
    parameters = sum(p.numel() for p in built.model.parameters())
    stated = re.search(r"([\d.]+) (b|m)illion parameters", file.read_text())
    assert stated is not None
    assert f"{parameters / {'b': 1e9, 'm': 1e6}[stated[2]]:.2f}" == stated[1]
    if isinstance(built.model, LanguageModule):
        config = built.model.config
        assert getattr(config, "max_position_embeddings", built.datamodule.block_size) == built.datamodule.block_size
        width = getattr(config, "d_kv", config.hidden_size // config.num_attention_heads)
        assert width in (32, 64, 128), "of an attention head"


@pytest.mark.parametrize("shape", [(8192, 4), (12288, 3), (16384, 2)])
def test_shapes_of_ssdtrain(shape: tuple[int, int]) -> None:
    """SSDTrain's figure 6; a T5's decoders are half of the layers, rounded down."""
    hidden, layers = shape
    for recipe in ("gpt", "bert", "t5"):
        (file,) = [file for file in MODELS if file.stem == f"{recipe}-h{hidden}-l{layers}"]
        text = file.read_text()
        sizes = {name: int(value) for name, value in re.findall(r"(\w+): (\d+)\b(?!\.)", text)}
        width = {"gpt": "n_embd", "bert": "hidden_size", "t5": "d_model"}[recipe]
        assert sizes[width] == hidden and (sizes["block_size"], sizes["batch_size"]) == (1024, 16)
        if recipe == "t5":
            assert sizes["num_decoder_layers"] == layers // 2 and sizes["num_layers"] == layers - layers // 2
            assert sizes["d_ff"] == 4 * hidden and sizes["num_heads"] * sizes["d_kv"] == hidden
        else:
            assert sizes[{"gpt": "n_layer", "bert": "num_hidden_layers"}[recipe]] == layers


@pytest.mark.parametrize("file", [file for file in MODELS if file.stem.endswith("-tiny")], ids=lambda file: file.stem)
def test_tiny_model_is_the_recipes_own(file: Path) -> None:
    recipe = recipe_of(file)
    assert (RECIPES / f"{recipe}.yaml").is_file()
    assert trained(read(recipe, file, options=PLAIN).config) == trained(read(recipe, options=PLAIN).config)


@pytest.mark.parametrize("file", MACHINES, ids=lambda file: file.stem)
def test_machine_file(file: Path) -> None:
    built = read("gpt", file, options=("--trainer.accelerator=cpu",))
    assert type(built.trainer.strategy).__name__ == "SSDOffloadStrategy"


@pytest.mark.parametrize("file", sorted(MACHINES[0].parent.glob("*.json")), ids=lambda file: file.stem)
def test_machine_profile(file: Path) -> None:
    """A profile that was not measured says so in its name, which the predictions print."""
    profile = HardwareProfile.from_json(file)
    assert ("not measured" in profile.name) == (file.stem != "h100")
