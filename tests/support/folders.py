"""Tiny models in folders, and trainings of them."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd._lightning import pl
from lightning_ssd.recipes.data import RecipeDataModule
from lightning_ssd.recipes.models import CausalLM
from tests.support.trainings import fit

VOCABULARY = 64
_SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)

FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_SIZES),
    "tied": LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**_SIZES),
    "qwen3": Qwen3Config(**_SIZES, head_dim=8),
    "mistral": MistralConfig(**_SIZES, sliding_window=8),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=32, resid_pdrop=0.0,
                       embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None),
}  # fmt: skip


def save_model(folder: Path, family: str, dtype: torch.dtype = torch.float32, shard: str = "1GB") -> PreTrainedModel:
    """Saves a model of random weights, and returns it."""
    torch.manual_seed(5)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(FAMILIES[family], dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def strategy(states: str, **arguments: Any) -> Any:
    """Returns "auto", or a strategy that offloads all weights and states to the tier `states`."""
    if states == "auto":
        return states
    return SSDOffloadStrategy(
        **{"states": states, "gpu_memory": "1B", "min_bytes": 1, "offload": "none"} | arguments  # type: ignore[arg-type]
    )


class Tokens(RecipeDataModule):
    """Random tokens, always the same; 12 batches."""

    def __init__(self) -> None:
        super().__init__(batch_size=2, val_share=0.1, seed=0, num_workers=0)

    def read(self) -> Any:
        """Returns rows of 16 tokens."""
        ids = torch.randint(VOCABULARY, (28, 16), generator=torch.Generator().manual_seed(2))
        rows = [{"input_ids": row} for row in ids]
        return rows[:24], rows[24:]


def train(
    root: Path, module: CausalLM, how: Any = "auto", data: Any = None, ckpt_path: Any = None, **arguments: Any
) -> pl.Trainer:
    """Trains `module` in place, for 3 steps unless told otherwise, and returns the Trainer."""
    settings: dict[str, Any] = {"max_epochs": None, "max_steps": 3, "gradient_clip_val": 1.0, "limit_val_batches": 0}
    fit(root, how, module, Tokens() if data is None else data, ckpt_path=ckpt_path, **settings | arguments)
    return module.trainer
