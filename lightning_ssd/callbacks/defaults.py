"""The callbacks that every offloading training has."""

from collections.abc import Sequence

from lightning_ssd._lightning import pl
from lightning_ssd.callbacks.auto_planner import AutoPlanner
from lightning_ssd.callbacks.find import trainer_callbacks
from lightning_ssd.callbacks.micro_batch_switch import MicroBatchSwitch
from lightning_ssd.callbacks.offload_monitor import OffloadMonitor
from lightning_ssd.callbacks.prefetch_scheduler import PrefetchScheduler
from lightning_ssd.callbacks.swap_planner import SwapPlanner


def add_default_callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    """Adds the callbacks of the package that the user did not give, before the user's checkpoint callbacks, and returns
    them.
    """
    callbacks = trainer_callbacks(trainer)
    given = list(callbacks)
    defaults: list[pl.Callback] = [
        MicroBatchSwitch(),
        PrefetchScheduler(),
        OffloadMonitor(loggers=False),
        AutoPlanner(),
    ]
    missing = [default for default in defaults if not any(isinstance(callback, type(default)) for callback in given)]
    first = [callback for callback in given if not isinstance(callback, pl.callbacks.Checkpoint)]
    last = [callback for callback in given if isinstance(callback, pl.callbacks.Checkpoint)]
    callbacks[:] = [*first, *missing, *last]
    return missing


def find_offload_callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    """Returns the Trainer's callbacks, the user's own and defaults, that decide about offloaded tensors."""
    kinds = (MicroBatchSwitch, PrefetchScheduler, AutoPlanner, SwapPlanner)
    return [callback for callback in trainer_callbacks(trainer) if isinstance(callback, kinds)]


def restore_offload_callbacks(trainer: pl.Trainer, callbacks: Sequence[pl.Callback]) -> None:
    """Adds the removed ones of `callbacks` to the Trainer again, and begins the training for them.

    Lightning's Tuner removes all callbacks while it searches for a batch size or a learning rate. Without them a batch
    would seem too large although the training can offload enough of it. The Tuner's own callback remains the first.
    """
    present = trainer_callbacks(trainer)
    missing = [callback for callback in callbacks if callback not in present]
    trainer.callbacks = [*present, *missing]  # type: ignore[attr-defined]
    for callback in missing:
        callback.on_train_start(trainer, trainer.lightning_module)


def remove_default_callbacks(trainer: pl.Trainer, added: Sequence[pl.Callback]) -> None:
    """Tears down callbacks that `add_default_callbacks` added, and removes them from the Trainer."""
    for callback in added:
        callback.teardown(trainer, trainer.lightning_module, stage=str(trainer.state.fn))
    # A new list: Lightning may be iterating over this one.
    trainer.callbacks = [callback for callback in trainer_callbacks(trainer) if callback not in added]  # type: ignore[attr-defined]
