"""A queue between threads, ordered by priority, that can be closed (`queue.PriorityQueue` can from Python 3.13)."""

import heapq
import itertools
import threading
from typing import Generic, TypeVar

Item = TypeVar("Item")


class PriorityQueue(Generic[Item]):
    """Items that any thread puts and any thread gets, the lowest priority first, and in the order of `put` within it.

    An item belongs to the queue from `put` until `get` or `close` returns it. The lock is held for an operation of the
    queue only, and no user code runs under it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        """Guards the next two. Acquired without `_changed`, whose methods for that are Python code."""
        self._changed = threading.Condition(self._lock)
        self._heap: list[tuple[tuple[int, ...], int, Item]] = []
        self._closed = False
        self._sequence = itertools.count()

    def put(self, item: Item, *priority: int) -> bool:
        """Queues an item. Returns False, and does not queue it, if the queue is closed.

        Args:
            priority: one number or several, which are compared in order; as many for each item of a queue.
        """
        with self._lock:
            if not self._closed:
                heapq.heappush(self._heap, (priority, next(self._sequence), item))
                self._changed.notify()
            return not self._closed

    def promote(self, item: Item, *priority: int) -> None:
        """Gives an item another priority, if it is queued. Its place within the priority is that of its `put`."""
        with self._lock:
            for index, (_, sequence, queued) in enumerate(self._heap):
                if queued is item:
                    self._heap[index] = (priority, sequence, item)
                    heapq.heapify(self._heap)
                    return

    def get(self) -> Item | None:
        """Waits for an item and returns it; None if the queue is closed."""
        with self._lock:
            while not (self._heap or self._closed):
                self._changed.wait()
            return heapq.heappop(self._heap)[-1] if self._heap else None

    def get_of(self, priority: int) -> Item | None:
        """Returns the next item if the first number of its priority is `priority`, and None otherwise, at once."""
        with self._lock:
            if not self._heap or self._heap[0][0][0] != priority:
                return None
            return heapq.heappop(self._heap)[-1]

    def close(self) -> list[Item]:
        """Ends every `get`, and returns the queued items in their order."""
        with self._lock:
            self._closed = True
            queued, self._heap = sorted(self._heap), []
            self._changed.notify_all()
        return [item for *_, item in queued]
