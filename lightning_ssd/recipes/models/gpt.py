"""GPT: a decoder-only language model, GPT-2 as `transformers` has it, to pre-train or to fine-tune."""

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel
from typing_extensions import override

from lightning_ssd.recipes.data import IGNORED, Batch, count_tokens, input_ids
from lightning_ssd.recipes.models.language import LanguageModule
from lightning_ssd.sizes import check_least


class GPT(LanguageModule):
    """GPT-2, trained to predict the next token.

    A batch is token ids, int64 (batch, sequence), alone or as `{"input_ids": ids}`. By default the labels are the ids
    themselves. A batch may have other `labels` in the form of `transformers`: aligned with the ids, shifted by the
    model, -100 for tokens that are not predicted. Sequences are packed, or padded on the right with labels of -100, so
    causal attention needs no mask.

    Args:
        vocab_size: Token ids are below it.
        n_positions: The longest sequence, in tokens.
        n_embd: The width of the model.
        n_layer: The number of transformer blocks.
        n_head: The number of attention heads, a divisor of `n_embd`.
        pretrained: A local folder that a GPT-2 was saved to with `save_pretrained`. The five sizes above are
            then the folder's.
        dropout: The probability of every dropout in the model.
        settings: Arguments of `RecipeModule`.
    """

    config_class = GPT2Config
    model_class = GPT2LMHeadModel

    def __init__(
        self,
        vocab_size: int = 50304,
        n_positions: int = 1024,
        n_embd: int = 768,
        n_layer: int = 12,
        n_head: int = 12,
        pretrained: str | Path | None = None,
        dropout: float = 0.0,
        **settings: Any,
    ) -> None:
        config = None
        if pretrained is None:
            config = GPT2Config(
                vocab_size=vocab_size,
                n_positions=n_positions,
                n_embd=n_embd,
                n_layer=n_layer,
                n_head=n_head,
                bos_token_id=None,
                eos_token_id=None,
            )
        super().__init__(config, pretrained, dropout, **settings)
        # A checkpoint should hold plain types only.
        pretrained = None if pretrained is None else str(pretrained)
        self.save_hyperparameters()
        self.config.use_cache = False
        self.config.embd_pdrop = self.config.attn_pdrop = self.config.resid_pdrop = dropout
        if self.config.activation_function == "gelu_new":
            # The same function as one kernel, which keeps one tensor for backward instead of four.
            self.config.activation_function = "gelu_pytorch_tanh"

    @override
    def setup(self, stage: str) -> None:
        """Checks that the data fits the model, as `LanguageModule` does, and that blocks have a next token.

        Raises:
            ValueError: If it does not fit.
        """
        super().setup(stage)
        # A mean over no predicted token would be NaN.
        check_least("data.block_size", getattr(getattr(self.trainer, "datamodule", None), "block_size", None), 2)

    def predict(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the logits and the ids that follow each token."""
        ids = input_ids(batch)
        labels = ids if isinstance(batch, Tensor) else batch.get("labels", ids)
        # The labels are shifted, not the logits: a slice of the logits would be copied to be flattened.
        return self(ids), F.pad(labels[:, 1:], (0, 1), value=IGNORED)

    def forward_flops(self, batch: Batch) -> int:
        """Returns the FLOPs of a micro-batch's forward, counted as `forward_flops_per_token` does."""
        return count_tokens(batch) * forward_flops_per_token(self.config, input_ids(batch).shape[1])


def forward_flops_per_token(config: GPT2Config, sequence: int) -> int:
    """Returns the floating-point operations of one token's forward; its backward takes twice as many.

    Counts matrix products, with attention as if it were not causal: the convention of published figures.
    """
    blocks = config.n_layer * (12 * config.n_embd**2 + 2 * sequence * config.n_embd)
    return 2 * (blocks + config.vocab_size * config.n_embd)
