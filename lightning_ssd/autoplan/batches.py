"""The size of a micro-batch: shapes of batches, and the bytes that batches of a shape save for backward."""

from collections.abc import Iterable, Iterator, Mapping
from math import ceil, log, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_ssd import torch_internals as internals

ROWS = 4
"""Rows of a plan for micro-batches of up to a quarter, a half, three quarters, and all of the recorded size."""

GROWTH = 1.1
"""Size of a row for micro-batches larger than the recorded one / that of the row before. The recorded one is among the
largest, so that most larger ones are so by a few per cent: coarse rows would free memory that none of them needs."""

SLACK = 0.02
"""Share by which a micro-batch may save more than the largest one of its row: saved bytes vary a little."""

NEGLIGIBLE = 0.01
"""Bytes of a tensor / bytes of its batch, up to which the memory of a micro-batch does not depend on the tensor."""


class BatchShape(NamedTuple):
    """Shapes of the tensors of a batch, in the order of the batch, and their bytes."""

    shapes: tuple[tuple[int, ...], ...]
    nbytes: int
    sizes: tuple[int, ...]
    """Bytes of each tensor."""

    @classmethod
    def of(cls, batch: Any) -> "BatchShape | None":
        """Returns the shape of a batch; `None`: it has no tensors, or sparse or nested ones."""
        tensors = list(_tensors(batch))
        if not tensors or any(tensor.layout is not torch.strided or tensor.is_nested for tensor in tensors):
            return None
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        sizes = tuple(prod(shape) * t.element_size() for shape, t in zip(shapes, tensors, strict=True))
        return cls(shapes, sum(sizes), sizes)

    def is_within(self, other: "BatchShape") -> bool:
        """Returns whether each tensor is, in each dimension, no larger than that of `other`."""
        if self.shapes == other.shapes:
            return True
        if [len(shape) for shape in self.shapes] != [len(shape) for shape in other.shapes]:
            return False
        pairs = zip(self.shapes, other.shapes, strict=True)
        return all(a <= b for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))

    def growth_over(self, other: "BatchShape") -> float | None:
        """Returns an upper bound of the bytes that this batch saves / those that `other` does; `None`: not comparable.

        Saved bytes are assumed to grow at most with the square of one dimension, as those of attention do with the
        length of a sample.
        """
        if [len(shape) for shape in self.shapes] != [len(shape) for shape in other.shapes] or not other.nbytes:
            return None
        pairs = zip(self.shapes, other.shapes, strict=True)
        longer = max((a / max(1, b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True)), default=1.0)
        return max(1.0, longer) * self.nbytes / other.nbytes

    def share_of(self, other: "BatchShape") -> float:
        """Returns this batch's size / that of `other`, which it is within: of the tensor that has shrunk least.

        A model may spend most of its memory on any of the tensors, such as the decoder's of two texts.
        """
        least = NEGLIGIBLE * other.nbytes
        shares = [a / b for a, b in zip(self.sizes, other.sizes, strict=True) if b > least]
        return max(shares, default=1.0)


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


