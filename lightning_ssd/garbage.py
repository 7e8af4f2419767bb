"""Full garbage collections during a training, which examine the objects of the training alone."""

import gc
from collections.abc import Callable
from typing import Any

FULL = 2
"""Generation of a full collection."""

AT_STARTUP = 1000
"""More objects than an interpreter freezes when it starts (Python 3.12: 375)."""


def shorten_collections() -> Callable[[], None]:
    """Exempts all objects that survive the next full collection from later ones.

    Imported packages own several hundred thousand objects, which a full collection of Python examines in 0.3 to 0.5 s
    on the host of an H100, while no thread of the training runs. It comes about every tenth step of a model of 2B with
    offloaded states. Survivors of a collection are no garbage; those that become cyclic garbage later are freed after
    the training. Nothing is changed if user code has frozen objects itself.

    Returns:
        A function that ends the exemption.
    """
    if gc.get_freeze_count() > AT_STARTUP:
        return lambda: None

    def freeze(phase: str, info: dict[str, Any]) -> None:  # on the thread whose allocation has caused the collection
        if phase == "stop" and info["generation"] == FULL and gc.get_freeze_count() <= AT_STARTUP:
            gc.freeze()

    def restore() -> None:
        gc.callbacks.remove(freeze)
        gc.unfreeze()

    gc.callbacks.append(freeze)
    return restore
