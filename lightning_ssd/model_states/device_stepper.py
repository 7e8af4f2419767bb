"""Optimizer steps on the device of flat parameters in host memory, whose values are copied there and back in pieces."""

import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ssd.device import CopyEngine, Mark, Worker, all_of, ended, then
from lightning_ssd.model_states.flat import FlatParameter
from lightning_ssd.model_states.layout import StagedState
from lightning_ssd.model_states.optimizers import ElementSpan, FlatOptimizer, Options, StepInput
from lightning_ssd.model_states.state_store import StateStore

_ROW_ALIGNMENT = 256
"""Alignment of each array of a piece, in bytes."""


@dataclass(frozen=True)
class DeviceStep:
    """One step that the device makes.

    Attributes:
        store: the values of the flat parameter, in host memory as a whole.
        flat_optimizer: its optimizer; `steps_on_device`.
        options: options of its parameter group.
        gradient: its gradient, in host memory.
        scale: the gradient is multiplied with it.
        limit: largest absolute value of a gradient's element, after that; None: no limit.
        drop_second: whether the second version in host memory is freed before.
    """

    store: StateStore
    flat_optimizer: FlatOptimizer
    options: Options
    gradient: Tensor
    scale: float
    limit: float | None
    drop_second: bool


class DeviceStepper:
    """Steps flat parameters on the device, piece by piece: copied to it, stepped, and copied back.

    While one piece is stepped, the next ones are copied to the device and the ones before are copied back, so that
    copies use both directions at once.

    Threads: `submit` may be called on any thread. Copies and kernels are issued on the thread `device-optimizer`, with
    streams of its own. It waits for memory of pieces that are copied back, and for nothing else. Returned futures
    complete on the `d2h-done` thread of these copies, or, after an error, on `device-optimizer`.

    Ownership: device memory of a piece belongs to the thread from `_free.get` on, then to the copies that were issued,
    until the last one's mark is reached. Values and gradient in host memory belong to the step until the second future
    that `submit` returns is done. After an error, no later step is made: copies that were issued may still use
    the memory of the failed piece, until `close` has waited for them.

    Args:
        copies: copy engine of the training; the stepper uses a sibling of it, with streams of its own.

    Attributes:
        nbytes: bytes of device memory.

    Raises:
        torch.OutOfMemoryError: the device has no room.
    """

    PIECES = 4
    """Pieces on the device at once: one is copied there, one is stepped, one is copied back, and one waits."""
    PIECE_BYTES = 2**27
    """Bytes of a piece with all its arrays: copies of 32 MiB reach the full bandwidth."""

    def __init__(self, copies: CopyEngine) -> None:
        self.nbytes = self.PIECES * self.PIECE_BYTES
        with torch._C._DisableTorchDispatch(), torch.inference_mode(False):
            memory = copies.empty(self.nbytes)
        self._allocated = copies.mark()
        """The memory belongs to earlier work of the compute stream until this mark is reached."""
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for start in range(0, self.nbytes, self.PIECE_BYTES):
            self._free.put(memory[start : start + self.PIECE_BYTES])
        self._failure: BaseException | None = None
        self._num_copies_back = 0
        """Copies to host memory that the running step has issued."""
        self._copies = copies.sibling()
        self._worker = Worker("device-optimizer")

    @property
    def failed(self) -> bool:
        """Whether a step has failed; later ones fail with its error."""
        return self._failure is not None

    def submit(self, step: DeviceStep, *, priority: int) -> "tuple[Future[None], Future[None]]":
        """Submits a step; the lowest priority goes first.

        Returns:
            A future that is done when the new compute weights are in host memory; and one for all new values, which is
            done when no copy uses the values or the gradient any more, also if it has an error.
        """
        weights: list[Future[None]] = []
        copied: list[Future[None]] = []
        overwritten = False

        def run() -> None:  # on the thread device-optimizer
            nonlocal overwritten
            if self._failure is not None:
                raise self._failure
            if step.drop_second:
                step.store.drop_second()
            staged = step.store.stage(step=True).result()
            self._num_copies_back = 0
            try:
                with self._copies.side_stream():
                    for spans in pieces(step.store.flat, self._piece_elements(staged, step.gradient)):
                        of_weights, of_all = self._copy_back(self._step(step, staged, spans), staged.out, spans)
                        weights[:] = [of_weights]  # copies end in the order in which they were issued
                        copied.append(of_all)
            except BaseException as error:
                self._failure = error
                overwritten = True  # unless the copies are known to have ended
                self._copies.drain()
                overwritten = False
                raise
            finally:
                overwritten |= staged.out is staged and self._num_copies_back > 0

        def end(done: "Future[None]") -> None:
            if (error := done.exception()) is not None and overwritten:
                step.store.lose(error)

        issued = self._worker.submit(run, priority=priority)
        first = then(issued, lambda _: all_of(weights))  # before the next line, so that it is done first
        done = then(ended(issued), lambda _: all_of([issued, *copied]))
        done.add_done_callback(end)
        return first, done

    def close(self) -> None:
        """Ends the thread after the submitted steps, and frees the memory."""
        self._worker.close()
        try:
            self._copies.drain()
        finally:
            self._copies.close()
            self._free = queue.SimpleQueue()

    def _piece_elements(self, staged: StagedState, gradient: Tensor) -> int:
        arrays = [*staged.arrays(), gradient]
        room = self.PIECE_BYTES - len(arrays) * _ROW_ALIGNMENT
        return room // sum(array.itemsize for array in arrays)

    def _step(self, step: DeviceStep, staged: StagedState, spans: Sequence[ElementSpan]) -> "_Piece":
        """Issues the copies of a piece to the device, and its step."""
        copies = self._copies
        start, end = spans[0][0], sum(spans[-1])
        host, host_gradient = staged.part(start, end), step.gradient[start:end]
        memory = self._free.get()
        values, gradient = _carve(memory, host, host_gradient)
        mark = self._allocated
        # New compute weights are rounded from whole master weights: the old ones are not needed then.
        rounded = host.master is not None and host.master is not host.weights
        for source, target in zip(host.arrays()[rounded:], values.arrays()[rounded:], strict=True):
            mark = copies.h2d(_bytes(source), _bytes(target), mark)
        copies.wait(copies.h2d(_bytes(host_gradient), _bytes(gradient), mark))
        scale = step.scale
        if step.limit is not None:
            # The copy in the memory of the piece may change: clipping allocates for 16-bit gradients alone.
            gradient, scale = gradient.float().mul_(scale).clamp_(-step.limit, step.limit), 1.0
        within = [(low - start, numel) for low, numel in spans]
        has_grad = [True] * len(step.store.flat.param_views)
        step.flat_optimizer.step_piece(StepInput(step.options, gradient, has_grad, scale), values, within)
        return _Piece(memory, values, copies.mark())

    def _copy_back(
        self, piece: "_Piece", out: StagedState, spans: Sequence[ElementSpan]
    ) -> "tuple[Future[None], Future[None]]":
        """Issues the copies of a piece to host memory.

        Returns:
            A future that is done when its weights were copied, and one for all its values, after which the memory of
            the piece is free.
        """
        copies = self._copies
        sources, targets = piece.values.arrays(), out.part(spans[0][0], sum(spans[-1])).arrays()
        marks: list[Mark] = []
        for source, target in zip(sources, targets, strict=True):
            awaited = source is sources[0] or source is sources[-1]
            marks.append(copies.d2h(_bytes(source), _bytes(target), piece.stepped, awaited=awaited))
            self._num_copies_back += 1
        of_weights, of_all = copies.on_d2h(marks[0]), copies.on_d2h(marks[-1])
        of_all.add_done_callback(lambda _: self._free.put(piece.memory))
        return of_weights, of_all


