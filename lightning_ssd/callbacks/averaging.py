"""Lightning's callbacks that average weights, where weights are not on the device: lent to them while they look."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch

from lightning_ssd._lightning import pl
from lightning_ssd.model_states import Loaded, exact_value

_HOOKS = ("on_train_epoch_start", "on_train_epoch_end", "on_train_end", "on_validation_epoch_start",
          "on_validation_epoch_end")  # fmt: skip


def averages_weights(callback: pl.Callback) -> bool:
    """Whether `callback` is `StochasticWeightAveraging`, `WeightAveraging`, or one derived from them."""
    return isinstance(callback, (pl.callbacks.StochasticWeightAveraging, pl.callbacks.WeightAveraging))


def average_of(callback: pl.Callback) -> torch.nn.Module | None:
    """Returns the average of a callback that `averages_weights`; None: it has none yet."""
    average: torch.nn.Module | None = callback._average_model  # type: ignore[attr-defined]  # both classes have it
    return average


def summon_full_params(
    callback: pl.Callback, lend: Callable[[], AbstractContextManager[None]], loaded: Loaded
) -> Callable[[], None]:
    """Has the hooks of `callback` that look at weights, or change them, run inside `lend()`.

    Args:
        callback: averages weights.
        lend: makes all weights whole while it lasts.
        loaded: values of a checkpoint that the average, which becomes an fp32 one, may have rounded.

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

    if (average := average_of(callback)) is not None:
        exact = {parameter: exact_value(parameter, loaded) for parameter in average.parameters()}
        average.float()  # what is lent to it is: in 16 bits the low ones would be lost when both are swapped
        for parameter, value in exact.items():
            if value is not None:
                parameter.data.copy_(value)
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
