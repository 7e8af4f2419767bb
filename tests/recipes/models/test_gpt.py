"""GPT learns and logs its figures; `test_language.py` has the tests of all language models."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ssd._lightning import pl
from lightning_ssd.recipes.data import TextDataModule
from lightning_ssd.recipes.models import GPT


def tiny(**settings: Any) -> GPT:
    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2, "warmup_steps": 3}
    return GPT(**{**sizes, "lr": 1e-2, **settings})


def trainer(folder: Path, **settings: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        enable_checkpointing=False,
        **{**quiet, "log_every_n_steps": 1, **settings},
    )


@pytest.fixture
def text(tmp_path: Path) -> TextDataModule:
    (tmp_path / "text.txt").write_text("All work and no play makes Jack a dull boy.\n" * 200)
    return TextDataModule(tmp_path, block_size=32, batch_size=4, val_share=0.1)


def test_loss_falls_on_a_text(tmp_path: Path, text: TextDataModule) -> None:
    model = tiny()
    run = trainer(tmp_path, max_steps=60, val_check_interval=30)
    run.fit(model, text)
    seen = run.callback_metrics
    assert seen["train/loss"] < 0.5 * math.log(257)
    assert seen["train/loss_mean"] < 0.5 * math.log(257)
    assert math.isclose(seen["val/perplexity"], math.exp(seen["val/loss"]), rel_tol=1e-4)
    assert seen["train/tokens"] == model.seen == 60 * 4 * 32


def test_accumulated_micro_batches_all_count_as_tokens(tmp_path: Path, text: TextDataModule) -> None:
    model = tiny()
    trainer(tmp_path, max_steps=3, accumulate_grad_batches=4, limit_val_batches=0).fit(model, text)
    assert model.seen == 3 * 4 * 4 * 32


def test_norms_and_biases_do_not_decay(tmp_path: Path, text: TextDataModule) -> None:
    model = tiny(weight_decay=0.3)
    run = trainer(tmp_path, max_steps=1, limit_val_batches=0)
    run.fit(model, text)
    (optimizer,) = run.optimizers
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        name: 0.0 if name.endswith("bias") or ".ln_" in name else 0.3 for name, _ in model.named_parameters()
    }


def test_learning_rate_rises_then_falls_to_a_tenth(tmp_path: Path, text: TextDataModule) -> None:
    rates = []

    class Rates(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    trainer(tmp_path, max_steps=10, limit_val_batches=0, callbacks=[Rates()]).fit(tiny(lr=1.0), text)
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert rates[2:] == sorted(rates[2:], reverse=True) and rates[-1] == pytest.approx(0.1, abs=0.06)


def test_run_without_an_end_is_refused(tmp_path: Path, text: TextDataModule) -> None:
    with pytest.raises(ValueError, match=r"trainer\.max_steps"):
        trainer(tmp_path, max_epochs=-1).fit(tiny(), text)
