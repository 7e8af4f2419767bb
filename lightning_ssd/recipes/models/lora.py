"""LoRA: a frozen causal language model with small trainable adapters, by peft."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from typing_extensions import override

from lightning_ssd.extras import check_extra
from lightning_ssd.recipes.models.causal_lm import CausalLM
from lightning_ssd.recipes.models.pretrained import replaced_folder
from lightning_ssd.sizes import check_least, check_probability

_OFFLOADED = "offloaded_adapters"
"""Key of a checkpoint: names of the adapters that are not in its state dict, because the strategy stores them."""


class LoRACausalLM(CausalLM):
    """A causal language model whose low-rank adapters alone are trained.

    The weights of the base are read and never written: they have no gradient and no optimizer states, and are not in
    checkpoints, which have the adapters alone. With a mixed precision the base keeps the dtype of its files, and the
    adapters are fp32; fp32 adapters smaller than the strategy's `min_bytes` are kept on the device.

    Args:
        pretrained: Folder of the base, as in `CausalLM`.
        config: Sizes of a base with random weights, as in `CausalLM`. Checkpoints then have the base, too.
        rank: Rank of the adapters.
        alpha: The adapters are scaled by `alpha / rank`.
        adapter_dropout: Probability of dropout before each adapter.
        targets: Names of the modules with adapters, or "all-linear": all linear layers but the head. None: "all-linear"
            for a folder; for random weights also the head, unless it shares its weight with the embedding, because a
            frozen random head predicts random tokens.
        lr: Highest learning rate. None: 2e-4 for a folder, 3e-3 for random weights.
        settings: Other arguments of `CausalLM`.

    Raises:
        ImportError: If peft is not installed.
    """

    def __init__(
        self,
        pretrained: str | Path | None = None,
        config: dict[str, Any] | None = None,
        rank: int = 16,
        alpha: int = 32,
        adapter_dropout: float = 0.0,
        targets: str | list[str] | None = None,
        lr: float | None = None,
        **settings: Any,
    ) -> None:
        check_extra("peft", "lora", "LoRA")
        if lr is None:
            lr = 3e-3 if pretrained is None else 2e-4
        pretrained = None if pretrained is None else str(pretrained)  # a checkpoint should hold plain types only
        super().__init__(pretrained, config, lr=lr, **settings)
        # The weights of a base from a folder are in the folder.
        self.strict_loading = self.folder is None
        check_least("model.rank", rank, 1)
        check_least("model.alpha", alpha, 1)  # adapters of scale 0 learn nothing
        check_probability("model.adapter_dropout", adapter_dropout)
        self.rank = rank
        self.alpha = alpha
        self.adapter_dropout = adapter_dropout
        self.targets = targets

    @property
    def causal_lm(self) -> Any:
        """Model of transformers, without adapters around it."""
        assert self.model is not None, "configure_model() makes the model"
        model: Any = self.model
        return model.get_base_model()

    def adapt(self, model: PreTrainedModel) -> nn.Module:
        """Returns `model`, frozen, with adapters, which are on the CPU, whatever the device of `model`.

        Raises:
            ValueError: If modules that `targets` names can't have adapters.
        """
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora import LoraLayer

        settings = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.adapter_dropout,
            target_modules=self._target_modules(model),
            task_type="CAUSAL_LM",
        )
        if self.folder is not None:
            settings.base_model_name_or_path = str(self.folder.path)
        try:
            adapted: nn.Module = get_peft_model(model, settings)
        except ValueError as error:
            linear = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)}
            raise ValueError(
                f"model.targets={self.targets!r} names modules that take no adapters: set it to 'all-linear' or to a"
                f" list of {', '.join(sorted(linear))} ({error})"
            ) from error
        # peft makes adapters on the base's device, which may be `meta`. Drawn on the CPU, values do not depend on it.
        for module in adapted.modules():
            if isinstance(module, LoraLayer):
                adapters: Any = module  # partly untyped
                for layers in (adapters.lora_A, adapters.lora_B):
                    layers.to_empty(device="cpu")
                for name in adapters.lora_A:
                    adapters.reset_lora_parameters(name, init_lora_weights=True)
        return adapted

    def _target_modules(self, model: PreTrainedModel) -> str | list[str]:
        """Returns `targets`, or its default for `model`."""
        if self.targets is not None:
            return self.targets
        if self.hparams["pretrained"] is not None or self.config.tie_word_embeddings:
            return "all-linear"
        return sorted(
            {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D)}
        )

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the count of tokens, and of the weights those that are trained."""
        super().on_save_checkpoint(checkpoint)
        # A record of `recover=True` has no offloaded weights in its state dict: the strategy keeps them.
        checkpoint[_OFFLOADED] = sorted(self._trained_names() - checkpoint["state_dict"].keys())
        if not self.strict_loading:
            trained = self._trained_names()
            checkpoint["state_dict"] = {n: v for n, v in checkpoint["state_dict"].items() if n in trained}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continues from the saved count of tokens.

        Raises:
            ValueError: If the checkpoint lacks an adapter.
        """
        super().on_load_checkpoint(checkpoint)
        held = {*checkpoint["state_dict"], *checkpoint.get(_OFFLOADED, ())}
        if missing := sorted(self._trained_names() - held):
            raise ValueError(
                f"the checkpoint has no weights for {len(missing)} adapters, {missing[0]!r} among them: resume with"
                f" the model.rank and model.targets that it was saved with"
            )

    def save_folder(self, value: Callable[[str], Tensor], folder: Path) -> None:
        """Writes the adapters to a folder that `PeftModel.from_pretrained` loads; arguments as in `CausalLM`."""
        self.check_folder(folder)
        model: Any = self.model
        trained = {name.removeprefix("model."): value(name).detach().cpu().clone() for name in self._trained_names()}
        with replaced_folder(folder) as part:
            # By default peft saves the frozen weight of a head that has adapters, too.
            model.save_pretrained(part, state_dict=trained, save_embedding_layers=False)

    def _make(self, dtype: torch.dtype | None = None) -> PreTrainedModel:
        # Autocast would cast a base in fp32 at every use, so the base has the dtype of its files, by the configuration.
        mixed = self._trainer is not None and "mixed" in str(self._trainer.precision)
        if mixed and dtype is None and isinstance(self.config.dtype, torch.dtype):
            dtype = self.config.dtype
        return super()._make(dtype)

    def _trained_names(self) -> set[str]:
        return {name for name, parameter in self.named_parameters() if parameter.requires_grad}
