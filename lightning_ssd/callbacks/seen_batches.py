"""`SeenBatches`: compares the size of a batch with earlier ones."""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

ALIKE = 0.8
"""Bytes of a batch / bytes of a larger one, from which on steps with either take about the same time."""


class BatchShape(NamedTuple):
    """Shapes of the tensors of a batch, in the order of the batch, and their bytes."""

    shapes: tuple[tuple[int, ...], ...]
    nbytes: int

    @classmethod
    def of(cls, batch: Any) -> "BatchShape | None":
        """Returns the shape of a batch; `None`: it has no tensors, or sparse or nested ones."""
        tensors = list(_tensors(batch))
        if not tensors or any(tensor.layout is not torch.strided or tensor.is_nested for tensor in tensors):
            return None
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        return cls(shapes, sum(prod(shape) * t.element_size() for shape, t in zip(shapes, tensors, strict=True)))

    def is_within(self, other: "BatchShape") -> bool:
        """Returns whether each tensor is, in each dimension, no larger than that of `other`."""
        if self.shapes == other.shapes:
            return True
        if [len(shape) for shape in self.shapes] != [len(shape) for shape in other.shapes]:
            return False
        pairs = zip(self.shapes, other.shapes, strict=True)
        return all(a <= b for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))

    def is_like(self, other: "BatchShape") -> bool:
        """Returns whether steps with either batch take about the same time, by their bytes."""
        return ALIKE * self.nbytes <= other.nbytes and ALIKE * other.nbytes <= self.nbytes


class SeenBatches:
    """The largest shapes of the batches so far."""

    #: Number of stored shapes, the newest ones.
    COUNT = 16

    #: Share of the bytes of the largest batch from which on a batch is large.
    LARGE = 0.95

    def __init__(self) -> None:
        self._largest: list[BatchShape] = []
        self.nbytes = 0
        """Bytes of the largest batch."""

    def add(self, shape: BatchShape) -> None:
        """Adds the shape of a batch."""
        if not self.covers(shape):
            self._largest = [one for one in self._largest if not one.is_within(shape)][1 - self.COUNT :] + [shape]
            self.nbytes = max(self.nbytes, shape.nbytes)

    def is_large(self, shape: BatchShape | None) -> bool:
        """Returns whether a batch has almost as many bytes as the largest one, or an unknown number."""
        return shape is None or shape.nbytes >= self.LARGE * self.nbytes

    def covers(self, shape: BatchShape | None) -> bool:
        """Returns whether a batch of that shape is, tensor by tensor, no larger than one that was added."""
        return shape is not None and any(shape.is_within(one) for one in self._largest)


def _tensors(batch: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yields the tensors of containers and of attributes of objects, which are searched to a depth."""
    for value in tree_leaves(batch):
        if isinstance(value, Tensor):
            yield value
        elif depth:
            # A mapping need not be a dict, such as transformers' BatchEncoding.
            items = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
            for item in items.values():
                yield from _tensors(item, depth - 1)
