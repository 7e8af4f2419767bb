"""Lightning's callbacks that average weights get whole weights while they read or change offloaded ones."""

from collections.abc import Callable, Container
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch

from lightning_ssd._lightning import pl
from lightning_ssd.model_states import Loaded, exact_value

_HOOKS = ("on_train_epoch_start", "on_train_epoch_end", "on_train_end", "on_validation_epoch_start",
          "on_validation_epoch_end")  # fmt: skip


def averages_weights(callback: pl.Callback) -> bool:
    """Returns True for a `StochasticWeightAveraging` or `WeightAveraging` callback, including subclasses."""
    return isinstance(callback, (pl.callbacks.StochasticWeightAveraging, pl.callbacks.WeightAveraging))


def average_of(callback: pl.Callback) -> torch.nn.Module | None:
    """Returns the averaged model of a callback that `averages_weights`, or None if it has none yet."""
    average: torch.nn.Module | None = callback._average_model  # type: ignore[attr-defined]  # both classes have it
    return average


def summon_full_params(
    callback: pl.Callback,
    module: torch.nn.Module,
    in_fp32: Container[torch.nn.Parameter],
    full_params: Callable[[], AbstractContextManager[None]],
    loaded: Loaded,
) -> Callable[[], None]:
    """Runs the hooks of `callback` that read or change weights inside `full_params()`.

    Args:
        callback: a callback that `averages_weights`.
        module: the model that it averages.
        in_fp32: parameters of the model that `full_params` gives in fp32; so are their averages from now on.
        full_params: returns a context in which all weights are whole tensors.
        loaded: exact checkpoint values of the average, which may have rounded them.

    Returns:
        A function that restores the callback.
    """

    def inside_context(hook: Callable[..., None], needed: Callable[[pl.Trainer], bool]) -> Callable[..., None]:
        @wraps(hook)
        def run(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
            if not needed(trainer):
                hook(trainer, *args, **kwargs)
                return
            with full_params():
                hook(trainer, *args, **kwargs)

        return run

    if (average := average_of(callback)) is not None:
        for averaged, parameter in zip(average.parameters(), module.parameters(), strict=False):
            if parameter in in_fp32:
                exact = exact_value(averaged, loaded)
                # Exchanged with 16-bit values, the whole weights would lose their low bits.
                averaged.data = averaged.data.float() if exact is None else exact.to(averaged.device, copy=True)
    hooks: dict[str, Callable[[pl.Trainer], bool]] = dict.fromkeys(_HOOKS, lambda trainer: True)
    if isinstance(callback, pl.callbacks.WeightAveraging):
        averaging = callback

        def updates(trainer: pl.Trainer) -> bool:
            """Returns True if the average is updated after this batch; else waiting for optimizer steps is needless."""
            step = trainer.global_step
            return step > averaging._latest_update_step and averaging.should_update(step_idx=step - 1)

        hooks["on_train_batch_end"] = updates
    for name, needed in hooks.items():
        setattr(callback, name, inside_context(getattr(callback, name), needed))

    def restore() -> None:
        for name in hooks:
            delattr(callback, name)

    return restore
