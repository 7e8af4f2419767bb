"""`HostGroup`: collectives of a rank with the ranks of the same number on other hosts."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ssd.ranks.messages import RankError
from lightning_ssd.uncopied import Uncopied


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

    def exchange(self, content: bytes) -> list[bytes]:
        """Returns the contents of all hosts."""
        longest = int(self.maximum(torch.tensor([len(content)]))[0])
        padded = len(content).to_bytes(8, "little") + content.ljust(longest, b"\0")
        own = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.size)]
        self._wait(dist.all_gather(found, own, self._group, async_op=True))
        parts = [one.numpy().tobytes() for one in found]
        return [part[8 : 8 + int.from_bytes(part[:8], "little")] for part in parts]

    def maximum(self, values: Tensor) -> Tensor:
        """Replaces values by their maximum over hosts, and returns them."""
        self._wait(dist.all_reduce(values, dist.ReduceOp.MAX, self._group, async_op=True))
        return values

    def sum(self, values: Tensor) -> None:
        """Replaces values by their sum over hosts, whose bits are the same on all of them."""
        self._wait(dist.all_reduce(values, dist.ReduceOp.SUM, self._group, async_op=True))

    def broadcast(self, values: Tensor) -> None:
        """Replaces values by those of the first host."""
        source = dist.get_global_rank(self._group, 0)
        self._wait(dist.broadcast(values, source, self._group, async_op=True))

    def close(self) -> None:
        """Ends the group, no collective of which runs."""
        dist.destroy_process_group(self._group)

    @staticmethod
    def _wait(work: dist.Work | None) -> None:
        assert work is not None
        try:
            work.wait()
        except RuntimeError as error:
            raise RankError(
                "a process of another host has ended, or is busy for longer than `ddp={'timeout': ...}` allows: "
                f"{error}"
            ) from error
