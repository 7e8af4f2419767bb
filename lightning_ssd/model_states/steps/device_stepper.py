"""Optimizer steps on the device of offloaded flat parameters, whose values are copied there and back in pieces.

One thread runs the three stages of all pieces: copy in, step, copy out. `piece_transfers` has the copies.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_ssd import torch_internals as internals
from lightning_ssd.device import CopyEngine, Mark, Worker
from lightning_ssd.futures import Future, all_of, ended, then
from lightning_ssd.model_states.gradients import WaitingGradient
from lightning_ssd.model_states.optimizers import FlatOptimizer, Options, StepInput
from lightning_ssd.model_states.steps.piece_transfers import PieceRange, PieceTransfers, as_bytes, pieces
from lightning_ssd.model_states.stores import Layout, StagedState, StateStore
from lightning_ssd.model_states.units import FlatParameter
from lightning_ssd.storage import align_up

_GRADIENT = "gradient"
"""Key of the gradient among the arrays of a piece."""


@dataclass(frozen=True)
class DeviceStep:
    """One step that the device makes.

    Attributes:
        store: the values of the flat parameter.
        flat_optimizer: its optimizer; `steps_on_device`.
        options: options of its parameter group.
        gradient: its gradient in the dtype of the flat parameter, in host memory or on the device.
        scale: the gradient is multiplied with it.
        limit: largest absolute value of a gradient's element, after that; None: no limit.
        drop_second: whether the second version in host memory is freed before.
        staged: the values, of which some are on SSDs and were read to staging memory; None: all are in host memory.
    """

    store: StateStore
    flat_optimizer: FlatOptimizer
    options: Options
    gradient: Tensor | WaitingGradient
    scale: float
    limit: float | None
    drop_second: bool
    staged: StagedState | None


class DeviceStepper:
    """Steps flat parameters on the device, piece by piece: copied to it, stepped, and copied back.

    While one piece is stepped, the next ones are copied to the device and the ones before are copied back, so that
    copies use both directions at once.

    The lowest priority goes first, piece by piece, also before less urgent steps that were submitted earlier. At most
    `AHEAD` pieces are copied to the device at once, so that an urgent piece waits for no more than these in the queue
    of copies.

    Threads: public methods may be called on any thread. Each posts an event to the thread `device-optimizer`, which
    owns all private fields but `_copies` and `_worker`, and issues copies and kernels, with streams of its own. It
    waits for nothing. The ends of copies are events, too, which the threads `d2h-done` and `h2d-done` post. Returned
    futures complete on these, or on `device-optimizer`.

    Ownership: the device memory of a piece belongs to `_free`, when no stream uses it; then, until they have ended, to
    its copies to the device, its step and its copies back, which return it to `_free`. Values in host memory or staging
    memory, and the gradient, belong to the step until the second future of `submit` is done. After an error of the
    device, no later step is made.

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
    AHEAD = 2
    """Pieces that are copied to the device at once, so that the second one begins without waiting for the host."""

    def __init__(self, copies: CopyEngine) -> None:
        self.nbytes = self.PIECES * self.PIECE_BYTES
        with internals.without_dispatch(), torch.inference_mode(False):
            memory = copies.empty(self.nbytes)
        self._allocated = copies.mark(awaited=True)
        """The memory belongs to earlier work of the compute stream until this mark is reached."""
        self._free: list[Tensor] = []
        self._num_arriving = 0
        """Pieces that are being copied to the device."""
        self._steps: dict[FlatParameter, _RunningStep] = {}
        """Steps that are not issued as a whole."""
        self._failure: BaseException | None = None
        self._copies = copies.sibling()
        self._worker = Worker("device-optimizer")
        self._return(memory.split(self.PIECE_BYTES), self._copies.on_h2d(self._allocated))

    @property
    def failed(self) -> bool:
        """Whether a step has failed; later ones fail with its error."""
        return self._failure is not None

    def submit(self, step: DeviceStep, *, priority: int) -> "tuple[Future[None], Future[None]]":
        """Submits a step; the lowest priority goes first.

        Returns:
            A future that is done when the new compute weights are in host memory, or in staging memory; and one for all
            new values, which is done when no copy uses the values or the gradient any more, also if it has an error.
        """
        running = _RunningStep(step, priority)

        def begin() -> None:
            if self._failure is not None:
                raise self._failure
            if step.drop_second:
                step.store.buffers.drop_second()
            layout = step.store.layout
            itemsize = sum(dtype.itemsize for _, dtype in _arrays(layout))
            running.transfers = PieceTransfers(step.store, step.staged, self._copies)
            running.pieces = list(pieces(layout.flat, self.PIECE_BYTES // itemsize))
            self._steps[layout.flat] = running

        def fail(begun: "Future[None]") -> None:
            if (error := begun.exception()) is not None:
                running.issued.set_exception(error)

        def end(done: "Future[None]") -> None:
            if (error := done.exception()) is not None and running.overwritten:
                step.store.lose(error)

        # Before the next line: it is done first.
        first = then(running.issued, lambda _: running.weights())
        done = then(ended(running.issued), lambda _: all_of([running.issued, *running.stored]))
        done.add_done_callback(end)
        self._post(begin).add_done_callback(fail)
        return first, done

    def offload(self, gradient: WaitingGradient) -> "Future[None]":
        """Copies a gradient to host memory, also after an error; returns a future that is done when it is there."""
        marks: list[Mark] = []

        def copy() -> None:
            with self._copies.side_stream():
                marks.append(gradient.offload(self._copies))

        return then(self._post(copy), lambda _: self._copies.on_d2h(marks[0]))

    def close(self) -> None:
        """Ends the thread, fails steps that were not issued, and frees the memory."""
        self._worker.close()
        self._fail_steps(RuntimeError("training ended before this optimizer step was made"))
        self._copies.close()
        self._free = []

    # ---- events, on the thread device-optimizer ----

    def _post(self, event: Callable[[], None]) -> "Future[None]":
        """Posts an event, which is followed by the most urgent copies and step that are possible then.

        Returns:
            A future with the error of `event`, if it has one.
        """

        def run() -> None:
            try:
                event()
            finally:
                self._advance()

        return self._worker.submit(run)

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
        """Issues the next piece of the most urgent step; returns whether anything was issued."""
        if not self._steps or self._num_arriving == self.AHEAD or not self._free:
            return False
        self._step(min(self._steps.values(), key=_priority))
        return True

    def _fail_steps(self, error: BaseException) -> None:
        """Fails all steps that are not issued, after the copies that were."""
        drained = True
        try:
            self._copies.drain()
        except BaseException as lost:  # the device is lost, and copies may still be under way
            error, drained = lost, False
        steps, self._steps = self._steps, {}
        for running in steps.values():
            running.drained = drained
            running.issued.set_exception(error)

    # ---- memory of pieces ----

    def _return(self, memory: Sequence[Tensor], unused: "Future[None]") -> None:
        """Returns memory of pieces to `_free` when `unused` is done, with a result or an error."""

        def free() -> None:
            self._free += memory

        unused.add_done_callback(lambda _: self._post(free))

    # ---- one piece ----

    def _step(self, running: "_RunningStep") -> None:
        """Issues the copies of the next piece to the device, its step, and the copies of its new values."""
        copies, step, transfers = self._copies, running.step, running.transfers
        assert transfers is not None
        elements, memory = running.pieces[running.num_stepped], self._free.pop()
        rows = _rows(step.store.layout, elements, memory)
        self._num_arriving += 1
        copied = transfers.read(elements, rows, self._allocated)
        ended(copies.on_h2d(copied)).add_done_callback(lambda _: self._post(self._end_read))
        own = rows[_GRADIENT]
        if isinstance(step.gradient, WaitingGradient):
            copies.wait(copied)
            step.gradient.copy_elements(elements.start, elements.end, own, copies)
        else:
            host = step.gradient[elements.start : elements.end]
            copies.wait(copies.h2d(as_bytes(host), as_bytes(own), copied))
        gradient, scale = own, step.scale
        if step.limit is not None:
            # The copy in the memory of the piece may change: clipping allocates for 16-bit gradients alone.
            gradient, scale = gradient.float().mul_(scale).clamp_(-step.limit, step.limit), 1.0
        values = step.store.layout.state_of({array.key: rows[array.key] for array in step.store.layout.arrays})
        within = [span._replace(start=span.start - elements.start) for span in elements.spans]
        has_grad = [True] * len(step.store.flat.param_views)
        step.flat_optimizer.step_piece(StepInput(step.options, gradient, has_grad, scale), values, within)
        stored = transfers.write(elements, rows)
        running.num_stepped += 1
        running.stored.append(stored)
        self._return([memory], stored)
        if running.num_stepped == len(running.pieces):
            del self._steps[step.store.flat]
            running.issued.set_result(None)

    def _end_read(self) -> None:
        self._num_arriving -= 1


@dataclass(eq=False)
class _RunningStep:
    """A submitted step.

    Attributes:
        step: the step.
        priority: the lowest goes first.
        transfers: copies of the values; set when it begins.
        pieces: its pieces; set when it begins.
        num_stepped: pieces that were stepped.
        issued: done when all copies have begun.
        stored: futures of the new values of the pieces.
        drained: whether copies that were issued before an error are known to have ended.
    """

    step: DeviceStep
    priority: int
    transfers: PieceTransfers | None = None
    pieces: Sequence[PieceRange] = ()
    num_stepped: int = 0
    issued: "Future[None]" = field(default_factory=Future)
    stored: "list[Future[None]]" = field(default_factory=list)
    drained: bool = True

    def weights(self) -> "Future[None]":
        """Returns a future that is done when the compute weights are in host memory, once all copies have begun."""
        assert self.transfers is not None
        return self.transfers.weights

    @property
    def overwritten(self) -> bool:
        """Whether copies have overwritten committed values, or may still write to the memory of another step."""
        begun = self.transfers is not None and self.transfers.begun
        return begun and (self.step.store.steps_in_place or not self.drained)


def _priority(running: _RunningStep) -> int:
    return running.priority


def _arrays(layout: Layout) -> list[tuple[str, torch.dtype]]:
    """Returns keys and dtypes of the arrays of a piece."""
    return [*((array.key, array.dtype) for array in layout.arrays), (_GRADIENT, layout.flat.dtype)]


def _rows(layout: Layout, elements: PieceRange, memory: Tensor) -> dict[str, Tensor]:
    """Returns the memory of each array of a piece, and of the gradient, each of which begins at a page."""
    rows: dict[str, Tensor] = {}
    start = 0
    for key, dtype in _arrays(layout):
        nbytes = (elements.end - elements.start) * dtype.itemsize
        rows[key] = memory[start : start + nbytes].view(dtype)
        start += align_up(nbytes)
    return rows
