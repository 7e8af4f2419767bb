"""Combined futures complete, whether the underlying ones have a result, fail or are cancelled."""

from concurrent.futures import CancelledError, Future
from typing import Any
from weakref import ref

import pytest

from lightning_ssd.device import all_of, ended, error_of, finished, then


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
    error = error_of(result)
    assert type(error) is expected if expected else error is None and hows == {"result"}


def test_the_function_that_makes_the_second_future_may_fail() -> None:
    def fail(_: None) -> "Future[None]":
        raise ValueError("no")

    assert isinstance(error_of(then(finished(None), fail)), ValueError)


@pytest.mark.parametrize("how", ["result", "error"])
def test_ended_futures_do_not_refer_to_combined_ones(how: str) -> None:
    """Steps wait for futures that are used in the callbacks of others: memory would be kept by such cycles."""
    first: Future[None] = Future()
    combined = all_of([first])
    found = ref(combined)
    end(first, how)
    del combined
    assert found() is None
