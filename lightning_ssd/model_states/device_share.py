"""Device share: the flat parameters in host memory whose optimizer steps the device makes, beside the CPU."""

import logging
from collections.abc import Collection, Mapping, Sequence

import torch

from lightning_ssd.device import CopyEngine, WorkCounter
from lightning_ssd.model_states.device_stepper import DeviceStepper
from lightning_ssd.model_states.flat import FlatParameter
from lightning_ssd.model_states.prefetcher import ParamPrefetcher
from lightning_ssd.model_states.state_store import StateStore
from lightning_ssd.storage import StorageError

log = logging.getLogger(__name__)


def choose_for_device(parameters: Sequence[int], cpu_rate: float, device_rate: float) -> list[bool]:
    """Returns for each flat parameter, in the order in which the next forward needs them, whether the device steps it.

    The CPU and the device make their steps in that order, at the same time. Each flat parameter goes to the one that
    ends its step first. Neither the first ones nor the last ones go to the device as a block: the forward would wait
    for the block's end where the other side was done long before. So no step ends later than if the CPU made all, and
    both sides end together at every point of the forward.

    Args:
        parameters: number of parameters of each flat parameter.
        cpu_rate: parameters that the CPU steps per second.
        device_rate: parameters that the device steps per second, copies included.
    """
    cpu = device = 0.0
    chosen: list[bool] = []
    for numel in parameters:
        on_cpu, on_device = cpu + numel / cpu_rate, device + numel / device_rate
        chosen.append(on_device < on_cpu)
        cpu, device = (cpu, on_device) if chosen[-1] else (on_cpu, device)
    return chosen


class DeviceShare:
    """The flat parameters that the device steps: none, until `select`. Where a step is made does not change its bits.

    Threads: the training thread, or autograd's while that waits.

    Args:
        stores: where the values of each flat parameter are stored.
        order: flat parameters that are stepped, in the order in which the forward needs them.
        copies: copies of the device.
        prefetcher: prefetches weights within a budget of device memory, which the device's steps take a part of.

    Attributes:
        stepper: makes the steps on the device; None while no flat parameter is chosen.
    """

    def __init__(
        self,
        stores: Mapping[FlatParameter, StateStore],
        order: Sequence[FlatParameter],
        copies: CopyEngine,
        prefetcher: ParamPrefetcher,
    ) -> None:
        self.stepper: DeviceStepper | None = None
        self._stores = stores
        self._order = order
        self._copies = copies
        self._prefetcher = prefetcher
        self._chosen: Collection[FlatParameter] = ()

    def stepper_of(self, flat: FlatParameter) -> DeviceStepper | None:
        """Returns the stepper if the device steps `flat`."""
        return self.stepper if flat in self._chosen else None

    def note(self, work: WorkCounter) -> None:
        """Notes the end of a step; `work` is that of the CPU so far."""

    def select(self, chosen: Collection[FlatParameter]) -> bool:
        """Has the device make the next steps of `chosen` alone, those of them that are in host memory as a whole.

        Returns:
            Whether there is memory for it; if not, nothing changes.
        """
        chosen = {flat for flat in chosen if self._stores[flat].in_memory}
        if chosen and not self._make_stepper():
            return False
        try:
            if self._copies.device.type == "cuda":
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
