"""`ResidentStates` moves model states of trainings with compiled code to the device, where it has room for them."""

import logging
from contextlib import AbstractContextManager
from typing import Any, Literal

from lightning_ssd._lightning import pl
from lightning_ssd.activations import PartitionerBudget, ResidentLimit
from lightning_ssd.callbacks.seen_batches import BatchShape
from lightning_ssd.callbacks.step_timer import StepTimer
from lightning_ssd.device import Clock
from lightning_ssd.sizes import format_seconds

log = logging.getLogger(__name__)

WARM_UP = 1
"""Steps after a change that are not timed."""

TIMED_STEPS = 3
"""Steps that are timed before and after states are moved. Their minimum counts: interruptions of the host lengthen
single steps."""

MAX_MISSED = 8
"""Steps in a row with batches of other sizes, after which one of these is timed instead."""

MAX_UNTIMED = 48
"""Steps with batches of other sizes since a change of tiers, after which the fastest tiers so far are applied."""

LEAST_SAVED = (0.1, 0.4)
"""Tried shares of its saved bytes for which compiled code needs memory if `activation_memory_budget` is lowered and
saved tensors are offloaded: a Llama of 0.85B saved 0.39 of them with a budget of 0.5, at 4 % more time, and 0.27 with
0.3, at 7 % more (one H200). Offloading as many bytes of states costs more time."""

Phase = Literal["timing", "trying", "decided"]


