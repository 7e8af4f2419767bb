"""Combinators of futures that concurrent.futures lacks."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

T = TypeVar("T")


def finished(result: T) -> "Future[T]":
    """Returns a future that is done. All futures without a result are one object: one that is done does not change."""
    if result is None:
        return _FINISHED
    future: Future[T] = Future()
    future.set_result(result)
    return future


_FINISHED: "Future[Any]" = Future()
_FINISHED.set_result(None)


def failed(error: BaseException) -> "Future[Any]":
    """Returns a future that is done with an error."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def error_of(future: "Future[Any]") -> BaseException | None:
    """Returns the error of a done future: a CancelledError if it was cancelled, None if it has a result."""
    try:
        return future.exception()
    except CancelledError as error:
        return error


def succeeded(future: "Future[Any]") -> bool:
    """Returns whether a future is done and has a result."""
    return future is _FINISHED or (future.done() and error_of(future) is None)


def pass_on(done: "Future[T]", result: "Future[T]") -> None:
    """Completes `result` with the result or error of `done`, a done future: a CancelledError if it was cancelled."""
    if (error := error_of(done)) is not None:
        result.set_exception(error)
    else:
        result.set_result(done.result())


def then(first: "Future[Any]", make: "Callable[[Any], Future[T]]") -> "Future[T]":
    """Chains futures: calls `make` with the result of `first`; the returned future completes as the one from `make`.

    If either future fails or is cancelled, the returned future fails with its error or a CancelledError.
    """
    if succeeded(first):  # no further future is needed then: most are done where values are in host memory
        try:
            return make(first.result())
        except BaseException as error:
            return failed(error)
    result: Future[T] = Future()

    def go(future: "Future[Any]") -> None:
        try:
            make(future.result()).add_done_callback(lambda made: pass_on(made, result))
        except BaseException as error:
            result.set_exception(error)

    first.add_done_callback(go)
    return result


def ended(future: "Future[Any]") -> "Future[None]":
    """Returns a future that is done without an error when `future` is done, failed or cancelled."""
    result: Future[None] = Future()
    future.add_done_callback(lambda _: result.set_result(None))
    return result


def all_of(futures: Iterable["Future[Any]"]) -> "Future[None]":
    """Returns a future that is done when all `futures` are. It fails with their first error, if there is one.

    Its callbacks run on the thread that completes the last of them. A future keeps its callbacks when it is done, but
    `futures` do not refer to the returned one then: a cycle would keep memory until a garbage collection.
    """
    waiting = [future for future in futures if not succeeded(future)]
    if not waiting:
        return finished(None)
    result: Future[None] = Future()
    target: Future[None] | None = result
    lock = threading.Lock()  # guards `left` and `failure`
    left = len(waiting) + 1
    failure: BaseException | None = None

    def count(future: "Future[Any] | None" = None) -> None:
        nonlocal left, failure, target
        error = None if future is None else error_of(future)
        with lock:
            failure = failure or error
            left -= 1
            last = left == 0
        if not last:
            return
        done, target = target, None
        assert done is not None
        if failure is not None:
            done.set_exception(failure)
        else:
            done.set_result(None)

    for future in waiting:
        future.add_done_callback(count)
    count()
    return result
