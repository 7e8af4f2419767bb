"""The DiT recipe trains as it is and draws samples, and every model file fits on top of it."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from PIL import Image

from lightning_ssd import cli as commands
from lightning_ssd.models import DiT

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "dit.yaml"
DEFAULTS = ROOT / "recipes" / "defaults.yaml"
MODELS = sorted((ROOT / "configs" / "models").glob("dit-*.yaml"))
LOHAN = {"dit-xl-2": (28, 16, 1152), "dit-0.9b": (30, 16, 1280), "dit-1.4b": (32, 16, 1536)}
LOHAN |= {"dit-10b": (28, 32, 4096), "dit-20b": (40, 40, 5120), "dit-40b": (48, 56, 7168)}


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["pytest"])
    monkeypatch.chdir(tmp_path)


def parse(*files: Path) -> LightningCLI:
    configs = [argument for file in (DEFAULTS, RECIPE, *files) for argument in ("--config", str(file))]
    return LightningCLI(args=[*configs, "--trainer.strategy=auto"], run=False)


@pytest.mark.thorough
@pytest.mark.parametrize("file", MODELS, ids=lambda file: file.stem)
def test_model_file(file: Path) -> None:
    assert LOHAN.keys() < {file.stem for file in MODELS}
    built = parse(file)
    assert isinstance(built.model, DiT)
    with torch.device("meta"):
        built.model.configure_model()
    parameters = sum(p.numel() for p in built.model.parameters())
    stated = re.search(r"([\d.]+) (b|m)illion parameters", file.read_text())
    assert stated is not None
    assert f"{parameters / {'b': 1e9, 'm': 1e6}[stated[2]]:.2f}" == stated[1]
    if file.stem in LOHAN:
        assert LOHAN[file.stem] == (built.model.num_layers, built.model.num_heads, built.model.hidden_size)
        assert (built.model.image_size // built.model.patch_size) ** 2 == 1024


@pytest.mark.thorough
def test_tiny_model_is_the_recipes_own() -> None:
    def trained(config: Any) -> dict[str, Any]:
        return {**config.model.init_args.as_dict(), **config.data.init_args.as_dict()}

    (file,) = [file for file in MODELS if file.stem == "dit-tiny"]
    assert trained(parse(file).config) == trained(parse().config)


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
        assert image.size == (
            8 * 10 * 6,
            10 * 10 * 6,
        )  # 8 columns of 10 classes, 8 pixels and a frame, 6 times as large
        assert len(set(image.tobytes())) > 50


@pytest.mark.thorough
def test_samples_are_recognizable_digits(tmp_path: Path) -> None:
    """A classifier of scikit-learn, trained on the real digits, recognizes them."""
    from sklearn.datasets import load_digits
    from sklearn.svm import SVC

    options = ["--trainer.accelerator=cpu", "--trainer.strategy=auto", "--trainer.enable_progress_bar=false"]
    options += ["--trainer.max_steps=500", "--trainer.limit_val_batches=1", "--trainer.val_check_interval=500"]
    assert commands.main(["run", str(RECIPE), *options]) == 0
    (checkpoint,) = tmp_path.glob("runs/dit/version_0/checkpoints/last.ckpt")
    model = DiT.load_from_checkpoint(checkpoint, weights_only=True).eval()
    labels = torch.arange(10).repeat_interleave(8)
    images = model.sample(torch.randn(80, 1, 8, 8, generator=torch.Generator().manual_seed(1)), labels)
    digits = load_digits()
    classifier = SVC(gamma=0.001, C=10).fit(digits.data, digits.target)
    recognized = classifier.predict(((images[:, 0] + 1) * 8).flatten(1).numpy())
    assert (recognized == labels.numpy()).mean() > 0.7
