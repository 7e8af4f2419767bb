"""The pinned pool: its budget, the order of waiting requests, and their wake-up."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ssd.futures import Future
from lightning_ssd.storage import PinnedBuffer, PinnedPool, StorageError
from lightning_ssd.storage.slab import Slab

PAGE = 4096


@settings(max_examples=60)
@given(
    st.sampled_from([None, 1, 2 * PAGE, 100 * PAGE]),
    st.lists(
        st.tuples(
            st.sampled_from(["allocate", "release", "trim", "reset"]), st.integers(1, 16 * PAGE), st.integers(0, 1000)
        ),
        max_size=50,
    ),
)
def test_buffers_are_disjoint_within_the_budget(slab: int | None, steps: list[tuple[str, int, int]]) -> None:
    pool = PinnedPool(16 * PAGE, pin=False, slab_bytes=slab)
    held: list[PinnedBuffer] = []
    most = 0
    for step, nbytes, choice in steps:
        if step == "allocate":
            buffer = pool.try_acquire(nbytes)
            if buffer is not None:
                assert buffer.nbytes == nbytes
                assert buffer.tensor.numel() == -(-nbytes // PAGE) * PAGE
                assert buffer.tensor.data_ptr() % PAGE == 0
                buffer.tensor.fill_(len(held))
                held.append(buffer)
        elif step == "release" and held:
            held.pop(choice % len(held)).release()
        elif step == "trim":
            pool.trim()
        elif step == "reset":
            pool.reset_peak()
            most = 0
        used = sum(buffer.tensor.numel() for buffer in held)
        most = max(most, used)
        assert pool.used_bytes == used <= pool.slab_total <= pool.budget
        assert pool.peak_bytes == most
        spans = sorted((b.tensor.data_ptr(), b.tensor.data_ptr() + b.tensor.numel()) for b in held)
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    for buffer in held:
        buffer.release()
    # Whatever slabs were made, one buffer can use the whole budget again.
    assert pool.try_acquire(16 * PAGE) is not None
    pool.close()


@given(st.integers(1, 8), st.integers(0, 8))
def test_a_trimmed_pool_has_the_slabs_of_its_last_requests(before: int, after: int) -> None:
    """Slabs that later requests did not need are freed; those that they needed stay."""
    pool = PinnedPool(16 * PAGE, pin=False, slab_bytes=2 * PAGE)
    for count in (before, after):
        pool.trim()
        for buffer in [pool.acquire(2 * PAGE) for _ in range(count)]:
            buffer.release()
    assert pool.slab_total == 2 * PAGE * max(before, after)
    pool.trim()
    assert pool.slab_total == 2 * PAGE * after
    pool.close()


@pytest.mark.parametrize("first", [2, 7])
def test_the_slab_of_a_large_request_is_freed_when_later_ones_are_small(first: int) -> None:
    """Whether it was made before those of small requests or after them."""
    pool = PinnedPool(16 * PAGE, pin=False, slab_bytes=2 * PAGE)
    pool.acquire(first * PAGE).release()
    for sizes in [(2, 2, 2, 7), (2, 2), (2, 2)]:
        pool.trim()
        for buffer in [pool.acquire(size * PAGE) for size in sizes]:
            buffer.release()
    pool.trim()
    assert pool.slab_total == 4 * PAGE
    pool.close()


def test_repeated_requests_are_served_by_the_slabs_that_are_left() -> None:
    sizes = [2, 4, 7, 2, 1, 2]
    pool = PinnedPool(32 * PAGE, pin=False, slab_bytes=3 * PAGE)
    for in_order in (sizes[::-1], sizes, sizes, sizes):
        for buffer in [pool.acquire(size * PAGE) for size in in_order]:
            buffer.release()
        pool.trim()
        assert pool.slab_total == 20 * PAGE
    pool.close()


def test_a_pool_of_one_slab_keeps_it() -> None:
    pool = PinnedPool(16 * PAGE, pin=False)
    pool.trim()
    assert pool.slab_total == 16 * PAGE
    pool.close()


def test_released_buffers_are_merged_before_slabs_are_added() -> None:
    """A request is served by small buffers that were released side by side, and not by another slab."""
    pool = PinnedPool(16 * PAGE, pin=False, slab_bytes=4 * PAGE)
    small = [pool.acquire(PAGE) for _ in range(4)]
    start = min(buffer.tensor.data_ptr() for buffer in small)
    for buffer in small:
        buffer.release()
    large = pool.acquire(4 * PAGE)
    assert large.tensor.data_ptr() == start
    large.release()
    assert pool.acquire(4 * PAGE).tensor.data_ptr() == start
    pool.close()


def test_the_smallest_budget_serves_one_page() -> None:
    pool = PinnedPool(PAGE, pin=False)
    buffer = pool.acquire(1)
    assert pool.try_acquire(1) is None
    buffer.release()
    pool.acquire(PAGE).release()


def test_a_request_that_can_never_fit_is_an_error_at_once() -> None:
    pool = PinnedPool(PAGE + 100, pin=False, name="staging")
    with pytest.raises(ValueError, match=r"staging pool with its budget of .*4196 bytes.*Raise the budget"):
        pool.acquire(PAGE + 1)
    with pytest.raises(ValueError, match="positive"):
        pool.acquire(0)
    with pytest.raises(ValueError, match="at least 4096"):
        PinnedPool(100, pin=False)


def test_waiters_are_served_in_turn_so_that_a_large_one_is_not_starved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = PinnedPool(4 * PAGE, pin=False)
    small = [pool.acquire(PAGE) for _ in range(4)]
    served: list[str] = []
    waiters = Waiters(pool, monkeypatch)
    large = waiters.acquire("large", 4 * PAGE, served)
    late = waiters.acquire("late", PAGE, served)
    for buffer in small:
        # Room for a small one, but the large one is first in line.
        assert pool.try_acquire(PAGE) is None
        buffer.release()
    large.result(timeout=60).release()
    late.result(timeout=60).release()
    assert served == ["large", "late"]


def test_closing_wakes_waiting_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PinnedPool(PAGE, pin=False)
    held = pool.acquire(1)
    waiting = Waiters(pool, monkeypatch).acquire("waiting", 1, [])
    pool.close()
    with pytest.raises(StorageError, match="closed"):
        waiting.result(timeout=60)
    held.tensor.fill_(1)  # still in use
    held.release()
    with pytest.raises(StorageError, match="closed"):
        pool.try_acquire(1)
    pool.close()


def test_a_buffer_is_allocated_until_its_last_reference_is_released() -> None:
    pool = PinnedPool(PAGE, pin=False)
    buffer = pool.acquire(1)
    assert buffer.try_retain()
    buffer.release()
    assert pool.used_bytes == PAGE
    buffer.release()
    assert pool.used_bytes == 0
    assert not buffer.try_retain()
    with pytest.raises(ValueError, match="more often"):
        buffer.release()


@pytest.mark.parametrize("way", ["acquire", "try_acquire", "close", "release"])
def test_other_threads_are_not_blocked_while_slabs_are_freed(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Freeing a slab waits for the GPU. Threads that release buffers after the GPU's copies must not wait for it."""
    pool = PinnedPool(4 * PAGE, pin=False, slab_bytes=PAGE)
    buffers = [pool.acquire(PAGE) for _ in range(4)]
    held = buffers.pop()
    for buffer in buffers:
        buffer.release()
    real, released = Slab.close, 0

    def close(slab: Slab) -> None:
        nonlocal released
        with ThreadPoolExecutor(1) as other:
            assert other.submit(held.try_retain).result(timeout=60)
            other.submit(held.release).result(timeout=60)
        released += 1
        real(slab)

    monkeypatch.setattr(Slab, "close", close)
    if way == "acquire":
        pool.acquire(3 * PAGE).release()
    elif way == "try_acquire":
        assert pool.try_acquire(3 * PAGE) is not None
    elif way == "close":
        pool.close()
    else:
        last = pool.acquire(PAGE)
        monkeypatch.setattr(Slab, "close", real)
        pool.close()
        monkeypatch.setattr(Slab, "close", close)
        last.release()
    assert released


