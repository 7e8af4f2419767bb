"""Ranks that are threads of one process."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_ssd.activations import OffloadConfig
from lightning_ssd.model_states import MetaTensors, ModelStates, Setup, StatesConfig, make_model_states
from lightning_ssd.ranks import RankMemory, RankMessages, Ranks
from lightning_ssd.ranks.rank_memory import make_files

T = TypeVar("T")

WIDTH = 64
UNITS = 8


def connect(size: int) -> list[RankMessages]:
    """Returns the messages of each of several ranks, which the caller closes."""
    pipes: list[dict[int, Connection]] = [{} for _ in range(size)]
    for high in range(size):
        for low in range(high):
            pipes[low][high], pipes[high][low] = Pipe()
    return [RankMessages(rank, connections) for rank, connections in enumerate(pipes)]


def make_block() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))


def build_on_ranks(
    path: Path, host_memory: Sequence[str], look: Callable[[ModelStates], T], **settings: Any
) -> list[T]:
    """Has each rank build the states of a model of equal units, and returns what `look` returns of them."""
    size = len(host_memory)
    messages, descriptors = connect(size), make_files(size)

    def make(rank: int) -> T:
        model = nn.Sequential(*(make_block() for _ in range(UNITS)))
        setup = Setup(
            config=StatesConfig("auto", "auto", None, "optimized", "fp32", "auto", False),
            storage=OffloadConfig(path, host_memory=host_memory[rank], offload="none"),
            default_path=path,
            autocast=None,
            clip_norm=lambda: False,
            clip_value=lambda: None,
            defer_to_user_hooks=False,
            world_size=size,
            **settings,
        )
        states = make_model_states(
            model,
            [torch.optim.AdamW(model.parameters())],
            set(model.parameters()),
            MetaTensors(set(), set()),
            torch.device("cpu"),
            setup,
            connected=Ranks(messages[rank], [RankMemory(descriptor) for descriptor in descriptors]),
        )
        try:
            return look(states)
        finally:
            states.close()

    try:
        with ThreadPoolExecutor(size) as executor:
            return list(executor.map(make, range(size)))
    finally:
        for one in messages:
            one.close()
        for descriptor in descriptors:
            os.close(descriptor)
