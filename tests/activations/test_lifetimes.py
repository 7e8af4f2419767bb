"""Restored bytes are released after the last view was unpacked, whenever other views are freed."""

import sys
import threading
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ssd.activations import record as records
from lightning_ssd.activations.record import RefCountedBytes, SavedHandle, SavedStorage, State, bytes_of
from lightning_ssd.activations.tier import Load, StoredCopy
from tests.support.locks import WatchedLock

EMPTY = torch.empty(0)


class Arrived(Load):
    issued = True

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def wait(self) -> None:
        return None


class Copy(StoredCopy):
    def __init__(self, data: Tensor) -> None:
        self._data = data

    def wait_copied(self) -> None:
        return None

    def load(self, *, urgent: bool) -> Load:
        return Arrived(self._data)

    def free(self) -> None:
        return None


def interrupted(attribute: str, views: list[SavedHandle]) -> type[SavedStorage]:
    """Returns a record in which a view is freed while `attribute` is set, as by a garbage collection."""
    slot: Any = getattr(SavedStorage, attribute)

    def assign(self: SavedStorage, value: Any) -> None:
        slot.__set__(self, value)
        if len(views) > 1:
            views.pop()

    return type("Interrupted", (SavedStorage,), {"__slots__": (), attribute: property(slot.__get__, assign)})


@pytest.mark.parametrize("attribute", ["num_restores", "num_pending", "state", "data", "load"])
@pytest.mark.parametrize("shown_before", [False, True])
def test_a_view_that_is_freed_while_bytes_are_restored(attribute: str, shown_before: bool) -> None:
    saved = torch.arange(4.0)
    data = torch.empty(0, dtype=torch.uint8).set_(saved.untyped_storage())
    views: list[SavedHandle] = []
    record = interrupted(attribute, views)(data, None, 0, deque())  # type: ignore[arg-type]
    record.offload(Copy(data.clone()), "host")
    record.evict()
    first = [SavedHandle(saved, record, EMPTY) for _ in range(3)]
    if shown_before:
        record.prefetch(urgent=True)
        record.wait()
        for index in range(3):
            first[index].materialize()
        assert record.state is State.OFFLOADED
    views += first
    del first
    record.prefetch(urgent=True)
    record.wait()
    while views:
        assert record.data is not None
        assert torch.equal(views.pop().materialize(), saved)
    assert record.data is None and record.views == 0


def test_a_view_that_cannot_be_made_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are made in inference mode have no version counter. The finalizer of the view raises no error."""
    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    with torch.inference_mode():
        saved = torch.arange(4.0)
    record = SavedStorage(bytes_of(torch.arange(4.0).untyped_storage()), None, 0, deque())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="version counter"):
        SavedHandle(saved, record, EMPTY)
    assert not ignored and record.views == 0


@pytest.mark.parametrize("change", ["add", "drop", "consume"])
def test_two_threads_count_views_one_after_the_other(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view is freed on another thread while this one has read a counter and not written it yet."""
    other_is_done = threading.Event()  # or waits for this thread
    monkeypatch.setattr(records, "_counting", WatchedLock(other_is_done))
    freeing: list[threading.Thread] = []

    class Counted(RefCountedBytes):
        count = 0

        @property
        def num_pending(self) -> int:  # type: ignore[override]
            read = self.count
            if freeing and not freeing[0].is_alive() and not other_is_done.is_set():
                freeing[0].start()
                assert other_is_done.wait(60)
            return read

        @num_pending.setter
        def num_pending(self, value: int) -> None:
            self.count = value

        def release(self) -> None:
            return None

    counted = Counted()
    for _ in range(4):
        counted.add_view()

    def free() -> None:
        counted.drop_view(last_restore=-1)
        other_is_done.set()

    freeing.append(threading.Thread(target=free))
    changes = {
        "add": (counted.add_view, 4),
        "drop": (lambda: counted.drop_view(-1), 2),
        "consume": (counted.consumed, 2),
    }
    run, expected = changes[change]
    run()
    freeing[0].join()
    assert counted.count == expected
