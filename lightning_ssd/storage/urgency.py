"""`Urgency`: tells all queues of a transfer whether a thread or stream waits for it."""

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_Request = TypeVar("_Request")


class Urgency:
    """Tells the queues that hold the requests of one transfer when a thread or stream begins to wait for it.

    A prefetch is queued long before its use. If it is still queued when the use arrives, it overtakes requests that no
    thread waits for: of staging memory (`device.Worker`) and of the drives (`Engine`). Thread-safe.

    Args:
        urgent: whether a thread or stream waits from the beginning.
    """

    def __init__(self, *, urgent: bool = False) -> None:
        self._lock = threading.Lock()
        """Guards the next two. Not held while a callback runs."""
        self._urgent = urgent
        self._waiting: list[tuple[weakref.ref[Any], Callable[[Any], object]]] = []
        """Requests, referenced weakly, and their callbacks. A transfer owns its `Urgency`, and a request's future owns
        the transfer: a strong reference would close a cycle, which keeps device memory until a garbage collection."""

    @property
    def urgent(self) -> bool:
        """Whether a thread or stream waits."""
        return self._urgent

    def begin_wait(self) -> None:
        """Called when a thread or stream begins to wait. Later calls have no effect."""
        with self._lock:
            self._urgent = True
            waiting, self._waiting = self._waiting, []
        for reference, callback in waiting:
            request = reference()
            if request is not None:
                callback(request)

    def on_wait(self, request: _Request, callback: Callable[[_Request], object]) -> None:
        """Has `callback(request)` called by the thread that calls `begin_wait`; at once if that was called already.

        Args:
            request: a queued request, which the queue owns: the callback is not called once the request is freed.
            callback: must not own the request.
        """
        with self._lock:
            if not self._urgent:
                self._waiting.append((weakref.ref(request), callback))
                return
        callback(request)
