"""`ResidentStates` moves model states of trainings with compiled code to the device, where it has room for them."""

import logging
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

LEAST_SAVED = 0.4
"""Share of its saved bytes that compiled code is expected to need where `activation_memory_budget` is lowered: a Llama
of 0.85B saved 0.39 of them with a budget of 0.5, at 4 % more time, and 0.27 with 0.3, at 7 % more (one H200)."""

Phase = Literal["timing", "trying", "decided"]


class ResidentStates:
    """Moves offloaded model states to the device, and back if steps are slower then.

    A strategy offloads states before the first step, when the memory of activations is not known, if they take most of
    the device's memory. Plans of trainings without compiled code place them anew. Compiled code has no profile from
    which such a plan could be made, so steps are timed instead: first as the states are; then with the first units in
    the device's free memory, and in the memory of saved tensors that compiled code can recompute (`LEAST_SAVED`), if
    there is any; and if that is no faster, with those in the free memory alone. If no trial is faster, all states are
    moved back to where they were.

    If saved tensors have no room, a `RegionPlanner` plans them before steps are timed, and anew after each move.

    Timed are steps whose micro-batches have the shape of the first timed one, while no plan for saved tensors is being
    made. All methods are called on the training thread, outside of forward and backward; none but `end_step` waits for
    the device, when it moves states.

    Args:
        strategy: the strategy of the training, whose states may be moved.
        clock: the device's clock.
    """

    def __init__(self, strategy: Any, clock: Clock) -> None:
        self._strategy = strategy
        self._timer = StepTimer(clock, TIMED_STEPS)
        self._phase: Phase = "timing"
        self._wait = WARM_UP
        """Steps that are still not timed."""
        self._shape: BatchShape | None = None
        """Shape of the batches of timed steps."""
        self._seconds = 0.0
        """Seconds of a step before the first move."""
        self._trials: list[Any] = []
        """Tiers of the remaining trials; the last ones are those before the first move."""

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
            self._timer.end()
            if timed and self._wait:
                self._wait -= 1
            elif timed:
                if self._shape is None:
                    self._shape = shape
                self._timer.begin()
        if not timed or shape != self._shape:
            self._timer.skip()

    def pause(self) -> None:
        """Called when a validation begins: its time is not part of a step's."""
        self._timer.pause()

    def resume(self) -> None:
        """Called when a validation has ended."""
        self._timer.resume()

    def end_step(self, limit: ResidentLimit, most_saved: int = 0) -> bool:
        """Called when a step has ended: moves states once enough steps were timed.

        Args:
            limit: limit of saved bytes on the device.
            most_saved: bytes that compiled code has saved in a micro-batch, if it saves less by now.

        Returns:
            Whether states were moved, so that the strategy has another offloader and the memory of steps is not known.
        """
        if self.decided or len(self._timer.seconds) < TIMED_STEPS:
            return False
        seconds = min(self._timer.seconds)
        if self._phase == "timing":
            self._seconds = seconds
            before = self._strategy.present_tiers()
            filled = [self._strategy.present_tiers(nbytes) for nbytes in _free_bytes(limit, most_saved)]
            self._trials = [tiers for tiers in filled if tiers != before]
            if self._trials:
                self._trials.append(before)
        elif seconds < self._seconds:
            self._decide(
                f"model states of the first units stay on the device: a step takes {format_seconds(seconds)}, and took "
                f"{format_seconds(self._seconds)}"
            )
            return False
        return self._try_next()

    def _try_next(self) -> bool:
        """Moves states to the tiers of the next trial. Returns whether they were moved."""
        self._phase, self._wait = "trying", WARM_UP
        self._timer.reset()
        while self._trials:
            tiers = self._trials.pop(0)
            try:
                self._strategy.move_states_to(tiers)
            except ValueError as error:  # nothing was moved
                log.warning("%s", error)
                continue
            if not self._trials:
                took = format_seconds(self._seconds)
                self._decide(f"model states are where they were, as steps were no faster than {took} with others")
            return True
        self._decide("")
        return False

    def _decide(self, text: str) -> None:
        self._phase = "decided"
        if text:
            pl.utilities.rank_zero_info(f"offload='auto': {text}.")


def _free_bytes(limit: ResidentLimit, most_saved: int) -> list[int]:
    """Returns the bytes of the device that states may take: with saved tensors recomputed, and without."""
    saved = limit.expected_bytes
    # A tenth of the saved bytes stays free, or their memory would count as short. Before a measurement, the memory of
    # everything else includes that of saved tensors.
    free = limit.room_bytes - (ResidentLimit.SPARE - (not limit.measured)) * saved
    recomputed = saved - LEAST_SAVED * max(saved, most_saved) if PartitionerBudget().may_change else 0.0
    return [int(nbytes) for nbytes in dict.fromkeys((free + max(0.0, recomputed), free)) if nbytes > 0]
