"""LoRA: a frozen base that is read and never written, with adapters that are trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightning_ssd import SaveFolder
from lightning_ssd._lightning import pl
from lightning_ssd.recipes.models import LoRACausalLM
from tests.support.compare import assert_same
from tests.support.folders import FAMILIES, save_model, strategy, train
from tests.support.products import combinations

ADAPTER_BYTES = 4 * 48 * 4  # of the largest adapter; all weights of a base are larger, except norms and biases


def module(folder: Path, **settings: Any) -> LoRACausalLM:
    return LoRACausalLM(folder, **{"rank": 4, "lr": 1e-2, "warmup_steps": 1} | settings)


@pytest.mark.quick_cases(1)
@combinations(
    "family, states, precision",
    ["llama", "tied", "qwen2", "mistral", "gpt2"],
    ["host", "ssd", "gpu"],
    ["32-true", "bf16-mixed"],
    quick=[("llama", "ssd", "32-true"), ("llama", "host", "bf16-mixed"), ("gpt2", "host", "32-true")],
)
def test_numbers_are_plain_lightnings(tmp_path: Path, family: str, states: str, precision: Any) -> None:
    save_model(tmp_path / "model", family, torch.float32 if precision == "32-true" else torch.bfloat16)
    expected, found = module(tmp_path / "model"), module(tmp_path / "model")
    losses = [
        train(tmp_path, expected, precision=precision).callback_metrics["train/loss"],
        train(tmp_path, found, strategy(states), precision=precision).callback_metrics["train/loss"],
    ]
    assert torch.equal(*losses)
    assert_same(found, expected)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_nothing_of_the_base_is_written_after_the_start(tmp_path: Path, precision: Any) -> None:
    saved = save_model(tmp_path / "model", "llama", torch.float32 if precision == "32-true" else torch.bfloat16)
    written: list[int] = []
    read: list[int] = []
    kept: list[bool] = []

    class Watch(pl.Callback):
        def look(self, trainer: Any, pl_module: Any) -> None:
            states = trainer.strategy.model_states
            states.drain()
            stats = states.staging.store.stats()
            written.append(stats.bytes_written)
            read.append(stats.bytes_read)
            trained = [p for p in pl_module.parameters() if p.requires_grad]
            kept.append(bool(trained) and not any(p in states.parameters for p in trained))

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.look(trainer, pl_module)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.look(trainer, pl_module)

    how = strategy("ssd", min_bytes=ADAPTER_BYTES + 1)
    trained = module(tmp_path / "model")
    train(tmp_path, trained, how, callbacks=[Watch()], precision=precision)
    assert written[0] > 0 and len(set(written)) == 1
    assert read == sorted(set(read)) and all(kept)
    base = trained.causal_lm
    for name, value in saved.state_dict().items():
        mine = next(v for n, v in base.state_dict().items() if n.replace(".base_layer", "") == name)
        assert torch.equal(mine, value) and mine.dtype == value.dtype


@pytest.mark.parametrize("states", ["auto", "ssd"])
def test_peft_loads_the_adapters(tmp_path: Path, states: str) -> None:
    save_model(tmp_path / "model", "llama")
    trained = module(tmp_path / "model")
    train(tmp_path, trained, strategy(states), callbacks=[SaveFolder(tmp_path / "adapters")])
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapters")
    ids = torch.randint(64, (2, 16))
    assert trained.model is not None
    with torch.no_grad():
        expected = trained.model(input_ids=ids).logits
        assert torch.equal(loaded(input_ids=ids).logits, expected)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    assert not torch.equal(plain(input_ids=ids).logits, expected)
    assert not (tmp_path / "adapters" / "model.safetensors").exists()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("states", ["auto", "ssd"])
def test_checkpoints_hold_the_adapters_and_resume(tmp_path: Path, states: str) -> None:
    save_model(tmp_path / "model", "llama")
    expected = module(tmp_path / "model")
    train(tmp_path, expected, strategy(states), max_steps=4)
    checkpoint = pl.callbacks.ModelCheckpoint(tmp_path / "saved", every_n_train_steps=2, save_top_k=-1)
    train(tmp_path, module(tmp_path / "model"), strategy(states), max_steps=4, callbacks=[checkpoint],
          enable_checkpointing=True)  # fmt: skip
    (saved,) = (tmp_path / "saved").glob("*step=2.ckpt")
    weights: dict[str, Tensor] = torch.load(saved, weights_only=True)["state_dict"]
    assert weights and all("lora_" in name for name in weights)
    found = module(tmp_path / "model")
    train(tmp_path, found, strategy(states), max_steps=4, ckpt_path=saved)
    assert_same(found, expected)
    with pytest.raises((ValueError, RuntimeError), match=r"rank|size mismatch"):
        train(tmp_path, module(tmp_path / "model", rank=2), strategy(states), ckpt_path=saved)
    with pytest.raises(ValueError, match=r"no weights for \d+ adapters.*model\.targets"):
        fewer = save_fewer(tmp_path, saved)
        train(tmp_path, module(tmp_path / "model"), strategy(states), ckpt_path=fewer)


def save_fewer(path: Path, saved: Path) -> Path:
    """Returns a checkpoint like `saved` that lacks an adapter."""
    content = torch.load(saved, weights_only=False)
    content["state_dict"].pop(next(iter(content["state_dict"])))
    torch.save(content, path / "fewer.ckpt")
    return path / "fewer.ckpt"


def test_random_bases_are_in_checkpoints(tmp_path: Path) -> None:
    mine = LoRACausalLM(config=FAMILIES["llama"].to_dict(), rank=4, warmup_steps=1)
    train(tmp_path, mine, strategy("ssd")).save_checkpoint(tmp_path / "last.ckpt")
    loaded = LoRACausalLM.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert_same(loaded, mine)


@pytest.mark.parametrize("name", ["rank", "alpha"])
def test_adapters_without_rank_or_scale_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^model\.{name}=0 is out of range: set it to 1 or more"):
        LoRACausalLM(**{name: 0})
