"""The RecipeModule of language models: it trains a model class of `transformers`, from token ids to logits."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import Perplexity
from transformers import PreTrainedConfig, PreTrainedModel
from typing_extensions import override

from lightning_ssd.recipes.data import IGNORED, Batch
from lightning_ssd.recipes.models.module import RecipeModule, exact
from lightning_ssd.recipes.models.size_checks import check_data, check_sizes
from lightning_ssd.sizes import check_probability


class LanguageModule(RecipeModule):
    """Trains a model of `transformers` to predict tokens, and measures perplexity and accuracy of held-out ones.

    A subclass sets `config_class` and `model_class`, and implements `predict`.

    Args:
        config: Sizes of the model; None if they are those of the folder `pretrained`.
        pretrained: Local folder that a model was saved to with `save_pretrained`; None for random weights.
        dropout: Probability of every dropout, which the subclass puts into `config`.
        settings: Arguments of `RecipeModule`.

    Attributes:
        config: Configuration of the model.

    Raises:
        FileNotFoundError: If `pretrained` holds no configuration.
        ValueError: If `pretrained` holds a model of another type, or an argument is out of range.
    """

    config_class: ClassVar[type[PreTrainedConfig]]
    model_class: ClassVar[type[PreTrainedModel]]

    def __init__(
        self, config: PreTrainedConfig | None, pretrained: str | Path | None, dropout: float, **settings: Any
    ) -> None:
        super().__init__(**settings)
        self.pretrained = None if pretrained is None else Path(pretrained)
        self.config: Any = config or self._saved_config(Path(pretrained or ""))
        check_probability("model.dropout", dropout)
        check_sizes(self.config, "model")
        self.perplexity = Perplexity(ignore_index=IGNORED)
        self.accuracy = MulticlassAccuracy(
            self.config.vocab_size, average="micro", ignore_index=IGNORED, validate_args=False
        )

    @abstractmethod
    def predict(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the logits, (batch, sequence, vocab_size), and the ids that they predict, (batch, sequence).

        Ids of -100 are not predicted.
        """

    def build_model(self) -> nn.Module:
        """Returns the model with random weights, or that of the folder `pretrained`.

        Raises:
            FileNotFoundError: If the folder has no weights.
        """
        model: PreTrainedModel
        if self.pretrained is None:
            model = self.model_class(self.config)
            return model
        try:
            model = self.model_class.from_pretrained(
                self.pretrained, config=self.config, dtype=torch.get_default_dtype(), local_files_only=True
            )
        except OSError as error:
            raise FileNotFoundError(
                f"model.pretrained={self.pretrained} holds no weights that can be loaded ({error}): save the model"
                f" there by transformers' `save_pretrained`"
            ) from error
        model.train()
        return model

    @override
    def setup(self, stage: str) -> None:
        """Checks that the data fits the model, where the data module states its sizes.

        Raises:
            ValueError: If the data has more token ids, or longer sequences, than the model.
        """
        data: Any = getattr(self.trainer, "datamodule", None)
        key = "max_position_embeddings"
        check_data(data, self.config, "model.vocab_size", f"raise model.{self.config.attribute_map.get(key, key)}")

    @override
    def forward(self, ids: Tensor) -> Tensor:
        """Returns the logits, (batch, sequence, vocab_size), of token ids, int64 (batch, sequence)."""
        assert self.model is not None, "configure_model() makes the model"
        logits: Tensor = self.model(input_ids=ids).logits
        return logits

    def training_loss(self, batch: Batch) -> Tensor:
        """Returns the mean loss of a micro-batch, in nats a predicted token."""
        return self._loss(*self._predict_exactly(batch))

    def evaluate(self, batch: Batch) -> tuple[Tensor, Mapping[str, Metric | Tensor]]:
        """Returns the mean loss of held-out text, in nats a predicted token, with perplexity and accuracy."""
        logits, targets = self._predict_exactly(batch)
        exact(self.perplexity).update(logits, targets)
        self.accuracy.update(logits.argmax(-1), targets)
        return self._loss(logits, targets), {"perplexity": self.perplexity, "accuracy": self.accuracy}

    def _predict_exactly(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits, targets = self.predict(batch)
        # Autocast casts them for the loss anyway; without autocast, bf16-true would round the loss.
        return logits.float(), targets

    @staticmethod
    def _loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    @classmethod
    def _saved_config(cls, folder: Path) -> PreTrainedConfig:
        wanted = cls.config_class.model_type
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"model.pretrained={folder} holds no config.json: set it to a folder that a model of type {wanted!r}"
                f" was saved to with `save_pretrained`, or leave it out to start from random weights"
            )
        values, _ = cls.config_class.get_config_dict(folder, local_files_only=True)
        if values.get("model_type", wanted) != wanted:
            raise ValueError(
                f"model.pretrained={folder} holds a model of type {values['model_type']!r}, and"
                f" {cls.__name__} trains {wanted!r}: set model.class_path to the class of the folder's type"
            )
        return cls.config_class.from_pretrained(folder, local_files_only=True)


def labels_of(batch: Batch, data: str) -> Tensor:
    """Returns the labels of `batch`, int64 (batch, sequence).

    Args:
        batch: A batch that the objective needs labels in.
        data: Name of the data module that makes such batches.

    Raises:
        ValueError: If there are none.
    """
    if isinstance(batch, Tensor) or "labels" not in batch:
        raise ValueError(f"The batches have no `labels`: set data.class_path=lightning_ssd.recipes.data.{data}")
    return batch["labels"]
