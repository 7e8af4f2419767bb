"""Models that `benchmarks.default` trains, with random weights and samples: Llama, GPT, BERT, T5 and ViT."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_ssd._lightning import pl
from lightning_ssd.recipes.data.span_corruption import span_lengths

VOCABULARY = 32000
PATCH, CLASSES = 14, 1000
"""Pixels of a ViT's patch in each direction, and its classes."""


def _llama(hidden: int, layers: int, tokens: int) -> Any:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        max_position_embeddings=tokens,
    )
    return LlamaForCausalLM(config)


def _gpt(hidden: int, layers: int, tokens: int) -> Any:
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=tokens, n_embd=hidden, n_layer=layers, n_head=hidden // 64)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def _bert(hidden: int, layers: int, tokens: int) -> Any:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        max_position_embeddings=tokens,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def _t5(hidden: int, layers: int, tokens: int) -> Any:
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=hidden,
        d_kv=64,
        d_ff=4 * hidden,
        num_layers=layers - layers // 2,
        num_decoder_layers=layers // 2,
        num_heads=hidden // 64,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def _vit(hidden: int, layers: int, tokens: int) -> Any:
    config = ViTConfig(
        image_size=isqrt(tokens) * PATCH,
        patch_size=PATCH,
        num_labels=CLASSES,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
    )
    return ViTForImageClassification(config)


@dataclass(frozen=True)
class Family:
    """A kind of model with the sizes at which it needs some 30 GiB.

    Attributes:
        make: returns a model of a width, a number of layers, and a number of tokens of a sample.
        hidden: width.
        layers: number of layers; half of a T5's are decoders, rounded down.
        batch: samples of a micro-batch.
        tokens: tokens of a sample, in a T5's encoder; the patches of a ViT's image, a square number.
    """

    make: Callable[[int, int, int], Any]
    hidden: int = 2048
    layers: int = 16
    batch: int = 8
    tokens: int = 1024


FAMILIES = {
    "llama": Family(_llama),
    "gpt": Family(_gpt),
    "bert": Family(_bert),
    "t5": Family(_t5, hidden=1024, layers=24),
    "vit": Family(_vit, hidden=1280, layers=32, batch=32, tokens=256),
}


class Model(pl.LightningModule):
    """A model of a family, trained by AdamW on random samples.

    Args:
        family: name of the family.
        hidden: width.
        layers: number of layers.
        tokens: tokens of a sample.
        compiled: compile every layer.
        recompute: checkpoint every layer.
    """

    def __init__(
        self, family: str, hidden: int, layers: int, tokens: int, *, compiled: bool = False, recompute: bool = False
    ) -> None:
        super().__init__()
        self.model = FAMILIES[family].make(hidden, layers, tokens)
        self.model.config.use_cache = False
        if recompute:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in self.model.modules():
            if compiled and isinstance(layer, GradientCheckpointingLayer):
                layer.compile()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


DISTINCT = 64
"""Samples that are made, and repeated. To make an image takes longer than to train on it."""


class RandomSamples(Dataset[dict[str, Tensor]]):
    """Random samples of a family, always the same ones, of which `DISTINCT` differ.

    Args:
        family: name of the family.
        count: number of samples.
        tokens: tokens of a sample.
    """

    def __init__(self, family: str, count: int, tokens: int) -> None:
        self._family = family
        self._count = count
        self._tokens = tokens
        self._made: dict[int, dict[str, Tensor]] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        index %= DISTINCT
        if index not in self._made:
            self._made[index] = self._make(index)
        return self._made[index]

    def _make(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)

        def ids(below: int, *shape: int) -> Tensor:
            return torch.randint(0, below, shape, generator=generator)

        if self._family == "vit":
            side = isqrt(self._tokens) * PATCH
            return {"pixel_values": torch.randn(3, side, side, generator=generator), "labels": ids(CLASSES)}
        tokens = ids(VOCABULARY, self._tokens)
        if self._family == "t5":
            return {"input_ids": tokens, "labels": ids(VOCABULARY, span_lengths(self._tokens, 0.15, 3.0).targets)}
        if self._family == "bert":
            masked = torch.rand(self._tokens, generator=generator) < 0.15
            return {"input_ids": tokens, "labels": tokens.where(masked, -100)}
        return {"input_ids": tokens, "labels": tokens}
