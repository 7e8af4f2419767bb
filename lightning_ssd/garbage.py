"""Full garbage collections during a training, which examine the objects of the training alone."""

import gc
from typing import Any

FULL = 2
"""Generation of a full collection."""

AT_STARTUP = 1000
"""More objects than an interpreter freezes when it starts (Python 3.12: 375)."""


class ShortCollections:
    """Exempts the objects that are older than a training from its full garbage collections.

    Imported packages own several hundred thousand objects, which a full collection of Python examines in 0.3 to 0.5 s
    on the host of an H100, while no thread of the training runs. It comes about every tenth step of a model of 2B with
    offloaded states. After the first one, garbage is collected once more between two micro-batches, and all objects
    that exist then are exempt. None of them belongs to a micro-batch, whose tensors would otherwise be kept until the
    training ends if they are in a reference cycle. Nothing is changed if user code has frozen objects itself.

    Threads: the training thread; `_note` runs on the thread whose allocation has caused a collection.
    """

    def __init__(self) -> None:
        self._due = False
        """Whether there was a full collection, and no object was exempt since."""
        self._frozen = False
        if gc.get_freeze_count() <= AT_STARTUP:
            gc.callbacks.append(self._note)

    def begin_micro_batch(self) -> None:
        """Exempts the present objects if there was a full collection. No micro-batch runs."""
        if not self._due:
            return
        self._end_notes()
        if gc.get_freeze_count() <= AT_STARTUP:
            gc.collect()
            gc.freeze()
            self._frozen = True

    def end(self) -> None:
        """Ends the exemption."""
        self._end_notes()
        if self._frozen:
            gc.unfreeze()

    def _note(self, phase: str, info: dict[str, Any]) -> None:
        self._due = self._due or (phase == "stop" and info["generation"] == FULL)

    def _end_notes(self) -> None:
        self._due = False
        if self._note in gc.callbacks:
            gc.callbacks.remove(self._note)
