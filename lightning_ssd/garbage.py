"""Garbage collections: full ones during a training examine its objects alone, and there are none during a search."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from time import perf_counter

AT_STARTUP = 1000
"""More objects than an interpreter freezes when it starts (Python 3.12: 375)."""

SLOW = 0.5
"""Seconds of a first micro-batch from which on a training is expected to last until its first full collection."""


class ShortCollections:
    """Exempts the objects that are older than a training from its full garbage collections.

    Imported packages own several hundred thousand objects, which a full collection of Python examines in 0.3 to 0.5 s
    on the host of an H100, while no thread of the training runs. It comes about every tenth step of a model of 2B with
    offloaded states. After the first one, or before it if the first micro-batch was slow, garbage is collected between
    two micro-batches, and all objects that exist then are exempt. None of them belongs to a micro-batch, whose tensors
    would otherwise be kept until the training ends if they are in a reference cycle. Nothing is changed if user code
    has frozen objects itself.

    Threads: the training thread. Collections are counted, and no callback of theirs is used: one that runs within
    compiled code would be compiled, too.
    """

    def __init__(self) -> None:
        self._before = _full_collections()
        """Full collections of the process before the training."""
        self._decided = False
        """Whether objects are exempt, or never will be."""
        self._frozen = False
        """Whether this object has exempted them."""
        self._began: float | None = None
        """Time when the first micro-batch began; infinity: later ones have begun."""

    def begin_micro_batch(self) -> None:
        """Exempts the present objects after a slow first micro-batch or a full collection. No micro-batch runs."""
        if self._decided:
            return
        slow = gc.isenabled() and self._began is not None and perf_counter() - self._began >= SLOW
        self._began = inf if self._began is not None else perf_counter()
        if not slow and _full_collections() == self._before:
            return
        if gc.get_freeze_count() > AT_STARTUP:
            self._decided = True
            return
        before = _full_collections()
        gc.collect()  # does nothing while another thread collects, whose collection lets the next micro-batch try it
        if _full_collections() > before:
            self._decided = True
            gc.freeze()
            self._frozen = True

    def end(self) -> None:
        """Ends the exemption."""
        if self._frozen:
            gc.unfreeze()


def _full_collections() -> int:
    return int(gc.get_stats()[-1]["collections"])


@contextmanager
def without_collections() -> Iterator[None]:
    """Disables garbage collections, which take an eighth of the time of a plan: its objects live as long as it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
