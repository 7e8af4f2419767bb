"""Memory of devices that ranks share: when a rank waits for room there. The ranks are threads of one process."""

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_ssd.device import CPUCopyEngine, make_copy_engine
from lightning_ssd.futures import Future
from lightning_ssd.ranks import PeerMemory, RankError, RankMemory, RankMessages, Ranks, Topic, peer_memory
from lightning_ssd.ranks.rank_memory import make_files
from tests.support.ranks import connect

PAGE = 4096


def make_memory(messages: RankMessages, slots: int) -> PeerMemory:
    return PeerMemory(messages, torch.zeros(slots * PAGE, dtype=torch.uint8), [0] * messages.size, [])


@pytest.fixture
def two() -> Iterator[list[RankMessages]]:
    """Messages of two ranks."""
    ranks = connect(2)
    yield ranks
    for one in ranks:
        one.close()


def test_a_rank_waits_for_the_sum_of_a_gradient(two: list[RankMessages]) -> None:
    told: SimpleQueue[Any] = SimpleQueue()
    two[1].listen(Topic.FULL, lambda rank, posted: told.put((rank, posted)))
    memory = make_memory(two[0], slots=2)
    offsets = [memory.acquire(number, PAGE) for number in (5, 6)]
    for number in (5, 6):
        memory.post(number, 1)
    found: list[int | None] = []
    waiting = threading.Thread(target=lambda: found.append(memory.acquire(7, PAGE)))
    waiting.start()
    assert told.get(timeout=20) == (0, ({5: 1, 6: 1}, {}))
    assert not found
    memory.free(6, 1)
    waiting.join(20)
    assert found == [offsets[1]]


def test_a_rank_waits_for_a_sum_that_another_one_has_learned_of_before(two: list[RankMessages]) -> None:
    """Rank 1 waits for room again, and its list lacks the gradient that was summed."""
    told: SimpleQueue[Any] = SimpleQueue()
    two[1].listen(Topic.FULL, lambda rank, lists: told.put(lists))
    memory = make_memory(two[0], slots=1)
    offset = memory.acquire(0, PAGE)
    memory.post(0, 1)
    two[1].post(Topic.FULL, 0, 0, ({1: 1}, {0: 1}), [0])
    two[1].post(Topic.READ, 0, 1, None, [0])
    received: Future[dict[int, None]] = two[0].collect(Topic.READ, 0, 1, [1])
    received.result(timeout=20)
    found: list[int | None] = []
    waiting = threading.Thread(target=lambda: found.append(memory.acquire(1, PAGE)))
    waiting.start()
    assert told.get(timeout=20) == ({0: 1}, {})
    memory.free(0, 1)
    waiting.join(20)
    assert found == [offset]


def test_a_failed_rank_is_not_waited_for(two: list[RankMessages]) -> None:
    told: SimpleQueue[Any] = SimpleQueue()
    two[1].listen(Topic.FULL, lambda rank, posted: told.put(posted))
    memory = make_memory(two[0], slots=1)
    memory.acquire(0, PAGE)
    memory.post(0, 1)
    found: list[int | None] = []
    waiting = threading.Thread(target=lambda: found.append(memory.acquire(1, PAGE)))
    waiting.start()
    told.get(timeout=20)
    two[1].fail(RankError("no more"))
    waiting.join(20)
    assert found == [None]


