"""GPT: a decoder-only language model, GPT-2 as `transformers` has it, to pre-train or to fine-tune."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.aggregation import RunningMean
from torchmetrics.text import Perplexity
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_ssd._lightning import pl
from lightning_ssd.data.batch import Batch, count_samples, count_tokens, input_ids
from lightning_ssd.models.optimizer import adamw_with_cosine

if TYPE_CHECKING:
    from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig

_IGNORED = -100  # the label of what is not predicted, as in transformers


class GPT(pl.LightningModule):
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
        super().__init__()
        # A checkpoint should hold plain types only.
        pretrained = None if pretrained is None else str(pretrained)
        self.save_hyperparameters()
        self.pretrained = pretrained
        self.gradient_checkpointing = gradient_checkpointing
        self.lr = lr
        self.betas = betas
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
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
        self.model: GPT2LMHeadModel | None = None
        self.tokens_seen = 0
        self.flops_per_batch = 0
        # No check for NaN and no average over devices: the one would wait for the GPU, the other for all of
        # them.
        self.train_loss = RunningMean(window=16, nan_strategy="disable", sync_on_compute=False)
        self.perplexity = Perplexity(ignore_index=_IGNORED)

    def configure_model(self) -> None:
        """Makes the model, unless it is made already.

        It is made here and not in `__init__`, so that a strategy decides where and in what precision.
        """
        if self.model is not None:
            return
        if self.pretrained is None:
            self.model = GPT2LMHeadModel(self.config)
        else:
            self.model = GPT2LMHeadModel.from_pretrained(
                self.pretrained, config=self.config, dtype=torch.get_default_dtype(), local_files_only=True
            )
            self.model.train()
        if self.gradient_checkpointing:
            recompute: Any = self.model.gradient_checkpointing_enable  # transformers leaves it untyped
            recompute({"use_reentrant": False})

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

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the logits, (batch, sequence, vocab_size), of token ids, int64 (batch, sequence)."""
        assert self.model is not None, "configure_model() makes the model"
        logits: Tensor = self.model(input_ids=ids).logits
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns the mean loss of a micro-batch, in nats a token."""
        loss, _, _ = self._predict(batch)
        self.tokens_seen += count_tokens(batch) * self.trainer.world_size
        self.flops_per_batch = 3 * self._forward_flops(batch)
        _exact(self.train_loss).update(loss.detach())
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/loss_mean", self.train_loss.compute())
        self.log("train/tokens", float(self.tokens_seen))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Measures the loss, in nats a token, and the perplexity on held-out text."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Measures the loss, in nats a token, and the perplexity on held-out text."""
        self._evaluate(batch, "test")

    def configure_optimizers(self) -> "OptimizerLRSchedulerConfig":
        """Returns AdamW, and a learning rate that falls until the Trainer's run ends."""
        return adamw_with_cosine(self, self.lr, self.betas, self.weight_decay, self.warmup_steps)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the count of tokens."""
        checkpoint["tokens_seen"] = self.tokens_seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Goes on with the saved count of tokens."""
        self.tokens_seen = checkpoint["tokens_seen"]

    def _evaluate(self, batch: Batch, stage: str) -> None:
        loss, logits, targets = self._predict(batch)
        self.flops_per_batch = self._forward_flops(batch)
        _exact(self.perplexity).update(logits, targets)
        self.log(f"{stage}/loss", loss, prog_bar=True, batch_size=count_samples(batch), sync_dist=True)
        self.log(f"{stage}/perplexity", self.perplexity, prog_bar=True)

    def _forward_flops(self, batch: Batch) -> int:
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


def _exact(metric: Metric) -> Metric:
    """Returns `metric`, with the fp32 sums that `bf16-true`, which casts all of the module, has taken from it."""
    return metric.set_dtype(torch.float32)


def _saved_config(folder: Path) -> GPT2Config:
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"model.pretrained={folder} holds no config.json: set it to a folder that a GPT-2 was saved to"
            f" with `save_pretrained`, or leave it out to start from random weights"
        )
    return GPT2Config.from_pretrained(folder, local_files_only=True)
