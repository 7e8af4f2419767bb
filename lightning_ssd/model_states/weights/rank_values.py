"""Tensors that each rank has, with the values of rank 0: parameters that are not offloaded at first, and buffers."""

import itertools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lightning_ssd.ranks import Ranks, Topic
from lightning_ssd.waits import wait_for

_ALIGNMENT = 16
"""Alignment of each tensor in bytes, a multiple of the size of every dtype."""


class RankValues:
    """Copies the values of rank 0, that of the first host, to the other ranks.

    Ownership: the shared memory belongs to rank 0 until it posts `Topic.VALUES`, and then to the others, each of which
    gives it back by `Topic.READ`. No other message does: rank 0 may end a backward before another rank begins its
    forward.

    Args:
        ranks: memory and messages of this rank.
        number: number of the tensors in messages.
        tensors: returns the tensors, in the same order on all ranks.
    """

    def __init__(self, ranks: Ranks, number: int, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._messages = ranks.messages
        self._hosts = ranks.values
        self._number = number
        self._tensors = tensors
        self._nbytes = sum(map(_aligned, tensors()))
        self._memory = ranks.memory[0].allocate(max(1, self._nbytes)).tensor
        self._turn = 0

    @torch.no_grad()
    def take(self) -> None:
        """Makes the values those of rank 0; called by all ranks.

        Raises:
            RuntimeError: the bytes of the tensors have changed.
            RankError: another rank has failed.
        """
        if not self._nbytes:
            return
        tensors = list(self._tensors())
        if sum(map(_aligned, tensors)) != self._nbytes:
            raise RuntimeError(
                "buffers of the model were added or resized, which several devices can't follow. Make them before `fit`"
            )
        messages, number, before = self._messages, self._number, self._turn
        is_source = messages.rank == 0
        self._turn += 1
        if not is_source:
            wait_for(messages.collect(Topic.VALUES, number, self._turn, [0]), "values of rank 0")
        elif before:
            wait_for(messages.collect(Topic.READ, number, before, messages.others), "other ranks")
        starts = itertools.accumulate(map(_aligned, tensors), initial=0)
        shared = [
            self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=False)
        ]
        if is_source:
            for target, tensor in zip(shared, tensors, strict=True):
                target.copy_(tensor)
            if self._hosts is not None:
                self._hosts.broadcast(self._memory)
            messages.post(Topic.VALUES, number, self._turn, b"", messages.others)
        if not is_source or self._hosts is not None:
            for target, tensor in zip(shared, tensors, strict=True):
                tensor.copy_(target)
        if not is_source:
            messages.post(Topic.READ, number, self._turn, b"", [0])


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
