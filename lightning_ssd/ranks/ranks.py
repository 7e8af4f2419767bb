"""`Ranks`: this rank's share of what the ranks of one host have together."""

import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import zip_longest
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from lightning_ssd.ranks.hosts import HostGroup, named_failure
from lightning_ssd.ranks.messages import RankError, RankMessages
from lightning_ssd.ranks.rank_memory import RankMemory, make_files
from lightning_ssd.uncopied import Uncopied

T = TypeVar("T")

_TIMEOUT_SECONDS = 120.0
"""Time in which other ranks connect, after all have begun to."""

_FAILURE_SECONDS = 3.0
"""Time in which the failure of a rank is known, after a collective has ended with an error."""


class Ranks(Uncopied):
    """Shared memory and messages of the ranks of one host. As a context, it ends with the context's error, if any.

    Args:
        messages: messages of this rank; owned.
        memory: memory that all ranks map, of each rank.
        sums, values: collectives with other hosts, of the thread that sums gradients and of the training thread; owned.
            None: there is one host.
    """

    def __init__(
        self,
        messages: RankMessages,
        memory: Sequence[RankMemory],
        sums: HostGroup | None = None,
        values: HostGroup | None = None,
    ) -> None:
        self.messages = messages
        self.memory = memory
        self.sums = sums
        self.values = values

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
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(_socket())
            listener.bind(f"\0lightning_ssd-{key}-{rank}")
            listener.listen(size)
            dist.barrier()
            sockets: dict[int, socket.socket] = {}
            try:
                for other in range(rank):
                    connection = sockets[other] = undo.enter_context(_socket())
                    connection.connect(f"\0lightning_ssd-{key}-{other}")
                    _check_user(connection)
                    connection.send(_RANK.pack(rank))
                while len(sockets) < size - 1:
                    connection = undo.enter_context(listener.accept()[0])
                    connection.settimeout(_TIMEOUT_SECONDS)
                    _check_user(connection)
                    sockets[_RANK.unpack(connection.recv(_RANK.size))[0]] = connection
                memory = _share_memory(rank, sockets)
            except OSError as error:
                raise RankError(f"the ranks of this host could not connect: {error}") from error
            for connection in sockets.values():
                connection.settimeout(None)
            messages = RankMessages(rank, sockets, members[0], timeout)
            listener.close()
            undo.pop_all()
        if len(hosts) == 1:
            return cls(messages, memory)
        sums, values = (HostGroup.connect(list(hosts.values()), timeout) for _ in range(2))
        return cls(messages, memory, sums, values)

    @property
    def rank(self) -> int:
        """Number of this rank on its host."""
        return self.messages.rank

    @property
    def size(self) -> int:
        """Number of ranks of this host."""
        return self.messages.size

    @property
    def world_size(self) -> int:
        """Number of ranks of all hosts."""
        return self.size * (1 if self.values is None else self.values.size)

    def exchange(self, content: T) -> list[T]:
        """Sends `content` to all ranks, and returns what those of all hosts have sent in the same call, by global rank.

        Raises:
            RankError: another rank has failed or ended.
        """
        of_host = self.messages.exchange(content)
        if self.values is None:
            return of_host
        of_hosts = [self.values.exchange(own) for own in of_host]
        return [of_hosts[rank][host] for host in range(self.values.size) for rank in range(self.size)]

    def check_agreement(self, items: Sequence[tuple[str, str]]) -> None:
        """Raises an error on all ranks if their names and values differ, which all give in the same order.

        Raises:
            RankError: the first difference, by name, with two values and their ranks.
        """
        first, *others = self.exchange([": ".join(item) for item in items])
        for rank, other in enumerate(others, 1):
            for one, found in zip_longest(first, other, fillvalue="nothing more"):
                if one != found:
                    raise RankError(
                        f"rank 0 and rank {rank} train differently: {one!r} on rank 0, {found!r} on rank {rank}. Build "
                        "the same model, optimizers and Trainer on all ranks."
                    )

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Replaces tensors on the device by those of global rank 0; called by all ranks, with the same shapes.

        They are sent as bytes, because no backend knows all dtypes.
        """
        for tensor in tensors:
            values = tensor.detach().contiguous()
            with self._named_failure():
                dist.broadcast(values.reshape(-1).view(torch.uint8), 0)
            if not tensor.is_contiguous():
                tensor.copy_(values)

    def sum(self, values: Tensor) -> None:
        """Replaces values on the device by their sum over all ranks; called by all ranks."""
        with self._named_failure():
            dist.all_reduce(values)

    @contextlib.contextmanager
    def _named_failure(self) -> Iterator[None]:
        """Raises the first failure of a rank of this host, if a collective in the context ends with an error."""
        try:
            with named_failure():
                yield
        except RankError:
            if self.messages.failed.wait(_FAILURE_SECONDS):  # gloo may notice the end of a process before `messages`
                self.messages.failed.result()
            raise

    def close(self) -> None:
        """Ends the messages, and the collectives with other hosts if no rank has failed."""
        self.messages.close()
        if not self.messages.failed.done():
            for group in (self.sums, self.values):
                if group is not None:
                    group.close()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.messages.close(error)


_RANK = struct.Struct("<I")


def _socket() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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
