"""Values of rank 0 on other ranks, which are threads of one process here."""

import os
import socket
import threading

import torch

from lightning_ssd.model_states.weights import RankValues
from lightning_ssd.ranks import RankMemory, RankMessages, Ranks
from lightning_ssd.ranks.rank_memory import make_files


def test_rank_0_changes_its_values_when_the_other_rank_has_read_them() -> None:
    (descriptor,) = make_files(1)
    messages = [
        RankMessages(rank, {1 - rank: connection})
        for rank, connection in enumerate(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    ]
    buffers = [torch.zeros(1), torch.zeros(1)]
    source, reader = (
        RankValues(Ranks(one, [RankMemory(descriptor)]), 1, lambda buffer=buffer: [buffer])
        for one, buffer in zip(messages, buffers, strict=True)
    )
    os.close(descriptor)
    buffers[0].fill_(1)
    source.take()
    buffers[0].fill_(2)
    ahead = threading.Thread(target=source.take)
    ahead.start()
    while ahead.is_alive() and not messages[0].pending():  # until rank 0 has written, or waits
        pass
    for expected in (1, 2):
        reader.take()
        assert buffers[1].item() == expected
    ahead.join()
    for one in messages:
        one.close()
