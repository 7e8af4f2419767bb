"""The SSD tier on the direct path: transfers between device memory and SSD without host buffers (GPUDirect Storage).

The backend's transfers are not ordered by streams. A request is therefore submitted once the GPU has produced the bytes
(or no longer uses the destination's memory), and owns the device memory until its future is done.
"""

import contextlib
from functools import partial

from torch import Tensor

from lightning_ssd.activations.ssd_base import SSDTierBase
from lightning_ssd.activations.tier import Load, StoredCopy
from lightning_ssd.device import Mark
from lightning_ssd.futures import Future
from lightning_ssd.storage import Blob, Urgency
from lightning_ssd.waits import wait_for, wait_for_all


class DirectTier(SSDTierBase):
    """Scratch files as a tier, over a store whose backend takes device buffers; owns `store`."""

    def store(self, data: Tensor, *, may_wait: bool) -> StoredCopy | None:
        blob = self._allocate(data.numel(), may_wait=may_wait)
        if blob is None:
            return None
        copy = _DirectCopy(self, blob)
        produced = self._copies.on_d2h(self._copies.mark(awaited=True))
        produced.add_done_callback(partial(copy.write, data))
        self.bytes_out += data.numel()
        return copy

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # callbacks run in reverse order, also after errors of earlier ones
            stack.callback(self.blobs.close)
            stack.callback(self._copies.drain)


class _DirectCopy(StoredCopy):
    def __init__(self, tier: DirectTier, blob: Blob) -> None:
        self.tier = tier
        self.blob = blob
        self._requests: Future[list[Future[None]]] = Future()
        """The writes, once the GPU has produced the bytes."""

    def write(self, data: Tensor, produced: "Future[None]") -> None:
        parts = ((piece, data[piece.start : piece.start + piece.nbytes]) for piece in self.blob.pieces)
        try:
            produced.result()
            self._requests.set_result([self.tier.blobs.write(piece, part) for piece, part in parts])
        except Exception as error:  # a closed store or a lost device; `wait_copied` raises it on the training thread
            self._requests.set_exception(error)

    def wait_copied(self) -> Mark:
        requests = wait_for(self._requests, "saved tensors")
        wait_for_all(requests, "saved tensors")
        for request in requests:
            if not request.cancelled():  # `free` cancels requests whose bytes are not needed
                request.result()
        return None

    def load(self, *, urgent: bool) -> Load:
        self.tier.bytes_in += self.blob.nbytes
        return _DirectLoad(self, urgent)

    def free(self) -> None:
        wait_for_all([self._requests], "saved tensors")
        if self._requests.exception() is None:
            requests = self._requests.result()
            for request in requests:
                request.cancel()
            wait_for_all(requests, "saved tensors")
        self.tier.blobs.free(self.blob)


class _DirectLoad(Load):
    def __init__(self, copy: _DirectCopy, urgent: bool) -> None:
        copies = copy.tier._copies
        self.data = copies.empty(copy.blob.nbytes)
        self._requests: Future[list[Future[None]]] = Future()
        # The compute stream may still use the memory for its last owner: the reads are submitted after that.
        self._urgency = Urgency(urgent=urgent)
        copies.on_h2d(copies.mark(awaited=True)).add_done_callback(partial(self._read, copy))

    @property
    def issued(self) -> bool:
        if not self._requests.done():
            return False
        return self._requests.exception() is not None or all([request.done() for request in self._requests.result()])

    def wait(self) -> Mark:
        if not self.issued:
            self._urgency.begin_wait()
        for request in wait_for(self._requests, "saved tensors"):
            wait_for(request, "saved tensors")
        return None

    def _read(self, copy: _DirectCopy, free: "Future[None]") -> None:
        parts = ((piece, self.data[piece.start : piece.start + piece.nbytes]) for piece in copy.blob.pieces)
        try:
            free.result()
            reads = [copy.tier.blobs.read(piece, part, urgency=self._urgency) for piece, part in parts]
            self._requests.set_result(reads)
        except Exception as error:  # as in `_DirectCopy.write`; `wait` raises it
            self._requests.set_exception(error)
