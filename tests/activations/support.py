"""What the tests of the tensor cache share."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_ssd.activations import ActivationOffloader, OffloadConfig, make_offloader
from lightning_ssd.activations.ssd import SSDTier

CPU = torch.device("cpu")
KIB, MIB = 2**10, 2**20

Hooks = Callable[[], AbstractContextManager[Any]]
Forward = Callable[..., Tensor]


@contextmanager
def open_cache(path: Path, **arguments: Any) -> Iterator[ActivationOffloader]:
    """A cache that offloads all it may: its window keeps back only what backward wants first. Closed at the end."""
    defaults = {"offload": 1.0, "min_bytes": 1, "staging_memory": "16MiB", "ssd_capacity": "4MiB"}
    cache = make_offloader(OffloadConfig(**{**defaults, **arguments}), CPU, default_path=path)
    cache.window_bytes = 0
    try:
        yield cache
    finally:
        cache.close()


def ssd(cache: ActivationOffloader) -> SSDTier:
    tier = cache.tiers["ssd"]
    assert isinstance(tier, SSDTier)
    return tier


def wait_for_writes(cache: ActivationOffloader) -> None:
    """Returns when no store holds staging memory any more: what is wanted back from here on is read from the file."""
    staging = ssd(cache).staging
    staging.acquire(staging.budget).release()


def eventually(condition: Callable[[], bool]) -> None:
    """Returns when I/O threads, which nobody can join, have made `condition` true."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(1e-3)


def gradients(forward: Forward, leaves: Sequence[Tensor], hooks: Hooks = nullcontext) -> list[Tensor]:
    """The gradients of `forward` at fresh leaves with the values of `leaves`."""
    fresh = [
        torch.nn.Parameter(leaf.detach().clone())
        if isinstance(leaf, torch.nn.Parameter)
        else leaf.detach().clone().requires_grad_()
        for leaf in leaves
    ]
    with hooks():
        loss = forward(*fresh)
    loss.backward()
    return [leaf.grad for leaf in fresh if leaf.grad is not None]


def assert_same_gradients(cache: ActivationOffloader, forward: Forward, *leaves: Tensor) -> int:
    """Proves that a micro-batch of `forward` has plain autograd's gradients; returns the bytes that it stored."""
    torch.manual_seed(0)
    expected = gradients(forward, leaves)
    torch.manual_seed(0)
    before = cache.stats().stored
    cache.begin_micro_batch()
    actual = gradients(forward, leaves, cache.hooks)
    assert len(actual) == len(expected) > 0
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)
    return cache.stats().stored - before
