"""Memory that ranks share, which are threads of one process here."""

import os
from multiprocessing import Pipe

import pytest
import torch
from torch import nn

from lightning_ssd.model_states.placement import RankStates
from lightning_ssd.model_states.stores import Layout
from lightning_ssd.model_states.units import FlatParameter
from lightning_ssd.ranks import RankMemory, RankMessages, Ranks
from lightning_ssd.ranks.rank_memory import make_files
from lightning_ssd.storage import Slab


def test_a_rank_commits_and_page_locks_its_own_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Slab] = []
    monkeypatch.setattr(Slab, "pin", lambda slab: pinned.append(slab))
    descriptors = make_files(2)
    for rank, connection in enumerate(Pipe()):
        messages = RankMessages(rank, {1 - rank: connection})
        flat = FlatParameter("flat", [("weight", nn.Parameter(torch.zeros(8)))], torch.float32, torch.device("cpu"))
        memory = [RankMemory(descriptor) for descriptor in descriptors]
        states = RankStates(
            Ranks(messages, memory), [Layout(flat, False, ("exp_avg",), steps=True, versions=1)], pin=True
        )
        states.commit()
        assert [os.fstat(descriptor).st_blocks > 0 for descriptor in descriptors] == [True, rank == 1]
        states.begin_fill()  # other ranks page-lock while rank 0 writes
        assert len(pinned) == rank
        states.pin()
        assert pinned == [states.gradients[flat].copies[rank]]
        pinned.clear()
        messages.close()
    for descriptor in descriptors:
        os.close(descriptor)


def test_private_values_change_for_one_rank_alone() -> None:
    (descriptor,) = make_files(1)
    ranks = [RankMemory(descriptor) for _ in range(2)]
    for memory in ranks:
        memory.floats(5)
    shared = [memory.floats(6).view(2, 3).T for memory in ranks]
    shared[0].copy_(torch.arange(6.0).view(3, 2))
    expected = shared[1].clone()
    private = [memory.private(values) for memory, values in zip(ranks, shared, strict=True)]
    assert private[0] is not None and private[1] is not None
    torch.testing.assert_close(private[0], expected, rtol=0, atol=0)
    private[0].zero_()
    for values in (*shared, private[1]):
        torch.testing.assert_close(values, expected, rtol=0, atol=0)
    os.close(descriptor)


def test_released_memory_takes_no_pages() -> None:
    (descriptor,) = make_files(1)
    memory = RankMemory(descriptor)
    released, kept = (memory.floats(3 * 4096) for _ in range(2))
    released.fill_(1)
    kept.fill_(1)
    before = os.fstat(descriptor).st_blocks
    memory.release(released)
    assert os.fstat(descriptor).st_blocks * 2 == before
    assert kept.eq(1).all()
    os.close(descriptor)
