"""Models of transformers that are built on `meta`."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.support.states import ssd
from tests.support.trainings import make_trainer

SIZES: dict[str, Any] = dict(vocab_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))


def bert() -> Any:
    return BertForMaskedLM(BertConfig(hidden_size=32, max_position_embeddings=16, **SIZES))


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(hidden_size=32, max_position_embeddings=16, **SIZES))


def t5() -> Any:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0)
    )


class Wrapped(pl.LightningModule):
    """A model that predicts its own input."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.make = make
        self.model: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(1)
            with torch.device("meta"):
                self.model = self.make()
            self.model.train()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("make", [gpt2, bert, llama, t5])
def test_models_that_were_built_on_meta(tmp_path: Path, make: Any) -> None:
    """They train, with weights of the distribution of their own initialization."""
    model = Wrapped(make)
    before: dict[str, Tensor] = {}

    class Looking(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            before.update(copy.deepcopy(pl_module.state_dict()))

    torch.manual_seed(1)
    trainer = make_trainer(tmp_path, ssd(), max_epochs=2, callbacks=[Looking()])
    tokens = torch.randint(64, (32, 12), generator=torch.Generator().manual_seed(2))
    trainer.fit(model, DataLoader(tokens, batch_size=4))
    for name, value in make().state_dict().items():
        made = before[f"model.{name}"]
        assert made.shape == value.shape and made.isfinite().all(), name
        assert torch.allclose(made.float().std(unbiased=False), value.float().std(unbiased=False), rtol=0.5), name
        assert torch.allclose(made.float().mean(), value.float().mean(), atol=0.1), name
    assert model.losses[-1] < model.losses[0]
