"""Device share: the offloaded flat parameters whose optimizer steps the device makes, beside the CPU.

The device memory for their pieces is a part of the budget of prefetched weights, so that it adds nothing to the memory
that the training may use.
"""

import logging
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from time import perf_counter

import torch

from lightning_ssd.device import CopyEngine, WorkCounter
from lightning_ssd.model_states.device_stepper import DeviceStepper
from lightning_ssd.model_states.flat import FlatParameter
from lightning_ssd.model_states.prefetcher import ParamPrefetcher
from lightning_ssd.model_states.share_trial import ShareTrial, StepEnd
from lightning_ssd.model_states.state_store import StateStore
from lightning_ssd.storage import StorageError
from lightning_ssd.waits import wait_for_all

log = logging.getLogger(__name__)


class DeviceShare:
    """The flat parameters that the device steps: none, until `select` or, on a GPU, until a trial of shares has ended.

    Where a step is made does not change its bits. A trial chooses among flat parameters in host memory; a plan may
    choose those on SSDs, too, whose values are read to staging memory for the step, and written afterwards; or to the
    device and from it, where the store of blobs takes device buffers.

    Threads: the training thread, or autograd's while that waits.

    Args:
        stores: where the values of each flat parameter are stored.
        order: flat parameters that are stepped, in the order in which the forward needs them.
        copies: copies of the device.
        prefetcher: prefetches weights within a budget of device memory, of which the device's steps use a part.
        drain: returns when the submitted steps have ended.
        prefetches: whether values are prefetched, because the scale of a step is not known when its gradients arrive.

    Attributes:
        stepper: makes the steps on the device; None while no flat parameter is chosen.
        kept_gradients: flat parameters whose gradients stay on the device for the steps that it makes.
    """

    BUDGET_SHARE = 0.25
    """Largest share of the budget of prefetched weights for pieces beyond the least number. More pieces help trainings
    whose scale is known at the end of backward: the device has more values by then."""

    def __init__(
        self,
        stores: Mapping[FlatParameter, StateStore],
        order: Sequence[FlatParameter],
        copies: CopyEngine,
        prefetcher: ParamPrefetcher,
        drain: Callable[[], object],
        *,
        prefetches: bool = False,
    ) -> None:
        self.stepper: DeviceStepper | None = None
        self.kept_gradients: Collection[FlatParameter] = ()
        self._stores = stores
        self._order = order
        self._copies = copies
        self._prefetcher = prefetcher
        self._drain = drain
        self._prefetches = prefetches
        self._chosen: Collection[FlatParameter] = ()
        self._planned = False
        self._prefetched: set[FlatParameter] = set()
        """Flat parameters whose values are prefetched for the running step."""
        self._candidates: set[FlatParameter] = set()
        """Flat parameters whose first step could have been made on the device."""
        self._trial: ShareTrial | None = None
        """Made at the end of the first step."""

    def stepper_of(self, flat: FlatParameter) -> DeviceStepper | None:
        """Returns the stepper if the device steps `flat`. After a failure it steps none."""
        return self.stepper if flat in self._chosen and self.stepper is not None and not self.stepper.failed else None

    @property
    def undecided(self) -> bool:
        """Whether a trial will decide which steps the device makes, and has not begun."""
        return self._trial is None and self._copies.device.type == "cuda"

    def consider(self, flat: FlatParameter) -> None:
        """Makes `flat`, whose steps the device can make, a candidate of the trial."""
        self._candidates.add(flat)

    def prefetch(self, priorities: Mapping[FlatParameter, int]) -> None:
        """Prefetches values in host memory for the running step, whose scale is not known yet.

        Values on SSDs would keep staging memory until then, which units that the next forward needs first may need, or
        memory of pieces that steps of values in host memory could use.

        Args:
            priorities: flat parameters that the running step may step, and their priorities.
        """
        for flat, priority in priorities.items():
            stepper, store = self.stepper_of(flat), self._stores[flat]
            if stepper is not None and store.in_memory:
                stepper.prefetch(store, priority=priority)
                self._prefetched.add(flat)

    def end_step(self, submitted: Container[FlatParameter]) -> None:
        """Drops prefetched values whose step was not submitted. On return, no copy reads them in host memory.

        Args:
            submitted: flat parameters whose step was submitted.
        """
        unused = [flat for flat in self._prefetched if flat not in submitted]
        self._prefetched.clear()
        if self.stepper is not None:
            wait_for_all([self.stepper.drop(flat) for flat in unused], "copies of values to the device")

    def note(self, work: WorkCounter) -> None:
        """Passes the end of a step to the trial; `work` is the CPU's work so far."""
        if self._copies.device.type != "cuda" or self._planned:
            return
        if self._trial is None:
            order = [flat for flat in self._order if flat in self._candidates]
            nbytes = sum(self._stores[flat].layout.step_bytes for flat in order)
            self._trial = ShareTrial(
                [flat.numel for flat in order],
                nbytes,
                lambda indices: self.select([order[index] for index in indices]),
            )
        if self._trial.share is None:
            self._trial.note(StepEnd(perf_counter(), work, self._copies.busy()))
            if self._trial.share is not None:
                self._drain()
                if self._trial.share == 0.0:
                    self.close()
                self._unpin_others()

    def plan(self, chosen: Collection[FlatParameter], kept_gradients: Collection[FlatParameter]) -> bool:
        """Selects the flat parameters that the device steps, as `select` does, in place of a trial of shares.

        Called between two steps.

        Args:
            chosen: the flat parameters.
            kept_gradients: those whose gradients stay on the device until their step.

        Returns:
            Whether there is memory for it; if not, nothing changes.
        """
        self._planned = True
        chosen = [flat for flat in self._order if flat in chosen]
        if not chosen and self.stepper is not None:
            self._drain()
            self.close()
        selected = self.select(chosen)
        if selected:
            self.kept_gradients = kept_gradients
        if self._trial is not None:
            self._drain()
            self._unpin_others()
        return selected

    def select(self, chosen: Collection[FlatParameter]) -> bool:
        """Selects the flat parameters that the device steps from now on.

        Returns:
            Whether there is memory for it; if not, nothing changes.
        """
        chosen = set(chosen)
        if chosen and not self._make_stepper():
            return False
        try:
            if chosen and self._copies.device.type == "cuda":
                self._drain()  # steps of the CPU allocate and free second versions, which are page-locked, too
                for flat in chosen:
                    self._stores[flat].pin()
        except StorageError as error:
            log.info("the CPU makes all optimizer steps: %s", error)
            return False
        self._chosen = chosen
        return True

    def close(self) -> None:
        """Frees the device memory; all steps have ended."""
        self._chosen = ()
        if self.stepper is not None:
            stepper, self.stepper = self.stepper, None
            stepper.close()
            self._prefetcher.change_budget(stepper.nbytes)

    def _unpin_others(self) -> None:
        """Unlocks the pages of values that a rejected share had page-locked; all steps have ended."""
        for flat in self._order:
            if flat not in self._chosen:
                self._stores[flat].unpin()

    def _make_stepper(self) -> bool:
        """Makes the stepper with as many pieces as there is memory for; returns False if there is too little."""
        num_pieces = self._num_pieces()
        while self.stepper is None:
            needed = num_pieces * DeviceStepper.PIECE_BYTES
            if self._prefetcher.change_budget(-needed):
                try:
                    self.stepper = DeviceStepper(self._copies, num_pieces)
                    break
                except torch.OutOfMemoryError:
                    self._prefetcher.change_budget(needed)
            if num_pieces == DeviceStepper.PIECES:
                return False
            num_pieces = max(DeviceStepper.PIECES, num_pieces // 2)
        return True

    def _num_pieces(self) -> int:
        """Returns the most pieces to allocate: within a share of the budget, and no more than all values have."""
        if not self._prefetches:
            return DeviceStepper.PIECES
        nbytes = sum(store.layout.step_bytes for flat in self._order if (store := self._stores[flat]).in_memory)
        most = min(nbytes, int(self.BUDGET_SHARE * self._prefetcher.budget)) // DeviceStepper.PIECE_BYTES
        return max(DeviceStepper.PIECES, most)
