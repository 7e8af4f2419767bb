"""`Future`, and combinators of futures.

`concurrent.futures.Future` makes a condition variable and calls up to eight Python functions whenever it is made,
completed or read. Each offloaded parameter has several futures a step, and all these calls delay the thread that
launches kernels, also those on other threads, because they hold Python's lock.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, InvalidStateError
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


class Future(Generic[T]):
    """A result that some thread will have: like `concurrent.futures.Future`, and cheaper. Thread-safe.

    Ownership: the future owns its callbacks until it is done, when it passes them to the thread that completes it; and
    its result or error from then on. Neither changes any more: they are read without the lock.
    """

    __slots__ = ("__weakref__", "_begun", "_callbacks", "_done", "_error", "_lock", "_result", "_traceback")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards the writes of all other fields. Not held while callbacks run."""
        self._callbacks: list[Callable[[Future[T]], object]] = []
        self._begun = False
        self._done = False
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        """That of the error as it was given. Without it, each raise would add frames to those of the raises before."""
        self._result: Any = None

    def done(self) -> bool:
        """Returns whether there is a result or an error."""
        return self._done

    def wait(self, timeout: float | None = None) -> bool:
        """Returns True when the future is done, or False after `timeout` seconds; None: there is no limit."""
        if self._done:
            return True
        woken = threading.Lock()
        woken.acquire()
        with self._lock:
            if self._done:
                return True
            self._callbacks.insert(0, lambda _: woken.release())  # before callbacks, which may take long
        return woken.acquire(timeout=-1 if timeout is None else timeout)

    def result(self, timeout: float | None = None) -> T:
        """Waits for the result and returns it, or raises the error.

        Raises:
            CancelledError: the work was cancelled.
            TimeoutError: the future was not done within `timeout` seconds.
        """
        if not self._done and not self.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            try:
                raise self._error.with_traceback(self._traceback)
            finally:
                del self  # the error's traceback refers to this frame
        result: T = self._result
        return result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits as `result`, and returns the error, which is a CancelledError of cancelled work; None: no error."""
        if not self._done and not self.wait(timeout):
            raise TimeoutError
        return self._error

    def set_result(self, result: T) -> None:
        """Completes the future, and runs its callbacks on this thread."""
        self._complete(result, None)

    def set_exception(self, error: BaseException) -> None:
        """Completes the future with an error, and runs its callbacks on this thread."""
        self._complete(None, error)

    def add_done_callback(self, callback: "Callable[[Future[T]], object]") -> None:
        """Has the thread that completes the future call `callback` with it, or calls it at once if it is done."""
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        self._run([callback])

    # ---- work that may be cancelled ----

    def begin(self) -> bool:
        """Makes the future one that can't be cancelled any more. Returns False if it was cancelled before."""
        with self._lock:
            if self._done:
                return False
            self._begun = True
            return True

    def cancel(self) -> bool:
        """Completes the future with a CancelledError, unless the work has begun or ended. Returns whether it did."""
        return self._complete(None, CancelledError(), cancels=True)

    def cancelled(self) -> bool:
        """Returns whether the work was cancelled."""
        return isinstance(self._error, CancelledError)

    def _complete(self, result: T | None, error: BaseException | None, *, cancels: bool = False) -> bool:
        with self._lock:
            if cancels and (self._begun or self._done):
                return False
            if self._done:
                raise InvalidStateError("a future is completed twice")
            self._result, self._error = result, error
            self._traceback = None if error is None else error.__traceback__
            self._done = True
            callbacks, self._callbacks = self._callbacks, []
        if callbacks:
            self._run(callbacks)
        return True

    def _run(self, callbacks: "list[Callable[[Future[T]], object]]") -> None:
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # logged, as the thread that completes futures has others to complete
                log.exception("a callback of a future has failed")


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


def pass_on(done: "Future[T]", result: "Future[T]") -> None:
    """Completes `result` with the result or error of `done`, a done future."""
    if (error := done.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(done.result())


def then(first: "Future[Any]", make: "Callable[[Any], Future[T]]") -> "Future[T]":
    """Chains futures: calls `make` with the result of `first`; the returned future completes as the one from `make`.

    If either future fails or is cancelled, the returned future fails with its error or a CancelledError.
    """
    if first._done and first._error is None:  # no further future is made: most are done if values are in host memory
        try:
            return make(first._result)
        except BaseException as error:
            return failed(error)
    result: Future[T] = Future()

    def go(future: "Future[Any]") -> None:
        if future._error is not None:
            result.set_exception(future._error)
            return
        try:
            make(future._result).add_done_callback(lambda made: pass_on(made, result))
        except BaseException as error:
            result.set_exception(error)

    first.add_done_callback(go)
    return result


def ended(future: "Future[Any]") -> "Future[None]":
    """Returns a future that is done without an error when `future` is done, failed or cancelled."""
    if future._done:
        return _FINISHED
    result: Future[None] = Future()
    future.add_done_callback(lambda _: result.set_result(None))
    return result


def first_of(futures: Iterable["Future[Any]"]) -> "Future[None]":
    """Returns a future that is done without an error when one of `futures` is done, failed or cancelled."""
    result: Future[None] = Future()
    lock = threading.Lock()

    def end(_: "Future[Any]") -> None:
        if lock.acquire(blocking=False):  # never released: later ends change nothing
            result.set_result(None)

    for future in futures:
        future.add_done_callback(end)
    return result


def all_of(futures: Iterable["Future[Any]"]) -> "Future[None]":
    """Returns a future that is done when all `futures` are. It fails with their first error, if there is one.

    Its callbacks run on the thread that completes the last of them. `futures` do not refer to the returned one when
    they are done: a cycle would keep memory until a garbage collection.
    """
    waiting = [future for future in futures if not future._done or future._error is not None]
    if not waiting:
        return _FINISHED
    result: Future[None] = Future()
    lock = threading.Lock()  # guards `left` and `failure`
    left = len(waiting)
    failure: BaseException | None = None

    def count(future: "Future[Any]") -> None:
        nonlocal left, failure
        with lock:
            failure = failure or future._error
            left -= 1
            last = left == 0
        if last:
            result._complete(None, failure)

    for future in waiting:
        future.add_done_callback(count)
    return result
