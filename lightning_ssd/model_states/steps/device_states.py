"""`DeviceStates`: optimizer states on the device of their flat parameter's owner, while it has memory to spare."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from lightning_ssd.device import CopyEngine, count_evictable
from lightning_ssd.futures import Future, all_of, finished
from lightning_ssd.model_states.optimizers import (
    ADAM_MOMENTS,
    AdamOptimizer,
    AdamValues,
    FlatOptimizer,
    RankMean,
    StepInput,
    StepWork,
    cuda_step,
    do_together,
    has_cuda_step,
)
from lightning_ssd.model_states.steps.peer_sums import PeerSums
from lightning_ssd.model_states.stores import StagedState, StateStore
from lightning_ssd.model_states.units import FlatParameter
from lightning_ssd.waits import wait_for


@dataclass(eq=False)
class _Part:
    """Values of some elements of a flat parameter on the device.

    Attributes:
        start: number of the first element.
        values: the values. A step replaces the tensors.
    """

    start: int
    values: AdamValues


class DeviceStates:
    """Steps flat parameters on the device of their owner, which keeps master weights and optimizer states there.

    The devices of several ranks have room for many states together. A step on the device moves 10 bytes a parameter
    through host memory, for the mean gradient and the compute weights, which all ranks read there as before; a step on
    the CPU moves 36. The bits are the same.

    Host memory keeps its room for the values, which are old there until `offload`: the device's memory is freed
    at once when a micro-batch may need it.

    Threads: `use` is called on the training thread, `holds` and `offload` on any. `step`, and the jobs of
    `offload`, run on the thread `sums` and use its stream. `_chosen` is changed by the training thread, and by a step
    that finds no memory; `_held` and `_refused` by the thread `sums` alone. No lock: each change, and each copy of a
    whole one, is one operation.

    Ownership: from a flat parameter's first step on the device until `offload`, its values but the compute weights
    belong to this object. `offload` is called while no step of it runs, or waits for the step's job.

    Args:
        flat_optimizers: flat parameters that this rank owns, in the order of the forward.
        stores: their values.
        copies: copies of the device.
        sums: the thread, its stream, and memory on the device.
    """

    def __init__(
        self,
        flat_optimizers: Mapping[FlatParameter, FlatOptimizer],
        stores: Mapping[FlatParameter, StateStore],
        copies: CopyEngine,
        sums: PeerSums,
    ) -> None:
        self._stores = stores
        self._copies = copies
        self._sums = sums
        self._optimizers = {
            flat: one
            for flat, one in flat_optimizers.items()
            if isinstance(one, AdamOptimizer) and _is_supported(stores[flat])
        }
        self._begun = False
        """Whether memory was to be used before."""
        self._chosen: dict[FlatParameter, None] = {}
        """Flat parameters that are stepped on the device from now on."""
        self._refused: set[FlatParameter] = set()
        """Flat parameters for which the device had no memory, although there was to be some: they stay on the host."""
        self._held: dict[FlatParameter, list[_Part]] = {}

    # ---- room on the device ----

    def use(self, nbytes: int) -> None:
        """Has flat parameters move to the device at their next steps, as many as have room, one more in each call.

        First units come first: the next forward waits for their steps. Returns when those for which there is no room
        any more are in host memory.

        Args:
            nbytes: bytes that nothing else needs.

        Raises:
            Exception: values could not be copied to host memory.
        """
        on_cuda = self._copies.device.type == "cuda"
        if nbytes and not self._begun and on_cuda:
            # The allocator holds memory of the first steps, which later ones may not need.
            torch.cuda.empty_cache()
            self._begun = True
            return
        wanted = [flat for flat in self._optimizers if flat not in self._refused]
        fitting = {flat for flat, used in zip(wanted, accumulate(map(_nbytes, wanted)), strict=True) if used <= nbytes}
        # Held ones that are not chosen are those of a call that was interrupted.
        evicted = {*self._chosen, *self._held} - fitting.intersection(self._chosen)
        for flat in evicted:
            self._chosen.pop(flat, None)
        added = next((flat for flat in wanted if flat in fitting and flat not in self._chosen), None)
        if added is not None:
            self._chosen[added] = None
        if evicted:
            # A step of one of them may be about to move it to the device: its job is before this one, or finds that it
            # may not.
            wait_for(all_of([self._submit_offload(flat) for flat in evicted]), "optimizer states on the device")
            if on_cuda:
                torch.cuda.empty_cache()  # of another stream, which the training would not use

    def steps(self, flat: FlatParameter) -> bool:
        """Returns whether `flat` is stepped on the device. On the training thread."""
        return flat in self._chosen

    def holds(self, flat: FlatParameter) -> bool:
        """Returns whether values of `flat`, of which no step runs, are old in host memory."""
        return flat in self._held

    def offload(self, flat: FlatParameter) -> "Future[None]":
        """Copies the values of `flat`, of which no step runs, to host memory, if they are old there. On any thread."""
        return self._submit_offload(flat) if self.holds(flat) else finished(None)

    def _submit_offload(self, flat: FlatParameter) -> "Future[None]":
        return self._sums.submit(partial(self.copy_to_host, flat), [], priority=-2)

    # ---- on the thread `sums` ----

    def submit(
        self, run: "Callable[[], Future[None] | None]", after: "Sequence[Future[Any]]", priority: int
    ) -> "Future[None]":
        """Queues the job of a step, as `PeerSums.submit` does."""
        return self._sums.submit(run, after, priority=priority)

    def step(self, flat: FlatParameter, given: StepInput) -> bool:
        """Makes a step, and writes the new compute weights to host memory, or returns False if the CPU has to."""
        optimizer, mean = self._optimizers[flat], given.gradient
        if isinstance(mean, RankMean):  # of one source: it has been written
            (mean,) = mean.sources
        on_cuda = self._copies.device.type == "cuda"
        settings = optimizer.device_settings(given, self._staged(flat))
        if settings is None or flat not in self._chosen:
            return False
        read, written = self._sums.begin()
        if on_cuda and not has_cuda_step(self._copies.device):
            return False
        parts = self._held.get(flat) or self._copy_to_device(flat, read.numel() if on_cuda else flat.numel)
        if parts is None:
            return False
        weights = self._staged(flat).weights
        if not on_cuda:
            ((masters, *moments),) = [part.values for part in parts]
            own = masters if weights.dtype == torch.float32 else weights
            staged = StagedState(own, masters, None, dict(zip(ADAM_MOMENTS, moments, strict=True)))
            do_together([StepWork(flat.name, optimizer.begin_step(given, staged), 0.0)])
            if own is masters:
                weights.copy_(own)
            return True
        rounded = written.view(flat.dtype)
        sizes = read.element_size(), rounded.element_size()
        for part in parts:
            numel = part.values[0].numel()
            self._copies.copy(read.data_ptr(), mean.data_ptr() + part.start * sizes[0], numel * sizes[0])
            part.values = cuda_step(read[:numel], part.values, settings)
            rounded[:numel].copy_(part.values[0])
            self._copies.copy(weights.data_ptr() + part.start * sizes[1], rounded.data_ptr(), numel * sizes[1])
        self._sums.end()
        return True

    def copy_to_host(self, flat: FlatParameter) -> None:
        """Copies the values of `flat` to host memory, and frees those on the device."""
        parts, staged = self._held.get(flat), self._staged(flat)
        if parts is None:
            return
        self._sums.begin()
        arrays = _arrays(staged)
        for part in parts:
            for array, values in zip(arrays, part.values, strict=True):
                if array is not staged.weights:  # which each step writes
                    array[part.start : part.start + values.numel()].copy_(values)
        del self._held[flat], parts, part, values
        count_evictable(self._copies.device, -_nbytes(flat))

    def _copy_to_device(self, flat: FlatParameter, size: int) -> list[_Part] | None:
        """Copies the values of `flat` to the device, in parts of `size` elements; None: there is no memory."""
        arrays, device = _arrays(self._staged(flat)), self._copies.device
        parts: list[_Part] = []
        count_evictable(device, _nbytes(flat))
        try:
            for start in range(0, flat.numel, size):
                masters, first, second = [array[start : start + size].to(device, copy=True) for array in arrays]
                parts.append(_Part(start, (masters, first, second)))
        except torch.OutOfMemoryError:
            self._refused.add(flat)
            self._chosen.pop(flat, None)
            parts.clear()
            count_evictable(device, -_nbytes(flat))
            return None
        self._held[flat] = parts
        return parts

    def _staged(self, flat: FlatParameter) -> StagedState:
        return self._stores[flat].buffers.stage_in_place(step=True).result()


def _arrays(staged: StagedState) -> AdamValues:
    """Returns the values in host memory."""
    assert staged.master is not None
    first, second = [staged.states[name] for name in ADAM_MOMENTS]
    return staged.master, first, second


def _nbytes(flat: FlatParameter) -> int:
    return 3 * torch.float32.itemsize * flat.numel


def _is_supported(store: StateStore) -> bool:
    layout = store.layout
    exact = layout.moments == "fp32" and not layout.split and layout.flat.dtype in (torch.float32, torch.bfloat16)
    return exact and layout.steps and layout.versions == 1 and store.buffers.in_memory
