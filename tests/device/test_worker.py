"""The worker runs the most urgent ready job first, and each job's future completes."""

import threading
from collections.abc import Generator, Sequence
from typing import Any

import pytest

from lightning_ssd.device import Worker
from lightning_ssd.futures import CancelledError, Future


def held(worker: Worker) -> tuple[threading.Event, "Future[None]"]:
    """Returns a function that releases the worker from a running job, and that job's future."""
    begun, release = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert release.wait(60)

    job = worker.submit(wait)
    assert begun.wait(60)
    return release, job


def run_all(
    worker: Worker,
    release: threading.Event,
    jobs: "Sequence[Future[None]]",
    needed: "Future[None]",
    late: "Future[None]",
) -> None:
    """Releases the worker, and closes it when `jobs` are done and then, after `needed` is, `late`."""
    release.set()
    for job in jobs:
        job.result(timeout=60)
    needed.set_result(None)
    late.result(timeout=60)
    worker.close()


def test_the_most_urgent_job_that_is_ready_runs_first() -> None:
    worker, ran = Worker("test"), list[str]()
    release, _ = held(worker)
    needed: Future[None] = Future()
    late = worker.submit(lambda: ran.append("needed something"), [needed], priority=0)
    jobs = [worker.submit(lambda name=name: ran.append(name), priority=p) for name, p in (("b", 2), ("c", 2), ("a", 1))]
    run_all(worker, release, jobs, needed, late)
    assert ran == ["a", "b", "c", "needed something"]


def test_a_job_fails_with_the_error_of_a_future_that_it_depends_on() -> None:
    worker, needed = Worker("test"), Future[Any]()
    job = worker.submit(lambda: None, [needed])
    needed.cancel()
    with pytest.raises(CancelledError):
        job.result(timeout=60)
    worker.close()


def test_no_job_is_stranded_when_the_worker_closes() -> None:
    """Queued jobs, jobs that wait for futures, and jobs that callbacks submit meanwhile."""
    worker, ran = Worker("test"), list[str]()
    release, running = held(worker)
    never, late = Future[None](), Future[None]()
    jobs = [worker.submit(lambda: ran.append("x"), after) for after in ([], [never], [late])]
    again: list[Future[None]] = []
    jobs[1].add_done_callback(lambda _: again.append(worker.submit(lambda: ran.append("again"))))
    closing = threading.Thread(target=worker.close)
    closing.start()
    release.set()
    closing.join()
    running.result(timeout=60)
    late.set_result(None)
    jobs += again
    assert len(jobs) == 4
    for job in jobs:
        with pytest.raises(RuntimeError, match="training ended before this was done"):
            job.result(timeout=60)
    assert not ran


def yielding(name: str, ended: list[str]) -> Generator[str, None, None]:
    """Yields its work, and notes its end or the error of the work."""
    try:
        yield name
    except ArithmeticError:
        ended.append(f"{name} failed")
        raise
    ended.append(name)


def test_work_of_jobs_of_one_priority_is_done_together() -> None:
    """Jobs of other priorities, and those that are not ready, have their own; ordinary jobs run in their turn."""
    done: list[list[str]] = []
    ended: list[str] = []
    worker = Worker("test", lambda works: done.append(list(works)))
    release, _ = held(worker)
    needed: Future[None] = Future()
    late = worker.submit(lambda: yielding("late", ended), [needed], priority=1)
    jobs = [worker.submit(lambda name=name: yielding(name, ended), priority=p) for name, p in (("c", 2), ("a", 1))]
    jobs.append(worker.submit(lambda: ended.append("ordinary"), priority=1))
    jobs.append(worker.submit(lambda: yielding("b", ended), priority=1))
    run_all(worker, release, jobs, needed, late)
    assert done == [["a", "b"], ["c"], ["late"]]
    assert ended == ["ordinary", "a", "b", "c", "late"]


def test_an_error_of_common_work_fails_all_its_jobs_and_no_other() -> None:
    ended: list[str] = []

    def fail_once(works: Sequence[str]) -> None:
        if "a" in works:
            raise ArithmeticError("no work")

    worker = Worker("test", fail_once)
    release, _ = held(worker)
    failed = [worker.submit(lambda name=name: yielding(name, ended), priority=1) for name in "ab"]
    other = worker.submit(lambda: yielding("c", ended), priority=2)
    release.set()
    for job in failed:
        with pytest.raises(ArithmeticError, match="no work"):
            job.result(timeout=60)
    other.result(timeout=60)
    worker.close()
    assert ended == ["a failed", "b failed", "c"]
