"""A thread that runs jobs once the futures that they need are done, the most urgent first.

The CPU optimizer runs on one (flats that the next forward uses first go first), and requests for staging memory and
reads of the drives are made on others.

A job belongs to the futures that it needs until they are done, then to the queue, then to the thread. `close` fails
all jobs that the thread has not begun, also those that still wait for futures, so that every job has an end.
"""

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from lightning_ssd.device.futures import all_of


@dataclass(order=True, unsafe_hash=True)
class _Job:
    order: tuple[int, int]
    run: Callable[[], None] | None = field(compare=False)
    done: "Future[None]" = field(compare=False, default_factory=Future)


class Worker:
    """Runs jobs on one thread.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._ready: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._sequence = itertools.count()
        self._lock = threading.Lock()
        """Guards the two below; never held while a future is completed, whose callbacks may submit jobs."""
        self._closed = False
        self._waiting: set[_Job] = set()
        """Jobs that the thread has not begun."""
        self._thread = threading.Thread(target=self._work, name=f"lightning_ssd-{name}", daemon=True)
        self._thread.start()

    def submit(
        self, run: Callable[[], None], after: "Sequence[Future[Any]]" = (), *, priority: int = -1
    ) -> "Future[None]":
        """Queues `run`, once all of `after` are done.

        Args:
            run: the job.
            after: what it needs; an error there is the job's.
            priority: of jobs that are ready, the lowest goes first, then the one submitted first.

        Returns:
            A future of the job's end; its callbacks run on this thread.
        """
        job = _Job((priority, next(self._sequence)), run)
        with self._lock:
            self._waiting.add(job)
            closed = self._closed
        if closed:
            self._fail(job, _ended())
            return job.done

        def ready(needed: "Future[None]") -> None:
            if (error := needed.exception()) is not None:
                self._fail(job, error)
            else:
                self._ready.put(job)

        all_of(after).add_done_callback(ready)
        return job.done

    def close(self) -> None:
        """Ends the thread after the job that it runs; all others fail, also those that wait for futures."""
        with self._lock:
            self._closed = True
        self._ready.put(_Job((-2, 0), None))
        self._thread.join()
        with self._lock:
            left = sorted(self._waiting)
        for job in left:
            self._fail(job, _ended())

    def _begin(self, job: _Job) -> bool:
        """Takes a job off those that wait; returns False if it has failed meanwhile."""
        with self._lock:
            waits = job in self._waiting
            self._waiting.discard(job)
            return waits

    def _fail(self, job: _Job, error: BaseException) -> None:
        if self._begin(job):
            job.done.set_exception(error)

    def _work(self) -> None:
        while (job := self._ready.get()).run is not None:
            if self._begin(job):
                try:
                    job.run()
                except BaseException as error:  # the job's future hands it to its waiters
                    job.done.set_exception(error)
                else:
                    job.done.set_result(None)
            del job  # an idle thread keeps nothing alive


def _ended() -> RuntimeError:
    return RuntimeError("training ended before this was done")
