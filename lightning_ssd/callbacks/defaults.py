"""The callbacks that an offloading training has anyway."""

from lightning_ssd._lightning import pl
from lightning_ssd.callbacks.micro_batch_switch import MicroBatchSwitch
from lightning_ssd.callbacks.offload_monitor import OffloadMonitor
from lightning_ssd.callbacks.prefetch_scheduler import PrefetchScheduler
from lightning_ssd.callbacks.tensor_cache import trainer_callbacks


def add_default_callbacks(trainer: pl.Trainer) -> None:
    """Adds the callbacks of the package that the user did not give, before the user's checkpoint callbacks."""
    callbacks = trainer_callbacks(trainer)
    given = list(callbacks)
    defaults: list[pl.Callback] = [MicroBatchSwitch(), PrefetchScheduler(), OffloadMonitor(loggers=False)]
    missing = [default for default in defaults if not any(isinstance(callback, type(default)) for callback in given)]
    first = [callback for callback in given if not isinstance(callback, pl.callbacks.Checkpoint)]
    last = [callback for callback in given if isinstance(callback, pl.callbacks.Checkpoint)]
    callbacks[:] = [*first, *missing, *last]
