"""A thread that runs jobs once what they need is there, the most urgent first.

The CPU optimizer is one (those flats first that the next forward wants first), and so is whoever takes staging memory
and asks the drives for bytes.
"""

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from lightning_ssd.device.futures import all_of


@dataclass(order=True)
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

        def ready(needed: "Future[None]") -> None:
            if (error := needed.exception()) is not None:
                job.done.set_exception(error)
            else:
                self._ready.put(job)

        all_of(after).add_done_callback(ready)
        return job.done

    def close(self) -> None:
        """Ends the thread; jobs that are still queued fail."""
        self._ready.put(_Job((-2, 0), None))
        self._thread.join()
        while not self._ready.empty():
            self._ready.get().done.set_exception(RuntimeError("training ended before this was done"))

    def _work(self) -> None:
        while (job := self._ready.get()).run is not None:
            try:
                job.run()
            except BaseException as error:  # whoever waits for it hears it
                job.done.set_exception(error)
            else:
                job.done.set_result(None)
            del job  # an idle thread keeps nothing alive
