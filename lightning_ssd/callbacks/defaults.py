"""The callbacks that an offloading training has anyway."""

from lightning_ssd._lightning import pl
from lightning_ssd.callbacks.micro_batch_switch import MicroBatchSwitch
from lightning_ssd.callbacks.offload_monitor import OffloadMonitor
from lightning_ssd.callbacks.prefetch_scheduler import PrefetchScheduler


def add_default_callbacks(trainer: pl.Trainer) -> None:
    """Adds the callbacks of the package that the user did not give, before the user's checkpoint callbacks."""
    given = list(trainer.callbacks)
    missing = [
        kind()
        for kind in (MicroBatchSwitch, PrefetchScheduler, OffloadMonitor)
        if not any(isinstance(callback, kind) for callback in given)
    ]
    last = [callback for callback in given if isinstance(callback, pl.callbacks.Checkpoint)]
    trainer.callbacks[:] = [callback for callback in given if callback not in last] + missing + last
