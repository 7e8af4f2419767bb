"""Device share: the flat parameters in host memory whose optimizer steps the device makes, beside the CPU."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from time import perf_counter

import torch

from lightning_ssd.device import CopyEngine, WorkCounter
from lightning_ssd.model_states.device_stepper import DeviceStepper
from lightning_ssd.model_states.flat import FlatParameter
from lightning_ssd.model_states.prefetcher import ParamPrefetcher
from lightning_ssd.model_states.share_trial import ShareTrial, StepEnd
from lightning_ssd.model_states.state_store import StateStore
from lightning_ssd.storage import StorageError

log = logging.getLogger(__name__)


class DeviceShare:
    """The flat parameters that the device steps: none, until `select` or, on a GPU, until a trial of shares has ended.

    Where a step is made does not change its bits.

    Threads: the training thread, or autograd's while that waits.

    Args:
        stores: where the values of each flat parameter are stored.
        order: flat parameters that are stepped, in the order in which the forward needs them.
        copies: copies of the device.
        prefetcher: prefetches weights within a budget of device memory, of which the device's steps use a part.
        drain: returns when the submitted steps have ended.

    Attributes:
        stepper: makes the steps on the device; None while no flat parameter is chosen.
    """

    def __init__(
        self,
        stores: Mapping[FlatParameter, StateStore],
        order: Sequence[FlatParameter],
        copies: CopyEngine,
        prefetcher: ParamPrefetcher,
        drain: Callable[[], object],
    ) -> None:
        self.stepper: DeviceStepper | None = None
        self._stores = stores
        self._order = order
        self._copies = copies
        self._prefetcher = prefetcher
        self._drain = drain
        self._chosen: Collection[FlatParameter] = ()
        self._planned = False
        self._trial: ShareTrial | None = None
        """Made at the end of the first step."""

    def stepper_of(self, flat: FlatParameter) -> DeviceStepper | None:
        """Returns the stepper if the device steps `flat`. After a failure it steps none."""
        return self.stepper if flat in self._chosen and self.stepper is not None and not self.stepper.failed else None

    def note(self, work: WorkCounter) -> None:
        """Notes the end of a step; `work` is that of the CPU so far."""
        if self._copies.device.type != "cuda" or self._planned:
            return
        if self._trial is None:
            order = [flat for flat in self._order if self._stores[flat].in_memory]
            nbytes = sum(self._stores[flat].layout.opt_state_bytes + 2 * flat.nbytes for flat in order)
            self._trial = ShareTrial(
                [flat.numel for flat in order],
                nbytes,
                lambda indices: self.select([order[index] for index in indices]),
            )
        if self._trial.share is None:
            self._trial.note(StepEnd(perf_counter(), work, self._copies.busy()))
            if self._trial.share == 0.0 and self.stepper is not None:
                self._drain()
                self.close()

    def plan(self, chosen: Collection[FlatParameter]) -> bool:
        """Selects the flat parameters that the device steps, as `select` does, in place of a trial of shares.

        Called between two steps.
        """
        self._planned = True
        chosen = [flat for flat in self._order if flat in chosen]
        if not chosen and self.stepper is not None:
            self._drain()
            self.close()
        return self.select(chosen)

    def select(self, chosen: Collection[FlatParameter]) -> bool:
        """Selects the flat parameters that the device steps from now on: those of `chosen` that are in host memory.

        Returns:
            Whether there is memory for it; if not, nothing changes.
        """
        chosen = {flat for flat in chosen if self._stores[flat].in_memory}
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

    def _make_stepper(self) -> bool:
        if self.stepper is None:
            needed = DeviceStepper.PIECES * DeviceStepper.PIECE_BYTES
            if not self._prefetcher.change_budget(-needed):
                return False
            try:
                self.stepper = DeviceStepper(self._copies)
            except torch.OutOfMemoryError:
                self._prefetcher.change_budget(needed)
                return False
        return True
