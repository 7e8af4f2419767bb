"""Locks by which tests see that threads wait for each other."""

import threading


class WatchedLock:
    """A re-entrant lock that sets an event when a thread waits for another one to release it."""

    def __init__(self, waited: threading.Event) -> None:
        self._lock = threading.RLock()
        self._waited = waited

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._waited.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
