"""Models that `full_finetune` trains by our strategy and by DeepSpeed, and their batches: the same in both."""

from typing import Any

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from lightning_ssd.recipes.data.span_corruption import span_lengths

TOKENS = 1024
MODELS = ("gpt", "t5", "llama")


def make_model(model: str, hidden: int, layers: int, vocabulary: int = 32000) -> Any:
    """Returns a model of transformers with random weights, in training mode.

    Args:
        model: `"gpt"`; `"t5"` with as many decoder as encoder blocks, heads of 128 and a wide feed-forward as in T5 3B;
            or `"llama"` with 8 heads of keys and values.
        hidden: Width.
        layers: Number of blocks, for a T5 of the encoder.
        vocabulary: Token ids of a Llama.
    """
    if model == "gpt":
        gpt = GPT2Config(vocab_size=50304, n_positions=TOKENS, n_embd=hidden, n_layer=layers, n_head=hidden // 128)
        gpt.resid_pdrop = gpt.embd_pdrop = gpt.attn_pdrop = 0.0
        made: Any = GPT2LMHeadModel(gpt)
    elif model == "t5":
        t5 = T5Config(
            vocab_size=32128,
            d_model=hidden,
            d_kv=128,
            d_ff=16 * hidden,
            num_layers=layers,
            num_heads=hidden // 32,
            dropout_rate=0.0,
        )
        t5.decoder_start_token_id = 0
        made = T5ForConditionalGeneration(t5)
    else:
        llama = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=8 * hidden // 3,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 128,
            num_key_value_heads=min(8, hidden // 128),
            max_position_embeddings=TOKENS,
        )
        made = LlamaForCausalLM(llama)
    made.config.use_cache = False
    made.train()
    return made


def random_batch(model: str, samples: int) -> dict[str, Tensor]:
    """Returns random token ids with labels, always the same: 1024 tokens a sample, and for a T5 its 229 of targets."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = {"gpt": 50257, "t5": 32000, "llama": 32000}[model]
    ids = torch.randint(0, vocabulary, (samples, TOKENS), generator=generator)
    if model != "t5":
        return {"input_ids": ids, "labels": ids}
    targets = span_lengths(TOKENS, 0.15, 3.0).targets
    return {"input_ids": ids, "labels": torch.randint(0, vocabulary, (samples, targets), generator=generator)}
