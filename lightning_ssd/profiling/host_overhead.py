"""Measures the host overhead of a plan: forwards and backwards of a small transformer, with and without a plan."""

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_ssd.activations import (
    ActivationOffloader,
    Arguments,
    CheckpointedCall,
    EmptyCaches,
    HostTier,
    KeepAll,
    OffloadPolicy,
    PlanMode,
    Saved,
    UnitProof,
    around_call,
    make_schedule,
)
from lightning_ssd.device import make_copy_engine
from lightning_ssd.planning import HostOverhead
from lightning_ssd.profiling.trace_mode import TraceMode
from lightning_ssd.storage import PinnedPool
from lightning_ssd.types import Choice

BLOCKS, HEADS, HIDDEN, TOKENS = 4, 2, 16, 4
"""Shape of the transformer, so small that launching its operators takes longer than executing them."""

HOST_BYTES = 2**21
"""Bytes of host memory for its activations."""

REPEATS = 9
"""Measured forwards and backwards under each plan."""


@functools.cache
def measure_host_overhead(device: torch.device) -> HostOverhead:
    """Measures the host overhead of plans on `device`. The result is cached for the process."""
    states = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(states), torch.inference_mode(False), torch.enable_grad():
        probe = _Probe(device)
        try:
            return probe.measure()
        finally:
            probe.close()


class _Block(nn.Module):
    """A block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.attend = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.project = nn.Linear(HIDDEN, HIDDEN)
        self.widen = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.narrow = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, value: Tensor) -> Tensor:
        query, key, values = (
            part.view(1, TOKENS, HEADS, -1).transpose(1, 2)
            for part in self.attend(self.norms[0](value)).split(HIDDEN, dim=2)
        )
        attended = torch.softmax(query @ key.transpose(2, 3), dim=3) @ values
        value = value + self.project(attended.transpose(1, 2).reshape(1, TOKENS, HIDDEN))
        wide: Tensor = functional.gelu(self.widen(self.norms[1](value)), approximate="tanh")
        narrow: Tensor = self.narrow(wide)
        return value + narrow


class _HostSeconds(NamedTuple):
    """Host seconds of a forward and of a backward."""

    forward: float
    backward: float


class _Probe:
    """The transformer, and an activation offloader for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._model = nn.Sequential(*(_Block() for _ in range(BLOCKS))).to(device)
        self._calls = [_Calls(block) for block in self._model]
        self._value = torch.zeros(1, TOKENS, HIDDEN, device=device, requires_grad=True)
        pool = PinnedPool(HOST_BYTES, pin=device.type == "cuda")
        copies = make_copy_engine(device)  # last: it starts threads
        # Without a prefetch window, backward finds every offloaded tensor in its tier.
        policy = OffloadPolicy(KeepAll(), window_bytes=0)
        self._offloader = ActivationOffloader(copies, {"host": HostTier(pool, copies)}, policy, min_bytes=1)
        self._plan_mode = PlanMode([[self._model]], self._offloader)

    def close(self) -> None:
        for calls in self._calls:
            calls.close()
        self._plan_mode.close()
        self._offloader.close()

    def measure(self) -> HostOverhead:
        """Returns the overhead: differences of host seconds between plans, per operation or saved tensor."""
        tracer = TraceMode([[self._model]], self._device, timed=False)
        policy = self._offloader.policy
        self._offloader.run(replace(policy, mode=tracer, on_saved=tracer.on_saved))
        self._run(self._offloader.hooks)
        tracer.close()
        self._offloader.run(replace(policy, mode=self._plan_mode))
        graph = tracer.graph
        saved = graph.saved(self._offloader.min_bytes)

        def under(choice: Choice, items: Sequence[Saved]) -> Callable[[], AbstractContextManager[object]]:
            choices: Mapping[int, Choice] = {item.buffer: choice if item in items else "keep" for item in saved}
            schedule = make_schedule(graph, saved, choices)

            def apply() -> AbstractContextManager[object]:
                self._plan_mode.schedule = schedule
                return self._offloader.hooks()

            return apply

        recomputable = [item for item in saved if item.recomputable]
        replayed = {index for item in recomputable for index in item.recompute_ops}
        plain, kept, recomputed, offloaded, dispatched, checkpointed = self._compare(
            contextlib.nullcontext,
            under("keep", []),
            under("recompute", recomputable),
            under("host", saved),
            lambda: self._plan_mode,
            self._checkpoint,
        )
        return HostOverhead(
            dispatch=_share(dispatched.forward - plain.forward, len(graph.operations)),
            pack=_share(sum(kept) - dispatched.forward - plain.backward, len(saved)),
            record=_share(recomputed.forward - kept.forward, len(replayed)),
            replay=_share(recomputed.backward - kept.backward, len(replayed)),
            offload=_share(offloaded.forward - kept.forward, len(saved)),
            prefetch=_share(offloaded.backward - kept.backward, len(saved)),
            checkpoint=_share(checkpointed.forward - plain.forward, len(saved)),
            rerun=_share(checkpointed.backward - plain.backward - plain.forward, len(saved)),
        )

    @contextlib.contextmanager
    def _checkpoint(self) -> Iterator[None]:
        """Runs the forward of each block again in backward."""
        for calls in self._calls:
            calls.checkpointed = True
        try:
            yield
        finally:
            for calls in self._calls:
                calls.checkpointed = False

    def _compare(self, *contexts: Callable[[], AbstractContextManager[object]]) -> list[_HostSeconds]:
        """Returns the host seconds of a forward inside each of the contexts, and of its backward.

        The contexts alternate, so that a temporary slowdown of the host affects all of them.
        """
        rounds = [[self._run(context) for context in contexts] for _ in range(REPEATS)]
        # The lower quartile excludes rounds in which other threads ran.
        return [
            _HostSeconds(*(statistics.quantiles(seconds)[0] for seconds in zip(*of_context, strict=True)))
            for of_context in zip(*rounds, strict=True)
        ]

    def _run(self, context: Callable[[], AbstractContextManager[object]]) -> _HostSeconds:
        """Runs a forward inside a context, and its backward; the device executes each of them before the next."""
        self._offloader.begin_micro_batch()
        self._synchronize()
        forward_start = perf_counter()
        with context():
            result = self._model(self._value)
        forward_end = perf_counter()
        self._synchronize()
        backward_start = perf_counter()
        result.backward(self._value.detach())
        backward_end = perf_counter()
        self._offloader.end_backward()
        self._synchronize()
        return _HostSeconds(forward_end - forward_start, backward_end - backward_start)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _Calls:
    """The calls of a block, which are checkpointed as by a plan while `checkpointed` is True."""

    def __init__(self, block: nn.Module) -> None:
        self.checkpointed = False
        self._block = block
        self._caches = EmptyCaches()
        self._running: CheckpointedCall | None = None
        self._remove_hooks = around_call(block, self._begin, self._end)
        self._proof = UnitProof(block)

    def close(self) -> None:
        """Removes the hooks, which the block and the proof's state own, and which own both."""
        self._remove_hooks()
        self._proof.forget()

    def _begin(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        if self.checkpointed:
            state = self._proof.state()
            assert state is not None
            self._running = CheckpointedCall(self._block, Arguments(args, kwargs, self._caches), state)
            self._running.begin()

    def _end(self, output: object) -> None:
        if self._running is not None:
            self._running.end()
            self._running = None


def _share(seconds: float, count: int) -> float:
    """Returns the seconds of one of `count`, at least 0: differences of times may be negative."""
    return max(0.0, seconds) / count if count else 0.0
