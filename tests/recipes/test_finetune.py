"""The fine-tuning recipes train unchanged, resume, and write folders that transformers and peft load."""

import csv
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_ssd import cli

ROOT = Path(__file__).parents[2]
QUICK = ("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--data.max_samples=120",
         "--data.block_size=128", "--data.batch_size=4", "--trainer.limit_val_batches=1",
         "--trainer.log_every_n_steps=1", "--model.warmup_steps=2")  # fmt: skip


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr("sys.argv", ["pytest"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def losses(version: Path) -> list[float]:
    rows = csv.DictReader((version / "metrics.csv").open())
    return [float(row["train/loss"]) for row in rows if row["train/loss"]]


def test_recipe(tmp_path: Path) -> None:
    assert cli.main(["run", str(ROOT / "recipes/finetune.yaml"), *QUICK, "--trainer.max_steps=12"]) == 0
    version = tmp_path / "runs/finetune/version_0"
    assert len(losses(version)) == 12 and losses(version)[-1] < losses(version)[0] - 0.5
    model = AutoModelForCausalLM.from_pretrained(version / "model", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(version / "model", local_files_only=True)
    saved = torch.load(version / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(model.lm_head.weight, saved["model.lm_head.weight"])
    assert tokenizer.chat_template


@pytest.mark.thorough
def test_lora_recipe(tmp_path: Path) -> None:
    assert cli.main(["run", str(ROOT / "recipes/lora.yaml"), *QUICK, "--trainer.max_steps=20"]) == 0
    version = tmp_path / "runs/lora/version_0"
    assert len(losses(version)) == 20 and losses(version)[-1] < losses(version)[0] - 0.5
    model = AutoPeftModelForCausalLM.from_pretrained(version / "model", local_files_only=True)
    assert any(value.any() for name, value in model.state_dict().items() if "lora_B" in name)


@pytest.mark.thorough
def test_long_context_recipe(tmp_path: Path) -> None:
    quick = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--data.max_bytes=100000",
             "--data.block_size=512", "--trainer.limit_val_batches=1", "--trainer.log_every_n_steps=1",
             "--model.warmup_steps=2"]  # fmt: skip
    assert cli.main(["run", str(ROOT / "recipes/long_context.yaml"), *quick, "--trainer.max_steps=6"]) == 0
    version = tmp_path / "runs/long_context/version_0"
    assert len(losses(version)) == 6 and losses(version)[-1] < losses(version)[0]
    AutoModelForCausalLM.from_pretrained(version / "model", local_files_only=True)
