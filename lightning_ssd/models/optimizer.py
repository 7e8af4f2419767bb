"""The optimizer of the recipes: AdamW, with a learning rate that warms up and falls along a cosine."""

from typing import TYPE_CHECKING

from torch.optim import AdamW
from transformers import get_cosine_with_min_lr_schedule_with_warmup_lr_rate

from lightning_ssd._lightning import pl

if TYPE_CHECKING:
    from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig

_FINAL_LR = 0.1  # of the highest learning rate


def adamw_with_cosine(
    module: pl.LightningModule,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    warmup_steps: int,
) -> "OptimizerLRSchedulerConfig":
    """Returns the result of `configure_optimizers`: AdamW, and a schedule that ends with the Trainer's run.

    Args:
        module: Its trainable parameters are optimized. Matrices decay; norms and biases do not.
        lr: The highest learning rate, reached after `warmup_steps` steps. The run ends at a tenth of it.
        betas: Of AdamW.
        weight_decay: Of the matrices.
        warmup_steps: Optimizer steps.

    Raises:
        ValueError: If the Trainer's run has no end.
    """
    steps = module.trainer.estimated_stepping_batches
    if steps == float("inf"):
        raise ValueError("The learning rate falls until the run ends: set trainer.max_steps or trainer.max_epochs")
    trainable = [p for p in module.parameters() if p.requires_grad]
    optimizer = AdamW(
        [
            {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=lr,
        betas=betas,
    )
    schedule = get_cosine_with_min_lr_schedule_with_warmup_lr_rate(
        optimizer, num_warmup_steps=warmup_steps, num_training_steps=int(steps), min_lr_rate=_FINAL_LR
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
