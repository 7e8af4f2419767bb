"""The Llama shapes have the stated number of parameters under every fine-tuning recipe."""

import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch.cli import LightningCLI

from lightning_ssd.recipes.data import TextDataModule
from lightning_ssd.recipes.models import CausalLM, LoRACausalLM

ROOT = Path(__file__).parents[2]
MODELS = sorted((ROOT / "configs" / "models").glob("llama-*.yaml"))
RECIPES = [ROOT / "recipes" / f"{name}.yaml" for name in ("finetune", "lora", "long_context")]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("file", MODELS, ids=lambda file: file.stem)
@pytest.mark.parametrize("recipe", RECIPES[:2], ids=lambda file: file.stem)
def test_model_file(recipe: Path, file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["pytest"])
    monkeypatch.chdir(tmp_path)
    configs = [argument for path in (ROOT / "recipes/defaults.yaml", recipe, file) for argument in ("-c", str(path))]
    built = LightningCLI(args=[*configs, "--trainer.accelerator=cpu", "--trainer.strategy=auto"], run=False)
    assert type(built.model) is (LoRACausalLM if recipe.stem == "lora" else CausalLM)
    assert isinstance(built.datamodule, TextDataModule)
    with torch.device("meta"):
        model = built.model._make()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    stated = re.search(r"([\d.]+) billion parameters", file.read_text())
    assert stated is not None and f"{parameters / 1e9:.2f}" == stated[1]
    assert model.config.max_position_embeddings >= built.datamodule.block_size
    assert built.model.chunked_loss and built.model.gradient_checkpointing and built.model.draw_late
