"""`Ranks`: shared memory, messages and collectives of one rank, and the end of its training after a failure."""

import contextlib
import os
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from multiprocessing.connection import Connection
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from lightning_ssd.futures import Future
from lightning_ssd.ranks.messages import RankError, RankMessages
from lightning_ssd.ranks.rank_memory import RankMemory, make_files
from lightning_ssd.torch_internals import abort_process_groups
from lightning_ssd.uncopied import Uncopied

T = TypeVar("T")

_TIMEOUT_SECONDS = 120.0
"""Time in which other ranks connect, after all have begun to."""

_FAILURE_SECONDS = 3.0
"""Time in which the failure of a rank is known, after a collective has ended with an error."""

_END_SECONDS = 8.0
"""Time in which the training thread has to see a failure, of the ten seconds in which a training ends."""


class Ranks(Uncopied):
    """Shared memory and messages of the ranks of one host, collectives of all hosts, and the end after a failure.

    The first failure of a rank aborts the communicators of torch.distributed, so that no stream waits for that rank. A
    collective of gloo can't be aborted: it ends with an error when the other process has ended. If the training thread
    has not ended its work with an error in time, the process ends with the failure as its last line. Scratch files
    remain then, as after a kill.

    Threads: the training thread; `gather` and `sum` with `hosts` on the thread `hosts`. Two of its own, `failure` and
    `abort`, begin with the first failure.

    Args:
        messages: messages of this rank; owned.
        memory: memory that all ranks map, of each rank.
        world: group of gloo of all ranks of all hosts; owned. None: there is one host.
        hosts: group of gloo of the ranks with this one's number on all hosts; owned. None: as `world`.

    Attributes:
        messages, memory, hosts: as the arguments.
        rank: number of this rank on its host.
        size: number of ranks of this host.
        world_size: number of ranks of all hosts.
    """

    def __init__(
        self,
        messages: RankMessages,
        memory: Sequence[RankMemory],
        world: dist.ProcessGroup | None = None,
        hosts: dist.ProcessGroup | None = None,
    ) -> None:
        self.messages = messages
        self.rank, self.size = messages.rank, messages.size
        self.world_size = self.size if world is None else world.size()
        self.memory = memory
        self.hosts = hosts
        self._world = world
        self._noticed = threading.Event()
        """Set once the training thread has seen an error, whose own end follows, or has ended."""
        # The callback does not refer to `self`: a cycle would keep the memory until a garbage collection.
        messages.failed.add_done_callback(partial(_begin_end, self._noticed))

    @classmethod
    def connect(cls, host: int, timeout: timedelta = default_pg_timeout) -> "Ranks":
        """Connects the ranks of a host; called by all ranks of torch.distributed's default process group.

        Args:
            host: number of this rank's host.
            timeout: time in which a rank, which is alive, may let others wait.

        Raises:
            RankError: a rank does not answer, or hosts have different numbers of ranks.
        """
        # Addresses in the abstract namespace, which no file system has: a killed rank leaves none behind.
        found: list[tuple[int, str]] = [(0, "")] * dist.get_world_size()
        dist.all_gather_object(found, (host, secrets.token_hex(16)))
        hosts = {name: [rank for rank, (of_rank, _) in enumerate(found) if of_rank == name] for name, _ in found}
        if len({len(ranks) for ranks in hosts.values()}) > 1:
            raise RankError(f"hosts have different numbers of processes: {hosts}. Start the same number on each.")
        members = hosts[host]
        rank, size, key = members.index(dist.get_rank()), len(members), found[members[0]][1]
        with contextlib.ExitStack() as closed:
            listener = closed.enter_context(_socket())
            listener.bind(f"\0lightning_ssd-{key}-{rank}")
            listener.listen(size)
            dist.barrier()
            sockets: dict[int, socket.socket] = {}
            try:
                for other in range(rank):
                    connection = sockets[other] = closed.enter_context(_socket())
                    connection.connect(f"\0lightning_ssd-{key}-{other}")
                    _check_user(connection)
                    connection.send(_RANK.pack(rank))
                while len(sockets) < size - 1:
                    connection = closed.enter_context(listener.accept()[0])
                    connection.settimeout(_TIMEOUT_SECONDS)
                    _check_user(connection)
                    sockets[_RANK.unpack(connection.recv(_RANK.size))[0]] = connection
                memory = _share_memory(rank, sockets)
            except OSError as error:
                raise RankError(f"the ranks of this host could not connect: {error}") from error
            for connection in sockets.values():
                connection.settimeout(None)
            connections = {other: Connection(connection.detach()) for other, connection in sockets.items()}
        messages = RankMessages(rank, connections, members[0], timeout)
        if len(hosts) == 1:
            return cls(messages, memory)
        world = dist.new_group(timeout=timeout, backend="gloo")
        groups = [dist.new_group(list(ranks), timeout, "gloo") for ranks in zip(*hosts.values(), strict=True)]
        return cls(messages, memory, world, groups[rank])

    # ---- collectives ----

    def exchange(self, content: T) -> list[T]:
        """Sends `content` to all ranks, and returns what those of all hosts have sent in the same call, by global rank.

        Raises:
            RankError: another rank has failed or ended.
        """
        of_host = self.messages.exchange(content)  # also where `gather` follows: it names a failure
        return of_host if self._world is None else self.gather(content, self._world)

    def gather(self, content: T, group: dist.ProcessGroup) -> list[T]:
        """Returns the contents of all ranks of a group, which call this together; they can be pickled."""
        found = [content] * group.size()
        with self._named_failure():
            dist.all_gather_object(found, content, group)
        return found

    def check_agreement(self, items: Sequence[str]) -> None:
        """Raises an error on all ranks if their items differ: names with values, in the same order on all of them.

        Raises:
            RankError: the first difference, with both items and their ranks.
        """
        first, *others = self.exchange(items)
        for rank, other in enumerate(others, 1):
            for one, found in zip_longest(first, other, fillvalue="nothing more"):
                if one != found:
                    raise RankError(
                        f"rank 0 and rank {rank} train differently: {one!r} on rank 0, {found!r} on rank {rank}. Build "
                        "the same model, optimizers and Trainer on all ranks."
                    )

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
        """Replaces tensors by those of the first rank of a group, whose ranks call this together; they have one shape.

        They are sent as bytes, because no backend knows all dtypes.

        Args:
            tensors: the tensors, on the device, or, for a group of gloo, in host memory.
            group: the group; None: all ranks.
        """
        for tensor in tensors:
            values = tensor.detach().contiguous()
            with self._named_failure():
                dist.broadcast(values.reshape(-1).view(torch.uint8), group=group, group_src=0)
            if not tensor.is_contiguous():
                tensor.copy_(values)

    def sum(self, values: Tensor, group: dist.ProcessGroup | None = None) -> None:
        """Replaces values by their sum, whose bits all ranks of the group have; as `broadcast`."""
        with self._named_failure():
            dist.all_reduce(values, group=group)

    @contextlib.contextmanager
    def _named_failure(self) -> Iterator[None]:
        """Raises the first failure of a rank of this host, if a collective in the context ends with an error."""
        try:
            yield
        except RuntimeError as error:
            if self.messages.failed.wait(_FAILURE_SECONDS):  # gloo may notice the end of a process before `messages`
                self.messages.failed.result()
            raise RankError(
                "a process of another host has ended, or is busy for longer than `ddp={'timeout': ...}` allows: "
                f"{error}"
            ) from error

    # ---- failures and the end ----

    def begin_batch(self, *, last: bool) -> None:
        """Called when a training batch begins; `last`: it is the last one of the epoch.

        Raises:
            RankError: another rank has failed, or has fewer batches in the epoch.
        """
        self.messages.begin_batch(last=last)
        self.check()

    def check(self) -> None:
        """Raises RankError if a rank has failed: results of collectives may be wrong since then."""
        if self.messages.failed.done():
            self.messages.failed.result()

    def notice(self, error: BaseException) -> BaseException | None:
        """Tells all ranks of the error that ends this rank's training. Returns the failure of another rank before it.

        A collective may end with an error just before the end of the other process is known: it is waited for.
        """
        self._noticed.set()
        text = str(error)
        if not isinstance(error, RankError) and ("closed by peer" in text or "reset by peer" in text):
            self.messages.failed.wait(_FAILURE_SECONDS)  # `_named_failure` has waited before it has raised a RankError
        if self.messages.failed.done():
            return self.messages.failed.exception()
        self.messages.fail(error)
        return None

    def close(self) -> None:
        """Ends the messages, and the collectives with other hosts, which learn of a failure by that."""
        self._noticed.set()
        self.messages.close()
        groups, self._world, self.hosts = (self._world, self.hosts), None, None
        for group in groups:
            if group is not None:
                dist.destroy_process_group(group)


