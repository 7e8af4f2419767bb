"""Helpers of the tests of the activation offloader."""

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
    UnitCall,
    make_offloader,
    make_schedule,
)
from lightning_ssd.activations.ssd import SSDTier
from lightning_ssd.profiling import TraceMode
from lightning_ssd.types import Choice, InputChoice
from tests.support.compare import assert_same

CPU = torch.device("cpu")
KIB, MIB = 2**10, 2**20

Hooks = Callable[[], AbstractContextManager[Any]]
Forward = Callable[..., Tensor]


@contextmanager
def open_offloader(path: Path, **arguments: Any) -> Iterator[ActivationOffloader]:
    """Yields an offloader of all storages but the one that backward needs first, and closes it."""
    defaults = {"offload": 1.0, "min_bytes": 1, "staging_memory": "16MiB", "ssd_capacity": "4MiB"}
    offloader = make_offloader(OffloadConfig(**{**defaults, **arguments}), CPU, default_path=path)
    change_policy(offloader, window_bytes=0)
    try:
        yield offloader
    finally:
        offloader.close()


def change_policy(offloader: ActivationOffloader, **rules: Any) -> None:
    """Replaces `rules`, fields of the policy of `offloader`."""
    offloader.run(replace(offloader.policy, **rules))


def ssd(offloader: ActivationOffloader) -> SSDTier:
    tier = offloader.tiers["ssd"]
    assert isinstance(tier, SSDTier)
    return tier


def wait_for_writes(offloader: ActivationOffloader) -> None:
    """Returns when no store uses staging memory any more, so that later loads read the file."""
    staging = ssd(offloader).staging
    staging.acquire(staging.budget).release()


def eventually(condition: Callable[[], bool]) -> None:
    """Returns when I/O threads, which can't be joined, have made `condition` true."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(1e-3)


def gradients(forward: Forward, leaves: Sequence[Tensor], hooks: Hooks = nullcontext) -> list[Tensor]:
    """Returns the gradients of `forward` at new leaves with the values of `leaves`."""
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


def assert_same_gradients(offloader: ActivationOffloader, forward: Forward, *leaves: Tensor) -> int:
    """Asserts that a micro-batch of `forward` has plain autograd's gradients; returns its stored bytes."""
    torch.manual_seed(0)
    expected = gradients(forward, leaves)
    torch.manual_seed(0)
    before = offloader.stats().stored
    offloader.begin_micro_batch()
    actual = gradients(forward, leaves, offloader.hooks)
    assert len(actual) == len(expected) > 0
    assert_same(actual, expected)
    return offloader.stats().stored - before


class Directed:
    """Forwards of an offloader, one recorded and the others under plans.

    Args:
        offloader: the offloader of all forwards.
        modules: module of each unit.
        save_weights: whether plain unit calls save references to weights.
    """

    def __init__(
        self, offloader: ActivationOffloader, modules: Sequence[nn.Module] = (), *, save_weights: bool = False
    ) -> None:
        self.offloader = offloader
        self._save_weights = save_weights
        self.units = [[module] for module in modules]
        self.graph = ForwardGraph()

    def record(self) -> AbstractContextManager[None]:
        self.recorder = TraceMode(self.units, CPU)
        self.offloader.begin_micro_batch()
        change_policy(self.offloader, mode=self.recorder, on_saved=self.recorder.on_saved)
        return self.offloader.hooks()

    def end_record(self) -> list[Saved]:
        self.offloader.end_backward()
        change_policy(self.offloader, mode=None, on_saved=None)
        self.recorder.finish()
        self.recorder.close()
        self.graph = self.recorder.graph
        return self.graph.saved(self.offloader.min_bytes)

    def check(self, checkpointed: frozenset[UnitCall] = frozenset()) -> AbstractContextManager[None]:
        """Returns the context of a forward whose recomputable buffers are checked, as by `SwapPlanner`."""
        choices: dict[int, Choice] = {
            item.buffer: "recompute" for item in self.graph.saved(self.offloader.min_bytes) if item.recomputable
        }
        self._make_plan_mode(choices, checkpointed)
        self.plan_mode.checking = True
        change_policy(self.offloader, on_saved=self.plan_mode.on_saved, on_unpacked=self.plan_mode.check)
        return self.offloader.hooks()

    def direct(
        self,
        choices: dict[int, Choice],
        checkpointed: frozenset[UnitCall] = frozenset(),
        inputs: InputChoice = "keep",
    ) -> AbstractContextManager[None]:
        self._make_plan_mode(choices, checkpointed, inputs)
        return self.offloader.hooks()

    def end_direct(self) -> None:
        self.offloader.end_backward()
        change_policy(self.offloader, mode=None, on_saved=None, on_unpacked=None)
        self.plan_mode.close()

    def _make_plan_mode(
        self,
        choices: dict[int, Choice],
        checkpointed: frozenset[UnitCall] = frozenset(),
        inputs: InputChoice = "keep",
    ) -> None:
        self.plan_mode = PlanMode(self.units, self.offloader)
        self.plan_mode.schedule = make_schedule(
            self.graph,
            self.graph.saved(self.offloader.min_bytes),
            choices,
            plain_calls=True,
            save_weights=self._save_weights,
            checkpointed=dict.fromkeys(checkpointed, inputs),
        )
        self.offloader.begin_micro_batch()
        change_policy(self.offloader, mode=self.plan_mode)
