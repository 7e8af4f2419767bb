"""Lightning's callbacks that average weights, where weights are not on the device: lent to them while they look."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch

from lightning_ssd._lightning import pl

_HOOKS = ("on_train_epoch_start", "on_train_epoch_end", "on_train_end", "on_validation_epoch_start",
          "on_validation_epoch_end")  # fmt: skip


def averages_weights(callback: pl.Callback) -> bool:
    """Whether `callback` is `StochasticWeightAveraging`, `WeightAveraging`, or one derived from them."""
    return isinstance(callback, (pl.callbacks.StochasticWeightAveraging, pl.callbacks.WeightAveraging))


def lend_weights(callback: pl.Callback, lend: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Has the hooks of `callback` that look at weights, or change them, run inside `lend()`.

    Returns:
        What makes the callback as it was.
    """

    def lending(hook: Callable[..., None], wanted: Callable[[pl.Trainer], bool]) -> Callable[..., None]:
        @wraps(hook)
        def run(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
            if not wanted(trainer):
                hook(trainer, *args, **kwargs)
                return
            with lend():
                hook(trainer, *args, **kwargs)

        return run

    average: torch.nn.Module | None = callback._average_model  # type: ignore[attr-defined]  # both classes have it
    if average is not None:
        average.float()  # what is lent to it is: in 16 bits the low ones would be lost when both are swapped
    hooks: dict[str, Callable[[pl.Trainer], bool]] = dict.fromkeys(_HOOKS, lambda trainer: True)
    if isinstance(callback, pl.callbacks.WeightAveraging):
        averaging = callback

        def updates(trainer: pl.Trainer) -> bool:
            """Whether it will look after this batch: lending waits for all that is under way."""
            step = trainer.global_step
            return step > averaging._latest_update_step and averaging.should_update(step_idx=step - 1)

        hooks["on_train_batch_end"] = updates
    for name, wanted in hooks.items():
        setattr(callback, name, lending(getattr(callback, name), wanted))

    def restore() -> None:
        for name in hooks:
            delattr(callback, name)

    return restore
