"""Ranks that are threads of one process."""

from multiprocessing import Pipe
from multiprocessing.connection import Connection

from lightning_ssd.ranks import RankMessages


def connect(size: int) -> list[RankMessages]:
    """Returns the messages of each of several ranks, which the caller closes."""
    pipes: list[dict[int, Connection]] = [{} for _ in range(size)]
    for high in range(size):
        for low in range(high):
            pipes[low][high], pipes[high][low] = Pipe()
    return [RankMessages(rank, connections) for rank, connections in enumerate(pipes)]
