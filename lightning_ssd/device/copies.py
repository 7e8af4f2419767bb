"""Copies between the training device and host memory, ordered on the device's own clock.

`CopyEngine` allocates on the device, copies device to host (d2h) and host to device (h2d), and records *marks*. A mark
stands for all work issued on one stream so far. The compute stream can wait for a mark (`wait`, which does not block
the host), or a future is done once it is reached (`on_d2h`, `on_h2d`; a thread completes these futures). On a GPU a
mark is a CUDA event. On a CPU, copies are done when the call returns, and a mark is `None`.
"""

import ctypes
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ssd import torch_internals as internals
from lightning_ssd.device.cuda_events import Event, Events, Mark
from lightning_ssd.device.memory import CUDAMemory, process_gpu_memory
from lightning_ssd.futures import Future, finished
from lightning_ssd.spans import COPY_IN, COPY_OUT, span
from lightning_ssd.waits import wait_for, watch


class WorkCounter(NamedTuple):
    """Work done (bytes copied or parameters stepped) and the busy time in seconds, for throughput."""

    amount: int
    seconds: float

    def plus(self, amount: int, seconds: float) -> "WorkCounter":
        return WorkCounter(self.amount + amount, self.seconds + seconds)

    def since(self, earlier: "WorkCounter") -> "WorkCounter":
        """Returns the work done and busy time since `earlier`."""
        return WorkCounter(self.amount - earlier.amount, self.seconds - earlier.seconds)


class CopyEngine(ABC):
    """Copies bytes between one device and host memory.

    All tensors are one-dimensional `uint8`. "Compute stream" means the current stream of the calling thread.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def empty(self, nbytes: int) -> Tensor:
        """Allocates `nbytes` bytes on the device, on the compute stream."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def follow(self, stream: int | None) -> int:
        """Orders this thread's compute stream after the present work of another one, and returns its handle.

        Args:
            stream: handle of the other stream; None: there is none.
        """
        return 0

    @abstractmethod
    def mark(self, *, awaited: bool = False) -> Mark:
        """Returns a mark for all work issued on the compute stream so far.

        Args:
            awaited: the mark will be passed to `on_d2h` or `on_h2d`, whose thread sleeps until it is reached. Only few
                such marks may be pending at once (see `Events.record`).
        """

    @abstractmethod
    def d2h(self, src: Tensor, dst: Tensor, after: Mark, *, awaited: bool = False) -> Mark:
        """Copies device bytes `src` to the beginning of host bytes `dst`, and returns the mark of the copy.

        The caller keeps both buffers alive until the returned mark is reached.

        Args:
            src: bytes on the device.
            dst: host bytes, at least as many as `src` has.
            after: mark that the copy waits for; None: all work issued on the compute stream so far (cheaper than a
                mark that is used once).
            awaited: as in `mark`, for the returned mark.
        """

    def d2h_each(self, sources: Sequence[Tensor], dst: Tensor, starts: Sequence[int], *, awaited: bool = False) -> Mark:
        """Copies several tensors to host bytes `dst`, and returns one mark, of the last copy.

        The copies wait for all work issued on the compute stream so far, as those of `d2h` do without `after`.

        Args:
            sources: tensors on the device, at least one, each dense (its elements are in memory without gaps).
            dst: host bytes, page-locked if the device is a GPU.
            starts: offset of each tensor's bytes in `dst`.
            awaited: as in `d2h`.
        """
        mark: Mark = None
        for src, start in zip(sources, starts, strict=True):
            data = src.as_strided((src.numel(),), (1,)).view(torch.uint8)
            last = awaited and src is sources[-1]
            mark = self.d2h(data, dst[start : start + data.numel()], None, awaited=last)
        return mark

    def mapped(self, host: Tensor) -> Tensor:
        """Returns a tensor on the device whose memory is the page-locked bytes `host`: kernels write them over PCIe.

        The host can read the bytes that a kernel has written once a mark is reached that was recorded after the kernel.
        The device makes copies to the host one after the other, whatever their streams: a copy of a few bytes would
        wait for all copies that were issued before it, and a kernel does not. The caller keeps `host` alive.
        """
        return host

    @abstractmethod
    def h2d(self, src: Tensor, dst: Tensor, after: Mark, *, awaited: bool = False) -> Mark:
        """Copies the beginning of host bytes `src` to device bytes `dst`, and returns the mark of the copy.

        The caller keeps both buffers alive until the returned mark is reached. `after` and `awaited`: as in `d2h`.
        """

    @abstractmethod
    def d2d(self, src: Tensor, dst: Tensor) -> None:
        """Copies `src`, which is dense, to the beginning of bytes `dst` on the device, on the compute stream.

        The caller may drop `src`, even if its memory is that of another stream, which this one follows.
        """

    @abstractmethod
    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Copies bytes between two addresses, of this device, another one or host memory, on the compute stream.

        If host memory is not page-locked, the call may wait until the copy is made; other threads run meanwhile.
        """

    @abstractmethod
    def reached(self, mark: Mark) -> bool:
        """Returns whether the device has passed `mark`."""

    @abstractmethod
    def wait(self, mark: Mark) -> None:
        """Makes the compute stream wait for `mark`, without blocking the host."""

    @abstractmethod
    def on_d2h(self, mark: Mark) -> "Future[None]":
        """Returns a future that is done once `mark`, of a d2h copy or of the compute stream, is reached.

        One thread completes these futures, in the order of the calls, and runs their callbacks: a callback delays all
        later futures. If the device is lost, a future has the CUDA error instead, and the copied bytes are invalid.
        """

    @abstractmethod
    def on_h2d(self, mark: Mark) -> "Future[None]":
        """Returns a future as `on_d2h` does, for a mark of an h2d copy or the compute stream, on its own thread."""

    @abstractmethod
    def busy(self) -> tuple[WorkCounter, WorkCounter]:
        """Returns bytes and busy seconds of all d2h copies and of all h2d copies so far."""

    def memory_is_short(self, nbytes: int) -> bool:
        """Returns True if `nbytes` more could leave too little device memory for the rest of a step."""
        return False

    @abstractmethod
    def drain(self) -> None:
        """Blocks until all copies are done, and all futures and their callbacks."""

    @abstractmethod
    def close(self) -> None:
        """Ends the threads after all pending futures are done."""


class CPUCopyEngine(CopyEngine):
    """Copies for a CPU "device": plain `memcpy`, done when the call returns."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        # h2d copies run on several I/O threads at once: they update the sums under the lock.
        self._lock = threading.Lock()
        self._out_busy = self._in_busy = WorkCounter(0, 0.0)

    def mark(self, *, awaited: bool = False) -> Mark:
        return None

    def d2h(self, src: Tensor, dst: Tensor, after: Mark, *, awaited: bool = False) -> Mark:
        start = perf_counter()
        # The copy is no operator of the model: dispatch modes that are active in a forward must not see it.
        with internals.without_dispatch(), span(COPY_OUT, src.numel()):
            dst[: src.numel()].copy_(src)
        with self._lock:
            self._out_busy = self._out_busy.plus(src.numel(), perf_counter() - start)
        return None

    def h2d(self, src: Tensor, dst: Tensor, after: Mark, *, awaited: bool = False) -> Mark:
        start = perf_counter()
        # Transforms of `torch.func`, in which a unit's forward may begin, would refuse to write memory from outside.
        with internals.without_dispatch(), internals.without_functorch(), span(COPY_IN, dst.numel()):
            dst.copy_(src[: dst.numel()])
        with self._lock:
            self._in_busy = self._in_busy.plus(dst.numel(), perf_counter() - start)
        return None

    def d2d(self, src: Tensor, dst: Tensor) -> None:
        self.copy(dst.data_ptr(), src.data_ptr(), src.nbytes)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        ctypes.memmove(to, source, nbytes)

    def reached(self, mark: Mark) -> bool:
        return True

    def wait(self, mark: Mark) -> None:
        return None

    def on_d2h(self, mark: Mark) -> "Future[None]":
        return finished(None)

    def on_h2d(self, mark: Mark) -> "Future[None]":
        return finished(None)

    def busy(self) -> tuple[WorkCounter, WorkCounter]:
        return self._out_busy, self._in_busy

    def drain(self) -> None:
        return None

    def close(self) -> None:
        return None


