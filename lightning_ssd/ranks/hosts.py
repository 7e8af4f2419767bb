"""`HostGroup`: collectives of a rank with the ranks of the same number on other hosts."""

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from lightning_ssd.ranks.messages import RankError
from lightning_ssd.uncopied import Uncopied

T = TypeVar("T")


class HostGroup(Uncopied):
    """Collectives of gloo, on tensors in host memory, which the ranks of a number call in the same order on all hosts.

    Errors of gloo, such as that a process has ended, are raised as RankError.

    Args:
        group: process group of these ranks, in the order of hosts.

    Attributes:
        size: number of hosts.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size = group.size()

    @classmethod
    def connect(cls, hosts: Sequence[Sequence[int]], timeout: timedelta) -> "HostGroup":
        """Makes the groups of all ranks, and returns that of this rank; called by all ranks.

        Args:
            hosts: global ranks of each host.
            timeout: time in which another host has to answer; the end of its process is noticed at once.
        """
        groups = [dist.new_group(list(ranks), timeout, backend="gloo") for ranks in zip(*hosts, strict=True)]
        return next(cls(group) for group in groups if group != dist.GroupMember.NON_GROUP_MEMBER)

    def exchange(self, content: T) -> list[T]:
        """Returns the contents of all hosts, which can be pickled."""
        found = [content] * self.size
        with named_failure():
            dist.all_gather_object(found, content, self._group)
        return found

    def sum(self, values: Tensor) -> None:
        """Replaces values by their sum over hosts, whose bits are the same on all of them."""
        with named_failure():
            dist.all_reduce(values, dist.ReduceOp.SUM, self._group)

    def broadcast(self, values: Tensor) -> None:
        """Replaces values by those of the first host."""
        with named_failure():
            dist.broadcast(values, group=self._group, group_src=0)

    def close(self) -> None:
        """Ends the group, no collective of which runs."""
        dist.destroy_process_group(self._group)


@contextlib.contextmanager
def named_failure() -> Iterator[None]:
    """Raises the error of a collective in the context as RankError."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            f"a process of another host has ended, or is busy for longer than `ddp={{'timeout': ...}}` allows: {error}"
        ) from error
