"""Optimizer steps on the device of offloaded flat parameters, whose values are copied there and back in pieces.

The file is large because one thread runs the three stages of all pieces (copy in, step, copy out) in a shared amount of
device memory: their order, their priorities and the release of memory after an error depend on each other.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
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
        store: the values of the flat parameter.
        flat_optimizer: its optimizer; `steps_on_device`.
        options: options of its parameter group.
        gradient: its gradient, in host memory, in the dtype of the flat parameter.
        scale: the gradient is multiplied with it.
        limit: largest absolute value of a gradient's element, after that; None: no limit.
        drop_second: whether the second version in host memory is freed before.
        staged: the values, of which some are on SSDs and were read to staging memory; None: all are in host memory.
    """

    store: StateStore
    flat_optimizer: FlatOptimizer
    options: Options
    gradient: Tensor
    scale: float
    limit: float | None
    drop_second: bool
    staged: StagedState | None


class DeviceStepper:
    """Steps flat parameters on the device, piece by piece: copied to it, stepped, and copied back.

    While one piece is stepped, the next ones are copied to the device and the ones before are copied back, so that
    copies use both directions at once. Values may be prefetched before the step is known, if there is memory.

    The lowest priority goes first, piece by piece: a step before a prefetch, and each before less urgent ones that were
    submitted earlier. At most `COPIES_AHEAD` pieces are copied to the device at once, so that an urgent piece waits for
    no more than these in the queue of copies. Without free memory, an urgent prefetch takes that of the least urgent
    one; a step takes that of any prefetch, if no memory is about to be free.

    Threads: public methods may be called on any thread. Each posts an event to the thread `device-optimizer`, which
    owns all private fields but `_copies` and `_worker`, and issues copies and kernels, with streams of its own. It
    waits for nothing. The ends of copies are events, too, which the threads `d2h-done` and `h2d-done` post. Returned
    futures complete on these two, or on `device-optimizer`.

    Ownership: the device memory of a piece belongs to `_free`; then, from the copies to the device on, to
    `_Work.copied`; then to the step and its copies to host memory, which return it to `_free` when they have ended. A
    dropped piece returns when its copies to the device have ended. Values in host memory may be read by copies from
    `prefetch` until the future of `drop`, or the second future of `submit`, is done; values in host memory or staging
    memory, and the gradient, belong to the step until then. After an error, no later step is made.

    Args:
        copies: copy engine of the training; the stepper uses a sibling of it, with streams of its own.
        num_pieces: pieces that have memory on the device; `PIECES` or more.

    Attributes:
        nbytes: bytes of device memory.

    Raises:
        torch.OutOfMemoryError: the device has no room.
    """

    PIECES = 4
    """Pieces on the device at once: one is copied there, one is stepped, one is copied back, and one waits."""
    PIECE_BYTES = 2**27
    """Bytes of a piece with all its arrays: copies of 32 MiB reach the full bandwidth."""
    COPIES_AHEAD = 2
    """Pieces that are copied to the device at once. The second one begins without waiting for the host."""

    def __init__(self, copies: CopyEngine, num_pieces: int = PIECES) -> None:
        self.nbytes = num_pieces * self.PIECE_BYTES
        with torch._C._DisableTorchDispatch(), torch.inference_mode(False):
            memory = copies.empty(self.nbytes)
        self._allocated = copies.mark()
        """The memory belongs to earlier work of the compute stream until this mark is reached."""
        self._free = [memory[start : start + self.PIECE_BYTES] for start in range(0, self.nbytes, self.PIECE_BYTES)]
        self._num_returning = 0
        """Pieces whose memory returns to `_free` without a further decision: they are copied back, or were dropped."""
        self._num_copying = 0
        """Pieces that are being copied to the device."""
        self._work: dict[FlatParameter, _Work] = {}
        """Flat parameters that are prefetched, or whose step is not issued as a whole."""
        self._failure: BaseException | None = None
        self._copies = copies.sibling()
        self._worker = Worker("device-optimizer")

    @property
    def failed(self) -> bool:
        """Whether a step has failed; later ones fail with its error."""
        return self._failure is not None

    def prefetch(self, store: StateStore, *, priority: int) -> None:
        """Copies values to the device once the announced step has ended, if there is memory.

        Values that change before their step are copied again. The caller submits a step, or calls `drop`.

        Args:
            store: the values, which are in host memory as a whole.
            priority: the lowest goes first.
        """
        work = _Work(store, priority)

        def announce() -> None:
            if self._failure is None:
                self._work.setdefault(store.flat, work)

        self._post(announce)
        # Without effect if it was dropped meanwhile.
        self._post(lambda: self._open(work, store.stage(step=True).result()), after=[store.stepped])

    def drop(self, flat: FlatParameter) -> "Future[None]":
        """Drops the prefetched values of `flat`, unless its step was submitted.

        Returns:
            A future that is done when no copy reads the values in host memory any more.
        """

        def release() -> "Future[None]":
            work = self._work.get(flat)
            if work is not None and work.step is None:
                del self._work[flat]
                self._release(work.copied)
            return self._copies.on_h2d(None)  # done after those of all earlier copies

        copied: list[Future[None]] = []
        return then(ended(self._post(lambda: copied.append(release()))), lambda _: all_of(copied))

    def submit(self, step: DeviceStep, *, priority: int) -> "tuple[Future[None], Future[None]]":
        """Submits a step; the lowest priority goes first.

        Returns:
            A future that is done when the new compute weights are in host memory, or in staging memory; and one for all
            new values, which is done when no copy uses the values or the gradient any more, also if it has an error.
        """
        running = _RunningStep(step)

        def begin() -> None:
            if self._failure is not None:
                raise self._failure
            if step.drop_second:
                step.store.drop_second()
            work = self._work.setdefault(step.store.flat, _Work(step.store, priority))
            try:
                running.staged = step.store.stage(step=True).result() if step.staged is None else step.staged
                if not work.spans:
                    self._open(work, running.staged)
            except BaseException:
                del self._work[step.store.flat]
                self._release(work.copied)
                raise
            work.step = running

        def fail(begun: "Future[None]") -> None:
            if (error := begun.exception()) is not None:
                running.issued.set_exception(error)

        def end(done: "Future[None]") -> None:
            if (error := done.exception()) is not None and running.overwritten:
                step.store.lose(error)

        first = then(running.issued, lambda _: all_of(running.weights))  # before the next line: it is done first
        done = then(ended(running.issued), lambda _: all_of([running.issued, *running.copied]))
        done.add_done_callback(end)
        self._post(begin).add_done_callback(fail)
        return first, done

    def close(self) -> None:
        """Ends the thread, fails steps that were not issued, and frees the memory."""
        self._worker.close()
        self._fail_steps(RuntimeError("training ended before this optimizer step was made"))
        self._copies.close()
        self._free = []

    # ---- events, on the thread device-optimizer ----

    def _post(self, event: Callable[[], None], after: "Sequence[Future[Any]]" = ()) -> "Future[None]":
        """Posts an event, which is followed by the most urgent copies and step that are possible then.

        Returns:
            A future with the error of `event`, if it has one.
        """

        def run() -> None:
            try:
                event()
            finally:
                self._advance()

        return self._worker.submit(run, after)

    def _advance(self) -> None:
        if self._failure is not None:
            return
        try:
            with self._copies.side_stream():
                issued = self._issue_next()
        except BaseException as error:
            self._failure = error
            self._fail_steps(error)
            return
        if issued:
            self._post(lambda: None)  # events that were posted meanwhile go first: they may be more urgent

    def _issue_next(self) -> bool:
        """Issues the most urgent step of a piece, or its copies to the device; returns whether anything was issued."""
        work = min((work for work in self._work.values() if work.step is not None), key=_priority, default=None)
        if work is None:
            for work in sorted(self._work.values(), key=_priority):
                if len(work.copied) < len(work.spans):
                    return self._copy_in(work)
            return False
        if work.changes != work.store.changes:
            assert work.step is not None
            for piece, spans in zip(work.copied, work.spans, strict=False):
                self._copy_values(piece, work.step.staged, spans)
            work.changes = work.store.changes
        if not work.copied and not self._copy_in(work):
            return False
        self._step(work)
        return True

    def _fail_steps(self, error: BaseException) -> None:
        """Fails all steps that are not issued, after the copies that were."""
        drained = True
        try:
            self._copies.drain()
        except BaseException as lost:  # the device is lost, and copies may still be under way
            error, drained = lost, False
        works, self._work = self._work, {}
        for work in works.values():
            if (running := work.step) is not None:
                running.drained = drained
                running.issued.set_exception(error)

    # ---- memory of pieces ----

    def _allocate(self, work: "_Work") -> Tensor | None:
        """Returns the memory of a piece; None: there is none until another event."""
        if self._free:
            return self._free.pop()
        if self._num_returning == 0:
            others = [
                other
                for other in self._work.values()
                if other is not work and other.copied and (work.step is not None or other.priority > work.priority)
            ]
            if others:
                self._release([max(others, key=_priority).copied.pop()])
        return None

    def _release(self, pieces: "Sequence[_Piece] | deque[_Piece]") -> None:
        """Frees the memory of pieces that are not stepped, once the copies to the device have ended."""
        for piece in pieces:
            self._num_returning += 1
            self._return(piece.memory, self._copies.on_h2d(None))  # done after those of all earlier copies

    def _return(self, memory: Tensor, ended: "Future[None]") -> None:
        def free() -> None:
            self._num_returning -= 1
            self._free.append(memory)

        ended.add_done_callback(lambda _: self._post(free))

    # ---- one piece ----

    def _open(self, work: "_Work", staged: StagedState) -> None:
        """Begins to copy values, which no step changes now."""
        flat = work.store.flat
        itemsize = sum(array.itemsize for array in staged.arrays()) + flat.dtype.itemsize
        room = self.PIECE_BYTES - (len(staged.arrays()) + 1) * _ROW_ALIGNMENT
        work.changes = work.store.changes
        work.spans = list(pieces(flat, room // itemsize))

    def _copy_in(self, work: "_Work") -> bool:
        """Issues the copies of the next piece to the device; returns whether it could."""
        if self._num_copying == self.COPIES_AHEAD or (memory := self._allocate(work)) is None:
            return False
        spans = work.spans[work.num_stepped + len(work.copied)]
        staged = work.store.stage(step=True).result() if work.step is None else work.step.staged
        start, end = spans[0][0], sum(spans[-1])
        piece = _Piece(memory, *_carve(memory, staged.part(start, end), work.store.flat.dtype), self._allocated)
        self._copy_values(piece, staged, spans)
        work.copied.append(piece)
        self._num_copying += 1
        self._copies.on_h2d(piece.copied).add_done_callback(lambda _: self._post(self._end_copy_in))
        return True

    def _copy_values(self, piece: "_Piece", staged: StagedState, spans: Sequence[ElementSpan]) -> None:
        host = staged.part(spans[0][0], sum(spans[-1]))
        # New compute weights are rounded from whole master weights: the old ones are not needed then.
        rounded = host.master is not None and host.master is not host.weights
        sources, targets = host.arrays()[rounded:], piece.values.arrays()[rounded:]
        for source, target in zip(sources, targets, strict=True):
            awaited = source is sources[-1]
            piece.copied = self._copies.h2d(_bytes(source), _bytes(target), piece.copied, awaited=awaited)

    def _end_copy_in(self) -> None:
        self._num_copying -= 1

    def _step(self, work: "_Work") -> None:
        """Issues the step of the first piece of `work`, and the copies of its new values to host memory."""
        assert work.step is not None
        copies, running, step = self._copies, work.step, work.step.step
        spans = work.spans[work.num_stepped]
        start, end = spans[0][0], sum(spans[-1])
        piece = work.copied.popleft()
        copies.wait(copies.h2d(_bytes(step.gradient[start:end]), _bytes(piece.gradient), piece.copied))
        gradient, scale = piece.gradient, step.scale
        if step.limit is not None:
            # The copy in the memory of the piece may change: clipping allocates for 16-bit gradients alone.
            gradient, scale = gradient.float().mul_(scale).clamp_(-step.limit, step.limit), 1.0
        within = [(low - start, numel) for low, numel in spans]
        has_grad = [True] * len(step.store.flat.param_views)
        step.flat_optimizer.step_piece(StepInput(step.options, gradient, has_grad, scale), piece.values, within)
        stepped = copies.mark()
        sources, targets = piece.values.arrays(), running.staged.out.part(start, end).arrays()
        marks: list[Mark] = []
        for source, target in zip(sources, targets, strict=True):
            awaited = source is sources[0] or source is sources[-1]
            marks.append(copies.d2h(_bytes(source), _bytes(target), stepped, awaited=awaited))
            running.num_copies_back += 1
        work.num_stepped += 1
        running.weights[:] = [copies.on_d2h(marks[0])]  # copies end in the order in which they were issued
        running.copied.append(copies.on_d2h(marks[-1]))
        self._num_returning += 1
        self._return(piece.memory, running.copied[-1])
        if work.num_stepped == len(work.spans):
            del self._work[step.store.flat]
            running.issued.set_result(None)


@dataclass(eq=False)
class _Piece:
    """A piece on the device.

    Attributes:
        memory: its device memory.
        values: its values.
        gradient: memory for its gradient.
        copied: mark after which the values are on the device.
    """

    memory: Tensor
    values: StagedState
    gradient: Tensor
    copied: Mark


@dataclass(eq=False)
class _RunningStep:
    """A submitted step.

    Attributes:
        step: the step.
        staged: values in host memory or staging memory; set when it begins.
        issued: done when all copies were issued.
        weights: the last future of copied weights.
        copied: futures of all values of the pieces.
        num_copies_back: copies to host memory that were issued.
        drained: whether copies that were issued before an error are known to have ended.
    """

    step: DeviceStep
    staged: StagedState = field(init=False)
    issued: "Future[None]" = field(default_factory=Future)
    weights: "list[Future[None]]" = field(default_factory=list)
    copied: "list[Future[None]]" = field(default_factory=list)
    num_copies_back: int = 0
    drained: bool = True

    @property
    def overwritten(self) -> bool:
        """Whether copies have overwritten committed values, or may still write to the memory of another step."""
        return self.num_copies_back > 0 and (self.step.store.steps_in_place or not self.drained)


@dataclass(eq=False)
class _Work:
    """A flat parameter that is prefetched or stepped.

    Attributes:
        store: its values.
        priority: the lowest goes first.
        changes: `StateStore.changes` of the values on the device.
        spans: its pieces; empty until the step before has ended.
        copied: pieces on the device, in order, from the first one that is not stepped.
        num_stepped: pieces that were stepped.
        step: its step; None: it is prefetched.
    """

    store: StateStore
    priority: int
    changes: int = 0
    spans: Sequence[Sequence[ElementSpan]] = ()
    copied: "deque[_Piece]" = field(default_factory=deque)
    num_stepped: int = 0
    step: _RunningStep | None = None


def _priority(work: _Work) -> int:
    return work.priority


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


def _carve(memory: Tensor, host: StagedState, gradient_dtype: torch.dtype) -> tuple[StagedState, Tensor]:
    """Returns arrays in device bytes `memory` like those in host memory, and one for the gradient."""
    start = 0

    def row(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        nonlocal start
        dtype = like.dtype if dtype is None else dtype
        nbytes = like.numel() * dtype.itemsize
        values = memory[start : start + nbytes].view(dtype)
        start += -(-nbytes // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        return values

    weights = row(host.weights)
    master: Any = host.master
    if master is not None:
        master = weights if master is host.weights else row(master)
    low = None if host.low is None else row(host.low)
    states = {name: row(of) for name, of in host.states.items()}
    return StagedState(weights, master, low, states), row(host.weights, gradient_dtype)


def _bytes(values: Tensor) -> Tensor:
    return values.view(torch.uint8)
