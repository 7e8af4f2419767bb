"""Messages between ranks, which are threads of one process here: order, ends and failures."""

import errno
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from lightning_ssd import waits
from lightning_ssd.futures import Future
from lightning_ssd.ranks import RankError, RankMessages, Ranks, Topic
from tests.support.ranks import connect


class Unreadable:
    """A content that its receiver can't make."""

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return no_room, ()


def no_room() -> object:
    raise MemoryError("no room")


def end_as_killed(rank: RankMessages) -> None:
    """Ends the connections of a rank, as the kernel does with those of a killed process."""
    for connection in [one for one in rank._connections.values() if not one.closed]:
        with socket.socket(fileno=os.dup(connection.fileno())) as ended:
            ended.shutdown(socket.SHUT_RDWR)


def assert_ends(ranks: list[RankMessages], *calls: Callable[[], None]) -> None:
    """Asserts that calls on threads of their own return, and ends all ranks if they do not."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    waiting = [thread for thread in threads if thread.is_alive()]
    for rank in ranks if waiting else ():
        end_as_killed(rank)
    assert not waiting


@pytest.fixture
def three() -> Iterator[list[RankMessages]]:
    """Messages of three ranks."""
    ranks = connect(3)
    yield ranks
    for one in ranks:
        one.close()


def test_messages_are_collected_whether_expected_before_or_after_they_arrive(three: list[RankMessages]) -> None:
    first, second, third = three
    before = first.collect(Topic.STEP, 7, 1, [1, 2])
    second.post(Topic.STEP, 7, 1, b"a", [0])
    second.post(Topic.STEP, 7, 2, b"c", [0])
    assert not before.done()
    third.post(Topic.STEP, 7, 1, b"b", [0])
    assert before.result(timeout=60) == {1: b"a", 2: b"b"}
    assert first.collect(Topic.STEP, 7, 2, [1]).result(timeout=60) == {1: b"c"}


def test_a_content_of_any_length_is_collected_whole(three: list[RankMessages]) -> None:
    first, second, third = three
    contents = {rank: bytes([rank]) * 10**6 + b"end" for rank in (1, 2)}
    collected = first.collect(Topic.TRAINING, 0, 0, [1, 2])
    for one in (second, third):
        one.post(Topic.TRAINING, 0, 0, contents[one.rank], [0])
    assert collected.result(timeout=60) == contents


def test_long_messages_of_several_threads_arrive_whole(three: list[RankMessages]) -> None:
    first, second, _ = three
    contents = [bytes([turn]) * 10**6 for turn in range(4)]
    collected = [first.collect(Topic.TRAINING, 0, turn, [1]) for turn in range(4)]
    with ThreadPoolExecutor(4) as threads:
        for turn, content in enumerate(contents):
            threads.submit(second.post, Topic.TRAINING, 0, turn, content, [0])
    assert [one.result(timeout=60) for one in collected] == [{1: content} for content in contents]


def test_threads_that_receive_can_post_while_ranks_send_each_other_long_messages(three: list[RankMessages]) -> None:
    """Neither receives until both ranks are sending messages that are longer than what sockets hold."""
    ranks = {one.rank: one for one in three[:2]}
    both = threading.Barrier(3)

    def answer(found: "Future[dict[int, None]]") -> None:
        (other,) = found.result()
        both.wait(60)
        both.wait(60)
        ranks[1 - other].post(Topic.READY, 0, 0, b"short", [other])

    for rank, one in ranks.items():
        one.collect(Topic.STEP, 0, 0, [1 - rank]).add_done_callback(answer)
        ranks[1 - rank].post(Topic.STEP, 0, 0, None, [rank])
    both.wait(60)  # the messages that they answer are received
    for rank, one in ranks.items():
        message = Topic.TRAINING, 0, 0, bytes(10**6), [1 - rank]
        threading.Thread(target=one.post, args=message, daemon=True).start()
    try:
        assert all(one._connections[1 - rank].poll(60) for rank, one in ranks.items())
        both.wait(60)
        for rank, one in ranks.items():
            assert one.collect(Topic.TRAINING, 0, 0, [1 - rank]).result(timeout=20) == {1 - rank: bytes(10**6)}
            assert one.collect(Topic.READY, 0, 0, [1 - rank]).result(timeout=20) == {1 - rank: b"short"}
    finally:
        for one in three:
            end_as_killed(one)


def test_ranks_can_end_while_they_send_each_other_long_messages(three: list[RankMessages]) -> None:
    first, second, _ = three
    for turn in range(10):
        for one, other in ((first, 1), (second, 0)):
            one.post(Topic.TRAINING, 0, turn, bytes(10**6), [other])
    assert_ends(three, first.close, second.close)


def test_a_rank_can_end_whose_messages_another_cannot_read(three: list[RankMessages]) -> None:
    first, second, _ = three
    second.post(Topic.TRAINING, 0, 0, Unreadable(), [0])
    assert first.failed.wait(60)
    second.post(Topic.TRAINING, 0, 1, bytes(10**6), [0])
    assert_ends(three, second.close)


@pytest.mark.parametrize("error", [OSError(errno.ENOBUFS, "no room"), MemoryError("no room")])
def test_a_message_that_cannot_be_sent_ends_all_ranks(
    three: list[RankMessages], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    first, second, third = three
    waits = [one.collect(Topic.STEP, 0, 0, [1]) for one in (first, third)]

    def send_bytes(connection: Connection, message: bytes) -> None:
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(Connection, "send_bytes", send_bytes)
    second.post(Topic.STEP, 0, 0, None, [0])
    for wait in waits:
        with pytest.raises(RankError, match="rank 1 has failed: .*no room"):
            wait.result(timeout=20)


def test_a_rank_that_ends_fails_only_what_it_has_not_sent(three: list[RankMessages]) -> None:
    first, second, third = three
    of_second, of_third = first.collect(Topic.STEP, 0, 0, [1]), first.collect(Topic.STEP, 0, 0 + 1, [2])
    sent = first.collect(Topic.SUM, 0, 0, [1])
    second.post(Topic.SUM, 0, 0, b"sent", [0])
    second.close()
    assert sent.result(timeout=60) == {1: b"sent"}
    with pytest.raises(RankError, match="rank 1 has ended its training, and rank 0 goes on"):
        of_second.result(timeout=60)
    with pytest.raises(RankError, match="rank 1 has ended"):  # at once
        first.collect(Topic.STEP, 5, 0, [1, 2]).result(timeout=0)
    third.post(Topic.STEP, 0, 1, b"", [0])
    assert of_third.result(timeout=60) == {2: b""}


def test_the_first_failure_is_the_error_of_all_ranks(three: list[RankMessages]) -> None:
    first, second, third = three
    waits = [one.collect(Topic.WEIGHTS, 0, 0, [other]) for one, other in ((first, 2), (third, 0))]
    second.fail(ValueError("a bad batch"))
    for wait in waits:
        with pytest.raises(RankError, match="rank 1 has failed: ValueError: a bad batch"):
            wait.result(timeout=60)
    first.fail(KeyError("later"))
    for one in three:
        with pytest.raises(RankError, match="a bad batch"):
            one.collect(Topic.STEP, 0, 0, [0, 1, 2]).result(timeout=0)


def test_what_a_rank_has_sent_before_it_fails_is_collected_afterwards(three: list[RankMessages]) -> None:
    """All ranks then raise the error that each of them finds, such as too small a budget that they have agreed on."""
    first, second, _ = three
    failed = first.collect(Topic.STEP, 0, 0, [1])
    second.post(Topic.SUM, 0, 0, b"sent", [0])
    second.fail(ValueError("a bad batch"))
    with pytest.raises(RankError, match="a bad batch"):
        failed.result(timeout=60)
    assert first.collect(Topic.SUM, 0, 0, [1]).result(timeout=0) == {1: b"sent"}


def test_after_a_failure_values_are_expected_from_a_rank_until_it_ends(three: list[RankMessages]) -> None:
    two = [three[0].collect(Topic.FETCHED, 0, turn, [1]) for turn in (1, 2)]
    three[2].fail(ValueError("no more"))
    assert isinstance(three[0].failed.exception(20), RankError)
    assert not any(one.done() for one in two)
    three[1].post(Topic.FETCHED, 0, 1, "values", [0])
    assert two[0].result(20) == {1: "values"}
    assert not two[1].done()
    three[1].close()
    assert isinstance(two[1].exception(20), RankError)


def test_a_dead_rank_is_named(three: list[RankMessages]) -> None:
    first, second, third = three
    wait = first.collect(Topic.READY, 0, 0, [2])
    first.post(Topic.STEP, 0, 0, b"unread", [1])
    end_as_killed(second)
    with pytest.raises(RankError, match="rank 1 has died"):
        wait.result(timeout=60)


def test_a_message_that_cannot_be_read_ends_all_ranks(three: list[RankMessages]) -> None:
    first, second, third = three
    waits = [first.collect(Topic.TRAINING, 0, 0, [1]), third.collect(Topic.STEP, 0, 0, [1])]
    second.post(Topic.TRAINING, 0, 0, Unreadable(), [0])
    for wait in waits:
        with pytest.raises(RankError, match="rank 0 has failed: MemoryError: no room"):
            wait.result(timeout=60)


def test_a_collective_that_another_host_has_ended_is_not_taken_for_the_end_of_a_rank_of_this_one(
    three: list[RankMessages], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was waited for already, where the collective has ended: a second wait exceeds the time of an end."""
    monkeypatch.setattr(Future, "wait", None)
    error = RankError("a process of another host has ended: Connection closed by peer")
    assert Ranks(three[0], []).notice(error) is None
    assert three[0].failed.exception() is error


