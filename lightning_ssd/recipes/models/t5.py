"""T5: an encoder-decoder that restores left-out spans, as `transformers` has it, to pre-train or to train further."""

from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration
from typing_extensions import override

from lightning_ssd.recipes.data import Batch, input_ids
from lightning_ssd.recipes.models.language import LanguageModule, labels_of


class T5(LanguageModule):
    """T5, trained to restore spans that were left out of its input.

    A batch is `{"input_ids": ids, "labels": labels}`, int64 (batch, inputs) and (batch, targets);
    `SpanCorruptionDataModule` makes such batches. The decoder reads the labels shifted right. Nothing is padded:
    attention of the encoder has no mask. Positions are relative, so that sequences may have any length. Tokens are
    counted in the encoder's input.

    Args:
        vocab_size: Token ids are below it.
        d_model: Width of the model.
        d_kv: Width of an attention head.
        d_ff: Width inside of feed-forward layers.
        num_layers: Number of encoder blocks.
        num_decoder_layers: Number of decoder blocks; None: as many as encoder blocks.
        num_heads: Number of attention heads.
        feed_forward_proj: Feed-forward layers, `"relu"`, or `"gated-gelu"` as in T5 1.1.
        tie_word_embeddings: Whether the head's weight is the shared embedding; False: one of its own, as in T5 1.1.
        pretrained: Local folder that a T5 was saved to with `save_pretrained`. The sizes above are then the folder's.
        dropout: Probability of every dropout in the model.
        betas: Betas of AdamW.
        weight_decay: Weight decay of matrices.
        settings: Other arguments of `RecipeModule`.
    """

    config_class = T5Config
    model_class = T5ForConditionalGeneration

    def __init__(
        self,
        vocab_size: int = 32128,
        d_model: int = 512,
        d_kv: int = 64,
        d_ff: int = 2048,
        num_layers: int = 6,
        num_decoder_layers: int | None = None,
        num_heads: int = 8,
        feed_forward_proj: Literal["relu", "gated-gelu"] = "relu",
        tie_word_embeddings: bool = True,
        pretrained: str | Path | None = None,
        dropout: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.98),
        weight_decay: float = 0.01,
        **settings: Any,
    ) -> None:
        config = None
        if pretrained is None:
            make: Any = T5Config  # its signature lacks keywords that it takes
            config = make(
                vocab_size=vocab_size,
                d_model=d_model,
                d_kv=d_kv,
                d_ff=d_ff,
                num_layers=num_layers,
                num_decoder_layers=num_decoder_layers,
                num_heads=num_heads,
                feed_forward_proj=feed_forward_proj,
                tie_word_embeddings=tie_word_embeddings,  # whether logits are scaled
            )
        super().__init__(config, pretrained, dropout, betas=betas, weight_decay=weight_decay, **settings)
        # A checkpoint should hold plain types only.
        pretrained = None if pretrained is None else str(pretrained)
        self.save_hyperparameters()
        self.tie_word_embeddings = tie_word_embeddings
        self.config.dropout_rate = dropout
        self.config.use_cache = False
        if getattr(self.config, "decoder_start_token_id", None) is None:
            self.config.decoder_start_token_id = self.config.pad_token_id  # as in T5

    def build_model(self) -> nn.Module:
        """Returns a T5 with random weights, or that of the folder `pretrained`."""
        model = super().build_model()
        if self.pretrained is None and not self.tie_word_embeddings:
            # `transformers` ties the weight whatever the configuration says.
            head = nn.Linear(self.config.d_model, self.config.vocab_size, bias=False)
            nn.init.normal_(head.weight, std=self.config.initializer_factor * self.config.d_model**-0.5)
            model.lm_head = head
        return model

    @override
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]  # reads labels, too
        """Returns the logits of the decoder.

        Args:
            ids: Token ids of the encoder, int64 (batch, inputs).
            labels: Token ids that the decoder predicts, int64 (batch, targets).

        Returns:
            (batch, targets, vocab_size).
        """
        assert self.model is not None, "configure_model() makes the model"
        model: T5ForConditionalGeneration = self.model  # type: ignore[assignment]
        shifted = model.prepare_decoder_input_ids_from_labels(labels)
        logits: Tensor = model(input_ids=ids, decoder_input_ids=shifted).logits
        return logits

    def predict(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the logits and the ids of the left-out spans.

        Raises:
            ValueError: If the batch has no labels.
        """
        labels = labels_of(batch, "SpanCorruptionDataModule")
        return self(input_ids(batch), labels), labels

    def forward_flops(self, batch: Batch) -> int:
        """Returns the FLOPs of a micro-batch's forward: those of the matrix products, of attention as if not causal."""
        c = self.config
        ids, labels = input_ids(batch), labels_of(batch, "SpanCorruptionDataModule")
        samples, inputs, targets = ids.shape[0], ids.shape[1], labels.shape[1]
        inner = c.num_heads * c.d_kv
        projection = c.d_model * inner
        feed_forward = (3 if c.is_gated_act else 2) * c.d_model * c.d_ff
        encoder = inputs * (4 * projection + feed_forward) + 2 * inputs * inputs * inner
        decoder = targets * (6 * projection + feed_forward) + inputs * 2 * projection  # cross-attention's K and V
        decoder += 2 * targets * (targets + inputs) * inner
        head = targets * c.vocab_size * c.d_model
        flops: int = 2 * samples * (c.num_layers * encoder + c.num_decoder_layers * decoder + head)
        return flops
