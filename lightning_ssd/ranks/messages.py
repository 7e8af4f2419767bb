"""Messages between the ranks of one host, futures of messages that are expected, and the end of a rank."""

import contextlib
import os
import pickle
import selectors
import socket
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from enum import IntEnum, auto
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, TypeVar

from torch.distributed.constants import default_pg_timeout

from lightning_ssd.futures import Future
from lightning_ssd.uncopied import Uncopied
from lightning_ssd.waits import wait_for, watch


class Topic(IntEnum):
    """What a message is about."""

    END = auto()
    """The sender's training has ended without an error."""
    FAILURE = auto()
    """The sender's training has failed; the content is the error's text."""
    EPOCH = auto()
    """The sender has begun the last batch of an epoch. The content is the number of training batches that it has
    begun."""
    EXCHANGE = auto()
    """The sender's part of an exchange between all ranks."""
    READY = auto()
    """The sender's part in a turn of a flat parameter, such as a gradient, is in memory that all ranks read, and the
    sender reads the values before no more. The receiver, the owner of the flat parameter, may change them."""
    FULL = auto()
    """The sender has no room for another gradient on its device. The content are the flat parameters whose gradients it
    has posted, and that are not summed, and those that are, with their turns; None: it waits for no room any more."""
    UNMAPPED = auto()
    """The sender has unmapped the memory of other ranks' devices, which these may free."""
    READ = auto()
    """The sender, a flat parameter's owner, has summed the gradients of its host, whose memory is free. With several
    hosts, `SUM` follows when all have; with one, nothing but `SUM` is sent."""
    SUM = auto()
    """The sender, a flat parameter's owner, has the gradients of all ranks, and norms of their mean. If user code may
    read gradients, the mean is in shared memory."""
    WEIGHTS = auto()
    """The sender, a flat parameter's owner, has written its new weights, and other values not yet."""
    STEP = auto()
    """The sender, a flat parameter's owner, has written all of its new values, and reads gradients no more."""
    FETCH = auto()
    """The sender needs all values of a flat parameter in host memory, some of which are on the device of the receiver,
    its owner. The content are number and turn of `FETCHED`."""
    FETCHED = auto()
    """The sender, a flat parameter's owner, has written all of its values to host memory, after the last step. It is
    sent after a failure, too, by threads that do not wait for other ranks."""
    TRAINING = auto()
    """A part of the sender's training state, for the record of a step that rank 0, the receiver, writes."""
    RECORDED = auto()
    """Rank 0, the sender, has written the record."""


_Key = tuple[Topic, int, int]
"""Topic, number and turn of a message."""

T = TypeVar("T")


class RankError(RuntimeError):
    """Another rank has failed, has died, or does not answer."""


class _Box:
    """Messages of several ranks with one key: those that have arrived, and the future of those that are expected."""

    def __init__(self) -> None:
        self.contents: dict[int, Any] = {}
        self.expected: frozenset[int] | None = None
        self.done: Future[dict[int, Any]] = Future()


