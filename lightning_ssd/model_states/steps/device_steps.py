"""Device steps: the offloaded flat parameters whose optimizer steps a plan has the device make, beside the CPU.

The device memory for their pieces is a part of the budget of prefetched weights, so that it adds nothing to the memory
that the training may use.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from lightning_ssd.device import CopyEngine
from lightning_ssd.model_states.steps.device_stepper import DeviceStepper
from lightning_ssd.model_states.stores import StateStore, pin_values
from lightning_ssd.model_states.units import FlatParameter
from lightning_ssd.model_states.weights import ParamPrefetcher
from lightning_ssd.storage import StorageError

log = logging.getLogger(__name__)


class DeviceSteps:
    """The flat parameters that the device steps: none, until a plan chooses some.

    The processor that makes a step does not change its bits. Values on SSDs are read to staging memory for the step,
    and written afterwards.

    Threads: the training thread, or autograd's while that waits.

    Args:
        stores: where the values of each flat parameter are stored.
        order: flat parameters that are stepped, in the order in which the forward needs them.
        copies: copies of the device.
        prefetcher: prefetches weights within a budget of device memory, of which the device's steps use a part.
        drain: returns when the submitted steps have ended.

    Attributes:
        stepper: makes the steps on the device; None while no flat parameter is chosen.
        kept_gradients: flat parameters whose gradients stay on the device for the steps that it makes.
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
        self.kept_gradients: Collection[FlatParameter] = ()
        self._stores = stores
        self._order = order
        self._copies = copies
        self._prefetcher = prefetcher
        self._drain = drain
        self._chosen: Collection[FlatParameter] = ()

    def stepper_of(self, flat: FlatParameter) -> DeviceStepper | None:
        """Returns the stepper if the device steps `flat`. After a failure it steps none."""
        return self.stepper if flat in self._chosen and self.stepper is not None and not self.stepper.failed else None

    def plan(self, chosen: Collection[FlatParameter], kept_gradients: Collection[FlatParameter]) -> bool:
        """Selects the flat parameters that the device steps from now on. Called between two steps.

        Args:
            chosen: the flat parameters; those that are not stepped are left out.
            kept_gradients: those whose gradients stay on the device until their step.

        Returns:
            Whether there is memory for it; if not, nothing changes.
        """
        chosen = [flat for flat in self._order if flat in chosen]
        if not chosen:
            if self.stepper is not None:
                self._drain()
                self.close()
        elif not self._make_stepper():
            return False
        elif self._copies.device.type == "cuda":
            self._drain()  # steps of the CPU allocate and free second versions, which are page-locked, too
            try:
                pin_values([self._stores[flat] for flat in chosen])
            except StorageError as error:
                log.info("the GPU makes no further optimizer steps: %s", error)
                if not self._chosen:
                    self.close()
                return False
        self._chosen = chosen
        self.kept_gradients = kept_gradients
        return True

    def close(self) -> None:
        """Frees the device memory; all steps have ended."""
        self._chosen = ()
        if self.stepper is not None:
            stepper, self.stepper = self.stepper, None
            stepper.close()
            self._prefetcher.change_budget(stepper.nbytes)

    def _make_stepper(self) -> bool:
        """Makes the stepper unless there is one; returns False if there is too little memory."""
        if self.stepper is not None:
            return True
        needed = DeviceStepper.PIECES * DeviceStepper.PIECE_BYTES
        if not self._prefetcher.change_budget(-needed):
            return False
        try:
            self.stepper = DeviceStepper(self._copies)
        except torch.OutOfMemoryError:
            self._prefetcher.change_budget(needed)
            return False
        return True
