"""GPT: a decoder-only language model, GPT-2 as `transformers` has it, to pre-train or to fine-tune."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.text import Perplexity
from transformers import GPT2Config, GPT2LMHeadModel
from typing_extensions import override

from lightning_ssd.data.batch import Batch, count_samples, count_tokens, input_ids
from lightning_ssd.models.module import RecipeModule, exact

_IGNORED = -100  # the label of what is not predicted, as in transformers


class GPT(RecipeModule):
    """GPT-2, trained to predict the next token.

    A batch is token ids, int64 (batch, sequence), alone or as `{"input_ids": ids}`. Their labels are the ids
    themselves. A batch may bring its own `labels` as `transformers` has them: aligned with the ids, shifted
    by the model, -100 for what is not to be predicted. Sequences are packed, or padded on the right with
    labels of -100; so causal attention needs no mask.

    Args:
        vocab_size: Token ids are below it.
        n_positions: The longest sequence, in tokens.
        n_embd: The width of the model.
        n_layer: The number of transformer blocks.
        n_head: The number of attention heads, a divisor of `n_embd`.
        pretrained: A local folder that a GPT-2 was saved to with `save_pretrained`. The five sizes above are
            then the folder's.
        dropout: The probability of every dropout in the model.
        gradient_checkpointing: Keep only the blocks' inputs for backward, and compute the rest again.
        lr: The highest learning rate.
        betas: Of AdamW.
        weight_decay: Of AdamW, for matrices only.
        warmup_steps: Optimizer steps up to the highest learning rate, which then falls along a cosine.
    """

    def __init__(
        self,
        vocab_size: int = 50304,
        n_positions: int = 1024,
        n_embd: int = 768,
        n_layer: int = 12,
        n_head: int = 12,
        pretrained: str | Path | None = None,
        dropout: float = 0.0,
        gradient_checkpointing: bool = False,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        warmup_steps: int = 100,
    ) -> None:
        super().__init__(gradient_checkpointing, lr, betas, weight_decay, warmup_steps)
        # A checkpoint should hold plain types only.
        pretrained = None if pretrained is None else str(pretrained)
        self.save_hyperparameters()
        self.pretrained = pretrained
        self.config = (
            GPT2Config(
                vocab_size=vocab_size,
                n_positions=n_positions,
                n_embd=n_embd,
                n_layer=n_layer,
                n_head=n_head,
                bos_token_id=None,
                eos_token_id=None,
            )
            if pretrained is None
            else _saved_config(Path(pretrained))
        )
        self.config.use_cache = False
        self.config.embd_pdrop = self.config.attn_pdrop = self.config.resid_pdrop = dropout
        if self.config.activation_function == "gelu_new":
            # The same function as one kernel, which keeps one tensor for backward instead of four.
            self.config.activation_function = "gelu_pytorch_tanh"
        self.perplexity = Perplexity(ignore_index=_IGNORED)

    def build_model(self) -> nn.Module:
        """Returns a GPT-2 with random weights, or that of the folder `pretrained`."""
        if self.pretrained is None:
            return GPT2LMHeadModel(self.config)
        model: GPT2LMHeadModel = GPT2LMHeadModel.from_pretrained(
            self.pretrained, config=self.config, dtype=torch.get_default_dtype(), local_files_only=True
        )
        model.train()
        return model

    @override
    def setup(self, stage: str) -> None:
        """Checks that the data fits the model, where the data module says what it needs.

        Raises:
            ValueError: If the data has more token ids, or longer blocks, than the model.
        """
        data: Any = getattr(self.trainer, "datamodule", None)
        if getattr(data, "vocab_size", 0) > self.config.vocab_size:
            raise ValueError(
                f"The data has {data.vocab_size} token ids and the model {self.config.vocab_size}: set"
                f" model.vocab_size={data.vocab_size} or more, or data.tokenizer to the model's own"
            )
        if getattr(data, "block_size", 0) > self.config.n_positions:
            raise ValueError(
                f"The data has blocks of {data.block_size} tokens and the model takes"
                f" {self.config.n_positions}: lower data.block_size, or raise model.n_positions"
            )

    @override
    def forward(self, ids: Tensor) -> Tensor:
        """Returns the logits, (batch, sequence, vocab_size), of token ids, int64 (batch, sequence)."""
        assert self.model is not None, "configure_model() makes the model"
        logits: Tensor = self.model(input_ids=ids).logits
        return logits

    def training_loss(self, batch: Batch) -> Tensor:
        """Returns the mean loss of a micro-batch, in nats a token."""
        return self._predict(batch)[0]

    def evaluate(self, batch: Batch) -> tuple[Tensor, Mapping[str, Metric | Tensor]]:
        """Returns the mean loss of held-out text, in nats a token, and the perplexity."""
        loss, logits, targets = self._predict(batch)
        exact(self.perplexity).update(logits, targets)
        return loss, {"perplexity": self.perplexity}

    def batch_size(self, batch: Batch) -> int:
        """Returns the number of sequences."""
        return count_samples(batch)

    def count(self, batch: Batch) -> int:
        """Returns the number of tokens."""
        return count_tokens(batch)

    def forward_flops(self, batch: Batch) -> int:
        """Returns the FLOPs of a micro-batch's forward, counted as `forward_flops_per_token` does."""
        return count_tokens(batch) * forward_flops_per_token(self.config, input_ids(batch).shape[1])

    def _predict(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the mean loss, the logits (batch, sequence, vocab_size) and what they should predict."""
        ids = input_ids(batch)
        labels = ids if isinstance(batch, Tensor) else batch.get("labels", ids)
        # The labels are shifted, not the logits: a slice of the logits would be copied to be flattened.
        targets = F.pad(labels[:, 1:], (0, 1), value=_IGNORED)
        # Autocast does this for the loss anyway; without autocast, bf16-true would round the loss.
        logits = self(ids).float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED)
        return loss, logits, targets


def forward_flops_per_token(config: GPT2Config, sequence: int) -> int:
    """Returns the floating-point operations of one token's forward; its backward takes twice as many.

    Counts matrix products, with attention as if it were not causal: the convention of published figures.

    Args:
        config: The sizes of the model.
        sequence: Tokens in a sequence.
    """
    blocks = config.n_layer * (12 * config.n_embd**2 + 2 * sequence * config.n_embd)
    return 2 * (blocks + config.vocab_size * config.n_embd)


def _saved_config(folder: Path) -> GPT2Config:
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"model.pretrained={folder} holds no config.json: set it to a folder that a GPT-2 was saved to"
            f" with `save_pretrained`, or leave it out to start from random weights"
        )
    return GPT2Config.from_pretrained(folder, local_files_only=True)
