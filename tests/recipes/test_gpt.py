"""The GPT recipe trains as it is, and every model and machine file fits on top of it."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI

from lightning_ssd.models import GPT

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "gpt.yaml"
DEFAULTS = ROOT / "recipes" / "defaults.yaml"
MODELS = sorted((ROOT / "configs" / "models").glob("gpt-*.yaml"))
MACHINES = sorted((ROOT / "configs" / "machines").glob("*.yaml"))


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["pytest"])
    monkeypatch.chdir(tmp_path)


def cli(*files: Path, options: tuple[str, ...] = (), run: bool = False) -> LightningCLI:
    configs = [argument for file in (DEFAULTS, RECIPE, *files) for argument in ("--config", str(file))]
    return LightningCLI(args=[*(["fit"] if run else []), *configs, *options], run=run)


def trained(config: Any) -> dict[str, Any]:
    return {**config.model.init_args.as_dict(), **config.data.init_args.as_dict()}


@pytest.mark.parametrize("file", MODELS, ids=lambda file: file.stem)
def test_model_file(file: Path) -> None:
    built = cli(file, options=("--trainer.strategy=auto",))
    assert isinstance(built.model, GPT)
    with torch.device("meta"):
        built.model.configure_model()
    parameters = sum(p.numel() for p in built.model.parameters())
    stated = re.search(r"([\d.]+) (b|m)illion parameters", file.read_text())
    assert stated is not None
    assert f"{parameters / {'b': 1e9, 'm': 1e6}[stated[2]]:.2f}" == stated[1]
    assert built.model.config.n_positions == built.datamodule.block_size
    assert built.model.config.n_embd // built.model.config.n_head in (32, 128)


def test_tiny_model_is_the_recipes_own() -> None:
    (file,) = [file for file in MODELS if file.stem == "gpt-tiny"]
    assert trained(cli(file, options=("--trainer.strategy=auto",)).config) == trained(
        cli(options=("--trainer.strategy=auto",)).config
    )


@pytest.mark.parametrize("file", MACHINES, ids=lambda file: file.stem)
def test_machine_file(file: Path) -> None:
    built = cli(file, options=("--trainer.accelerator=cpu",))
    assert type(built.trainer.strategy).__name__ == "SSDOffloadStrategy"


def test_later_files_and_options_change_single_keys() -> None:
    model, machine = ROOT / "configs/models/gpt-1.3b.yaml", ROOT / "configs/machines/laptop-cpu.yaml"
    config = cli(model, machine, options=("--model.n_layer=2", "--trainer.strategy.tier=host")).config
    assert config.model.init_args.n_embd == 2048 and config.model.init_args.n_layer == 2
    assert config.model.init_args.warmup_steps == 20 and config.data.init_args.max_bytes == 4_000_000
    assert config.trainer.strategy.init_args.tier == "host"
    assert config.trainer.strategy.init_args.min_bytes == 65536
    assert config.trainer.accelerator == "cpu" and len(config.trainer.callbacks) == 3


def test_recipe_trains_without_this_packages_strategy(tmp_path: Path) -> None:
    quick = ("--model.n_layer=1", "--data.block_size=64", "--data.max_bytes=300000", "--trainer.max_steps=30")
    cli(options=("--trainer.strategy=auto", "--trainer.accelerator=cpu", *quick), run=True)
    (file,) = tmp_path.glob("runs/gpt/version_0/metrics.csv")
    rows = list(csv.DictReader(file.open()))
    losses = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    assert len(losses) == 3 and losses[-1] < losses[0] < 5.6 and losses[-1] < 3.6
    assert any(row["train/device/items_per_sec"] for row in rows)
    assert any(row["train/device/flops_per_sec"] for row in rows)
    assert any(row["lr-AdamW/pg1"] for row in rows)
