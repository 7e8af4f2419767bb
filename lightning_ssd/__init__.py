"""Offloads activations, weights and optimizer states of Lightning trainings to host memory and SSDs.

`import torch` imports this package (see `_autoload`), so nothing heavy is imported here: the public classes are
imported when they are first used. Importing the package also registers its strategies, for programs that run
with `TORCH_DEVICE_BACKEND_AUTOLOAD=0`, which disables the import by torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_ssd._autoload import register

if TYPE_CHECKING:
    from lightning_ssd.callbacks import (
        ActivationOffload,
        MicroBatchSwitch,
        ModelProfiler,
        OffloadMonitor,
        PrefetchScheduler,
        SaveFolder,
        SwapPlanner,
        TimelineRecorder,
        follow_stages,
    )
    from lightning_ssd.locations import tensor_locations
    from lightning_ssd.model_states import register_optimizer
    from lightning_ssd.strategy import SSDOffloadStrategy

__all__ = [
    "ActivationOffload",
    "MicroBatchSwitch",
    "ModelProfiler",
    "OffloadMonitor",
    "PrefetchScheduler",
    "SSDOffloadStrategy",
    "SaveFolder",
    "SwapPlanner",
    "TimelineRecorder",
    "follow_stages",
    "register_optimizer",
    "tensor_locations",
]
__version__ = "0.1.0"

register()


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = {
        "SSDOffloadStrategy": "lightning_ssd.strategy",
        "register_optimizer": "lightning_ssd.model_states",
        "tensor_locations": "lightning_ssd.locations",
    }
    try:
        module = import_module(modules.get(name, "lightning_ssd.callbacks"))
    except AttributeError as error:
        # Python reports an AttributeError of `__getattr__` as "cannot import name", without its cause.
        raise ImportError(f"lightning_ssd can't import {name}: {error}", name=__name__) from error
    return getattr(module, name)
