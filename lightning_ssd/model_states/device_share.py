"""Device share: the flat parameters in host memory whose optimizer steps the device makes, beside the CPU."""

import logging
import statistics
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from time import perf_counter

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
    """Chooses the flat parameters that the device steps, by the seconds of training steps.

    The rates of CPU and copies give a first idea of the share, but both sides use the bandwidth of host memory, and
    copies of weights and gradients are under way at the same time. So a few shares are tried for a few steps each,
    and the fastest one is kept: none, unless another one is faster. Where a step is made does not change its bits.

    Threads: the training thread, or autograd's while that waits.

    Args:
        stores: where the values of each flat parameter are stored.
        order: flat parameters that are stepped, in the order in which the forward needs them.
        copies: copies of the device.
        prefetcher: prefetches weights within a budget of device memory, which the device's steps take a part of.
        drain: returns when the submitted steps have ended.

    Attributes:
        stepper: makes the steps on the device; None while no flat parameter is chosen.
    """

    WARM_UP = 3
    """Steps before the first measured one, and 2 of them after each change: values are pinned, copies settle."""
    MEASURED = 5
    """Steps whose median is the seconds of a share."""
    FACTORS = (0.4, 0.8, 1.6)
    """Tried rates of the device / rate by the bandwidth that copies leave."""
    BUSY = 0.6
    """Share of the time that the CPU must be busy with steps before shares are tried."""
    GAIN = 0.015
    """Least share of a step's time that a share must save."""

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
        self._trial: Iterator[None] | None = self._try_shares() if copies.device.type == "cuda" else None
        self._work = WorkCounter(0, 0.0)

    def stepper_of(self, flat: FlatParameter) -> DeviceStepper | None:
        """Returns the stepper if the device steps `flat`."""
        return self.stepper if flat in self._chosen else None

    def note(self, work: WorkCounter) -> None:
        """Notes the end of a step; `work` is that of the CPU so far."""
        self._work = work
        if self._trial is not None and next(self._trial, self) is self:
            self._trial = None

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

    def _try_shares(self) -> Iterator[None]:
        """Yields once a step, and selects the best share."""
        for _ in range(self.WARM_UP):
            yield
        order = [flat for flat in self._order if self._stores[flat].in_memory]
        numel = sum(flat.numel for flat in order)
        begun, work, copied = perf_counter(), self._work, self._copies.busy()
        seconds: dict[float, float] = {}
        seconds[0.0] = yield from self._measure()
        elapsed, work = perf_counter() - begun, self._work.since(work)
        if not numel or not work.seconds or work.seconds < self.BUSY * elapsed:
            return
        rates = [
            now.since(before).amount / now.since(before).seconds * max(0.2, 1 - now.since(before).seconds / elapsed)
            for now, before in zip(self._copies.busy(), copied, strict=True)
            if now.since(before).seconds
        ]
        nbytes = sum(self._stores[flat].layout.opt_state_bytes + 2 * flat.nbytes for flat in order)
        if not rates:
            return
        device_rate = min(rates) * numel / nbytes
        selections: dict[float, list[FlatParameter]] = {0.0: []}
        for factor in self.FACTORS:
            on_device = choose_for_device(
                [flat.numel for flat in order], work.amount / work.seconds, factor * device_rate
            )
            selections[factor] = [flat for flat, chosen in zip(order, on_device, strict=True) if chosen]
            if not self.select(selections[factor]):
                break
            for _ in range(2):
                yield
            seconds[factor] = yield from self._measure()
        best = min(seconds, key=lambda factor: seconds[factor] * (1 if factor else 1 - self.GAIN))
        self.select(selections[best])
        share = sum(flat.numel for flat in selections[best]) / numel
        log.info(
            "the GPU steps %.0f %% of the parameters in host memory; seconds of a step by share tried: %s",
            100 * share,
            ", ".join(f"{sum(f.numel for f in selections[k]) / numel:.2f}: {v:.3f}" for k, v in seconds.items()),
        )
        if not selections[best] and self.stepper is not None:
            self._drain()
            self.close()

    def _measure(self) -> Generator[None, None, float]:
        """Yields once a step, and returns the median of the seconds of `MEASURED` steps."""
        ends = [perf_counter()]
        for _ in range(self.MEASURED):
            yield
            ends.append(perf_counter())
        return statistics.median(after - before for before, after in zip(ends, ends[1:], strict=False))
