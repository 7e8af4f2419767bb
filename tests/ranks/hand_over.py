"""Hands shared memory from rank to rank by messages, many times and with random delays."""

import contextlib
import random

import torch
from torch import Tensor

from lightning_ssd.ranks import Ranks, Topic
from lightning_ssd.waits import wait_for

NUMEL, TURNS = 4096, 2000


def torn_hand_overs() -> int:
    """Returns how often a rank has read other values than those that a message was about; called by all ranks.

    In each turn, every rank writes its slab, rank 0 writes the sum of all slabs, and every rank reads the sum.
    """
    torn = 0
    with contextlib.closing(Ranks.connect(0)) as ranks:
        slabs = [memory.floats(NUMEL) for memory in ranks.memory]
        total = ranks.memory[0].floats(NUMEL)
        messages, delays = ranks.messages, random.Random(ranks.rank)
        for turn in range(TURNS):
            _work(delays)
            slabs[ranks.rank].fill_(turn + ranks.rank)
            messages.post(Topic.READY, 0, turn, b"", [0] if ranks.rank else [])
            if ranks.rank == 0:
                wait_for(messages.collect(Topic.READY, 0, turn, messages.others), "slabs")
                torn += sum(_differs(slab, turn + rank) for rank, slab in enumerate(slabs))
                _work(delays)
                torch.sum(torch.stack(slabs), 0, out=total)
                messages.post(Topic.SUM, 0, turn, b"", messages.others)
            else:
                wait_for(messages.collect(Topic.SUM, 0, turn, [0]), "the sum")
            torn += _differs(total, sum(turn + rank for rank in range(ranks.size)))
    return torn


def _differs(values: Tensor, expected: int) -> bool:
    return bool((values != expected).any())


def _work(delays: random.Random) -> None:
    """Computes for some time, mostly none."""
    for _ in range(int(delays.paretovariate(1.0)) - 1 & 1023):
        pass
