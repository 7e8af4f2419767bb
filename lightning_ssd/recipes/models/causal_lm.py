"""Causal language models of transformers: those of a folder, to fine-tune, or random weights of any size."""

import copy
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from typing_extensions import override

from lightning_ssd.model_states import materialize_on
from lightning_ssd.recipes.data import IGNORED, Batch, count_tokens, input_ids
from lightning_ssd.recipes.models.linear_loss import chunked_cross_entropy
from lightning_ssd.recipes.models.module import RecipeModule, exact
from lightning_ssd.recipes.models.pretrained import PretrainedFolder, check_replaceable, save_new
from lightning_ssd.recipes.models.size_checks import check_data, check_sizes
from lightning_ssd.recipes.models.small_model import changes_logits, mixes_samples
from lightning_ssd.recipes.models.tiny_llama import cached_tiny_llama
from lightning_ssd.sizes import check_least
from lightning_ssd.strategy import SSDOffloadStrategy

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
"""Names in configurations of the number of experts, and of those that a token is routed to."""


class CausalLM(RecipeModule):
    """Any causal language model of transformers, trained to predict the next token.

    A batch is token ids, int64 (batch, sequence), alone or as `{"input_ids": ids}`. It may have `labels`: aligned with
    the ids, -100 for tokens that are not predicted; and `position_ids`, which begin at 0 with every document of a
    packed sequence. Many model types of transformers separate the documents by them, but not all. `setup` measures this
    for data modules that state `packing`, with a small random model; for other data the user has to know it.

    The weights of a folder are read from its files one tensor at a time: with this package's strategy to host memory or
    SSDs, with others to the device.

    Args:
        pretrained: Local folder that a model was saved to with `save_pretrained`. None, without `config`: a tiny Llama
            with random weights, which is made in the user's cache directory.
        config: Instead of a folder, the `model_type` and sizes of a model with random weights.
        draw_late: Draws random weights of `config` one unit at a time, when the strategy places them in their tiers,
            instead of all in RAM first. They differ from the weights without offloading.
        chunked_loss: Computes the loss of training and validation in chunks of tokens, without all logits in memory.
            The last digits differ.
        gradient_checkpointing: Keeps only the inputs of blocks for backward, and recomputes the rest.
        lr: Highest learning rate. None: 1e-5 for a folder, 3e-3 for random weights.
        betas: Betas of AdamW.
        weight_decay: Weight decay of matrices.
        warmup_steps: Optimizer steps up to the highest learning rate, which then falls along a cosine.
    """

    def __init__(
        self,
        pretrained: str | Path | None = None,
        config: dict[str, Any] | None = None,
        draw_late: bool = False,
        chunked_loss: bool = False,
        gradient_checkpointing: bool = False,
        lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        warmup_steps: int = 100,
    ) -> None:
        if lr is None:
            lr = 3e-3 if pretrained is None else 1e-5
        super().__init__(gradient_checkpointing, lr, betas, weight_decay, warmup_steps)
        # A checkpoint should hold plain types only.
        pretrained = None if pretrained is None else str(pretrained)
        self.save_hyperparameters()
        if pretrained is not None and config is not None:
            raise ValueError("model.pretrained and model.config exclude each other: leave one of them out")
        self.draw_late = draw_late
        self.chunked_loss = chunked_loss
        self.folder: PretrainedFolder | None = None
        if config is None:
            self.folder = PretrainedFolder(cached_tiny_llama() if pretrained is None else Path(pretrained))
        self.config = _make_config(config) if self.folder is None else self.folder.config  # type: ignore[arg-type]
        if self.folder is not None:
            _check_causal(self.config, f"model.pretrained={self.folder.path}")
        self.config.get_text_config().use_cache = False
        if chunked_loss:
            _check_linear_head(self.config)
        self.perplexity = TokenPerplexity()

    @property
    def causal_lm(self) -> Any:  # transformers is partly untyped
        """Model of transformers, without adapters around it."""
        assert self.model is not None, "configure_model() makes the model"
        return self.model

    def build_model(self) -> nn.Module:
        """Returns the model, with the weights of the folder or random ones.

        Raises:
            ValueError: If the folder's weights are not those of the model, or some are of images or sounds.
        """
        strategy = None if self._trainer is None else self._trainer.strategy
        offloads = isinstance(strategy, SSDOffloadStrategy)
        if self.folder is None:
            with torch.device("meta" if offloads and self.draw_late else torch.get_default_device()):
                return self.adapt(self._make())
        with torch.device("meta"):
            made = self._make()
        if any(_encoders(made)):
            raise ValueError(
                f"model.pretrained={self.folder.path} has encoders of images or sounds, which can't be loaded: save the"
                f" text part alone, of the model type {self.config.get_text_config().model_type!r}, to a folder"
            )
        values = self.folder.bind(made)
        model = self.adapt(made)
        if offloads:
            made.initial_values = values  # type: ignore[assignment]  # taken when the strategy materializes the model
        else:
            materialize_on(model, torch.get_default_device(), values)
        return model

    def adapt(self, model: PreTrainedModel) -> nn.Module:
        """Returns `model` as it is trained; a subclass adds adapters. Parameters may be on `meta`."""
        return model

    @override
    def setup(self, stage: str) -> None:
        """Checks that the data fits the model, where the data module states its sizes and whether it packs samples.

        Raises:
            ValueError: If the data has more token ids, or longer sequences, than the model, or if it packs samples that
                the model does not separate.
        """
        data: Any = getattr(self.trainer, "datamodule", None)
        # A mean over no predicted token would be NaN.
        check_least("data.block_size", getattr(data, "block_size", None), 2)
        longer = "if the model is to learn longer ones, scale its `max_position_embeddings` in its configuration"
        where = "config.json of model.pretrained, or model.config"
        check_data(data, self.config, "model.config.vocab_size", f"{longer} ({where})")
        if getattr(data, "packing", False):
            _check_separation(self.config)

    @override
    def forward(self, ids: Tensor) -> Tensor:
        """Returns the logits, (batch, sequence, vocab_size), of token ids, int64 (batch, sequence)."""
        logits: Tensor = self.causal_lm(input_ids=ids).logits
        return logits

    def training_loss(self, batch: Batch) -> Tensor:
        """Returns the mean loss of the predicted tokens of a micro-batch, in nats."""
        return self._loss(batch)[0]

    def evaluate(self, batch: Batch) -> tuple[Tensor, Mapping[str, Metric | Tensor]]:
        """Returns the mean loss of held-out tokens, in nats, and the perplexity of all of them."""
        loss, targets = self._loss(batch)
        exact(self.perplexity).update(loss, (targets != IGNORED).sum())
        return loss, {"perplexity": self.perplexity}

    def forward_flops(self, batch: Batch) -> int:
        """Returns the FLOPs of a micro-batch's forward: matrix products, with attention as if it were not causal."""
        length, config = input_ids(batch).shape[1], self.config.get_text_config()
        attention: int = 2 * length * config.hidden_size * config.num_hidden_layers
        return round(2 * count_tokens(batch) * (sum(self._multiplied().values()) + attention))

    @override
    def training_flops(self, batch: Batch) -> int:
        """Returns the FLOPs of a micro-batch's forward and backward: frozen weights have no gradient."""
        frozen = sum(count for weight, count in self._multiplied().items() if not weight.requires_grad)
        return 3 * self.forward_flops(batch) - round(2 * count_tokens(batch) * frozen)

    def _multiplied(self) -> dict[nn.Parameter, float]:
        """Returns the elements of each weight that multiply a token: of experts those that it is routed to."""
        model = self.causal_lm
        config = self.config.get_text_config()
        experts, used = (next(filter(None, (getattr(config, n, 0) for n in names)), 1) for names in (_EXPERTS, _USED))
        counts: dict[nn.Parameter, float] = {}
        for name, weight in model.named_parameters():
            routed = "experts" in name.split(".") or (weight.ndim == 3 and weight.shape[0] == experts)
            if weight.ndim >= 2 and not name.endswith("bias"):
                counts[weight] = weight.numel() * (used / experts if routed else 1)
        embedding = model.get_input_embeddings().weight
        if model.get_output_embeddings().weight is not embedding:
            del counts[embedding]  # a look-up; a tied one is multiplied with, too
        unused = {weight for part in _encoders(model) for weight in part.parameters()}
        return {weight: count for weight, count in counts.items() if weight not in unused}

    def check_folder(self, folder: Path) -> None:
        """Checks that `folder` may be replaced: a new one, or one that holds a saved model but not this one's weights.

        Raises:
            ValueError: If it may not.
        """
        check_replaceable(folder, None if self.folder is None else self.folder.path)

    def save_folder(self, value: Callable[[str], Tensor], folder: Path) -> None:
        """Writes the model to a folder that `from_pretrained` loads, in the layout of its original folder.

        Args:
            value: Returns the value of a parameter, by its name in this module.
            folder: Folder to write, which is replaced.
        """
        self.check_folder(folder)
        if self.folder is None:
            save_new(self.causal_lm, lambda name: value(f"model.{name}"), folder)
            return
        self.folder.save(self.causal_lm, lambda name: value(f"model.{name}"), folder)

    def _make(self, dtype: torch.dtype | None = None) -> PreTrainedModel:
        auto: Any = AutoModelForCausalLM  # untyped
        config = copy.deepcopy(self.config)  # whose dtype is set
        model: PreTrainedModel = auto.from_config(config, dtype=dtype or torch.get_default_dtype())
        model.train()
        return model

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the mean loss and its targets, (batch, sequence)."""
        ids = input_ids(batch)
        packed: Mapping[str, Tensor] = {} if isinstance(batch, Tensor) else batch
        targets = F.pad(packed.get("labels", ids)[:, 1:], (0, 1), value=IGNORED)
        inputs = {"input_ids": ids, "position_ids": packed.get("position_ids"), "use_cache": False}
        model = self.causal_lm
        if self.chunked_loss:
            hidden = model.base_model(**inputs).last_hidden_state
            head = model.get_output_embeddings()
            return chunked_cross_entropy(hidden.flatten(0, 1), head, targets.flatten(), ignored=IGNORED), targets
        # Autocast does this for the loss anyway; without autocast, bf16-true would round the loss.
        logits = model(**inputs).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED), targets


class TokenPerplexity(Metric):
    """The exponential of the mean loss over all predicted tokens; batches are weighted by their predicted tokens."""

    full_state_update = False
    total: Tensor
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, loss: Tensor, tokens: Tensor) -> None:
        """Adds a batch.

        Args:
            loss: Mean loss of its predicted tokens, in nats.
            tokens: Number of predicted tokens.
        """
        self.total += loss.detach() * tokens
        self.tokens += tokens

    def compute(self) -> Tensor:
        """Returns the perplexity."""
        return (self.total / self.tokens).exp()


def _encoders(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Yields the parts of a model that do not run on texts: those of images or sounds."""
    texts = {type(model.config), type(model.config.get_text_config())}
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and type(part.config) not in texts:
            yield part


