"""Recycled CUDA events, by calls of the driver.

The activation offloader records about ten events for every tensor that is offloaded and prefetched, on the thread that
launches kernels. The driver's calls with a free list take a fifth of the time that new `torch.cuda.Event`s take there.
"""

import ctypes
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from lightning_ssd import torch_internals as internals

Stream = int | ctypes.c_void_p


class Event:
    """A point on a stream. Its driver event is reused after the last reference to this object is dropped.

    Streams that wait for the event keep waiting for this point: the driver captures it when `Events.wait` is called.
    """

    __slots__ = ("_events", "_free", "_handle")

    def __init__(self, events: "Events", handle: ctypes.c_void_p, free: "deque[ctypes.c_void_p]") -> None:
        self._events = events
        self._handle = handle
        self._free = free

    def __del__(self) -> None:
        self._free.append(self._handle)  # atomic: finalisers run on any thread

    def reached(self) -> bool:
        """Returns True if the device has passed the event."""
        result = self._events._driver.cuEventQuery(self._handle)
        if result == _NOT_READY:
            return False
        _check(result, "cuEventQuery")
        return True

    def synchronize(self) -> None:
        """Blocks until the device has passed the event: sleeping if it was recorded as awaited, else spinning."""
        _check(self._events._blocking.cuEventSynchronize(self._handle), "cuEventSynchronize")

    def seconds_until(self, end: "Event") -> float:
        """Returns the seconds from this event to `end`, negative if `end` was reached first.

        Both events must be timed and reached.
        """
        milliseconds = ctypes.c_float()
        driver = self._events._driver
        _check(
            driver.cuEventElapsedTime(ctypes.byref(milliseconds), self._handle, end._handle),
            "cuEventElapsedTime",
        )
        return milliseconds.value / 1e3


Mark = Event | None
"""An event behind all work that was issued on one stream so far; `None` on a CPU, where the work is done already."""


class Events:
    """Makes, records and awaits events of one CUDA device. Thread-safe.

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
        return internals.raw_stream(self._index)

    def record(self, stream: Stream, *, timed: bool = False, awaited: bool = False) -> Event:
        """Records an event at the present end of `stream`.

        Args:
            timed: allow `seconds_until`.
            awaited: a thread that calls `synchronize` sleeps instead of spinning. Only events that a thread waits for
                are recorded so: recording blocks while about 56 of them are not reached yet (driver 580, H100).
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
        """Makes `stream` wait for `event`, without blocking the host."""
        if not self._thread.entered:
            self._enter()
        if result := self._driver.cuStreamWaitEvent(stream, event._handle, 0):
            _check(result, "cuStreamWaitEvent")

    def follow_compute(self, stream: Stream) -> None:
        """Makes `stream` wait for all work issued on this thread's compute stream so far, without blocking the host."""
        thread = self._thread
        if not thread.entered:
            self._enter()
        if thread.order is None:
            thread.order = self._new(_DISABLE_TIMING)
        # The next call records the event again; `stream` waits for its present point all the same.
        if result := self._driver.cuEventRecord(thread.order, self.compute_stream()):
            _check(result, "cuEventRecord")
        if result := self._driver.cuStreamWaitEvent(stream, thread.order, 0):
            _check(result, "cuStreamWaitEvent")

    def copy(self, dst: int, src: int, nbytes: int, stream: Stream, *, waits: bool = False) -> None:
        """Issues a copy between two addresses on `stream`.

        Args:
            waits: whether the call may wait until the device has made the copy, which it does if host memory is not
                page-locked. Other threads of Python run meanwhile: the device may wait for them, by another rank.
        """
        if not self._thread.entered:
            self._enter()
        driver = self._blocking if waits else self._driver
        if result := driver.cuMemcpyAsync(dst, src, nbytes, stream):
            raise RuntimeError(f"cuMemcpyAsync of {nbytes} bytes failed with CUDA driver error {result}")

    def _new(self, flags: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        _check(self._driver.cuEventCreate(ctypes.byref(handle), flags), "cuEventCreate")
        return handle

    def _enter(self) -> None:
        """Makes the device's context current on this thread: I/O threads have none at first."""
        torch.cuda.set_device(self._device)
        torch.cuda.current_stream().query()  # any call that makes the runtime use the driver sets the context
        self._thread.entered = True


class _Thread(threading.local):
    """State of each thread."""

    entered = False
    """True if the device's context is current on the thread."""

    order: ctypes.c_void_p | None = None
    """The thread's event for `Events.follow_compute`."""


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
