"""Lightning's callbacks that average weights get whole weights while they read or change offloaded ones."""

from collections.abc import Callable, Container
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch

from lightning_ssd._lightning import pl
from lightning_ssd.callbacks import trainer_callbacks
from lightning_ssd.model_states import Loaded, exact_value

_HOOKS = ("on_train_epoch_start", "on_train_epoch_end", "on_train_end", "on_validation_epoch_start",
          "on_validation_epoch_end")  # fmt: skip


def averaging_callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    """Returns the Trainer's `StochasticWeightAveraging` and `WeightAveraging` callbacks, including subclasses."""
    kinds = (pl.callbacks.StochasticWeightAveraging, pl.callbacks.WeightAveraging)
    return [callback for callback in trainer_callbacks(trainer) if isinstance(callback, kinds)]


def average_of(callback: pl.Callback) -> torch.nn.Module | None:
    """Returns the averaged model of one of `averaging_callbacks`, or None if it has none yet."""
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
        callback: one of `averaging_callbacks`.
        in_fp32: parameters of the model that `full_params` gives in fp32; so are their averages from now on.
        full_params: returns a context in which all weights are whole tensors.
        loaded: exact checkpoint values of the average, which may have rounded them.

    Returns:
        A function that restores the callback.
    """

    def inside_context(hook: Callable[..., None]) -> Callable[..., None]:
        @wraps(hook)
        def run(*args: Any, **kwargs: Any) -> None:
            with full_params():
                hook(*args, **kwargs)

        return run

    if (average := average_of(callback)) is not None:
        for averaged, parameter in zip(average.parameters(), module.parameters(), strict=False):
            if parameter in in_fp32:
                exact = exact_value(averaged, loaded)
                # Exchanged with 16-bit values, the whole weights would lose their low bits.
                averaged.data = averaged.data.float() if exact is None else exact.to(averaged.device, copy=True)
    hooks = {name: inside_context(getattr(callback, name)) for name in _HOOKS}
    if isinstance(callback, pl.callbacks.WeightAveraging):
        hooks["on_train_batch_end"] = _inside_context_if_updated(callback, full_params)
    for name, hook in hooks.items():
        setattr(callback, name, hook)

    def restore() -> None:
        for name in hooks:
            delattr(callback, name)

    return restore


def _inside_context_if_updated(
    averaging: "pl.callbacks.WeightAveraging", full_params: Callable[[], AbstractContextManager[None]]
) -> Callable[..., None]:
    """Returns the callback's `on_train_batch_end`, run inside `full_params()` if the average is updated after a batch.

    Otherwise waiting for optimizer steps is needless. `should_update` of user code, which may count its calls or draw
    random numbers, is called once for a step, as without offloading.
    """
    hook = averaging.on_train_batch_end

    @wraps(hook)
    def run(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        step = trainer.global_step
        if step <= averaging._latest_update_step:
            hook(trainer, *args, **kwargs)
            return
        should_update = averaging.should_update
        updates = should_update(step_idx=step - 1)

        def decided(step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            known = step_idx == step - 1 and epoch_idx is None
            return updates if known else should_update(step_idx=step_idx, epoch_idx=epoch_idx)

        own = vars(averaging).get("should_update")
        averaging.should_update = decided  # type: ignore[method-assign]
        try:
            with full_params() if updates else nullcontext():
                hook(trainer, *args, **kwargs)
        finally:
            if own is None:
                del averaging.should_update
            else:
                averaging.should_update = own  # type: ignore[method-assign]

    return run
