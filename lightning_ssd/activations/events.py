"""CUDA events by way of the driver, recycled.

The tensor cache records some ten events for every tensor that leaves and comes back, on the thread that feeds the GPU:
the driver's calls and a free list take a fifth of what new `torch.cuda.Event`s take there.
"""

import ctypes
import threading
from collections import deque
from typing import Any

import torch


class Event:
    """A point on a stream. Its driver event is recorded anew when the last reference to this one has gone.

    Streams that were told to wait for it keep waiting for this point (the driver captures it with the call).
    """

    __slots__ = ("_events", "_handle", "_timed")

    def __init__(self, events: "Events", handle: int, timed: bool) -> None:
        self._events = events
        self._handle = handle
        self._timed = timed

    def __del__(self) -> None:
        self._events._free[self._timed].append(self._handle)  # atomic: finalisers run on any thread

    def reached(self) -> bool:
        """Whether the device has passed it."""
        driver = self._events._driver
        result = driver.cuEventQuery(self._handle)
        if result == _NOT_READY:
            return False
        _check(result, "cuEventQuery")
        return True

    def synchronize(self) -> None:
        """Returns when the device has passed it; the thread sleeps."""
        self._events._sleep_until(self._handle)

    def seconds_until(self, end: "Event") -> float:
        """Returns the seconds from this to `end`, both timed and reached."""
        milliseconds = ctypes.c_float()
        driver = self._events._driver
        _check(
            driver.cuEventElapsedTime(ctypes.byref(milliseconds), self._handle, end._handle),
            "cuEventElapsedTime",
        )
        return milliseconds.value / 1e3


class Events:
    """The events of one CUDA device, and the few driver calls that go with them. Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._free: tuple[deque[int], deque[int]] = (deque(), deque())  # untimed, timed
        self._thread = threading.local()
        # These calls take a microsecond: releasing the GIL around them (as CDLL does) would take longer.
        self._driver = _declared(ctypes.PyDLL("libcuda.so.1"))

    def compute_stream(self) -> int:
        """Returns the handle of the stream that is current on this thread."""
        return torch._C._cuda_getCurrentRawStream(self._device.index)

    def record(self, stream: int, *, timed: bool = False) -> Event:
        """Returns the present end of `stream` (a handle)."""
        self._enter()
        free = self._free[timed]
        try:
            handle = free.popleft()
        except IndexError:
            handle = _new_event(self._driver, 0 if timed else _DISABLE_TIMING)
        event = Event(self, handle, timed)
        _check(self._driver.cuEventRecord(handle, stream), "cuEventRecord")
        return event

    def wait(self, stream: int, event: Event) -> None:
        """Makes `stream` wait for `event`; the host goes on."""
        self._enter()
        _check(self._driver.cuStreamWaitEvent(stream, event._handle, 0), "cuStreamWaitEvent")

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Issues a copy between two addresses on `stream`."""
        self._enter()
        result = self._driver.cuMemcpyAsync(dst, src, nbytes, stream)
        if result:
            raise RuntimeError(f"cuMemcpyAsync of {nbytes} bytes failed with CUDA driver error {result}")

    def _sleep_until(self, handle: int) -> None:
        """Returns when the device has passed an event."""
        self._enter()
        if not hasattr(self._thread, "waiter"):
            self._thread.waiter = _Waiter(self._driver)
        self._thread.waiter.sleep_until(handle)

    def _enter(self) -> None:
        """Makes the device's context current: I/O threads have none at first."""
        if not hasattr(self._thread, "entered"):
            torch.cuda.set_device(self._device)
            torch.cuda.current_stream().query()  # some call that the runtime passes on to the driver
            self._thread.entered = True


class _Waiter:
    """Lets one thread sleep until the device has passed an event.

    A thread may sleep only for events that were made for it; waiting for others, it spins. But whoever records those
    is held up until the device is through, once some 56 of them are ahead of it (driver 580 on an H100): the host would
    never get far ahead. So a thread has one of them, and records it on a stream of its own, that waits for the other.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._blocking = _declared(ctypes.CDLL("libcuda.so.1"))  # others run meanwhile
        self._stream = ctypes.c_void_p()
        self._event: int | None = None
        _check(driver.cuStreamCreate(ctypes.byref(self._stream), _NON_BLOCKING), "cuStreamCreate")
        self._event = _new_event(driver, _BLOCKING_SYNC | _DISABLE_TIMING)

    def __del__(self) -> None:
        if self._event is not None:
            self._driver.cuEventDestroy_v2(self._event)
        if self._stream:
            self._driver.cuStreamDestroy_v2(self._stream)

    def sleep_until(self, handle: int) -> None:
        """Returns when the device has passed the event."""
        _check(self._driver.cuStreamWaitEvent(self._stream, handle, 0), "cuStreamWaitEvent")
        _check(self._driver.cuEventRecord(self._event, self._stream), "cuEventRecord")
        _check(self._blocking.cuEventSynchronize(self._event), "cuEventSynchronize")


_NOT_READY = 600
_BLOCKING_SYNC = 1
_DISABLE_TIMING = 2
_NON_BLOCKING = 1
"""Of a stream: it does not wait for the default stream."""


def _new_event(driver: Any, flags: int) -> int:
    handle = ctypes.c_void_p()
    _check(driver.cuEventCreate(ctypes.byref(handle), flags), "cuEventCreate")
    assert handle.value is not None
    return handle.value


def _declared(driver: Any) -> Any:
    pointer = ctypes.c_void_p
    driver.cuEventCreate.argtypes = (pointer, ctypes.c_uint)
    driver.cuEventRecord.argtypes = (pointer, pointer)
    driver.cuEventQuery.argtypes = (pointer,)
    driver.cuEventSynchronize.argtypes = (pointer,)
    driver.cuEventElapsedTime.argtypes = (pointer, pointer, pointer)
    driver.cuStreamWaitEvent.argtypes = (pointer, pointer, ctypes.c_uint)
    driver.cuMemcpyAsync.argtypes = (pointer, pointer, ctypes.c_size_t, pointer)
    driver.cuStreamCreate.argtypes = (pointer, ctypes.c_uint)
    driver.cuStreamDestroy_v2.argtypes = (pointer,)
    driver.cuEventDestroy_v2.argtypes = (pointer,)
    return driver


def _check(result: int, call: str) -> None:
    if result:
        raise RuntimeError(f"{call} failed with CUDA driver error {result}")
