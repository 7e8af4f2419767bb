"""BERT: an encoder that restores masked tokens, as `transformers` has it, to pre-train or to train further."""

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from lightning_ssd.recipes.data import Batch, count_tokens, input_ids
from lightning_ssd.recipes.models.language import LanguageModule, labels_of


class BERT(LanguageModule):
    """BERT, trained to restore masked tokens.

    A batch is `{"input_ids": ids, "labels": labels}`, both int64 (batch, sequence), with labels of -100 for tokens
    that are not to be predicted; `MaskedTextDataModule` makes such batches. Sequences are packed: attention has no
    mask, and all tokens are of type 0.

    Args:
        vocab_size: Token ids are below it.
        max_position_embeddings: Longest sequence, in tokens.
        hidden_size: Width of the model.
        num_hidden_layers: Number of transformer blocks.
        num_attention_heads: Number of attention heads, a divisor of `hidden_size`.
        pretrained: Local folder that a BERT was saved to with `save_pretrained`. The five sizes above are then the
            folder's.
        dropout: Probability of every dropout in the model.
        betas: Betas of AdamW.
        weight_decay: Weight decay of matrices.
        settings: Other arguments of `RecipeModule`.
    """

    config_class = BertConfig
    model_class = BertForMaskedLM

    def __init__(
        self,
        vocab_size: int = 30592,
        max_position_embeddings: int = 512,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        pretrained: str | Path | None = None,
        dropout: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.98),
        weight_decay: float = 0.01,
        **settings: Any,
    ) -> None:
        config = None
        if pretrained is None:
            config = BertConfig(
                vocab_size=vocab_size,
                max_position_embeddings=max_position_embeddings,
                hidden_size=hidden_size,
                num_hidden_layers=num_hidden_layers,
                num_attention_heads=num_attention_heads,
                intermediate_size=4 * hidden_size,
                pad_token_id=None,  # nothing is padded, and the embedding of a padding token would not be trained
            )
        super().__init__(config, pretrained, dropout, betas=betas, weight_decay=weight_decay, **settings)
        # A checkpoint should hold plain types only.
        pretrained = None if pretrained is None else str(pretrained)
        self.save_hyperparameters()
        self.config.hidden_dropout_prob = self.config.attention_probs_dropout_prob = dropout

    def predict(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the logits and the original ids of the masked tokens.

        Raises:
            ValueError: If the batch has no labels.
        """
        labels = labels_of(batch, "MaskedTextDataModule")
        return self(input_ids(batch)), labels

    def forward_flops(self, batch: Batch) -> int:
        """Returns the FLOPs of a micro-batch's forward: those of the matrix products."""
        c = self.config
        blocks = 4 * c.hidden_size**2 + 2 * c.hidden_size * c.intermediate_size
        attention = 2 * input_ids(batch).shape[1] * c.hidden_size
        head = c.hidden_size**2 + c.vocab_size * c.hidden_size
        flops: int = 2 * count_tokens(batch) * (c.num_hidden_layers * (blocks + attention) + head)
        return flops
