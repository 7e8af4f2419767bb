"""CUDA events by way of the driver, recycled.

The activation offloader records some ten events for every tensor that is offloaded and prefetched, on the thread that
launches kernels: the driver's calls and a free list take a fifth of the time of new `torch.cuda.Event`s there.
"""

import ctypes
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

Stream = int | ctypes.c_void_p


class Event:
    """A point on a stream. Its driver event is recorded anew when the last reference to this one has gone.

    Streams that were told to wait for it keep waiting for this point (the driver captures it with the call).
    """

    __slots__ = ("_events", "_free", "_handle")

    def __init__(self, events: "Events", handle: ctypes.c_void_p, free: "deque[ctypes.c_void_p]") -> None:
        self._events = events
        self._handle = handle
        self._free = free

    def __del__(self) -> None:
        self._free.append(self._handle)  # atomic: finalisers run on any thread

    def reached(self) -> bool:
        """Whether the device has passed it."""
        result = self._events._driver.cuEventQuery(self._handle)
        if result == _NOT_READY:
            return False
        _check(result, "cuEventQuery")
        return True

    def synchronize(self) -> None:
        """Returns when the device has passed it; the thread sleeps if it was recorded as awaited, else it spins."""
        _check(self._events._blocking.cuEventSynchronize(self._handle), "cuEventSynchronize")

    def seconds_until(self, end: "Event") -> float:
        """Returns the seconds from this to `end`, both timed and reached; negative if `end` was reached first."""
        milliseconds = ctypes.c_float()
        driver = self._events._driver
        _check(
            driver.cuEventElapsedTime(ctypes.byref(milliseconds), self._handle, end._handle),
            "cuEventElapsedTime",
        )
        return milliseconds.value / 1e3


Mark = Event | None
"""Everything that was issued on one stream up to a point; `None` on a CPU, where it is done already."""


class Events:
    """The events of one CUDA device, and the few driver calls that go with them. Thread-safe.

    Streams are given as handles: an `int`, or a `ctypes.c_void_p`, which is not converted in each call.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._index: int = self._device.index
        self._free: Mapping[int, deque[ctypes.c_void_p]] = {flags: deque() for flags in range(4)}
        self._thread = _Thread()
        # These calls take a microsecond: releasing the GIL around them (as CDLL does) would take longer.
        self._driver = _declared(ctypes.PyDLL("libcuda.so.1"))
        self._blocking = _declared(ctypes.CDLL("libcuda.so.1"))

    def compute_stream(self) -> int:
        """Returns the handle of the stream that is current on this thread."""
        return torch._C._cuda_getCurrentRawStream(self._index)

    def record(self, stream: Stream, *, timed: bool = False, awaited: bool = False) -> Event:
        """Returns the present end of `stream`.

        Args:
            stream: to record on.
            timed: `seconds_until` will be asked.
            awaited: a thread will wait for it, and may sleep. Who records some 56 of these ahead of the device is held
                up until it has passed the first (driver 580, H100): others are recorded as not awaited.
        """
        if not self._thread.entered:
            self._enter()
        flags = (0 if timed else _DISABLE_TIMING) | (_BLOCKING_SYNC if awaited else 0)
        free = self._free[flags]
        try:
            handle = free.popleft()
        except IndexError:
            handle = self._new(flags)
        event = Event(self, handle, free)
        if result := self._driver.cuEventRecord(handle, stream):
            _check(result, "cuEventRecord")
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Makes `stream` wait for `event`; the host goes on."""
        if not self._thread.entered:
            self._enter()
        if result := self._driver.cuStreamWaitEvent(stream, event._handle, 0):
            _check(result, "cuStreamWaitEvent")

    def follow_compute(self, stream: Stream) -> None:
        """Makes `stream` wait for what the compute stream of this thread was given so far; the host goes on."""
        thread = self._thread
        if not thread.entered:
            self._enter()
        if thread.order is None:
            thread.order = self._new(_DISABLE_TIMING)
        # The event is recorded anew in the next call: `stream` waits for the point that it stands for now.
        if result := self._driver.cuEventRecord(thread.order, self.compute_stream()):
            _check(result, "cuEventRecord")
        if result := self._driver.cuStreamWaitEvent(stream, thread.order, 0):
            _check(result, "cuStreamWaitEvent")

    def copy(self, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        """Issues a copy between two addresses on `stream`."""
        if not self._thread.entered:
            self._enter()
        if result := self._driver.cuMemcpyAsync(dst, src, nbytes, stream):
            raise RuntimeError(f"cuMemcpyAsync of {nbytes} bytes failed with CUDA driver error {result}")

    def _new(self, flags: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        _check(self._driver.cuEventCreate(ctypes.byref(handle), flags), "cuEventCreate")
        return handle

    def _enter(self) -> None:
        """Makes the device's context current on this thread: I/O threads have none at first."""
        torch.cuda.set_device(self._device)
        torch.cuda.current_stream().query()  # some call that the runtime passes on to the driver
        self._thread.entered = True


class _Thread(threading.local):
    """State of each thread."""

    entered = False
    """Whether the device's context is current."""

    order: ctypes.c_void_p | None = None
    """The event of `Events.follow_compute`."""


_NOT_READY = 600
_BLOCKING_SYNC = 1
_DISABLE_TIMING = 2


def _declared(driver: Any) -> Any:
    pointer = ctypes.c_void_p
    driver.cuEventCreate.argtypes = (pointer, ctypes.c_uint)
    driver.cuEventRecord.argtypes = (pointer, pointer)
    driver.cuEventQuery.argtypes = (pointer,)
    driver.cuEventSynchronize.argtypes = (pointer,)
    driver.cuEventElapsedTime.argtypes = (pointer, pointer, pointer)
    driver.cuStreamWaitEvent.argtypes = (pointer, pointer, ctypes.c_uint)
    driver.cuMemcpyAsync.argtypes = (pointer, pointer, ctypes.c_size_t, pointer)
    return driver


def _check(result: int, call: str) -> None:
    if result:
        raise RuntimeError(f"{call} failed with CUDA driver error {result}")
