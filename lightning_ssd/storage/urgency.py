"""`Urgency`: whether a thread or stream waits for a transfer, for all queues through which the transfer passes."""

import threading
from collections.abc import Callable

__all__ = ["Urgency"]


class Urgency:
    """Tells the queues that hold the requests of one transfer when a thread or stream begins to wait for it.

    A prefetch is queued long before its use. If it is still queued when the use arrives, it overtakes requests that no
    thread waits for: of staging memory (`device.Worker`) and of the drives (`Engine`). Thread-safe.

    Args:
        urgent: whether a thread or stream waits from the begin.
    """

    def __init__(self, *, urgent: bool = False) -> None:
        self._lock = threading.Lock()
        """Guards the next two. Not held while a callback runs."""
        self._urgent = urgent
        self._callbacks: list[Callable[[], object]] = []

    @property
    def urgent(self) -> bool:
        """Whether a thread or stream waits."""
        return self._urgent

    def begin_wait(self) -> None:
        """Called when a thread or stream begins to wait. Later calls have no effect."""
        with self._lock:
            self._urgent = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def on_wait(self, callback: Callable[[], object]) -> None:
        """Has `callback` called by the thread that calls `begin_wait`; at once if that was called already."""
        with self._lock:
            if not self._urgent:
                self._callbacks.append(callback)
                return
        callback()
