"""Transfers of a step on the device: values from where they are stored to the memory of a piece, and new ones back.

Values are in host memory (`HostTransfer`), also those that were read to staging memory, or on SSDs whose store of blobs
takes device buffers (`SSDTransfer`). A flat parameter with values in both has both.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ssd.device import CopyEngine, Mark, all_of, ended, finished, then
from lightning_ssd.model_states.optimizers import ElementSpan
from lightning_ssd.model_states.stores import (
    WEIGHT,
    HostBuffer,
    SSDBuffer,
    SSDStep,
    StagedState,
    StateStore,
    StoredArray,
)
from lightning_ssd.model_states.units import FlatParameter
from lightning_ssd.storage import PAGE, align_up

CUT = PAGE // torch.int16.itemsize
"""Pieces begin at multiples of this number of elements, which are whole pages in each dtype of the stored arrays, so
that no page has bytes of two pieces. Parameters begin at multiples of 64 elements, and so no vector of a kernel has
elements of two pieces."""


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
        spans = ((max(start, view.start), min(end, view.start + view.numel)) for view in flat.param_views)
        yield PieceRange(start, end, [(low, high - low) for low, high in spans if low < high])


class Reading(NamedTuple):
    """A transfer to the device.

    Attributes:
        mark: what the device executes after it finds the values that were copied from host memory.
        arrived: done when the values that are read from SSDs are there. If it has an error, they are not.
        ended: done when the transfer does not use the memory any more.
    """

    mark: Mark
    arrived: "Future[None]"
    ended: "Future[None]"


class Writing(NamedTuple):
    """A transfer from the device.

    Attributes:
        stored: done when the step may be committed: the values are in host memory, or their writes are submitted.
        ended: as that of a `Reading`.
    """

    stored: "Future[None]"
    ended: "Future[None]"


class PieceTransfer(ABC):
    """Transfers the pieces of some arrays of one flat parameter, in one step.

    Threads: `read` and `write` run on the thread `device-optimizer`, whose current stream computes the step; `end` on
    that, or on the one that fails the step or closes the `DeviceStepper`.

    Ownership: the memory of a piece belongs to a transfer until `ended` is done. The values belong to the step.

    Args:
        copies: copies of the steps on the device.

    Attributes:
        from_ssds: whether values are read from SSDs.
        begun: whether a transfer from the device has begun.
        weights: done when the compute weights of all pieces so far are stored, if they are among the arrays.
    """

    from_ssds = False

    def __init__(self, copies: CopyEngine) -> None:
        self.begun = False
        self.weights: Future[None] = finished(None)
        self._copies = copies

    @abstractmethod
    def read(self, piece: PieceRange, rows: Mapping[str, Tensor], after: Mark) -> Reading:
        """Begins to transfer the values of a piece to the device, except those that the step does not use.

        Args:
            piece: elements of the piece.
            rows: device memory of each array, in whole pages, by keys of the layout.
            after: mark that copies from host memory wait for; no stream uses the memory.
        """

    @abstractmethod
    def write(self, piece: PieceRange, rows: Mapping[str, Tensor]) -> Writing:
        """Begins to transfer the new values, which the current stream has computed; arguments as in `read`."""

    def end(self) -> None:
        """Called once, when all transfers of the step have begun."""
        return None


class HostTransfer(PieceTransfer):
    """Copies of arrays in host memory.

    Args:
        copies: as in `PieceTransfer`.
        sources: whole arrays of the committed version, by key.
        targets: whole arrays of the uncommitted version, compute weights first; those of `sources` if there is one
            version.
    """

    def __init__(self, copies: CopyEngine, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        super().__init__(copies)
        self._sources = sources
        self._targets = targets

    def read(self, piece: PieceRange, rows: Mapping[str, Tensor], after: Mark) -> Reading:
        if not self._sources:
            return Reading(after, finished(None), finished(None))
        *_, last = self._sources
        for key, source in self._sources.items():
            after = self._copies.h2d(
                as_bytes(source[piece.start : piece.end]), as_bytes(rows[key]), after, awaited=key == last
            )
        return Reading(after, finished(None), self._copies.on_h2d(after))

    def write(self, piece: PieceRange, rows: Mapping[str, Tensor]) -> Writing:
        copies = self._copies
        stepped = copies.mark()
        marks: list[Mark] = []
        keys = list(self._targets)
        for key, target in self._targets.items():
            awaited = key in (keys[0], keys[-1])
            marks.append(
                copies.d2h(as_bytes(rows[key]), as_bytes(target[piece.start : piece.end]), stepped, awaited=awaited)
            )
            self.begun = True
        if keys[0] == WEIGHT:
            self.weights = copies.on_d2h(marks[0])  # copies end in the order in which they were issued
        copied = copies.on_d2h(marks[-1])
        return Writing(copied, copied)


class SSDTransfer(PieceTransfer):
    """Reads and writes of arrays on SSDs (GPUDirect Storage), without host memory.

    Pieces begin and end at pages of the drives, so that a write does not change bytes of another piece.

    Args:
        copies: as in `PieceTransfer`.
        step: transfers of the buffer that has the arrays.
        arrays: the arrays.
        unread: key of an array that the step does not use; None: it uses all.
    """

    from_ssds = True

    def __init__(self, copies: CopyEngine, step: SSDStep, arrays: Sequence[StoredArray], unread: str | None) -> None:
        super().__init__(copies)
        self._step = step
        self._arrays = arrays
        self._unread = unread
        self._writes: list[Future[None]] = []

    def read(self, piece: PieceRange, rows: Mapping[str, Tensor], after: Mark) -> Reading:
        used = [array for array in self._arrays if array.key != self._unread]
        arrived = all_of(self._step.read(*_bytes_of(array, piece), _pages(rows[array.key])) for array in used)
        return Reading(after, arrived, ended(arrived))

    def write(self, piece: PieceRange, rows: Mapping[str, Tensor]) -> Writing:
        self.begun = True
        # The drives do not wait for streams: `d2h-done` submits the writes when the device has computed the values.
        computed = self._copies.on_d2h(self._copies.mark(awaited=True))
        written = then(computed, partial(self._submit, piece, rows))
        self._writes.append(written)
        self.weights = computed  # a prefetch of them waits for their write, too
        return Writing(computed, ended(written))

    def _submit(self, piece: PieceRange, rows: Mapping[str, Tensor], _: None) -> "Future[None]":
        return all_of(self._step.write(*_bytes_of(array, piece), _pages(rows[array.key])) for array in self._arrays)

    def end(self) -> None:
        self._step.end(self._writes)


def make_transfers(store: StateStore, staged: StagedState | None, copies: CopyEngine) -> Sequence[PieceTransfer]:
    """Returns the transfers of a step's arrays, those of the compute weights first.

    Args:
        store: the values, all of which are in host memory, or `stage_on_device` has returned.
        staged: values that were read to staging memory; None: all are transferred from where they are stored.
        copies: copies of the steps on the device.
    """
    # New compute weights are rounded from whole master weights: the old ones are not needed then.
    unread = WEIGHT if store.layout.whole_master else None

    def without_unread(arrays: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {key: array for key, array in arrays.items() if key != unread}

    if staged is None and store.buffers.in_memory:
        staged = store.stage(step=True).result()
    if staged is not None:
        return [HostTransfer(copies, without_unread(staged.by_key()), staged.out.by_key())]
    transfers: list[PieceTransfer] = []
    for index, buffer in enumerate(store.buffers):
        arrays = [array for array in store.layout.arrays if array.buffer == index]
        if isinstance(buffer, SSDBuffer):
            transfers.append(SSDTransfer(copies, buffer.step_on_device(), arrays, unread))
        elif isinstance(buffer, HostBuffer):
            make = partial(store.layout.arrays_in, index)
            sources, targets = (buffer.views(make, uncommitted=uncommitted) for uncommitted in (False, True))
            transfers.append(HostTransfer(copies, without_unread(sources), targets))
    return transfers


def as_bytes(values: Tensor) -> Tensor:
    """Returns the bytes of a contiguous tensor, which copies take."""
    return values.view(torch.uint8)


def _bytes_of(array: StoredArray, piece: PieceRange) -> tuple[int, int]:
    """Returns offset and number of the bytes of a piece in the buffer of an array."""
    return array.start + piece.start * array.dtype.itemsize, (piece.end - piece.start) * array.dtype.itemsize


def _pages(row: Tensor) -> Tensor:
    """Returns the bytes of an array of a piece, with the rest of the last page."""
    return as_bytes(row).as_strided((align_up(row.nbytes),), (1,))
