"""Mistakes in recipes and data end a run before its first step, with a line that names the key and the remedy."""

import os
import subprocess
from pathlib import Path

import pytest

from lightning_ssd import cli
from lightning_ssd.recipes.models.tiny_llama import cached_tiny_llama
from tests.support import forks
from tests.support.recipes import RECIPES, no_arguments  # noqa: F401

QUICK = ["--trainer.max_steps=1", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
LLAMA = "model_type: llama, vocab_size: 2048, intermediate_size: 8, num_hidden_layers: 1"
FILES = {
    "file.txt": "some text\n",
    "field.jsonl": '{"txt": "a"}\n',
    "answer.jsonl": '{"messages": [{"role": "user", "content": "a"}]}\n',
    "pictures/0/a.png": "no picture",
    "folder/file.txt": "a file that is not a model's",
}


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def refused(recipe: str, *options: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Returns the line that the run of a recipe ends with; fails if it trains, or ends by anything else."""
    for name, text in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    with pytest.raises(SystemExit) as ended:
        few = ["--data.max_samples=50"] if recipe in ("finetune", "lora") else []
        cli.main(["run", str(RECIPES / f"{recipe}.yaml"), *QUICK, *few, *options])
    assert ended.value.code == 2
    assert not [*Path().glob("runs/**/*.ckpt")]
    return capsys.readouterr().err


MISTAKES = [
    ("gpt", "--data.path=missing.txt", "data.path=missing.txt does not exist"),
    ("gpt", "--data.path=field.jsonl", "field.jsonl:1 has no text under 'text' (it has 'txt'): set data.field"),
    ("gpt", "--model.nokey=1", "GPT has no argument 'nokey'"),
    ("gpt", "--model.n_head=3", "model.n_embd=128 is not a multiple of model.n_head=3"),
    ("gpt", "--model.pretrained=folder", "model.pretrained=folder holds no config.json"),
    ("gpt", "--trainer.accumulate_grad_batches=0", "trainer.accumulate_grad_batches=0 is out of range"),
    ("gpt", "--trainer.gradient_clip_val=-1", "trainer.gradient_clip_val=-1 is out of range"),
    ("gpt", "--trainer.val_check_interval=0", "trainer.val_check_interval=0 is out of range"),
    ("gpt", "--trainer.logger.save_dir=file.txt", "file.txt/gpt: Not a directory"),
    ("gpt", "--trainer.strategy.path=missing", "/missing' does not exist: create it first"),
    ("gpt", "--config=gpt-1.3", "Did you mean 'gpt-1.3b'?"),
    ("gpt", "--ckpt_path=missing.ckpt", "Checkpoint file not found: missing.ckpt"),
    ("gpt", "--ckpt_path=file.txt", "ckpt_path=file.txt is no whole checkpoint"),
    ("gpt", "--trainer.max_steps=-5", "`max_steps` must be a non-negative integer or -1"),
    ("bert", "--model.vocab_size=10", "token ids and the model 10: set model.vocab_size="),
    ("bert", "--data.mask_share=2", "data.mask_share=2.0"),
    ("t5", "--data.mean_span=0", "data.mean_span=0"),
    ("dit", "--data.path=pictures", "pictures/0/a.png can't be read as an image"),
    ("dit", "--model.num_classes=3", "The data has 10 classes and the model 3"),
    ("dit", "--trainer.callbacks.columns=0", "SampleGrid's columns=0 is out of range"),
    ("dit", "--data.class_path=lightning_ssd.recipes.data.TextDataModule", "no 'images': set data.class_path="),
    ("finetune", "--data.path=answer.jsonl", "answer.jsonl:1 has no message of the role 'assistant'"),
    ("finetune", "--model.config={model_type: nope}", "the model_type 'nope', which transformers does not know"),
    ("finetune", "--trainer.callbacks.folder=file.txt", "file.txt is a file: name a folder"),
    ("finetune", "--trainer.callbacks.folder=folder", "folder holds other files than a saved model"),
    ("finetune", "--trainer.callbacks.folder=file.txt/model", "file.txt/model can't be written"),
    ("lora", "--model.targets=[nope]", "model.targets=['nope'] names modules that take no adapters"),
    ("long_context", "--data.block_size=4096", "sequences of 4096 tokens and the model takes 2048"),
]


@pytest.mark.quick_cases(4)
@pytest.mark.drawn(8)
@pytest.mark.parametrize(("recipe", "option", "message"), MISTAKES)
def test_a_mistake_is_named_before_training(
    recipe: str, option: str, message: str, capsys: pytest.CaptureFixture[str], cache: None
) -> None:
    shown = refused(recipe, option, capsys=capsys)
    assert message in shown[shown.rindex("error: ") :]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            "{model_type: llama, hiden_size: 16}",
            "the key 'hiden_size', which 'llama' does not have: is it 'hidden_size'",
        ),
        ("{model_type: gpt2, n_layer: 0}", "model.config.n_layer=0 is out of range"),
        (f"{{{LLAMA}, hidden_size: 100, num_attention_heads: 3}}", "model.config makes no model"),
        (f"{{{LLAMA}, hidden_size: 12, num_attention_heads: 4, num_key_value_heads: 2}}", "makes heads of 3"),
        (f"{{{LLAMA}, hidden_size: 16, num_attention_heads: 4, num_key_value_heads: 3}}", "num_key_value_heads=3"),
        ("{model_type: bert}", "whose attention is not causal unless `is_decoder` is true"),
    ],
)
def test_sizes_that_make_no_model_are_named(
    config: str, message: str, capsys: pytest.CaptureFixture[str], cache: None
) -> None:
    shown = refused("finetune", f"--model.config={config}", f"--data.tokenizer={cached_tiny_llama()}", capsys=capsys)
    assert message in shown[shown.rindex("error: ") :]


LOGGERS = """
import sys

for name in {blocked}:
    sys.modules[name] = None  # as if it were not installed
from lightning_ssd import cli

options = ["--trainer.max_steps=1", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
options += ["--trainer.limit_val_batches=0", "--data.max_bytes=100000", "--model.n_layer=1"]
cli.main(["run", {recipe!r}, *options, "--trainer.logger={logger}", "--trainer.logger.save_dir=runs"])
"""
PACKAGES = {"TensorBoardLogger": ("tensorboard", "tensorboardX"), "WandbLogger": ("wandb",)}


def run_with_logger(logger: str, *, blocked: tuple[str, ...]) -> "subprocess.CompletedProcess[str]":
    script = LOGGERS.format(logger=logger, blocked=blocked, recipe=str(RECIPES / "gpt.yaml"))
    environment = os.environ | {"WANDB_MODE": "offline"}
    return forks.run(["-c", script], env=environment, cwd=Path.cwd(), timeout=200)


@pytest.mark.thorough
@pytest.mark.parametrize("logger", PACKAGES)
def test_a_logger_whose_package_is_missing_is_refused_by_name(logger: str) -> None:
    run = run_with_logger(logger, blocked=PACKAGES[logger])
    assert run.returncode == 2, run.stderr[-2000:]
    last = run.stderr[run.stderr.rindex("error: ") :]
    assert PACKAGES[logger][0] in last and "pip install" in last and "Traceback" not in run.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("logger", PACKAGES)
def test_a_logger_whose_package_is_installed_is_used(logger: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES[logger][0])
    run = run_with_logger(logger, blocked=())
    assert run.returncode == 0, run.stderr[-2000:]
    assert not [*tmp_path.glob("**/metrics.csv")]
    assert [*tmp_path.glob("runs/**/*tfevents*"), *tmp_path.glob("runs/**/*.wandb")]
