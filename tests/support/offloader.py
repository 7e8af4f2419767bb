"""What the tests of the activation offloader share."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ssd.activations import (
    ActivationOffloader,
    ForwardGraph,
    OffloadConfig,
    PlanMode,
    Saved,
    make_offloader,
    make_schedule,
)
from lightning_ssd.activations.ssd import SSDTier
from lightning_ssd.profiling import TraceMode
from lightning_ssd.types import Choice

CPU = torch.device("cpu")
KIB, MIB = 2**10, 2**20

Hooks = Callable[[], AbstractContextManager[Any]]
Forward = Callable[..., Tensor]


@contextmanager
def open_cache(path: Path, **arguments: Any) -> Iterator[ActivationOffloader]:
    """An offloader of all that may be: its window keeps only what backward needs first. Closed at the end."""
    defaults = {"offload": 1.0, "min_bytes": 1, "staging_memory": "16MiB", "ssd_capacity": "4MiB"}
    cache = make_offloader(OffloadConfig(**{**defaults, **arguments}), CPU, default_path=path)
    change_policy(cache, window_bytes=0)
    try:
        yield cache
    finally:
        cache.close()


def change_policy(offloader: ActivationOffloader, **rules: Any) -> None:
    """Has `offloader` follow other `rules`, which are fields of its policy."""
    offloader.run(replace(offloader.policy, **rules))


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


class Directed:
    """Forwards of a cache, one recorded and the others under directions.

    Args:
        cache: for all of them.
        modules: the units.
    """

    def __init__(self, cache: ActivationOffloader, modules: Sequence[nn.Module] = ()) -> None:
        self.cache = cache
        self.units = [[module] for module in modules]
        self.graph = ForwardGraph()

    def record(self) -> AbstractContextManager[None]:
        self.recorder = TraceMode(self.units, CPU)
        self.cache.begin_micro_batch()
        change_policy(self.cache, mode=self.recorder, on_saved=self.recorder.saved)
        return self.cache.hooks()

    def end_record(self) -> list[Saved]:
        self.cache.end_backward()
        change_policy(self.cache, mode=None, on_saved=None)
        self.recorder.finish()
        self.recorder.close()
        self.graph = self.recorder.graph
        return self.graph.saved(self.cache.min_bytes)

    def check(self) -> AbstractContextManager[None]:
        """A forward, and a backward, that try what might be recomputed, as `SwapPlanner` does."""
        again: dict[int, Choice] = {
            item.buffer: "recompute" for item in self.graph.saved(self.cache.min_bytes) if item.again
        }
        self._make_director(again)
        self.director.checking = True
        change_policy(self.cache, on_saved=self.director.saved, on_unpacked=self.director.check)
        return self.cache.hooks()

    def direct(self, choices: dict[int, Choice]) -> AbstractContextManager[None]:
        self._make_director(choices)
        return self.cache.hooks()

    def end_direct(self) -> None:
        self.cache.end_backward()
        change_policy(self.cache, mode=None, on_saved=None, on_unpacked=None)
        self.director.close()

    def _make_director(self, choices: dict[int, Choice]) -> None:
        chains = {item.buffer: item.chain for item in self.graph.saved(self.cache.min_bytes)
                  if choices.get(item.buffer) == "recompute"}  # fmt: skip
        self.director = PlanMode(self.units, CPU, self.cache.pack, self.cache.unpack)
        self.director.program = make_schedule(self.graph, choices, chains)
        self.cache.begin_micro_batch()
        change_policy(self.cache, mode=self.director)
