"""Buffers of modules, such as the statistics of batch norms: those of rank 0, on all ranks."""

import torch
from torch import Tensor, nn

from lightning_ssd.ranks import Ranks, Topic
from lightning_ssd.waits import wait_for

_ALIGNMENT = 16
"""Alignment of each buffer in bytes, a multiple of the size of every dtype."""


class RankBuffers:
    """Copies the buffers of rank 0 to the other ranks, before a forward, as torch's DDP does.

    Ownership: the shared memory is written by rank 0, and read by others from its message on. Rank 0 writes it again
    after a reduction of gradients, which each rank enters when it has read it.

    Args:
        ranks: memory and messages of this rank.
        module: the model, whose buffers are initialized.
    """

    def __init__(self, ranks: Ranks, module: nn.Module) -> None:
        self._messages = ranks.messages
        self._module = module
        self._nbytes = sum(_aligned(buffer) for buffer in module.buffers())
        self._memory = ranks.memory.allocate(max(1, self._nbytes)).tensor
        self._turn = 0

    @torch.no_grad()
    def take(self) -> None:
        """Makes the buffers those of rank 0; called by all ranks.

        Raises:
            RuntimeError: the bytes of buffers have changed since training began.
            RankError: another rank has failed.
        """
        if not self._nbytes:
            return
        buffers = list(self._module.buffers())
        if sum(map(_aligned, buffers)) != self._nbytes:
            raise RuntimeError("buffers of the model were added or resized, which several devices can't follow")
        is_source = self._messages.rank == 0
        self._turn += 1
        if not is_source:
            wait_for(self._messages.collect(Topic.BUFFERS, 0, self._turn, [0]), "the buffers of rank 0")
        start = 0
        for buffer in buffers:
            shared = self._memory[start : start + buffer.nbytes].view(buffer.dtype).view(buffer.shape)
            if is_source:
                shared.copy_(buffer)
            else:
                buffer.copy_(shared)
            start += _aligned(buffer)
        if is_source:
            self._messages.post(Topic.BUFFERS, 0, self._turn, b"", self._messages.others)


def _aligned(buffer: Tensor) -> int:
    return -(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT
