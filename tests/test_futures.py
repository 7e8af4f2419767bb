"""Combined futures complete, whether the underlying ones have a result, fail or are cancelled."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from random import Random
from types import FrameType
from typing import Any
from weakref import ref

import pytest

from lightning_ssd.futures import CancelledError, Future, InvalidStateError, all_of, ended, finished, first_of, then
from lightning_ssd.futures import __file__ as futures_file


def end(future: "Future[Any]", how: str) -> None:
    if how == "result":
        future.set_result(None)
    elif how == "error":
        future.set_exception(ValueError("lost"))
    else:
        future.cancel()


@pytest.mark.parametrize("done", ["neither", "first", "both"])
@pytest.mark.parametrize("outer", ["result", "error", "cancelled"])
@pytest.mark.parametrize("inner", ["result", "error", "cancelled"])
@pytest.mark.parametrize("make", [lambda one, other: then(one, lambda _: other), lambda *both: all_of(both)])
def test_every_end_of_either_future_is_passed_on(make: Any, outer: str, inner: str, done: str) -> None:
    """Also if they are done before they are combined."""
    first: Future[None] = Future()
    second: Future[None] = Future()
    if done != "neither":
        end(first, outer)
    if done == "both":
        end(second, inner)
    result = make(first, second)
    if done == "neither":
        end(first, outer)
    if done != "both":
        end(second, inner)
    assert result.done() and ended(result).result() is None
    hows = {outer, inner}
    expected = {"error": ValueError, "cancelled": CancelledError}.get(outer if outer != "result" else inner)
    error = result.exception()
    assert type(error) is expected if expected else error is None and hows == {"result"}


def test_the_function_that_makes_the_second_future_may_fail() -> None:
    def fail(_: None) -> "Future[None]":
        raise ValueError("no")

    assert isinstance(then(finished(None), fail).exception(), ValueError)


def test_a_chain_of_failed_futures_and_many_raises_add_no_frames_to_an_error() -> None:
    first: Future[None] = Future()
    last = first
    for _ in range(10):
        last = then(last, lambda _: finished(None))
    first.set_exception(ValueError("lost"))
    lengths = set()
    for _ in range(3):
        with pytest.raises(ValueError, match="lost") as raised:
            last.result()
        lengths.add(len(raised.traceback))
    assert lengths == {2}


@pytest.mark.parametrize("how", ["result", "error"])
def test_ended_futures_do_not_refer_to_combined_ones(how: str) -> None:
    """Steps wait for futures that are used in the callbacks of others: memory would be kept by such cycles."""
    first: Future[None] = Future()
    combined = all_of([first])
    found = ref(combined)
    end(first, how)
    del combined
    assert found() is None


def test_work_that_has_begun_is_not_cancelled_and_cancelled_work_does_not_begin() -> None:
    begun, cancelled = Future[int](), Future[int]()
    assert begun.begin() and not begun.cancel()
    assert cancelled.cancel() and not cancelled.begin() and not cancelled.cancel()
    begun.set_result(3)
    assert begun.result() == 3 and not begun.cancelled() and cancelled.cancelled()
    with pytest.raises(CancelledError):
        cancelled.result()
    with pytest.raises(InvalidStateError):
        begun.set_result(4)
    assert begun.result() == 3


def test_a_wait_ends_before_callbacks_which_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    """A thread that waits goes on although the first callback needs it to, and the second one runs after an error."""
    future, went_on = Future[int](), threading.Event()
    ended: list[bool] = []
    assert not future.wait(0)
    with pytest.raises(TimeoutError):
        future.result(0)

    def fail(_: Future[int]) -> None:
        ended.append(went_on.wait(60))
        raise ValueError("no")

    def wait(_: Future[int]) -> None:
        woken.set_result(future.result(60))
        went_on.set()

    woken = Future[int]()
    future.add_done_callback(fail)
    future.add_done_callback(lambda _: ended.append(True))
    waiter = threading.Thread(target=wait, args=(future,))
    waiter.start()
    future.set_result(3)
    waiter.join()
    assert woken.result() == 3 and ended == [True, True] and "a callback of a future has failed" in caplog.text


def test_the_first_of_several_futures_ends_a_wait_and_later_ones_change_nothing() -> None:
    slow, fast = Future[None](), Future[None]()
    first = first_of([slow, fast])
    assert not first.done()
    fast.set_exception(ValueError("lost"))
    assert first.result() is None
    slow.set_result(None)
    assert first_of([slow, Future()]).done()


@pytest.fixture
def switching() -> Iterator[Callable[[], None]]:
    """A call has this thread switch after any bytecode of futures: Python does it after calls only; a tracer is one."""

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename != futures_file:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if random.random() < 0.2:
            os.stat("/")  # a call without Python's lock
        return trace

    def begin() -> None:
        with one_at_a_time:  # Python refuses a second tracer while one is installed
            sys.settrace(trace)

    random, one_at_a_time = Random(0), threading.Lock()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield begin
    sys.setswitchinterval(before)


@pytest.mark.parametrize("seed", range(10))
def test_each_future_ends_once_for_every_callback_and_waiting_thread(seed: int, switching: Callable[[], None]) -> None:
    """Threads complete, cancel, begin, chain, combine and wait for the same futures, each in an order of its own."""
    futures = [Future[int]() for _ in range(25)]
    calls: list[list[int]] = [[] for _ in futures]
    combined = [make(futures) for make in (all_of, first_of) for _ in range(30)]
    chained: list[tuple[int, Future[int]]] = []
    waited: list[tuple[int, bool]] = []
    begin = threading.Barrier(6)

    def end_them(random: Random, how: str) -> None:
        for index in random.sample(range(len(futures)), len(futures)):
            if how == "cancel":
                futures[index].cancel()
            elif futures[index].begin():
                if random.random() < 0.2:
                    futures[index].set_exception(ValueError(index))
                else:
                    futures[index].set_result(index)

    def use_them(random: Random, _: str) -> None:
        for index in random.sample(range(len(futures)), len(futures)):
            future, others = futures[index], random.sample(futures, 5)
            future.add_done_callback(lambda done, index=index: calls[index].append(id(done)))  # type: ignore[misc]
            combined.extend([all_of(others), first_of(others), ended(future), all_of([ended(one) for one in others])])
            chained.append((index, then(future, finished)))
            waited.append((index, future.wait(60)))

    def run(number: int, work: Callable[[Random, str], None], how: str) -> None:
        random = Random(f"{seed} {number}")
        switching()
        begin.wait(60)
        work(random, how)

    works = [(end_them, "complete"), (end_them, "cancel"), *[(use_them, "")] * 4]
    threads = [threading.Thread(target=run, args=(number, *work)) for number, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(done for _, done in waited) and all(future.done() for future in (*futures, *combined))
    for index, (future, called) in enumerate(zip(futures, calls, strict=True)):
        assert called == [id(future)] * 4
        assert future.cancelled() or isinstance(future.exception(), ValueError) or future.result() == index
    for index, future in chained:
        assert future.exception() is futures[index].exception()
        assert future.exception() is not None or future.result() == index
