"""`PeerSums`: means of all ranks' gradients, computed on the device of a flat parameter's owner."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ssd import torch_internals as internals
from lightning_ssd.device import CopyEngine, Worker
from lightning_ssd.futures import Future
from lightning_ssd.model_states.units import ParamView

CHUNK = 2**23
"""Elements that are summed at a time."""


class Source(NamedTuple):
    """Where a rank's gradient is: in a slot of `PeerMemory`, or in shared host memory."""

    address: int
    dtype: torch.dtype


class PeerSums:
    """Sums gradients of all ranks, and measures norms of their mean, on the device, while it computes backward.

    The device reads gradients of other ranks from their devices, and writes the mean to host memory: 4 bytes a
    parameter cross that, whatever the number of ranks is, and 4 more when the step reads them.

    Threads: `submit` is called on the training thread, or autograd's while that waits. Jobs run on the thread `sums`,
    with a stream of its own, and end when the device has made them.

    Ownership: the sources and the mean belong to a job from the end of its dependencies until its future is done. The
    buffers on the device belong to the job that runs, one after the other.

    Args:
        copies: copies of the device.
        elements: elements of the largest flat parameter.

    Attributes:
        nbytes: bytes of the buffers on the device.
    """

    def __init__(self, copies: CopyEngine, elements: int) -> None:
        self._copies = copies
        size, device = min(CHUNK, elements), copies.device
        buffers = torch.empty(3, size, dtype=torch.float32, device=device)
        self.nbytes = buffers.nbytes
        self._read, self._part, self._mean = buffers.unbind()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._worker = Worker("sums")

    def submit(
        self, run: Callable[[], "Future[None] | None"], after: "Sequence[Future[Any]]", *, priority: int = -1
    ) -> "Future[None]":
        """Queues a job, which calls `write` or `begin`, when all of `after` are done, as `Worker.submit` does."""
        return self._worker.submit(run, after, priority=priority)

    def begin(self) -> tuple[Tensor, Tensor]:
        """Begins a job that uses the device: work that it issues is ordered by the stream of this object.

        Returns:
            Memory on the device that the job may use, twice as many elements in fp32.
        """
        if self._stream is not None:
            # No context: at its end, this thread would have the first device again, and allocate memory for a context.
            torch.cuda.set_stream(self._stream)
        return self._read, self._part

    def end(self) -> None:
        """Waits until the device has done the job's work."""
        if (mark := self._copies.mark(awaited=True)) is not None:
            mark.synchronize()

    def write(
        self, sources: Sequence[Source | None], share: float, total: Tensor, measured: Sequence[ParamView]
    ) -> list[float]:
        """Writes the mean of gradients, and returns the norms of parameters in it. Runs in a job.

        The mean is that of `RankMean`: the sources are multiplied by `share` in fp32, and added in their order.

        Args:
            sources: the gradients, each of as many elements as `total`; None: zeros.
            share: the reciprocal of the number of ranks.
            total: receives the mean, fp32 in host memory.
            measured: the parameters.
        """
        self.begin()
        pieces: list[list[Tensor]] = [[] for _ in measured]
        for low in range(0, total.numel(), self._mean.numel()):
            mean = self._mean[: total.numel() - low]
            self._sum(sources, share, low, mean)
            self._copies.copy(total[low:].data_ptr(), mean.data_ptr(), mean.nbytes)
            _measure(mean, low, measured, pieces)
        norms = [norm for of_one in pieces for norm in of_one]
        values = iter(torch.stack(norms).tolist() if norms else ())  # waits for the device
        if not norms:
            self.end()
        # Not `math.hypot`, which is infinite of a NaN and an infinite number.
        return [math.sqrt(sum([next(values) ** 2 for _ in of_one])) for of_one in pieces]

    def _sum(self, sources: Sequence[Source | None], share: float, low: int, mean: Tensor) -> None:
        """Computes a part of the mean, from element `low` on."""
        for number, source in enumerate(sources):
            part = self._part[: mean.numel()] if number else mean
            if source is None:
                part.zero_()
            else:
                address, dtype = source
                read = self._read.view(dtype)[: mean.numel()]
                self._copies.copy(read.data_ptr(), address + low * dtype.itemsize, read.nbytes)
                part.copy_(read)
            if number:
                mean.add_(part, alpha=share)
            else:
                mean.mul_(share)

    def close(self) -> None:
        """Ends the thread after its current job, and frees the memory on the device. Idempotent."""
        self._worker.close()
        self._read = self._part = self._mean = torch.empty(0)


def _measure(mean: Tensor, low: int, measured: Sequence[ParamView], pieces: Sequence[list[Tensor]]) -> None:
    """Appends the norms of those parts of parameters that are in `mean`, which begins at element `low`."""
    high = low + mean.numel()
    inside = [
        (of_one, mean[max(item.start, low) - low : min(item.start + item.numel, high) - low])
        for item, of_one in zip(measured, pieces, strict=True)
        if item.start < high and low < item.start + item.numel
    ]
    norms = internals.foreach_norm([part for _, part in inside]) if inside else ()
    for (of_one, _), norm in zip(inside, norms, strict=True):
        of_one.append(norm)