def test_many_threads_share_a_small_pool() -> None:
    pool = PinnedPool(8 * PAGE, pin=False, slab_bytes=PAGE)

    def work(number: int) -> None:
        for round in range(50):
            buffer = pool.acquire(1 + (number * 7 + round * 3) % (8 * PAGE))
            buffer.tensor.fill_(number)
            assert bool((buffer.tensor == number).all())
            buffer.release()

    with ThreadPoolExecutor(6) as threads:
        for future in [threads.submit(work, number) for number in range(6)]:
            future.result(timeout=60)
    assert pool.used_bytes == 0
    assert pool.peak_bytes <= pool.budget


class Waiters:
    """Starts threads that wait on a pool, one after the other, in a known order."""

    def __init__(self, pool: PinnedPool, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pool = pool
        self._threads: set[threading.Thread] = set()
        self._began = threading.Semaphore(0)
        wait = threading.Condition.wait

        def announced(condition: threading.Condition, timeout: float | None = None) -> bool:
            if threading.current_thread() in self._threads:
                self._began.release()
            return wait(condition, timeout)

        monkeypatch.setattr(threading.Condition, "wait", announced)

    def acquire(self, name: str, nbytes: int, served: list[str]) -> Future[PinnedBuffer]:
        """Starts a thread, and returns when it waits for the pool."""
        future: Future[PinnedBuffer] = Future()

        def work() -> None:
            try:
                buffer = self._pool.acquire(nbytes)
                served.append(name)
                future.set_result(buffer)
            except BaseException as error:
                future.set_exception(error)

        thread = threading.Thread(target=work, daemon=True)
        self._threads.add(thread)
        thread.start()
        assert self._began.acquire(timeout=60)
        return future
