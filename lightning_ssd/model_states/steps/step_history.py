"""The last optimizer steps, and the roll-back of those that were committed in a part of the model only."""

from collections import deque
from collections.abc import Mapping

from lightning_ssd.futures import Future
from lightning_ssd.model_states.optimizers import parameters_of
from lightning_ssd.model_states.units import FlatParameter
from lightning_ssd.model_states.weights import OffloadedModel


class StepHistory:
    """Makes a step of an optimizer all or nothing: it is committed in all flat parameters, or rolled back in all.

    Threads: those of `StepScheduler`; `revert_partial_steps` is called when all jobs have ended.
    """

    def __init__(self, offloaded: OffloadedModel) -> None:
        self._offloaded = offloaded
        self._stores = offloaded.stores
        self._flat_optimizers = offloaded.flat_optimizers
        self._running: dict[FlatParameter, int] = {}
        """Number of committed steps of the flat parameters of the running step when theirs was submitted."""
        self._ended: deque[tuple[dict[FlatParameter, int], Future[None]]] = deque()
        """For each of the last two ended steps, and any earlier one that may still fail: the same numbers, and a future
        that is done when the step is committed and written. Steps of several optimizers end one after the other without
        waiting."""

    def submit(self, flat: FlatParameter) -> None:
        """Adds a flat parameter to the running step, before its step is submitted."""
        self._running[flat] = self._stores[flat].steps

    def end(self, done: "Future[None]") -> None:
        """Ends the running step, which is committed and written when `done` is done."""
        if self._running:
            self._ended.append((self._running, done))
            self._running = {}
        while len(self._ended) > 2 and (done := self._ended[0][1]).done() and done.exception() is None:
            self._ended.popleft()

    def revert_partial_steps(self) -> list[str]:
        """Rolls back the steps that are committed in some flat parameters only.

        Returns:
            Names of flat parameters that are one step ahead of the others, since their step was made in place.
        """
        ahead = self._revert(self._running, ended=False)
        for steps_before, done in reversed(self._ended):
            skipped = done.done() and done.exception() is None  # or committed
            ahead += self._revert(steps_before, ended=True, failed=not skipped)
        return list(dict.fromkeys(ahead))

    def _revert(self, steps_before: Mapping[FlatParameter, int], *, ended: bool, failed: bool = False) -> list[str]:
        """Rolls back one optimizer step unless it is committed everywhere.

        Args:
            steps_before: committed steps of its flat parameters when it was submitted.
            ended: whether the user's optimizer has stepped the parameters on the device.
            failed: whether a flat parameter was not stepped because of an error.
        """
        stores = {flat: self._stores[flat] for flat in steps_before}
        committed = [flat for flat, store in stores.items() if store.steps > steps_before[flat]]
        if not committed:
            return ["parameters on the device"] if failed and self._steps_on_device() else []
        if (
            ended
            and len(committed) == len(steps_before)
            and not any([store.written().exception() for store in stores.values()])
        ):
            return []
        ahead = [flat for flat in committed if not stores[flat].buffers.revertible]
        for flat in committed:
            if flat not in ahead:
                stores[flat].revert()
                self._flat_optimizers[flat].revert()
        stepped = len(steps_before) if ended else len(self._flat_optimizers)
        if len(ahead) == stepped and (ended or not self._steps_on_device()):
            return []  # committed everywhere; values that could not be written are lost
        left = ["parameters on the device"] if ended and self._steps_on_device() else []
        return [flat.name for flat in ahead] + left

    def _steps_on_device(self) -> bool:
        """Returns whether the user's optimizers step parameters on the device."""
        offloaded = self._offloaded.parameters
        return any(
            [
                parameter.requires_grad and parameter not in offloaded
                for optimizer in self._offloaded.optimizers
                for parameter in parameters_of(optimizer)
            ]
        )