class CUDACopyEngine(CopyEngine):
    """Copies for a CUDA device, on one stream each way beside the compute stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        # The other fifth is for gradients, workspaces and fragments of backward.
        self._short_from = 0.8 * process_gpu_memory(device)
        self._memory = CUDAMemory(device)
        self._events = Events(device)
        self._out = _CopyStream("d2h-done", device, self._events)
        self._in = _CopyStream("h2d-done", device, self._events)

    def follow(self, stream: int | None) -> int:
        compute = self._events.compute_stream()
        if stream is not None and stream != compute:
            self._events.wait(compute, self._events.record(stream))
        return compute

    def mark(self, *, awaited: bool = False) -> Mark:
        return self._events.record(self._events.compute_stream(), awaited=awaited)

    def d2h(self, src: Tensor, dst: Tensor, after: Mark, *, awaited: bool = False) -> Mark:
        return self._out.copy([(dst.data_ptr(), src.data_ptr(), src.numel())], after, awaited)

    def d2h_each(self, sources: Sequence[Tensor], dst: Tensor, starts: Sequence[int], *, awaited: bool = False) -> Mark:
        first = dst.data_ptr()
        spans = [
            (first + start, source.data_ptr(), source.nbytes) for source, start in zip(sources, starts, strict=True)
        ]
        return self._out.copy(spans, None, awaited)

    def mapped(self, host: Tensor) -> Tensor:
        mapped = torch.as_tensor(_Mapped(host), device=self.device)
        assert mapped.data_ptr() == host.data_ptr(), f"host memory of {self.device} was page-locked for another device"
        return mapped

    def h2d(self, src: Tensor, dst: Tensor, after: Mark, *, awaited: bool = False) -> Mark:
        return self._in.copy([(dst.data_ptr(), src.data_ptr(), dst.numel())], after, awaited)

    def d2d(self, src: Tensor, dst: Tensor) -> None:
        self._events.copy(dst.data_ptr(), src.data_ptr(), src.nbytes, self._events.compute_stream())
        src.record_stream(torch.cuda.current_stream(self.device))  # which has no effect on the stream's own memory

    def copy(self, to: int, source: int, nbytes: int) -> None:
        self._events.copy(to, source, nbytes, self._events.compute_stream(), waits=True)

    def reached(self, mark: Mark) -> bool:
        return mark is None or mark.reached()

    def wait(self, mark: Mark) -> None:
        if mark is not None:
            self._events.wait(self._events.compute_stream(), mark)

    def on_d2h(self, mark: Mark) -> "Future[None]":
        return self._out.done.when_reached(mark)

    def on_h2d(self, mark: Mark) -> "Future[None]":
        return self._in.done.when_reached(mark)

    def busy(self) -> tuple[WorkCounter, WorkCounter]:
        return self._out.busy(), self._in.busy()

    def memory_is_short(self, nbytes: int) -> bool:
        return self._memory.allocated() + nbytes > self._short_from

    def drain(self) -> None:
        for stream in (self._out, self._in):
            wait_for(stream.done.when_reached(None), "copies")
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        self._out.done.close()
        self._in.done.close()


class _Mapped:
    """Page-locked host bytes with the CUDA array interface, by which torch makes a tensor of them without a copy."""

    def __init__(self, host: Tensor) -> None:
        data = (host.data_ptr(), False)
        self.__cuda_array_interface__ = {"shape": (host.numel(),), "typestr": "|u1", "data": data, "version": 2}


class _CopyStream:
    """One direction: a stream, and a thread that completes the futures of its copies."""

    #: Bytes of the smallest copies that are timed: the time of smaller ones is mostly latency, not bandwidth.
    TIMED = 4 * 2**20

    def __init__(self, name: str, device: torch.device, events: Events) -> None:
        self.done = _EventThread(f"lightning_ssd-{name}", device)
        self._stream = torch.cuda.Stream(device)
        self._handle = ctypes.c_void_p(self._stream.cuda_stream)
        self._events = events
        self._spans: deque[tuple[Event, Event, int]] = deque()
        self._busy = WorkCounter(0, 0.0)

    def copy(self, spans: Sequence[tuple[int, int, int]], after: Mark, awaited: bool) -> Event:
        """Issues copies, each given by the address of its destination, that of its source, and its bytes."""
        # The stream executes in order, so the marks of earlier copies on it are reached before this one's.
        stream, events = self._handle, self._events
        if after is None:
            events.follow_compute(stream)
        else:
            events.wait(stream, after)
        nbytes = sum([span[2] for span in spans])
        start = events.record(stream, timed=True) if nbytes >= self.TIMED else None
        # The driver's call instead of `copy_` needs no current stream and no views, and a third of the host's time.
        for to, source, size in spans:
            events.copy(to, source, size, stream)
        end = events.record(stream, timed=True, awaited=awaited)
        if start is not None:
            self._spans.append((start, end, nbytes))
        return end

    def busy(self) -> WorkCounter:
        while self._spans and self._spans[0][1].reached():
            start, end, nbytes = self._spans.popleft()
            self._busy = self._busy.plus(nbytes, start.seconds_until(end))
        return self._busy


class _EventThread:
    """Completes futures on a thread, in order, once their CUDA events are reached.

    The callbacks of a future own the buffers that they close over until they have run on this thread.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._queue: queue.SimpleQueue[tuple[Mark, Future[None]] | None] = queue.SimpleQueue()
        self._device = device
        self._reached = 0
        # Daemon: it must not keep the interpreter alive if the training thread died without closing the engine.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        watch(self)

    def progress(self) -> tuple[int, ...]:
        """Returns the number of events that were reached (`waits.Watched`)."""
        return (self._reached,)

    def pending(self) -> str:
        """Returns the number of events that were not awaited yet (`waits.Watched`)."""
        return f"{waiting} copies of {self._thread.name}" if (waiting := self._queue.qsize()) else ""

    def when_reached(self, mark: Mark) -> "Future[None]":
        reached: Future[None] = Future()
        self._queue.put((mark, reached))
        return reached

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        while (item := self._queue.get()) is not None:
            mark, reached = item
            try:
                if mark is not None:
                    mark.synchronize()
            except RuntimeError as error:  # the device is lost
                reached.set_exception(error)
            else:
                reached.set_result(None)
            self._reached += 1
            del item, mark, reached  # an idle thread must not keep buffers alive


def make_copy_engine(device: torch.device) -> CopyEngine:
    """Returns the copy engine for `device`.

    Raises:
        ValueError: `device` is neither a CPU nor a CUDA device.
    """
    if device.type == "cpu":
        return CPUCopyEngine(device)
    if device.type == "cuda":
        # With an explicit index: the engine's threads would have another current device.
        return CUDACopyEngine(torch.device("cuda", torch.cuda.current_device()) if device.index is None else device)
    raise ValueError(
        f"activations can be offloaded from CPU and CUDA devices, not from {device}. "
        "Set `accelerator='gpu'` (CUDA) or `accelerator='cpu'`, or use another strategy."
    )
