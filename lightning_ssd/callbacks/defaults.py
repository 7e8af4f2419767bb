"""The callbacks that every offloading training has."""

from collections.abc import Sequence

from lightning_ssd._lightning import pl
from lightning_ssd.callbacks.auto_planner import AutoPlanner
from lightning_ssd.callbacks.micro_batch_switch import MicroBatchSwitch
from lightning_ssd.callbacks.offload_monitor import OffloadMonitor
from lightning_ssd.callbacks.offloader import trainer_callbacks
from lightning_ssd.callbacks.prefetch_scheduler import PrefetchScheduler


def add_default_callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    """Adds the callbacks of the package that the user did not give, before the user's checkpoint callbacks.

    Returns:
        The added callbacks.
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


def remove_default_callbacks(trainer: pl.Trainer, added: Sequence[pl.Callback]) -> None:
    """Tears down callbacks that `add_default_callbacks` added, and removes them from the Trainer."""
    for callback in added:
        callback.teardown(trainer, trainer.lightning_module, stage=str(trainer.state.fn))
    # A new list: Lightning may be iterating over this one.
    trainer.callbacks = [callback for callback in trainer_callbacks(trainer) if callback not in added]  # type: ignore[attr-defined]
