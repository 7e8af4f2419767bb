"""Waits that end with an error once nothing moves any more."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from lightning_ssd import waits
from lightning_ssd.futures import Future
from lightning_ssd.waits import wait_for, wait_for_all, wait_for_first, watch


class Work:
    """Work that `polls` tells how often waits have asked for its progress; `act` is called each time."""

    def __init__(self, act: Callable[["Work"], object]) -> None:
        self.polls = self.moved = 0
        self.act = act

    def progress(self) -> tuple[int, ...]:
        self.polls += 1
        self.act(self)
        return (self.moved,)

    def pending(self) -> str:
        return "2 jobs of a worker"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(waits, "LIMIT", 5)
    monkeypatch.setattr(waits, "_stuck", None)
    monkeypatch.setattr(waits, "_watched", weakref.WeakKeyDictionary())  # without objects that earlier tests have left


WAITS: dict[str, Callable[[Future[int]], Any]] = {
    "one": lambda future: wait_for(future, "weights"),
    "all": lambda future: wait_for_all([future], "weights"),
    "first": lambda future: wait_for_first([future, Future()], "weights"),
}


@pytest.mark.parametrize("kind", WAITS)
def test_a_wait_goes_on_as_long_as_something_moves(kind: str) -> None:
    future: Future[int] = Future()

    def act(work: Work) -> None:
        work.moved += work.polls % 4 == 0  # less often than the counters are compared
        if work.polls == 50:
            future.set_result(1)

    work = Work(act)
    watch(work)
    WAITS[kind](future)
    assert work.polls == 50


@pytest.mark.parametrize("kind", WAITS)
def test_a_wait_in_which_nothing_moves_names_who_waits_for_what(kind: str) -> None:
    work = Work(lambda _: None)
    watch(work)
    with pytest.raises(RuntimeError, match=r"MainThread waits for weights, .*2 jobs of a worker\. Threads: Main"):
        WAITS[kind](Future())
    assert work.polls == 6  # the first one has nothing to compare with


def test_later_waits_end_at_once_until_something_moves() -> None:
    """Otherwise the end of a training would wait minutes for each flat parameter."""
    work = Work(lambda _: None)
    watch(work)
    with pytest.raises(RuntimeError):
        wait_for(Future(), "weights")
    work.polls = 0
    with pytest.raises(RuntimeError):
        wait_for(Future(), "values")
    assert work.polls == 2
    work.moved, work.polls = 1, 0
    with pytest.raises(RuntimeError):
        wait_for(Future(), "values")
    assert work.polls > 2


def test_a_wait_ends_with_the_result_or_the_error_of_its_future() -> None:
    future: Future[int] = Future()
    failing: Future[int] = Future()

    def complete() -> None:
        future.set_result(3)
        failing.set_exception(TimeoutError("of the drive"))

    threading.Thread(target=complete).start()
    assert wait_for(future, "values") == 3
    wait_for_all([future, failing], "values")
    with pytest.raises(TimeoutError, match="of the drive"):
        wait_for(failing, "values")