class ResidentStates:
    """Moves offloaded model states to the device, and back if steps are slower then.

    A strategy offloads states before the first step, when the memory of activations is not known, if they take most of
    the device's memory. Plans of trainings without compiled code place them anew. Compiled code has no profile from
    which such a plan could be made, so steps are timed instead: first as the states are; then with the first units in
    the device's free memory, and in that of saved tensors that compiled code can recompute (`LEAST_SAVED`), if there is
    any; then with fewer units, at last in the free memory alone. The trials end when one has all states on the device
    and is faster, or is slower than a faster one before it. The fastest tiers are applied, which may be the first ones.

    If saved tensors have no room, a `RegionPlanner` plans them before steps are timed, and anew after each move.

    Only steps whose micro-batches have about the size of the first timed one are timed, and only while no plan for
    saved tensors is being made. If that size does not occur, another one is timed. The trials also end if few steps can
    be timed, as each has batches of several sizes. All methods are called on the training thread, outside of forward
    and backward; only `end_step` waits for the device, when it moves states.

    Args:
        strategy: the strategy of the training, whose states may be moved.
        clock: the device's clock.
    """

    def __init__(self, strategy: Any, clock: Clock) -> None:
        self._strategy = strategy
        self._timer = StepTimer(clock, TIMED_STEPS, WARM_UP)
        self._phase: Phase = "timing"
        self._shape: BatchShape | None = None
        """Shape of the first timed batch."""
        self._awaited = False
        """Whether the present step is timed unless its batches have another size."""
        self._num_missed = 0
        """Steps in a row with batches of another size."""
        self._num_untimed = 0
        """All such steps since tiers were changed."""
        self._seconds = 0.0
        """Seconds of a step before the first move."""
        self._fastest = 0.0
        """Seconds of a step with the fastest tiers so far."""
        self._tiers: Any = None
        """The tiers with which a step takes `_fastest` seconds."""
        self._trials: list[Any] = []
        """Tiers of the remaining trials."""

    @property
    def decided(self) -> bool:
        """Whether the tiers of states are final."""
        return self._phase == "decided"

    def begin_micro_batch(self, shape: BatchShape | None, *, begins_step: bool, timed: bool) -> None:
        """Called when a micro-batch begins.

        Args:
            shape: shape of the batch; `None`: unknown.
            begins_step: whether it is the first micro-batch of a step.
            timed: whether saved tensors are treated as in later steps.
        """
        if self.decided:
            return
        if begins_step:
            self._end_timed_step()
            self._awaited = timed and self._timer.begin()
            if self._awaited and self._shape is None:
                self._shape = shape
        alike = shape == self._shape or (shape is not None and self._shape is not None and shape.is_like(self._shape))
        if not timed or not alike:
            self._timer.skip()

    def _end_timed_step(self) -> None:
        """Ends the step before. Times batches of another size, before the first trial, if that size does not occur."""
        before = self._timer.num_steps
        self._timer.end()
        if not self._awaited:
            return
        missed = self._timer.num_steps == before
        self._num_untimed += missed
        self._num_missed = self._num_missed + 1 if missed else 0
        if self._num_missed == MAX_MISSED and self._phase == "timing":
            self._shape, self._num_missed = None, 0
            self._timer.reset()

    def skip_step(self) -> None:
        """Excludes the present step, which has fewer micro-batches than others."""
        self._timer.skip()

    def pause(self) -> None:
        """Called when a validation begins: its time is not part of a step's."""
        self._timer.pause()

    def resume(self) -> None:
        """Called when a validation has ended."""
        self._timer.resume()

    def excluded(self) -> AbstractContextManager[None]:
        """Returns a context whose time is not part of the present step's."""
        return self._timer.excluded()

    def end_step(self, limit: ResidentLimit, most_saved: int = 0) -> bool:
        """Called when a step has ended: moves states once enough steps were timed.

        Args:
            limit: limit of saved bytes on the device.
            most_saved: bytes that compiled code has saved in a micro-batch, if it saves less by now.

        Returns:
            Whether states were moved, so that the strategy has another offloader and the memory of steps is not known.
        """
        if self.decided:
            return False
        if self._num_untimed >= MAX_UNTIMED:
            return self._give_up()
        if len(self._timer.seconds) < TIMED_STEPS:
            return False
        seconds = min(self._timer.seconds)
        present = self._strategy.present_tiers()
        if self._phase == "timing":
            self._seconds, self._fastest, self._tiers = seconds, seconds, present
            filled = [self._strategy.present_tiers(nbytes) for nbytes in _free_bytes(limit, most_saved)]
            self._trials = [tiers for index, tiers in enumerate(filled) if tiers not in (present, *filled[:index])]
            if not self._trials:
                self._phase = "decided"
                return False
        elif seconds < self._fastest:
            self._fastest, self._tiers = seconds, present
            if not self._strategy.model_states.stores:
                self._trials.clear()
        elif self._fastest < self._seconds:  # fewer units on the device would be slower still
            self._trials.clear()
        return self._try_next(present)

    def _give_up(self) -> bool:
        """Ends the trials, as steps can't be timed. Returns whether states were moved."""
        self._trials.clear()
        if self._phase == "trying":
            return self._try_next(self._strategy.present_tiers())
        self._phase = "decided"
        pl.utilities.rank_zero_info(
            "offload='auto': model states stay in their tiers, as the batches of a step differ too much in size to "
            "compare its time with others."
        )
        return False

    def _try_next(self, present: Any) -> bool:
        """Moves states to the tiers of the next trial, or to the fastest ones. Returns whether they were moved."""
        self._phase = "trying"
        self._timer.reset(WARM_UP)
        self._num_missed = self._num_untimed = 0
        while self._trials:
            if self._move(self._trials.pop(0)):
                return True
        moved = self._tiers != present and self._move(self._tiers)
        self._decide()
        return moved

    def _move(self, tiers: Any) -> bool:
        try:
            self._strategy.move_states_to(tiers)
        except ValueError as error:  # nothing was moved
            log.warning("%s", error)
            return False
        return True

    def _decide(self) -> None:
        before, fastest = format_seconds(self._seconds), format_seconds(self._fastest)
        if self._fastest < self._seconds:
            text = f"model states of the first units are kept on the device: a step takes {fastest}, and took {before}"
        else:
            text = f"model states are in their first tiers again: no other tiers made a step faster than {before}"
        self._phase = "decided"
        pl.utilities.rank_zero_info(f"offload='auto': {text}.")


def _free_bytes(limit: ResidentLimit, most_saved: int) -> list[int]:
    """Returns the bytes of the device that states may take: with saved tensors recomputed, and at last without."""
    saved = limit.expected_bytes
    # Weights that were prefetched before the micro-batch began are part of the measured memory of everything else.
    # Before a measurement, that includes saved tensors.
    room = limit.room_bytes + limit.growth_bytes + (0 if limit.measured else saved)
    most = room - ResidentLimit.SPARE * saved  # with less, their memory would count as short
    shares = LEAST_SAVED if PartitionerBudget().may_change else ()
    free = [max(most, room - share * max(saved, most_saved)) for share in shares]
    return [int(nbytes) for nbytes in dict.fromkeys((*free, most)) if nbytes > 0]
