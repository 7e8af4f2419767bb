"""`ProvenRules`: whether a micro-batch may run out of memory, by those before it under the same rule."""

from collections import Counter

PROVEN = 16
"""Micro-batches in a row without an OutOfMemoryError, after which none is expected under the same rules."""

FIRST_MICRO_BATCHES = 2
"""Micro-batches under a rule whose optimizer steps begin after backward. Most of those that run out of memory are among
them; in later ones the delay would cost more time than a failure."""


class ProvenRules:
    """Counts the micro-batches under each rule that had enough memory, since one ran out of it.

    A rule is any value that compares equal for micro-batches with the same plan, placement or phase of profiling. All
    methods are called on the training thread, once for each micro-batch.
    """

    def __init__(self) -> None:
        self._rule: object = None
        """Rule of the present micro-batch."""
        self._proven: Counter[object] = Counter()

    def begin(self, rule: object, *, larger: bool) -> None:
        """Begins a micro-batch; `larger` says that its batch is larger than all earlier ones."""
        self._rule = rule
        if larger:
            self._proven[rule] = 0

    def end(self) -> None:
        """Ends the micro-batch, which had enough memory."""
        self._proven[self._rule] += 1

    def restart(self) -> None:
        """Called when the present micro-batch has run out of memory."""
        self._proven.clear()

    @property
    def may_run_out(self) -> bool:
        """Whether the present micro-batch is one of the first `PROVEN` under its rule."""
        return self._proven[self._rule] < PROVEN

    @property
    def begins_rule(self) -> bool:
        """Whether it is one of the first `FIRST_MICRO_BATCHES` under its rule, which run out of memory most often."""
        return self.may_run_out and self._proven[self._rule] < FIRST_MICRO_BATCHES
