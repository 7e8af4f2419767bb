"""`PlannedShapes`: the plans of a training, one for each of a few shapes of batches."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from lightning_ssd.activations import AllocatorMeter
from lightning_ssd.callbacks.seen_batches import BatchShape, SeenBatches

__all__ = ["PlannedShape", "PlannedShapes", "UnplannedBatches"]

MAX_UNPLANNED = 4
"""Micro-batches without a plan before another one is made. It doubles with each plan."""

LOOSELY_PLANNED = 8
"""Micro-batches under a plan for much larger batches that count as one without a plan."""

StateT = TypeVar("StateT")


@dataclass(eq=False)
class PlannedShape(Generic[StateT]):
    """A plan, and the micro-batch that was recorded for it.

    Attributes:
        shape: shape of the recorded batch; `None`: unknown.
        trained: whether each parameter required gradients.
        allocated_bytes: bytes that were allocated before the recorded step.
        state: the plan.
    """

    shape: BatchShape | None
    trained: tuple[bool, ...]
    allocated_bytes: int
    state: StateT

    def covers(self, shape: BatchShape | None) -> bool:
        """Returns whether a batch of that shape is, tensor by tensor, no larger than the recorded one."""
        return shape is not None and self.shape is not None and shape.is_within(self.shape)


class PlannedShapes(Generic[StateT]):
    """Finds the plan of a micro-batch: that of its shape, or that of the smallest shape that is no smaller.

    A micro-batch has no plan if it may need more memory than the recorded one: if its batch is larger, if other
    parameters are trained, or if more bytes were allocated before its step.

    Args:
        meter: the device's allocator.
    """

    #: Most plans. The least recently used one is removed.
    COUNT = 8
    #: Largest growth of allocated bytes / limit of memory, with which a plan still applies.
    GROWTH = 0.01
    #: Bytes of a batch / bytes of the planned one, below which the batch gets a plan of its own.
    CLOSE_ENOUGH = 0.8

    def __init__(self, meter: AllocatorMeter) -> None:
        self._meter = meter
        self._allocated_bytes = 0
        """Bytes that were allocated before the present step; 0: not compared."""
        self._plans: list[PlannedShape[StateT]] = []

    def begin_step(self, *, compare_bytes: bool) -> None:
        """Called when a step begins; `compare_bytes` is False if steps begin with any number of allocated bytes."""
        self._allocated_bytes = self._meter.allocated() if compare_bytes else 0

    def make(self, shape: BatchShape | None, trained: tuple[bool, ...], state: StateT) -> PlannedShape[StateT]:
        """Returns a plan for the present micro-batch, which is recorded. `find` does not find it before `add`."""
        return PlannedShape(shape, trained, self._allocated_bytes, state)

    def add(self, planned: PlannedShape[StateT]) -> list[PlannedShape[StateT]]:
        """Adds a plan in place of one of the same shape and trained parameters; returns the plans that were removed."""
        kind = planned.shape, planned.trained
        removed = [one for one in self._plans if one is not planned and (one.shape, one.trained) == kind]
        self._plans = [one for one in self._plans if one is not planned and one not in removed]
        removed += self._plans[: -self.COUNT + 1]
        self._plans = [*self._plans[-self.COUNT + 1 :], planned]
        return removed

    def remove(self, planned: PlannedShape[StateT]) -> None:
        """Removes a plan, if it was added."""
        self._plans = [one for one in self._plans if one is not planned]

    def find(self, shape: BatchShape | None, trained: tuple[bool, ...]) -> PlannedShape[StateT] | None:
        """Returns the plan of the present micro-batch; `None`: there is none."""
        least = self._allocated_bytes - self.GROWTH * self._meter.limit()
        fitting = [
            one for one in self._plans if one.covers(shape) and one.trained == trained and one.allocated_bytes >= least
        ]
        if not fitting:
            return None
        found = min(fitting, key=lambda one: (one.shape != shape, one.shape.nbytes if one.shape is not None else 0))
        self._plans.remove(found)
        self._plans.append(found)
        return found

    def is_close(self, planned: PlannedShape[StateT], shape: BatchShape) -> bool:
        """Returns whether a plan was made for a batch of about the size of `shape`."""
        return planned.shape is not None and shape.nbytes >= self.CLOSE_ENOUGH * planned.shape.nbytes

    def clear(self) -> list[PlannedShape[StateT]]:
        """Removes all plans, and returns them."""
        plans, self._plans = self._plans, []
        return plans


class UnplannedBatches:
    """Counts micro-batches without a plan of about their size, until there are enough of them for another plan."""

    def __init__(self) -> None:
        self._batches = SeenBatches()
        """Batches since the last plan was made."""
        self._count = 0.0
        self._patience = MAX_UNPLANNED

    def add(self, shape: BatchShape, *, planned: bool) -> bool:
        """Counts a micro-batch, and returns whether a plan should be made for its shape.

        Args:
            shape: shape of its batch.
            planned: whether it has a plan, which is one for much larger batches.
        """
        self._batches.add(shape)
        self._count += 1 / LOOSELY_PLANNED if planned else 1
        # The largest batch may not occur again: a smaller one is planned when twice as many have been counted.
        large = self._batches.is_large(shape) or self._count > 2 * self._patience
        return self._count > self._patience and large

    def restart(self) -> None:
        """Called when a plan is made."""
        self._batches, self._count = SeenBatches(), 0.0
        self._patience *= 2
