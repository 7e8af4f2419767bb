"""Trainings whose operators can't be planned: those on several devices, and those with compiled code."""

import sys
from typing import Any

from lightning_ssd._lightning import pl
from lightning_ssd.callbacks.offloader import offload_config
from lightning_ssd.model_states import is_compiled

__all__ = ["check_can_plan", "compiled_frames", "obstacle_to_planning"]


def compiled_frames() -> int:
    """Returns the number of frames that `torch.compile` has seen in this process."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["frames"]["total"])


def obstacle_to_planning(trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
    """Returns why no plan can be applied to the training; `None`: one can."""
    if trainer.world_size > 1:
        return "several devices train, and plans are for the training of one device"
    for name, part in module.named_modules():
        if is_compiled(part):
            return (
                f"{name or type(module).__name__} is compiled, and single operations of compiled code can't be planned"
            )
    return None


def check_can_plan(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raises ValueError if `SwapPlanner` can't apply a plan to the training."""
    config = offload_config(trainer)
    if config.amount() != "auto":
        raise ValueError(
            "SwapPlanner decides which activations are offloaded, and "
            f"`offload={config.offload!r}` decides about them, too. Set it to 'auto', or remove the callback."
        )
    obstacle = obstacle_to_planning(trainer, module)
    if obstacle is not None:
        remedy = "Set `devices=1`" if trainer.world_size > 1 else "Remove `torch.compile`"
        rest = "" if trainer.world_size > 1 else ": the default plans compiled code where memory is short"
        raise ValueError(f"SwapPlanner can't plan: {obstacle}. {remedy}, or remove the callback{rest}.")
