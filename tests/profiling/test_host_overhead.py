"""The host overhead of a plan: measured without side effects, and attributed to the right activity."""

import gc
import threading
from collections.abc import Iterator
from dataclasses import asdict
from math import isfinite
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ssd.profiling import host_overhead, measure_host_overhead

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def measured_anew() -> Iterator[None]:
    measure_host_overhead.cache_clear()
    yield
    measure_host_overhead.cache_clear()


def test_the_measurement_leaves_no_threads_and_keeps_the_random_state() -> None:
    """All costs are finite, no thread remains, the random state is unchanged, and the result is cached."""
    threads, state = set(threading.enumerate()), torch.get_rng_state()
    with torch.no_grad():
        costs = measure_host_overhead(CPU)
    assert all(isfinite(seconds) and seconds >= 0 for seconds in asdict(costs).values())
    assert sum(asdict(costs).values()) > 0
    assert set(threading.enumerate()) <= threads
    assert torch.equal(torch.get_rng_state(), state)
    assert measure_host_overhead(CPU) is costs


def test_the_measured_model_is_freed_without_garbage_collection() -> None:
    gc.disable()
    try:
        measure_host_overhead(CPU)
        assert not [one for one in gc.get_objects() if type(one).__name__ == "_Block"]
    finally:
        gc.enable()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("operators", "charged"),
    [
        ({"aten::gelu", "aten::addmm", "aten::native_layer_norm"}, {"replay"}),  # those of the forward
        (
            {"aten::detach"},
            {"pack", "prefetch", "replay", "rerun"},
        ),  # tensors made for autograd, of kept or restored bytes
        # Memory that saved tensors are restored to; an argument of the node that saves those of a checkpointed call.
        ({"aten::empty"}, {"prefetch", "checkpoint"}),
    ],
)
def test_operators_are_charged_to_the_activity_that_runs_them(
    monkeypatch: pytest.MonkeyPatch, operators: set[str], charged: set[str]
) -> None:
    """The clock counts calls of `operators` in place of seconds."""

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += func._schema.name in operators
            return func(*args, **(kwargs or {}))

    with Count() as count:
        monkeypatch.setattr(host_overhead, "perf_counter", lambda: float(count.calls))
        costs = asdict(measure_host_overhead(CPU))
    assert {name for name, calls in costs.items() if calls} == charged, costs
