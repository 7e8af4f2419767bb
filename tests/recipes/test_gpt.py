"""The GPT recipe trains unchanged, and later files and options change single keys."""

import re
from pathlib import Path

import pytest

from tests.support.recipes import ROOT, logged, no_arguments, read  # noqa: F401


def test_later_files_and_options_change_single_keys() -> None:
    model, machine = ROOT / "configs/models/gpt-1.3b.yaml", ROOT / "configs/machines/laptop-cpu.yaml"
    config = read("gpt", model, machine, options=("--model.n_layer=2", "--trainer.strategy.tier=host")).config
    assert config.model.init_args.n_embd == 2048 and config.model.init_args.n_layer == 2
    assert config.model.init_args.warmup_steps == 20 and config.data.init_args.max_bytes == 4_000_000
    assert config.trainer.strategy.init_args.tier == "host"
    assert config.trainer.strategy.init_args.min_bytes == 65536
    assert config.trainer.accelerator == "cpu" and len(config.trainer.callbacks) == 3


def test_recipe_trains_without_this_packages_strategy(tmp_path: Path) -> None:
    quick = ("--model.n_layer=1", "--data.block_size=64", "--data.max_bytes=300000", "--trainer.max_steps=30")
    read("gpt", options=("--trainer.strategy=auto", "--trainer.accelerator=cpu", *quick), run=True)
    losses = logged(tmp_path, "train/loss")
    assert len(losses) == 3 and losses[-1] < losses[0] < 5.6 and losses[-1] < 3.6
    assert logged(tmp_path, "train/device/items_per_sec")
    assert logged(tmp_path, "train/device/flops_per_sec")
    assert logged(tmp_path, "lr-AdamW/pg1")


def test_the_readmes_first_command_keeps_everything_on_ssd(caplog: pytest.LogCaptureFixture) -> None:
    command = next(line for line in (ROOT / "README.md").read_text().splitlines() if "ssd run gpt" in line)
    assert command.endswith(" && lightning-ssd run gpt -c laptop-cpu")
    quick = ("--model.n_layer=1", "--data.block_size=64", "--data.max_bytes=100000", "--trainer.max_steps=2")
    with caplog.at_level("INFO", logger="lightning_ssd"):
        read("gpt", ROOT / "configs/machines/laptop-cpu.yaml", options=quick, run=True)
    assert re.search(r"weights: \S+ MiB on SSD", caplog.text) and re.search(r"states: \S+ MiB on SSD", caplog.text)
    assert "activations: those of 64.00 KiB or more to SSD" in caplog.text
