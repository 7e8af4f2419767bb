"""`DeviceStates`: optimizer states on the device of their flat parameter's owner, while it has memory to spare."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ssd.device import CopyEngine, lend
from lightning_ssd.futures import Future, finished
from lightning_ssd.model_states.optimizers import (
    AdamOptimizer,
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
from lightning_ssd.waits import wait_for_all

MOMENTS = ("exp_avg", "exp_avg_sq")


class _Held(NamedTuple):
    """Values of a flat parameter on the device, fp32: master weights and both moments."""

    masters: Tensor
    first: Tensor
    second: Tensor


class DeviceStates:
    """Steps flat parameters on the device of their owner, which keeps master weights and optimizer states there.

    The devices of several ranks have room for many states together. A step on the device moves 10 bytes a parameter
    through host memory, for the mean gradient and the compute weights, which all ranks read there as before; a step on
    the CPU moves 36. The bits are the same.

    Host memory keeps its room for the values, which are old there until `bring_home`: the device's memory is given back
    at once when a micro-batch may need it.

    Threads: `use` is called on the training thread, `holds` and `bring_home` on any. `step`, and the jobs of
    `bring_home`, run on the thread `sums` and use its stream. `_lent` is changed by the training thread, and by a step
    that finds no memory; `_held` by the thread `sums` alone. No lock: each change is one operation on a dictionary.

    Ownership: from a flat parameter's first step on the device until `bring_home`, its values but the compute weights
    belong to this object. `bring_home` is called while no step of it runs, or waits for the step's job.

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
        self._lent: dict[FlatParameter, None] = {}
        """Flat parameters that are stepped on the device from now on."""
        self._held: dict[FlatParameter, _Held] = {}

    # ---- room on the device ----

    def use(self, nbytes: int) -> None:
        """Has flat parameters move to the device at their next steps, as many as have room, one more in each call.

        First units come first: the next forward waits for their steps. Returns when those for which there is no room
        any more are in host memory.

        Args:
            nbytes: bytes that nothing else needs.
        """
        leaving: list[FlatParameter] = []
        used = 0
        for flat in self._optimizers:
            used += _nbytes(flat)
            if used > nbytes:
                if flat in self._lent:
                    del self._lent[flat]
                    leaving.append(flat)
            elif flat not in self._lent:
                self._lent[flat] = None
                break
        if leaving:
            # A step of one of them may be about to move it to the device: its job is before this one, or finds that it
            # may not.
            wait_for_all([self._submit_home(flat) for flat in leaving], "optimizer states on the device")
            if self._copies.device.type == "cuda":
                torch.cuda.empty_cache()  # of another stream, which the training would not use
                torch.cuda.reset_peak_memory_stats(self._copies.device)

    def steps(self, flat: FlatParameter) -> bool:
        """Returns whether `flat` is stepped on the device. On the training thread."""
        return flat in self._lent

    def holds(self, flat: FlatParameter) -> bool:
        """Returns whether values of `flat`, of which no step runs, are old in host memory."""
        return flat in self._held

    def bring_home(self, flat: FlatParameter) -> "Future[None]":
        """Copies the values of `flat`, of which no step runs, to host memory, if they are old there. On any thread."""
        return self._submit_home(flat) if self.holds(flat) else finished(None)

    def _submit_home(self, flat: FlatParameter) -> "Future[None]":
        return self._sums.submit(partial(self.home, flat), [], priority=-2)

    # ---- on the thread `sums` ----

    def submit(
        self, run: "Callable[[], Future[None] | None]", after: "Sequence[Future[Any]]", priority: int
    ) -> "Future[None]":
        """Queues the job of a step, as `PeerSums.submit` does."""
        return self._sums.submit(run, after, priority=priority)

    def step(self, flat: FlatParameter, given: StepInput) -> bool:
        """Makes a step, and writes the new compute weights to host memory, or returns False if the CPU has to."""
        optimizer, gradient = self._optimizers[flat], given.gradient
        assert isinstance(gradient, RankMean)
        mean, *others = gradient.sources  # which has been written to host memory
        assert not others and gradient.share == 1.0
        on_cuda = self._copies.device.type == "cuda"
        settings = optimizer.device_settings(given)
        if settings is None or flat not in self._lent or (on_cuda and not has_cuda_step(self._copies.device)):
            return False
        read, written = self._sums.begin()
        held = self._held.get(flat) or self._move(flat)
        if held is None:
            return False
        weights = self._staged(flat).weights
        if not on_cuda:
            own = held.masters if weights.dtype == torch.float32 else weights
            staged = StagedState(own, held.masters, None, dict(zip(MOMENTS, held[1:], strict=True)))
            do_together([StepWork(flat.name, optimizer.begin_step(given, staged), 0.0)])
            if own is held.masters:
                weights.copy_(own)
            return True
        for low in range(0, flat.numel, read.numel()):
            part = _Held(*[values[low : low + read.numel()] for values in held])
            numel = part.masters.numel()
            self._copies.copy(read.data_ptr(), mean[low:].data_ptr(), read[:numel].nbytes)
            stepped = cuda_step(read[:numel], part.masters, (part.first, part.second), settings)
            for old, new in zip(part, stepped, strict=True):
                old.copy_(new)
            rounded = written.view(flat.dtype)[:numel].copy_(part.masters)
            self._copies.copy(weights[low:].data_ptr(), rounded.data_ptr(), rounded.nbytes)
        self._sums.end()
        return True

    def home(self, flat: FlatParameter) -> None:
        """Copies the values of `flat` to host memory, and frees those on the device."""
        held, staged = self._held.get(flat), self._staged(flat)
        if held is None:
            return
        self._sums.begin()
        for name, values in zip(MOMENTS, held[1:], strict=True):
            staged.states[name].copy_(values)
        assert staged.master is not None
        if staged.master is not staged.weights:
            staged.master.copy_(held.masters)
        del self._held[flat], held
        lend(self._copies.device, -_nbytes(flat))

    def _move(self, flat: FlatParameter) -> _Held | None:
        """Copies the values of `flat` to the device; None: there is no memory."""
        staged = self._staged(flat)
        try:
            values = [staged.masters(), *[staged.states[name] for name in MOMENTS]]
            held = _Held(*[torch.empty_like(one, device=self._copies.device).copy_(one) for one in values])
        except torch.OutOfMemoryError:
            self._lent.pop(flat, None)
            return None
        self._held[flat] = held
        lend(self._copies.device, _nbytes(flat))
        return held

    def _staged(self, flat: FlatParameter) -> StagedState:
        return self._stores[flat].buffers.stage_in_place(step=True).result()


def _nbytes(flat: FlatParameter) -> int:
    return 3 * torch.float32.itemsize * flat.numel


def _is_supported(store: StateStore) -> bool:
    layout = store.layout
    exact = layout.moments == "fp32" and not layout.split
    return exact and layout.steps and layout.versions == 1 and store.buffers.in_memory