class BatchSizes:
    """Bounds the bytes that a micro-batch saves for backward, by those of earlier ones.

    Saved bytes are fitted over the recorded sizes: a share that does not depend on the batch, and a rest that is
    proportional to it. A batch that is larger than all earlier ones in any dimension has no bound.
    """

    #: Number of stored shapes.
    COUNT = 32
    #: Saved bytes / their bound, below which a shape is stored, as the fit does not describe it.
    CLOSE_ENOUGH = 0.9

    def __init__(self) -> None:
        self._known: list[tuple[BatchShape, int]] = []
        self._fixed = 0.0
        """Share of the saved bytes that does not depend on the batch."""

    def add(self, shape: BatchShape, saved_bytes: int) -> None:
        """Adds the bytes that a micro-batch with a batch of that shape has saved; 0: it had no forward."""
        if not saved_bytes:
            return
        for other, nbytes in self._known:
            if shape.is_within(other):
                self._fit(shape.share_of(other), saved_bytes / nbytes)
            elif other.is_within(shape):
                self._fit(other.share_of(shape), nbytes / saved_bytes)
        bound = self.bound(shape)
        if bound is not None and self.CLOSE_ENOUGH * bound <= saved_bytes <= bound:
            return
        saved_bytes = max([saved_bytes, *(nbytes for other, nbytes in self._known if other == shape)])
        known = [one for one in self._known if one[0] != shape]
        largest = max(known, key=lambda one: one[1], default=None)
        if len(known) >= self.COUNT:  # the largest one stays: it bounds most others
            known.remove(next(one for one in known if one is not largest))
        self._known = [*known, (shape, saved_bytes)]

    def _fit(self, share: float, saved: float) -> None:
        if saved > share and share < 1:
            self._fixed = min(1.0, max(self._fixed, (saved - share) / (1 - share)))

    def size(self, shape: BatchShape | None, recorded: BatchShape) -> float | None:
        """Returns the most bytes that a batch of a shape saves / those of the recorded one; `None`: not known."""
        bound, whole = self.bound(shape), self.bound(recorded)
        if bound is not None and whole is not None:
            return bound / whole
        return 1.0 if shape is not None and shape.is_within(recorded) else None  # maybe it saves no large tensors

    def bound(self, shape: BatchShape | None) -> float | None:
        """Returns the most bytes that a batch of that shape saves; `None`: it may save more than earlier ones."""
        if shape is None:
            return None
        bounds = [
            nbytes * (self._fixed + (1 - self._fixed) * shape.share_of(other))
            for other, nbytes in self._known
            if shape.is_within(other)
        ]
        return min(bounds, default=None)


class RecordedBatch:
    """The recorded micro-batch, with which later ones are compared: by their batch and their trained parameters.

    Attributes:
        shape: shape of its batch; `None`: unknown.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.shape: BatchShape | None = None
        self._parameters = tuple(parameters)
        self._trained: frozenset[int] = frozenset()
        """Indices of the parameters that it has trained."""
        self._sizes = BatchSizes()
        self._present: BatchShape | None = None
        """Shape of the present micro-batch; `None`: it is unknown, or saved bytes can't be counted."""

    def record(self, shape: BatchShape | None) -> None:
        """Called when a micro-batch is recorded that replaces the one before."""
        self.shape, self._trained, self._sizes = shape, trained_parameters(self._parameters), BatchSizes()

    def begin(self, shape: BatchShape | None) -> None:
        """Called when a micro-batch begins; `shape` is that of its batch, or `None` if that is unknown."""
        self._present = shape

    def discard(self) -> None:
        """Called when the present micro-batch runs again, so that its saved bytes can't be counted."""
        self._present = None

    def end(self, saved_bytes: int) -> None:
        """Called when a micro-batch has ended whose saved bytes were all counted."""
        shape, self._present = self._present, None
        if shape is not None and self.trains_all:
            self._sizes.add(shape, saved_bytes)

    @property
    def trains_all(self) -> bool:
        """Whether the recorded micro-batch has trained all parameters that the present one trains."""
        return trained_parameters(self._parameters) <= self._trained

    def size(self, shape: BatchShape | None) -> float | None:
        """Returns the most bytes that a batch of a shape saves / those of the recorded one; `None`: not known."""
        return 1.0 if self.shape is None else self._sizes.size(shape, self.shape)


def trained_parameters(parameters: Iterable[nn.Parameter]) -> frozenset[int]:
    """Returns the indices of the parameters that require gradients now."""
    with internals.without_torch_function():  # which offloaded parameters run for each attribute
        return frozenset([index for index, one in enumerate(parameters) if one.requires_grad])


def row_of(size: float) -> int:
    """Returns the number of the row for micro-batches of a size: saved bytes / those of the recorded micro-batch."""
    size /= 1 + SLACK
    return max(1, ceil(ROWS * size)) if size <= 1 else ROWS + ceil(log(size) / log(GROWTH))


def size_of_row(number: int) -> float:
    """Returns the size of the largest micro-batches of a row."""
    return number / ROWS if number <= ROWS else GROWTH ** (number - ROWS)


def _tensors(batch: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yields the tensors of containers and of attributes of objects, which are searched to a depth."""
    for value in internals.tree_leaves(batch):
        if isinstance(value, Tensor):
            yield value
        elif depth:
            # A mapping need not be a dict, such as transformers' BatchEncoding.
            items = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
            for item in items.values():
                yield from _tensors(item, depth - 1)
