"""A thread that runs jobs in the order of their priority, each after the futures that it depends on.

The CPU optimizer runs on such a thread (flat parameters that the next forward uses first are stepped first). Other
workers request staging memory, submit reads of saved tensors and model states, and write the journal.

A job may be a generator, which yields work that the thread does together with that of other queued jobs of the same
priority: steps of the flat parameters of a unit are computed without waiting for Python's lock in between.

A job is owned by the futures that it depends on until they are done, then by the queue, then by the thread. `close`
fails every job that the thread has not begun, including jobs whose futures are not done, so that each job's future
completes.
"""

import itertools
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_ssd.futures import Future, all_of, pass_on
from lightning_ssd.storage import PriorityQueue, Urgency
from lightning_ssd.waits import watch

Run = Callable[[], "Generator[Any, None, None] | Future[None] | None"]
"""A job: a function, or a generator function that yields once. A job that returns a future ends when that is done."""

URGENT = -(2**62)
"""Priority of jobs that a thread or stream waits for."""


@dataclass(eq=False)
class _Job:
    order: tuple[int, int]
    run: Run
    done: "Future[None]" = field(default_factory=Future)


class Worker:
    """Runs jobs on one daemon thread.

    Args:
        name: name of the thread, after `lightning_ssd-`.
        together: does the work that jobs have yielded. An error fails them all.
    """

    def __init__(self, name: str, together: Callable[[Sequence[Any]], None] | None = None) -> None:
        self._together = together
        self._ready: PriorityQueue[_Job] = PriorityQueue()
        self._sequence = itertools.count()
        self._lock = threading.Lock()
        """Guards `_closed`, `_waiting` and orders of jobs. Not held while futures complete: callbacks may submit."""
        self._closed = False
        self._ended = 0
        """Number of jobs that the thread, which alone changes it, has run."""
        self._waiting: set[_Job] = set()
        """Jobs that the thread has not begun, whether queued or still depending on futures."""
        self._thread = threading.Thread(target=self._work, name=f"lightning_ssd-{name}", daemon=True)
        self._thread.start()
        watch(self)

    def submit(
        self,
        run: Run,
        after: "Sequence[Future[Any]]" = (),
        *,
        priority: int = -1,
        urgency: Urgency | None = None,
    ) -> "Future[None]":
        """Queues `run` as soon as all of `after` are done.

        Args:
            after: futures that the job depends on. If one fails, the job fails with its error and does not run.
            priority: among queued jobs the lowest priority runs first, then the earliest submitted.
            urgency: tells when a thread or stream begins to wait for the job, which then precedes jobs of any priority.

        Returns:
            A future that is done when the job has run. Its callbacks run on this thread, or, for a job that fails
            without running, on the thread that fails it.
        """
        job = _Job((priority, next(self._sequence)), run)
        with self._lock:
            self._waiting.add(job)
            closed = self._closed
        if closed:
            self._fail(job, _ended())
            return job.done

        def enqueue(dependencies: "Future[None]") -> None:
            if (error := dependencies.exception()) is not None:
                self._fail(job, error)
            else:
                self._enqueue(job)

        if after:
            all_of(after).add_done_callback(enqueue)
        else:
            self._enqueue(job)
        if urgency is not None:
            urgency.on_wait(job, self._promote)
        return job.done

    def _enqueue(self, job: _Job) -> None:
        with self._lock:
            self._ready.put(job, *job.order)

    def _promote(self, job: _Job) -> None:
        """Runs a job, once it is queued, before all jobs that no thread or stream waits for."""
        with self._lock:
            job.order = (URGENT, job.order[1])
            self._ready.promote(job, *job.order)

    def progress(self) -> tuple[int, ...]:
        """Returns the number of jobs that have ended (`waits.Watched`)."""
        return (self._ended,)

    def pending(self) -> str:
        """Returns the number of jobs that have not begun (`waits.Watched`)."""
        return f"{len(self._waiting)} jobs of {self._thread.name}" if self._waiting else ""

    def close(self) -> None:
        """Ends the thread after its current job, and fails all other jobs. No error is raised for them here."""
        with self._lock:
            self._closed = True
        self._ready.close()  # the jobs in it are in `_waiting`, too
        self._thread.join()
        with self._lock:
            pending = sorted(self._waiting, key=lambda job: job.order)
        for job in pending:
            self._fail(job, _ended())

    def _begin(self, job: _Job) -> bool:
        """Removes a job from the pending ones. Returns False if it has failed already."""
        with self._lock:
            pending = job in self._waiting
            self._waiting.discard(job)
            return pending

    def _fail(self, job: _Job, error: BaseException) -> None:
        if self._begin(job):
            job.done.set_exception(error)

    def _work(self) -> None:
        while (job := self._ready.get()) is not None:
            if self._begin(job) and (paused := _start(job)) is not None:
                self._work_together(paused)
            self._ended += 1
            job = paused = None  # an idle thread must not keep the last job's buffers alive

    def _work_together(self, first: "_Paused") -> None:
        """Does the work that a job has yielded, and that of queued jobs of its priority, and ends these jobs."""
        batch = [first]
        while (job := self._ready.get_of(first.job.order[0])) is not None:
            if self._begin(job) and (paused := _start(job)) is not None:
                batch.append(paused)
        error: BaseException | None = None
        try:
            assert self._together is not None, "jobs of this worker yield nothing"
            self._together([paused.work for paused in batch])
        except BaseException as raised:
            error = raised
        for paused in batch:
            _end(paused, error)


@dataclass(eq=False)
class _Paused:
    """A job that has yielded `work`, and whose `rest` runs when that is done."""

    job: _Job
    rest: Generator[Any, None, None]
    work: Any


def _start(job: _Job) -> _Paused | None:
    """Runs a job until it yields work, or ends it and returns None."""
    try:
        rest = job.run()
        if isinstance(rest, Future):
            rest.add_done_callback(lambda done: pass_on(done, job.done))
            return None
        if rest is not None:
            for work in rest:
                return _Paused(job, rest, work)
    except BaseException as error:  # raised on the thread that reads the job's future
        job.done.set_exception(error)
    else:
        job.done.set_result(None)
    return None


def _end(paused: _Paused, error: BaseException | None) -> None:
    """Runs the rest of a job, in which `error`, that of its work, is raised."""
    try:
        if error is not None:
            paused.rest.throw(error)
        for _ in paused.rest:
            raise AssertionError("a job yields once")
    except BaseException as raised:
        paused.job.done.set_exception(raised)
    else:
        paused.job.done.set_result(None)


def _ended() -> RuntimeError:
    return RuntimeError("training ended before this was done")
