"""Order, cancellation and the life of buffers, seen from the store."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lightning_ssd.futures import CancelledError, Future, all_of
from lightning_ssd.storage import BlobStore, Piece, StorageError, Urgency
from lightning_ssd.storage.engine import Meter
from tests.support.faults import GatedBackend
from tests.support.garbage import collect
from tests.support.storage import KIB, noise, open_store

PIECE = 64 * KIB


def buffer() -> torch.Tensor:
    return noise(PIECE)


@contextmanager
def busy_store(path: Path, gate: GatedBackend, count: int) -> Iterator[tuple[BlobStore, Sequence[Piece], Future[None]]]:
    """Yields a store with `count` written pieces, whose only thread writes one of them: later requests are queued."""
    with open_store(path, backend=gate, threads=1) as store:
        pieces = store.allocate(count * PIECE).pieces
        for piece in pieces:
            store.write(piece, buffer()).result()
        gate.hold()
        first = store.write(pieces[0], buffer())
        gate.wait_for_arrival()
        yield store, pieces, first


def test_urgent_reads_are_served_first_and_each_kind_in_order(tmp_path: Path) -> None:
    gate = GatedBackend()
    with busy_store(tmp_path, gate, 6) as (store, pieces, first):
        futures = [
            first,
            store.write(pieces[1], buffer()),
            store.read(pieces[2], buffer()),
            store.read(pieces[3], buffer(), urgency=Urgency(urgent=True)),
            store.write(pieces[4], buffer()),
            store.read(pieces[5], buffer(), urgency=Urgency(urgent=True)),
        ]
        gate.release()
        for future in futures:
            future.result(timeout=60)
    order = [pieces[number].offset for number in (0, 3, 5, 1, 2, 4)]
    assert [offset for _, offset in gate.served] == order


def test_a_queued_read_overtakes_others_once_a_thread_waits_for_it(tmp_path: Path) -> None:
    gate, urgency = GatedBackend(), Urgency()
    with busy_store(tmp_path, gate, 4) as (store, pieces, first):
        futures = [first, store.write(pieces[1], buffer()), store.read(pieces[2], buffer())]
        futures.append(store.read(pieces[3], buffer(), urgency=urgency))
        urgency.begin_wait()
        gate.release()
        for future in futures:
            future.result(timeout=60)
    assert [offset for _, offset in gate.served] == [pieces[number].offset for number in (0, 3, 1, 2)]


def test_a_queued_request_is_dropped_and_a_running_one_completes(tmp_path: Path) -> None:
    gate = GatedBackend()
    with open_store(tmp_path, backend=gate, threads=1) as store:
        first, second, third = store.allocate(3 * PIECE).pieces
        gate.hold()
        running = store.write(first, buffer())
        gate.wait_for_arrival()
        memory = buffer()
        alive = weakref.ref(memory)
        queued = store.write(second, memory)
        del memory
        assert alive() is not None
        assert queued.cancel()
        assert alive() is None  # at once, without a thread that serves it
        assert not running.cancel()
        last = store.write(third, buffer())
        gate.release()
        running.result(timeout=60)
        last.result(timeout=60)
        with pytest.raises(CancelledError):
            queued.result()
        assert [offset for _, offset in gate.served] == [first.offset, third.offset]
        assert store.stats().bytes_written == 2 * PIECE


def test_a_request_keeps_its_buffer_until_it_is_done(tmp_path: Path) -> None:
    gate = GatedBackend()
    with open_store(tmp_path, backend=gate, threads=1) as store:
        (piece,) = store.allocate(PIECE).pieces
        gate.hold()
        memory = buffer()
        alive = weakref.ref(memory)
        future = store.write(piece, memory)
        del memory
        gate.wait_for_arrival()
        collect()
        assert alive() is not None
        freed = threading.Event()
        weakref.finalize(alive(), freed.set)
        gate.release()
        future.result(timeout=60)
        assert freed.wait(timeout=60)


def test_no_more_pieces_are_in_flight_than_there_are_threads(tmp_path: Path) -> None:
    gate = GatedBackend()
    with open_store(tmp_path, backend=gate, threads=3) as store:
        pieces = store.allocate(8 * PIECE).pieces
        gate.hold()
        futures = [store.write(piece, buffer()) for piece in pieces]
        for _ in range(3):
            gate.wait_for_arrival()
        assert sum(not future.cancel() for future in futures) == 3
        gate.release()
        assert all_of(futures).wait(60)


def test_callbacks_run_on_the_io_thread_and_may_use_the_store(tmp_path: Path) -> None:
    gate = GatedBackend()
    with open_store(tmp_path, backend=gate, threads=1) as store:
        first, second = store.allocate(2 * PIECE).pieces
        names: list[str] = []
        done = threading.Event()

        def follow(_: object) -> None:
            names.append(threading.current_thread().name)
            store.write(second, buffer()).add_done_callback(lambda _: done.set())

        gate.hold()
        store.write(first, buffer()).add_done_callback(follow)
        gate.release()
        assert done.wait(timeout=60)
        assert names[0].startswith("lightning_ssd-io")


def test_close_cancels_queued_requests_and_waits_for_running_ones(tmp_path: Path) -> None:
    gate = GatedBackend()
    with open_store(tmp_path, backend=gate, threads=1) as store:
        pieces = store.allocate(3 * PIECE).pieces
        gate.hold()
        futures = [store.write(piece, buffer()) for piece in pieces]
        gate.wait_for_arrival()
        # The test releases the running one when others are cancelled: close must cancel before it waits.
        futures[1].add_done_callback(lambda _: gate.release())
        store.close()
        assert futures[0].result() is None
        assert futures[1].cancelled()
        assert futures[2].cancelled()
        assert all_of(futures).wait(60)
        assert list(tmp_path.iterdir()) == []
        names = [thread.name for thread in threading.enumerate()]
        assert not [name for name in names if name.startswith("lightning_ssd-io")]
        with pytest.raises(StorageError, match="closed"):
            store.write(pieces[0], buffer())
        store.close()


def test_a_callback_may_close_the_store(tmp_path: Path) -> None:
    with open_store(tmp_path, threads=2) as store:
        (piece,) = store.allocate(PIECE).pieces
        closed = threading.Event()

        def close(_: object) -> None:
            store.close()
            closed.set()

        store.write(piece, buffer()).add_done_callback(close)
        assert closed.wait(timeout=60)
        assert list(tmp_path.iterdir()) == []


def test_an_error_outside_of_a_transfer_is_that_transfers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example by a clock that user code has replaced: the thread continues, and no caller waits forever."""

    def fail(meter: Meter) -> None:
        raise LookupError("no clock")

    with open_store(tmp_path, threads=1) as store:
        (piece,) = store.allocate(PIECE).pieces
        with monkeypatch.context() as patch:
            patch.setattr(Meter, "start", fail)
            for _ in range(2):
                with pytest.raises(LookupError, match="no clock"):
                    store.write(piece, buffer()).result(timeout=60)
        store.write(piece, buffer()).result(timeout=60)