def _make_config(sizes: dict[str, Any]) -> PretrainedConfig:
    kind = sizes.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ValueError(
            f"model.config has the model_type {kind!r}, which transformers does not know: set it to one such as"
            f" 'llama', 'qwen2', 'mistral' or 'gpt2'"
        )
    if CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"model.config has the model_type {kind!r}, which is no causal language model: take 'llama'")
    # transformers takes any key, and ignores those that it does not know.
    default = AutoConfig.for_model(kind)
    known = {*default.to_dict(), *default.attribute_map}
    for key in sizes:
        meant = get_close_matches(key, known, 1, 0.8)
        if key not in known and not hasattr(default, key) and meant:
            raise ValueError(f"model.config has the key {key!r}, which {kind!r} does not have: is it {meant[0]!r}?")
    try:
        config: PretrainedConfig = AutoConfig.for_model(**sizes)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ValueError(f"model.config makes no model of the model_type {kind!r}: {error}") from error
    check_sizes(config, "model.config")
    _check_causal(config, "model.config")
    return config


def _check_causal(config: PretrainedConfig, key: str) -> None:
    """Raises ValueError if every token would see the tokens after it, which it is to predict."""
    encodes = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not config.is_encoder_decoder
    if encodes and not getattr(config, "is_decoder", True):
        raise ValueError(
            f"{key} has the model_type {config.model_type!r}, whose attention is not causal unless `is_decoder` is"
            f" true: set that, or take a causal language model such as a Llama"
        )


def _check_separation(config: PretrainedConfig) -> None:
    """Raises ValueError if packed samples are not known to have the logits that they have alone."""
    mixed = mixes_samples(config)
    if mixed is None:
        raise ValueError(
            f"data.packing=true needs a model that separates the samples of a row, which can't be measured for the"
            f" model type {config.model_type!r}: set data.packing=false"
        )
    if mixed:
        raise ValueError(
            f"data.packing=true puts several samples into a row, and {config.model_type!r} computes the tokens of a"
            f" sample from those of the samples before it, too: set data.packing=false"
        )


def _check_linear_head(config: PretrainedConfig) -> None:
    """Raises ValueError if logits are not known to be those of the linear output layer alone."""
    changed = changes_logits(config)
    if changed is None:
        raise ValueError(
            f"model.chunked_loss=true computes logits by the output layer alone, which can't be compared with those of"
            f" the model type {config.model_type!r}: set it to false"
        )
    if changed:
        raise ValueError(
            f"model.chunked_loss=true computes logits by the output layer alone, and {config.model_type!r} computes"
            f" other ones: set it to false"
        )
