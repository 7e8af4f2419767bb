"""Transfers of a step on the device: values from host memory to the memory of a piece, and new ones back."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ssd.device import CopyEngine, Mark
from lightning_ssd.futures import Future, finished
from lightning_ssd.model_states.optimizers import ElementSpan
from lightning_ssd.model_states.stores import WEIGHT, StagedState, StateStore
from lightning_ssd.model_states.units import FlatParameter

CUT = 2048
"""Pieces begin at multiples of this number of elements, so that no vector of a kernel has elements of two pieces."""


class PieceRange(NamedTuple):
    """Elements of a piece.

    Attributes:
        start: first element.
        end: the element after the last one.
        spans: the elements of parameters among them; the others align parameters.
    """

    start: int
    end: int
    spans: Sequence[ElementSpan]


def pieces(flat: FlatParameter, elements: int) -> Iterator[PieceRange]:
    """Yields the pieces of a flat parameter, of at most `elements` elements each."""
    most = elements // CUT * CUT
    assert most
    for start in range(0, flat.numel, most):
        end = min(start + most, flat.numel)
        spans: list[ElementSpan] = []
        for view in flat.param_views:
            low, high = max(start, view.start), min(end, view.start + view.numel)
            if low < high:
                spans.append(ElementSpan(low, high - low, low - view.start, view.random_key))
        yield PieceRange(start, end, spans)


class PieceTransfers:
    """Copies the pieces of one flat parameter in one step to the device, and back.

    Threads: the thread `device-optimizer`, whose current stream computes the step.

    Ownership: the memory of a piece belongs to its copies until they have ended. The values, which are in host memory,
    belong to the step.

    Args:
        store: the values.
        staged: values that were read to staging memory; None: all are copied from where they are stored.
        copies: copies of the steps on the device.

    Attributes:
        begun: whether a copy from the device has begun.
        weights: done when the compute weights of all pieces so far are in host memory.
    """

    def __init__(self, store: StateStore, staged: StagedState | None, copies: CopyEngine) -> None:
        if staged is None:
            staged = store.stage(step=True).result()
        # New compute weights are rounded from whole master weights: the old ones are not needed then.
        unread = WEIGHT if store.layout.whole_master else None
        self.begun = False
        self.weights: Future[None] = finished(None)
        self._copies = copies
        self._sources = {key: array for key, array in staged.by_key().items() if key != unread}
        self._targets = staged.out.by_key()

    def read(self, piece: PieceRange, rows: Mapping[str, Tensor], after: Mark) -> Mark:
        """Begins to copy the values of a piece to the device, except those that the step does not use.

        Args:
            piece: elements of the piece.
            rows: device memory of each array, by keys of the layout.
            after: mark after which no stream uses the memory.

        Returns:
            The mark of the last copy.
        """
        *_, last = self._sources
        for key, source in self._sources.items():
            values = as_bytes(source[piece.start : piece.end])
            after = self._copies.h2d(values, as_bytes(rows[key]), after, awaited=key == last)
        return after

    def write(self, piece: PieceRange, rows: Mapping[str, Tensor]) -> "Future[None]":
        """Begins to copy new values back, which the current stream has computed; arguments as in `read`.

        Returns:
            A future that is done when they are in host memory.
        """
        stepped = self._copies.mark()
        marks: list[Mark] = []
        *_, last = self._targets
        for key, target in self._targets.items():
            values = as_bytes(target[piece.start : piece.end])
            marks.append(self._copies.d2h(as_bytes(rows[key]), values, stepped, awaited=key in (WEIGHT, last)))
            self.begun = True
        self.weights = self._copies.on_d2h(marks[0])  # copies end in the order in which they were issued
        return self._copies.on_d2h(marks[-1])


def as_bytes(values: Tensor) -> Tensor:
    """Returns the bytes of a contiguous tensor, which copies take."""
    return values.view(torch.uint8)
