"""The DiT recipe trains unchanged and draws samples; its sizes are those of LoHan's table VI."""

import csv
from pathlib import Path

import pytest
from PIL import Image

from lightning_ssd import cli as commands
from lightning_ssd.recipes.models import DiT
from tests.support.recipes import RECIPES, ROOT, no_arguments, read  # noqa: F401

RECIPE = RECIPES / "dit.yaml"
MODELS = ROOT / "configs" / "models"
LOHAN = {"dit-xl-2": (28, 16, 1152), "dit-0.9b": (30, 16, 1280), "dit-1.4b": (32, 16, 1536)}
LOHAN |= {"dit-10b": (28, 32, 4096), "dit-20b": (40, 40, 5120), "dit-40b": (48, 56, 7168)}


@pytest.mark.thorough
@pytest.mark.parametrize("name", LOHAN)
def test_sizes_are_those_of_lohan(name: str) -> None:
    model = read("dit", MODELS / f"{name}.yaml", options=("--trainer.strategy=auto",)).model
    assert isinstance(model, DiT)
    assert LOHAN[name] == (model.num_layers, model.num_heads, model.hidden_size)
    assert (model.image_size // model.patch_size) ** 2 == 1024


QUICK = ["--trainer.accelerator=cpu", "--trainer.max_steps=20", "--trainer.val_check_interval=20"]
QUICK += ["--trainer.limit_val_batches=1", "--trainer.enable_progress_bar=false", "--model.num_layers=1"]
QUICK += ["--data.batch_size=32", "--model.warmup_steps=3", "--model.lr=1e-2"]


def test_recipe_trains_and_writes_a_grid_of_samples(tmp_path: Path) -> None:
    assert commands.main(["run", str(RECIPE), *QUICK, "--trainer.strategy=auto"]) == 0
    (file,) = tmp_path.glob("runs/dit/version_0/metrics.csv")
    rows = list(csv.DictReader(file.open()))
    losses = [float(row["train/loss_mean"]) for row in rows if row["train/loss_mean"]]
    assert len(losses) == 2 and losses[-1] < 0.8 * losses[0] < 1
    assert any(row["val/loss"] for row in rows)
    assert [row["train/images"] for row in rows if row["train/images"]] == ["320.0", "640.0"]
    (grid,) = tmp_path.glob("runs/dit/version_0/samples/step_000020.png")
    with Image.open(grid) as image:
        # 8 columns, 10 classes; 8 pixels, 6 times as large, and a frame of 2 on each side.
        assert image.size == (8 * (8 * 6 + 4), 10 * (8 * 6 + 4))
        assert len(set(image.tobytes())) > 50