def _begin_end(noticed: threading.Event, failed: "Future[None]") -> None:
    """Aborts communicators after the first failure, and ends the process unless that is noticed in time."""

    def end() -> None:
        if not noticed.wait(_END_SECONDS):
            try:
                print(f"lightning_ssd: {failed.exception()}", file=sys.stderr, flush=True)
            finally:  # `print` fails if the process that read this one's output has ended
                os._exit(1)

    for target, name in ((abort_process_groups, "abort"), (end, "failure")):
        threading.Thread(target=target, name=f"lightning_ssd-{name}", daemon=True).start()


_RANK = struct.Struct("<I")


def _socket() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_TIMEOUT_SECONDS)
    return connection


def _check_user(connection: socket.socket) -> None:
    """Raises RankError if the other end is another user's."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    if user != os.getuid():
        raise RankError(f"the user {user} has connected to a rank of user {os.getuid()}")


def _share_memory(rank: int, sockets: dict[int, socket.socket]) -> list[RankMemory]:
    """Returns the memory of each rank, in files that rank 0 has made and sends to the others."""
    size = len(sockets) + 1
    if rank == 0:
        descriptors = make_files(size)
        for connection in sockets.values():
            socket.send_fds(connection, [b"files"], descriptors)
    else:
        _, descriptors, _, _ = socket.recv_fds(sockets[0], len(b"files"), size)
    try:
        return [RankMemory(descriptor) for descriptor in descriptors]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
