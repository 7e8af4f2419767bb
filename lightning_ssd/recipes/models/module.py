"""The LightningModule that all recipes train: optimizer, counts, logging and resume, without model or objective."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torchmetrics import Metric
from torchmetrics.aggregation import RunningMean
from transformers import PreTrainedModel, get_cosine_with_min_lr_schedule_with_warmup_lr_rate
from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.recipes.data import count_items, count_samples
from lightning_ssd.sizes import check_least

if TYPE_CHECKING:
    from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig

_FINAL_LR = 0.1  # final learning rate / highest learning rate


class RecipeModule(pl.LightningModule):
    """Trains one model by one objective with AdamW and a cosine schedule.

    A subclass implements `build_model`, `training_loss` and `evaluate`; `batch_size` and `count` if its batches are no
    `Batch`; and `forward_flops` if there are published FLOP counts.

    Args:
        gradient_checkpointing: Keeps only the inputs of blocks for backward, and recomputes the rest.
        lr: Highest learning rate.
        betas: Betas of AdamW.
        weight_decay: Weight decay of matrices.
        warmup_steps: Optimizer steps up to the highest learning rate, which then falls along a cosine.

    Raises:
        ValueError: If an argument is negative.

    Attributes:
        model: The model, None until `configure_model`.
        seen: Tokens (or images, see `unit`) trained on, over all devices; saved in checkpoints.
        flops_per_batch: FLOPs of the last micro-batch, which Lightning's `ThroughputMonitor` reads; 0: unknown.
    """

    unit: ClassVar[str] = "tokens"
    """Name of the quantity that `count` counts."""

    def __init__(
        self,
        gradient_checkpointing: bool = False,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        warmup_steps: int = 100,
    ) -> None:
        super().__init__()
        check_least("model.lr", lr, 0)
        check_least("model.weight_decay", weight_decay, 0)
        check_least("model.warmup_steps", warmup_steps, 0)
        self.gradient_checkpointing = gradient_checkpointing
        self.lr = lr
        self.betas = betas
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.model: nn.Module | None = None
        self.seen = 0
        self.flops_per_batch = 0
        # A check for NaN would wait for the GPU, and an average over devices would wait for all devices.
        self.train_loss = RunningMean(window=16, nan_strategy="disable", sync_on_compute=False)

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Returns the model, in the default dtype and on the default device, in training mode."""

    @abstractmethod
    def training_loss(self, batch: Any) -> Tensor:
        """Returns the mean loss of a micro-batch."""

    @abstractmethod
    def evaluate(self, batch: Any) -> tuple[Tensor, Mapping[str, Metric | Tensor]]:
        """Returns the mean loss of a held-out micro-batch and the metrics, by name, to log beside it."""

    def batch_size(self, batch: Any) -> int:
        """Returns the number of samples in a micro-batch."""
        return count_samples(batch)

    def count(self, batch: Any) -> int:
        """Returns the number of tokens (or images, see `unit`) in a micro-batch."""
        return count_items(batch)

    def forward_flops(self, batch: Any) -> int:
        """Returns the FLOPs of a micro-batch's forward; 0: unknown."""
        return 0

    def training_flops(self, batch: Any) -> int:
        """Returns the FLOPs of a micro-batch's forward and backward; 0: unknown."""
        return 3 * self.forward_flops(batch)

    @override
    def configure_model(self) -> None:
        """Builds the model, unless it is built already.

        Lightning calls this method under the strategy's device and precision, unlike `__init__`.
        """
        if self.model is not None:
            return
        self.model = self.build_model()
        if self.gradient_checkpointing:
            older = "gradient_checkpointing_enable"  # deprecated by transformers that have the other name
            enable: Any = getattr(self.model, "activation_checkpointing_enable", None) or getattr(self.model, older)
            enable({"use_reentrant": False})

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Returns the mean loss of a micro-batch, and logs it."""
        loss = self.training_loss(batch)
        self.seen += self.count(batch) * self.trainer.world_size
        self.flops_per_batch = self.training_flops(batch)
        exact(self.train_loss).update(loss.detach())
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/loss_mean", self.train_loss.compute())
        self.log(f"train/{self.unit}", float(self.seen))
        return loss

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Logs loss and metrics of held-out samples."""
        loss, metrics = self.evaluate(batch)
        self.flops_per_batch = self.forward_flops(batch)
        size = self.batch_size(batch)
        self.log("val/loss", loss, prog_bar=True, batch_size=size, sync_dist=True)
        for name, value in metrics.items():
            self.log(f"val/{name}", value, prog_bar=True, batch_size=size, sync_dist=isinstance(value, Tensor))

    @override
    def configure_optimizers(self) -> "OptimizerLRSchedulerConfig":
        """Returns AdamW, which decays matrices only, and a learning rate that falls until the Trainer's run ends.

        Raises:
            ValueError: If the Trainer's run has no end.
        """
        steps = self.trainer.estimated_stepping_batches
        if steps == float("inf"):
            raise ValueError("The learning rate falls until the run ends: set trainer.max_steps or trainer.max_epochs")
        trainable = [p for p in self.parameters() if p.requires_grad]
        optimizer = AdamW(
            [
                {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": self.weight_decay},
                {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=self.lr,
            betas=self.betas,
        )
        schedule = get_cosine_with_min_lr_schedule_with_warmup_lr_rate(
            optimizer, num_warmup_steps=self.warmup_steps, num_training_steps=int(steps), min_lr_rate=_FINAL_LR
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the count of tokens (or images), and the configuration of a model of `transformers` for `export`."""
        checkpoint[f"{self.unit}_seen"] = self.seen
        if isinstance(self.model, PreTrainedModel):
            checkpoint["model_config"] = self.model.config.to_json_string()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continues from the saved count of tokens (or images)."""
        self.seen = checkpoint[f"{self.unit}_seen"]


def exact(metric: Metric) -> Metric:
    """Returns `metric` with fp32 sums, which `bf16-true` has cast with the rest of the module."""
    return metric.set_dtype(torch.float32)