def test_a_forked_process_does_not_keep_connections(three: list[RankMessages]) -> None:
    descriptors = [connection.fileno() for one in three for connection in one._connections.values()]
    child = os.fork()
    if child == 0:
        os._exit(sum(os.path.exists(f"/proc/self/fd/{descriptor}") for descriptor in descriptors))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Busy:
    """Work of another rank, whose message arrives after some comparisons of the waiting rank's counters."""

    def __init__(self, sender: RankMessages, awaited: "Future[dict[int, bytes]]") -> None:
        self.sender, self.awaited, self.polls = sender, awaited, 0

    def progress(self) -> tuple[int, ...]:
        self.polls += 1
        if self.polls == 20:
            self.sender.post(Topic.WEIGHTS, 7, 0, b"late", [0])
            assert self.awaited.wait(60)  # the thread that receives it may be slow
        return ()

    def pending(self) -> str:
        return ""


def test_a_wait_for_a_busy_rank_lasts_as_long_as_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(waits, "LIMIT", 5)
    monkeypatch.setattr(waits, "_stuck", None)
    monkeypatch.setattr(waits, "_watched", weakref.WeakKeyDictionary())
    timeout = timedelta(seconds=0.04)
    first, second = (RankMessages(rank, {1 - rank: one}, timeout=timeout) for rank, one in enumerate(Pipe()))
    late = first.collect(Topic.WEIGHTS, 7, 0, [1])
    busy = Busy(second, late)
    waits.watch(busy)
    assert waits.wait_for(late, "weights") == {1: b"late"}
    assert busy.polls >= 20
    with pytest.raises(RuntimeError, match=r"missing: STEP 3 of ranks \[1\]; .*set `ddp={'timeout'"):
        waits.wait_for(first.collect(Topic.STEP, 3, 0, [1]), "weights")
    for one in (first, second):
        one.close()
