"""Memory that ranks share, which are threads of one process here."""

import os
import socket

import pytest
import torch
from torch import nn

from lightning_ssd.model_states.placement import RankStates
from lightning_ssd.model_states.stores import Layout
from lightning_ssd.model_states.units import FlatParameter
from lightning_ssd.ranks import RankMemory, RankMessages, Ranks
from lightning_ssd.ranks.rank_memory import make_file
from lightning_ssd.storage import Slab


def test_a_rank_page_locks_its_own_gradients_which_it_unlocks(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Slab] = []
    monkeypatch.setattr(Slab, "pin", lambda slab: pinned.append(slab))
    descriptor, nbytes = make_file()
    for rank, connection in enumerate(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)):
        messages = RankMessages(rank, {1 - rank: connection})
        flat = FlatParameter("flat", [("weight", nn.Parameter(torch.zeros(8)))], torch.float32, torch.device("cpu"))
        memory = RankMemory(descriptor, nbytes)
        states = RankStates(
            Ranks(messages, memory), [Layout(flat, False, ("exp_avg",), steps=True, versions=1)], pin=True
        )
        memory.pin()
        assert pinned == [states.gradients[flat].copies[rank]]
        pinned.clear()
        messages.close()
    os.close(descriptor)