class RankMessages(Uncopied):
    """Sends messages to other ranks and receives theirs, each with a topic, a number and a turn.

    A rank that ends without `close` (killed, or by an exception) makes all futures of messages fail on the other ranks,
    pending and later ones, with an error that names it, except of messages that it has sent before, and of
    `Topic.FETCHED` from ranks that have not ended. If it has ended by `close`, without an error, those fail that need a
    message which it has not sent.

    Threads: any. `_lock` guards the fields below it; it is not held while futures complete. Futures complete, and run
    their callbacks, on the thread `ranks`, which receives; or on the calling thread if their messages have arrived.

    Deadlocks: only the thread `ranks-sender` waits until a socket has room. The thread `ranks` of the other rank makes
    room by receiving, and waits for nothing but messages: `post` only queues them, and callbacks do not wait. If it has
    to stop receiving from a rank, it closes that direction of the socket, so that sending ends with an error there.

    Args:
        rank: number of this rank.
        connections: connections to all other ranks; owned.
        first: what errors add to the numbers of ranks, which count those of this host.
        timeout: time in which another rank, which is alive, may send nothing, such as in a validation of its own.

    Attributes:
        rank: number of this rank.
        size: number of ranks.
        others: numbers of the other ranks.
        failed: completes with the first failure of any rank, this one included.
    """

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, Connection],
        first: int = 0,
        timeout: timedelta = default_pg_timeout,
    ) -> None:
        self.rank = rank
        self.failed: Future[None] = Future()
        self._first = first
        self.size = len(connections) + 1
        self.others = sorted(connections)
        self._connections = connections
        self._posted: SimpleQueue[tuple[bytes, Collection[int]] | None] = SimpleQueue()
        """Messages that are not sent yet, and their receivers; None: no message follows."""
        self._received = 0
        self._exchanges = 0
        self._lock = threading.Lock()
        self._boxes: dict[_Key, _Box] = {}
        self._ended: set[int] = set()
        """Ranks whose training has ended without an error."""
        self._gone: set[int] = set()
        """Ranks from which no message can be received any more."""
        self._batches = 0
        """Training batches that this rank has begun."""
        self._lasts: set[int] = set()
        """Numbers of those that were the last of an epoch."""
        self._lasts_of: list[tuple[int, int]] = []
        """Other ranks, and numbers of their batches that are the last of an epoch, which this rank has not begun."""
        self._failure: RankError | None = None
        """Why no message is expected any more: the first failure of any rank, this one included."""
        self._listeners: dict[Topic, Callable[[int, Any], None]] = {}
        """Functions that are called with each message of a topic, and its sender."""
        self._wake, self._woken = Pipe()
        self._thread = threading.Thread(target=self._run, name="lightning_ssd-ranks", daemon=True)
        self._sender = threading.Thread(target=self._send, name="lightning_ssd-ranks-sender", daemon=True)
        self._thread.start()
        self._sender.start()
        watch(self, timeout.total_seconds())
        _open.add(self)

    # ---- messages ----

    def post(self, topic: Topic, number: int, turn: int, content: object, to: Collection[int]) -> None:
        """Has a message sent to other ranks, which see the bytes that this rank has written to shared memory before.

        Messages arrive in the order of their calls. The call waits for nothing, so that callbacks may make it.
        `number` is that of a flat parameter, if the topic is about one, and `turn` counts the messages about it.
        `content` can be pickled, and may have any length.
        """
        message = pickle.dumps(((topic, number, turn), content))  # which only processes of the same user receive
        self._posted.put((message, to))

    def post_after(
        self,
        done: "Future[Any]",
        topic: Topic,
        number: int,
        turn: int,
        content: Callable[[], object],
        to: Collection[int],
    ) -> None:
        """Posts a message, whose content `content` returns, once `done` is, on the thread that completes it.

        If either fails, this rank does.
        """

        def end(future: "Future[Any]") -> None:
            if (failure := future.exception()) is not None:
                self.fail(failure)
                return
            try:
                self.post(topic, number, turn, content(), to)
            except BaseException as error:
                self.fail(error)

        done.add_done_callback(end)

    def collect(self, topic: Topic, number: int, turn: int, ranks: Collection[int]) -> "Future[dict[int, T]]":
        """Returns a future of the messages of other ranks with one key, by rank. Each message is collected once."""
        key = topic, number, turn
        with self._lock:
            box = self._boxes.setdefault(key, _Box())
            assert box.expected is None, f"messages {key} are collected twice"
            box.expected = frozenset(ranks)
        self._complete([key])
        return box.done

    def listen(self, topic: Topic, listener: Callable[[int, Any], None] | None) -> None:
        """Has a function called with the sender and content of each message of a topic, on the thread `ranks`.

        None: none is called any more.
        """
        with self._lock:
            self._listeners.pop(topic, None)
            if listener is not None:
                self._listeners[topic] = listener

    def exchange(self, content: T) -> list[T]:
        """Sends `content` to all other ranks, and returns what all ranks have sent in the same call, by rank.

        Raises:
            RankError: another rank has failed or ended.
        """
        turn, self._exchanges = self._exchanges, self._exchanges + 1
        self.post(Topic.EXCHANGE, 0, turn, content, self.others)
        collected: Future[dict[int, T]] = self.collect(Topic.EXCHANGE, 0, turn, self.others)
        contents = {**wait_for(collected, "the other ranks"), self.rank: content}
        return [contents[rank] for rank in range(self.size)]

    def begin_batch(self, *, last: bool) -> None:
        """Called when a training batch begins. Fails if another rank has fewer batches in the epoch.

        It would wait for this one in its validation, and this one for the gradients of its batch.

        Args:
            last: whether it is the last batch of the epoch.
        """
        with self._lock:
            self._batches += 1
            if last:
                self._lasts.add(self._batches)
        if last:
            self.post(Topic.EPOCH, 0, 0, self._batches, self.others)
        self._compare_epochs()

    def _compare_epochs(self) -> None:
        with self._lock:
            begun = [one for one in self._lasts_of if one[1] <= self._batches]
            self._lasts_of = [one for one in self._lasts_of if one[1] > self._batches]
            fewer = [rank for rank, number in begun if number not in self._lasts]
        if fewer:
            self.fail(self._had_fewer(fewer[0], f"is at the end of an epoch, and {self._name(self.rank)} is not"))

    def _had_fewer(self, rank: int, what: str) -> RankError:
        return RankError(
            f"{self._name(rank)} {what}: it had fewer batches. Give all ranks the same number of batches "
            "(`limit_train_batches`, `drop_last=True`)."
        )

    # ---- the end ----

    def fail_with(self, future: "Future[Any]") -> None:
        """Has this rank fail if a future that is done has failed; a callback of futures."""
        if (error := future.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Ends the training of all ranks with the text of an error of this one, unless another one has failed before.

        All pending futures fail, here and there, and later ones of messages that have not arrived; but see the class.
        """
        text = str(error) if isinstance(error, RankError) else f"{type(error).__name__}: {error}"
        own = error if isinstance(error, RankError) else RankError(f"{self._name(self.rank)} has failed: {text}")
        if self._failure is None:
            self.post(Topic.FAILURE, 0, 0, text[:10_000], self.others)
            self._fail_all(own)

    def close(self) -> None:
        """Ends the messages of this rank, which waits for none, without an error unless it has failed. Idempotent."""
        if not self._thread.is_alive():
            return
        if self._failure is None:
            self.post(Topic.END, 0, 0, None, self.others)
        self._posted.put(None)
        self._sender.join()  # before the thread `ranks` ends: another rank may wait for room, too, in order to end
        self._wake.send(None)
        self._thread.join()
        for one in (*self._connections.values(), self._wake, self._woken):
            one.close()

    # ---- for error messages of waits ----

    def progress(self) -> tuple[int, ...]:
        """Returns the number of messages received (`waits.Watched`)."""
        return (self._received,)

    def pending(self) -> str:
        """Returns what other ranks have not sent (`waits.Watched`)."""
        with self._lock:
            waiting = [
                f"{topic.name} {number} of ranks {sorted(box.expected - box.contents.keys())}"
                for (topic, number, _), box in self._boxes.items()
                if box.expected is not None
            ]
        remedy = "if they are busy for so long, set `ddp={'timeout': timedelta(hours=2)}`"
        return f"messages missing: {'; '.join(waiting)}; {remedy}" if waiting else ""

    # ---- the threads that send and receive ----

    def _send(self) -> None:
        for message, ranks in iter(self._posted.get, None):
            for rank in ranks:
                try:
                    self._connections[rank].send_bytes(message)
                except ConnectionError:
                    pass  # the rank has ended, which the receiving thread finds out, too
                except Exception as error:  # e.g. MemoryError: if this thread ended, other ranks would wait for ever
                    self.fail(error)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while True:
                for found, _ in selector.select():
                    if found.fileobj is self._woken:
                        return
                    if not self._receive(found.data):
                        selector.unregister(found.fileobj)
                        unread = socket.socket(fileno=found.fd)
                        unread.shutdown(socket.SHUT_RD)  # otherwise the other rank may wait for room for ever
                        unread.detach()
                        with self._lock:
                            self._gone.add(found.data)
                        self._complete()

    def _receive(self, rank: int) -> bool:
        """Receives one message of a rank. Returns False if no more of its messages can be received."""
        received = None
        try:
            # The rank may have ended, maybe with messages unread, or while it sent one.
            with contextlib.suppress(EOFError, OSError):
                received = pickle.loads(self._connections[rank].recv_bytes())
        except Exception as error:  # such as for lack of memory; the thread would end, and waits for messages would not
            self.fail(error)
            return False
        if received is None:
            if rank not in self._ended:
                died = f"{self._name(rank)} has died, such as by a signal or for lack of memory. See its own output"
                self._fail_all(RankError(died))
            return False
        key, content = received
        self._received += 1
        if key[0] == Topic.FAILURE:
            self._fail_all(RankError(f"{self._name(rank)} has failed: {content}"))
        elif key[0] == Topic.EPOCH:
            with self._lock:
                self._lasts_of.append((rank, content))
            self._compare_epochs()
        elif (listener := self._listeners.get(key[0])) is not None:
            listener(rank, content)
        elif key[0] == Topic.END:
            with self._lock:
                self._ended.add(rank)
            self._complete()
        else:
            with self._lock:
                self._boxes.setdefault(key, _Box()).contents[rank] = content
            self._complete([key])
        return True

    def _fail_all(self, error: RankError) -> None:
        """Fails all pending futures at the first failure. Messages that have arrived can still be collected."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
        self._complete()
        self.failed.set_exception(error)

    def _complete(self, keys: Iterable[_Key] | None = None) -> None:
        """Completes the future of each box whose expected messages have arrived, or will not arrive any more.

        `keys` are those of the boxes; None: all boxes.
        """
        completed: list[tuple[_Box, RankError | None]] = []
        with self._lock:
            for key in list(self._boxes if keys is None else keys):
                box = self._boxes.get(key)
                if box is None or box.expected is None:
                    continue
                missing = box.expected - box.contents.keys()
                error = self._why_missing(key[0], missing) if missing else None
                if not missing or error is not None:
                    completed.append((self._boxes.pop(key), error))
        for box, error in completed:
            if error is None:
                box.done.set_result(box.contents)
            else:
                box.done.set_exception(error)

    def _name(self, rank: int) -> str:
        return f"rank {self._first + rank}"

    def _why_missing(self, topic: Topic, ranks: Collection[int]) -> RankError | None:
        """Returns why messages of ranks will not arrive; None: they may. The lock is held."""
        if topic is Topic.FETCHED and self._failure is not None and not self._gone.intersection(ranks):
            return None
        if self._failure is None and (ended := sorted(self._ended.intersection(ranks))):
            return self._had_fewer(ended[0], f"has ended its training, and {self._name(self.rank)} goes on")
        return self._failure


_open: "weakref.WeakSet[RankMessages]" = weakref.WeakSet()
"""Messages whose sockets a forked process inherits."""


def _close_in_child() -> None:
    """Closes sockets in a forked process (a DataLoader worker), which would hide the end of its rank from others."""
    for messages in _open:
        for connection in messages._connections.values():
            connection.close()


os.register_at_fork(after_in_child=_close_in_child)