@dataclass(frozen=True)
class _Piece:
    """A piece on the device.

    Attributes:
        memory: its device memory.
        values: its new values.
        stepped: mark after which they have their values.
    """

    memory: Tensor
    values: StagedState
    stepped: Mark


def pieces(flat: FlatParameter, elements: int) -> Iterator[list[ElementSpan]]:
    """Yields pieces of a flat parameter of at most `elements` elements each, as spans of neighbouring parameters.

    A parameter is divided at multiples of 1024 elements, which no vector of a kernel crosses.
    """
    most = elements // 1024 * 1024
    assert most
    piece: list[ElementSpan] = []
    for item in flat.param_views:
        for low in range(item.start, item.start + item.numel, most):
            span = (low, min(most, item.start + item.numel - low))
            if piece and sum(span) - piece[0][0] > most:
                yield piece
                piece = []
            piece.append(span)
    if piece:
        yield piece


def _carve(memory: Tensor, host: StagedState, host_gradient: Tensor) -> tuple[StagedState, Tensor]:
    """Returns arrays in device bytes `memory` like those in host memory."""
    start = 0

    def row(like: Tensor) -> Tensor:
        nonlocal start
        values = memory[start : start + like.nbytes].view(like.dtype)
        start += -(-like.nbytes // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        return values

    weights = row(host.weights)
    master: Any = host.master
    if master is not None:
        master = weights if master is host.weights else row(master)
    low = None if host.low is None else row(host.low)
    return StagedState(weights, master, low, {name: row(of) for name, of in host.states.items()}), row(host_gradient)


def _bytes(values: Tensor) -> Tensor:
    return values.view(torch.uint8)