def test_a_rank_waits_once_for_others_that_wait_for_it(
    two: list[RankMessages], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 1 is in a collective of its backward, which rank 0 has not reached, and does not tell."""
    waits: list[str] = []
    monkeypatch.setattr(peer_memory, "wait_at_most", lambda changed, seconds, work: bool(waits.append(work)))
    memory = make_memory(two[0], slots=1)
    memory.acquire(0, PAGE)
    memory.post(0, 1)
    assert [memory.acquire(number, PAGE) for number in (1, 2)] == [None, None]
    assert len(waits) == 1
    assert "NCCL_P2P_DISABLE=1" in caplog.text
    for number in (1, 2):
        memory.post(number, 1)
    memory.free(1, 1)
    assert memory.acquire(3, PAGE) is None
    assert len(waits) == 2
    memory.free(0, 1)
    assert memory.acquire(4, PAGE) is not None


class Backwards:
    """Backwards of several ranks, each of which computes the gradients of all flat parameters in an order of its own.

    A gradient is summed once all ranks have posted it, as their owners do.
    """

    def __init__(self, orders: Sequence[Sequence[int]], slots: int) -> None:
        self.messages = connect(len(orders))
        self.memories = [make_memory(one, slots) for one in self.messages]
        self.on_host = [0] * len(orders)
        self.ended = [False] * len(orders)
        self._orders = orders
        self._posted: dict[int, int] = dict.fromkeys(orders[0], 0)
        self._lock = threading.Lock()

    def run(self) -> None:
        threads = [threading.Thread(target=self._run, args=(rank,), daemon=True) for rank in range(len(self.memories))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        if all(self.ended):
            for one in self.messages:
                one.close()

    def _run(self, rank: int) -> None:
        for number in self._orders[rank]:
            if self.memories[rank].acquire(number, PAGE) is None:
                self.on_host[rank] += 1
            self.memories[rank].post(number, 1)
            with self._lock:
                self._posted[number] += 1
                summed = self._posted[number] == len(self._orders)
            if summed:
                for memory in self.memories:
                    memory.free(number, 1)
        self.ended[rank] = True


ORDERS = st.integers(2, 3).flatmap(
    lambda ranks: st.integers(1, 7).flatmap(
        lambda flats: st.lists(st.permutations(range(flats)), min_size=ranks, max_size=ranks)
    )
)


@given(ORDERS, st.integers(1, 3))
def test_ranks_whose_backwards_differ_do_not_wait_for_ever(orders: list[list[int]], slots: int) -> None:
    backwards = Backwards(orders, slots)
    backwards.run()
    assert all(backwards.ended)


@given(st.permutations(range(6)), st.integers(1, 3))
def test_gradients_stay_on_the_devices_of_ranks_whose_backwards_are_alike(order: list[int], slots: int) -> None:
    backwards = Backwards([order] * 3, slots)
    backwards.run()
    assert all(backwards.ended)
    assert backwards.on_host == [0, 0, 0]


@pytest.mark.parametrize("fails", [False, True])
def test_memory_is_freed_when_other_ranks_have_unmapped_it(fails: bool, two: list[RankMessages]) -> None:
    freed = threading.Event()
    tensor = torch.zeros(PAGE, dtype=torch.uint8)
    weakref.finalize(tensor, freed.set)
    memories = [PeerMemory(two[0], tensor, [0, 0], []), make_memory(two[1], slots=1)]
    del tensor
    memories[0].close()
    memories[0].close()
    assert not freed.is_set()
    if fails:
        two[1].fail(RankError("no more"))
    else:
        memories[1].close()
    assert freed.wait(20)


@pytest.mark.parametrize("disabled", [False, True])
def test_all_ranks_share_memory_or_none(disabled: bool, two: list[RankMessages]) -> None:
    """One rank whose environment forbids it decides for all."""
    descriptors = make_files(2)
    copies = make_copy_engine(torch.device("cpu"))
    shared: dict[int, PeerMemory | None] = {}

    def share(rank: int) -> None:
        ranks = Ranks(two[rank], [RankMemory(descriptor) for descriptor in descriptors])
        shared[rank] = PeerMemory.share(ranks, copies, 2 * PAGE)

    exchange = two[1].exchange
    if disabled:
        two[1].exchange = lambda content: exchange(True if content is False else content)  # type: ignore[method-assign]
    threads = [threading.Thread(target=share, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    if disabled:
        assert shared == {0: None, 1: None}
    else:
        first, second = shared[0], shared[1]
        assert first is not None and second is not None
        offset = second.acquire(0, PAGE)
        assert offset is not None
        second.slot(offset, PAGE).fill_(7)
        read = torch.zeros(PAGE, dtype=torch.uint8)
        copies.copy(read.data_ptr(), first.address(1, offset), PAGE)
        assert read.eq(7).all()
    for descriptor in descriptors:
        os.close(descriptor)


def test_no_rank_keeps_memory_that_another_one_has_no_access_to(
    two: list[RankMessages], monkeypatch: pytest.MonkeyPatch
) -> None:
    exported: list[weakref.ref[torch.Tensor]] = []
    opened: SimpleQueue[int] = SimpleQueue()
    closed: SimpleQueue[int] = SimpleQueue()

    def export_memory(memory: torch.Tensor) -> tuple[bytes, int]:
        exported.append(weakref.ref(memory))
        return threading.current_thread().name.encode(), 0

    def open_memory(handle: bytes) -> int:
        if handle == b"0":
            raise RuntimeError("no access")
        opened.put(7)
        return 7

    monkeypatch.setattr(peer_memory, "fixed_segments", contextlib.nullcontext)
    monkeypatch.setattr(peer_memory, "export_memory", export_memory)
    monkeypatch.setattr(peer_memory, "open_memory", open_memory)
    monkeypatch.setattr(peer_memory, "close_memory", closed.put)
    monkeypatch.setattr(peer_memory, "_reads", lambda copies, address, rank: True)
    copies = CPUCopyEngine(torch.device("meta"))
    found: list[PeerMemory | None] = []

    def share(rank: int) -> None:
        found.append(PeerMemory.share(Ranks(two[rank], []), copies, PAGE))

    threads = [threading.Thread(target=share, args=(rank,), name=f"{rank}") for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [None, None]
    assert opened.get(timeout=20) == closed.get(timeout=20)
    assert [one() for one in exported] == [None, None]
