"""The backward that runs: whether its gradients can be dropped, so that a micro-batch that has failed can run again."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from lightning_ssd.interrupts import uninterrupted
from lightning_ssd.model_states.gradients.copies_in_flight import CopiesInFlight
from lightning_ssd.model_states.gradients.gradient import Gradient, GradientState
from lightning_ssd.model_states.gradients.norms import GradientNorms
from lightning_ssd.model_states.units import FlatParameter


@dataclass
class _Before:
    """The gradients before a backward whose steps are delayed.

    Attributes:
        accumulated: flat parameters that had gradients of earlier micro-batches, or of user code.
    """

    states: Mapping[FlatParameter, list[GradientState]]
    accumulated: frozenset[FlatParameter]


class RunningBackward:
    """Undoes a backward that has failed, if the steps of its gradients are delayed until it ends.

    Threads: the training thread, or autograd's while that waits.

    Args:
        in_flight: device memory of gradients that are being copied.

    Attributes:
        ignored: parameters whose gradients of the next backward are ignored, because an attempt that has failed has
            added them.
    """

    def __init__(
        self, gradients: Mapping[FlatParameter, Gradient], norms: GradientNorms, in_flight: CopiesInFlight
    ) -> None:
        self.ignored: set[nn.Parameter] = set()
        self._gradients = gradients
        self._norms = norms
        self._in_flight = in_flight
        self._before: _Before | None = None
        """None: the gradients can't be dropped, because steps may use them."""
        self._added = False
        """Whether the backward has added to gradients of earlier micro-batches or steps."""
        self._summed: set[FlatParameter] = set()
        """Flat parameters whose gradients the backward has added in fp32 on the host, one by one."""

    @property
    def arriving(self) -> bool:
        """Whether the backward has offloaded gradients."""
        return bool(self._summed) or any([gradient.num_arrived for gradient in self._gradients.values()])

    def delay_steps(self) -> None:
        """Begins a backward whose gradients are stepped after its end. Earlier gradients are accumulated."""
        states = {flat: list(gradient.states) for flat, gradient in self._gradients.items()}
        accumulated = frozenset(flat for flat, gradient in self._gradients.items() if gradient.kept)
        self._before, self._added = _Before(states, accumulated), False

    def end_delay(self) -> None:
        """Has gradients stepped from now on as they are complete: what the backward has done can't be undone."""
        self._before = None

    @property
    def steps_delayed(self) -> bool:
        """Whether gradients are stepped after the end of the backward only."""
        return self._before is not None

    @property
    def droppable(self) -> bool:
        """Whether `drop` undoes what the backward has done."""
        return self._before is not None and not self._added

    @uninterrupted
    def drop(self) -> None:
        """Drops the gradients of the backward, which has failed, if steps were delayed."""
        before, self._before = self._before, None
        if before is None:
            return
        self._in_flight.release()  # later copies to the same host memory are on the same stream
        for flat, gradient in self._gradients.items():
            if not gradient.num_arrived and flat not in self._summed:
                continue
            if flat not in before.accumulated:  # all that is accumulated or measured is of this backward
                if gradient.accumulating:
                    gradient.drop()
                self._norms.reset(flat)
            gradient.undo_backward(before.states[flat])
        self._summed.clear()

    def note_resumed(self) -> None:
        """Notes an addition to a gradient that a step has used, which can't be undone."""
        self._added = True

    def note_added(self, flat: FlatParameter) -> None:
        """Notes an addition to the accumulated gradients of `flat`, which can't be undone if they have earlier ones."""
        if self._before is not None and flat in self._before.accumulated:
            self._added = True

    def note_sum(self, flat: FlatParameter) -> None:
        """Notes that the backward adds a gradient of `flat` in fp32 on the host."""
        self.note_added(flat)
        self._summed.add(flat)

    def end(self) -> None:
        """Ends the backward."""
        self.end_delay()
        self._summed.clear()
        self.ignored.clear()
