"""Roll-back of partial steps: each flat parameter has the values of the same step afterwards, or is named."""

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_ssd.futures import Future, finished
from lightning_ssd.model_states.steps.step_history import StepHistory
from lightning_ssd.model_states.units.flat import FlatParameter
from tests.support.state_stores import CPU


class Store:
    """Counts the steps of values that have two versions or one. A write that fails is that of the last step."""

    def __init__(self, two_versions: bool) -> None:
        self.steps = 0
        self.two_versions = two_versions
        self.buffers = SimpleNamespace(revertible=False)
        self.error: Exception | None = None

    def commit(self) -> None:
        self.steps, self.buffers.revertible = self.steps + 1, self.two_versions

    def revert(self) -> None:
        assert self.buffers.revertible
        self.steps, self.buffers.revertible, self.error = self.steps - 1, False, None

    def written(self) -> "Future[None]":
        return finished(None) if self.error is None else _failed(self.error)


def _failed(error: Exception) -> "Future[None]":
    future: Future[None] = Future()
    future.set_exception(error)
    return future


@given(st.data())
def test_steps_are_committed_everywhere_or_those_ahead_are_named(data: st.DataObject) -> None:
    """After some whole steps, one fails to be computed or written somewhere. Others may make one more step."""
    stores = [Store(two) for two in data.draw(st.lists(st.booleans(), min_size=1, max_size=4))]
    flat_params = [
        FlatParameter(f"flat{number}", [("w", nn.Parameter(torch.zeros(2)))], torch.float32, CPU)
        for number in range(len(stores))
    ]
    reverted: list[int] = []
    offloaded: Any = SimpleNamespace(
        stores=dict(zip(flat_params, stores, strict=True)),
        flat_optimizers={
            flat: SimpleNamespace(revert=lambda number=number: reverted.append(number))
            for number, flat in enumerate(flat_params)
        },
        parameters={item.parameter for flat in flat_params for item in flat.param_views},
        optimizers=[torch.optim.SGD([item.parameter for flat in flat_params for item in flat.param_views])],
    )
    history = StepHistory(offloaded)
    whole = data.draw(st.integers(0, 3))
    for _ in range(whole):
        for flat, store in offloaded.stores.items():
            history.submit(flat)
            store.commit()
        history.end(finished(None))
    ways = []
    for store in stores:
        # Values on SSDs have two versions if any others have, and writes fail there alone.
        on_ssd = store.two_versions or not any(other.two_versions for other in stores)
        ways.append(data.draw(st.sampled_from(["committed", "not computed"] + ["not written"] * on_ssd)))
    for (flat, store), way in zip(offloaded.stores.items(), ways, strict=True):
        history.submit(flat)
        if way != "not computed":
            store.commit()
        if way == "not written":
            store.error = OSError("Input/output error")
    failed = set(ways) != {"committed"}
    ended = data.draw(st.booleans())
    if ended:
        history.end(_failed(OSError("Input/output error")) if failed else finished(None))
        for (flat, store), way in zip(offloaded.stores.items(), ways, strict=True):
            history.submit(flat)
            if failed and way == "committed" and data.draw(st.booleans()):
                store.commit()
        if data.draw(st.booleans()):
            history.end(_failed(OSError("Input/output error")))
    before = [store.steps for store in stores]
    ahead = history.revert_partial_steps()
    after = [store.steps for store in stores]
    assert set(ahead) == {flat.name for flat, steps in zip(flat_params, after, strict=True) if steps > min(after)}
    assert [reverted.count(number) for number in range(len(stores))] == [
        one - other for one, other in zip(before, after, strict=True)
    ]
    assert min(after) >= whole + (ended and not failed)
