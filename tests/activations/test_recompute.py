"""Recomputation operation by operation changes no gradients, errors or random numbers, and frees memory."""

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ssd.activations import ActivationOffloader, Saved
from lightning_ssd.types import Choice
from tests.support.compare import assert_same
from tests.support.forwards import FORWARDS
from tests.support.garbage import collect
from tests.support.offloader import Directed, Forward, change_policy, gradients, open_offloader

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def offloader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ActivationOffloader]:
    path: Path = tmp_path_factory.mktemp("scratch")
    with open_offloader(path, host_memory="64MiB") as offloader:
        yield offloader


def draw(saved: Sequence[Saved], seed: int, recompute: float) -> dict[int, Choice]:
    """Returns random choices; `recompute` is the share of recomputable buffers that is recomputed."""
    generator = random.Random(seed)
    others: list[Choice] = ["keep", "host", "ssd"]
    return {
        item.buffer: "recompute" if item.recomputable and generator.random() < recompute else generator.choice(others)
        for item in saved
    }


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("recompute", [0.5, 1.0])
def test_hard_forwards(offloader: ActivationOffloader, forward: Forward, recompute: float) -> None:
    leaves = [torch.randn(32, 32), torch.randn(32, 32)]
    directed = Directed(offloader)
    torch.manual_seed(0)
    expected = gradients(forward, leaves)
    torch.manual_seed(0)
    gradients(forward, leaves, directed.record)
    choices = draw(directed.end_record(), 0, recompute)
    for _ in range(2):
        torch.manual_seed(0)
        actual = gradients(forward, leaves, lambda: directed.direct(choices))
        directed.end_direct()
        assert_same(actual, expected)


def everything(saved: Sequence[Saved]) -> dict[int, Choice]:
    return draw(saved, 0, 1.0)


def test_random_numbers_are_drawn_once(offloader: ActivationOffloader) -> None:
    """A recomputed operation draws the same random numbers again, and does not change those of later operations."""
    x = torch.randn(64, requires_grad=True)

    def forward() -> Tensor:
        return (x * torch.rand_like(x)).sin().sum() + torch.rand(5).sum()

    def backward(loss: Tensor) -> tuple[Tensor, Tensor]:
        loss.backward()
        grad, x.grad = x.grad, None
        assert grad is not None
        return grad, torch.rand(3)

    torch.manual_seed(0)
    expected = backward(forward())
    directed = Directed(offloader)
    torch.manual_seed(0)
    with directed.record():
        loss = forward()
    backward(loss)
    saved = directed.end_record()
    assert [item.name for item in saved if item.recomputable] == ["rand_like", "mul"]
    torch.manual_seed(0)
    with directed.direct(everything(saved)):
        loss = forward()
    actual = backward(loss)
    directed.end_direct()
    assert_same(actual, expected)


def test_tensors_that_are_changed_in_place_are_not_recomputed(offloader: ActivationOffloader) -> None:
    """Neither the changed tensor is recomputed, nor results that are computed from it."""
    x = torch.randn(100, requires_grad=True)
    directed = Directed(offloader)
    with directed.record():
        changed = x * 2
        read = changed + 1
        changed.add_(3)
        loss = (changed.sin() * read.cos()).sum()
    loss.backward()
    saved = directed.end_record()
    found = {item.name: item.recomputable for item in saved}
    assert found == {"mul": False, "add": False, "sin": False, "cos": True}


def test_each_value_is_recomputed_once_and_released(offloader: ActivationOffloader) -> None:
    """A chain of saved results is recomputed once, and all its memory is freed."""
    x = torch.randn(1000, requires_grad=True)
    ran: list[str] = []

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    def forward() -> Tensor:
        return (x * 2).sin().exp().tanh().sum()

    directed = Directed(offloader)
    with directed.record():
        loss = forward()
    loss.backward()
    saved = directed.end_record()
    assert [(item.name, len(item.recompute_ops)) for item in saved] == [("mul", 1), ("exp", 2), ("tanh", 1)]
    before = offloader.stats()
    with directed.direct(everything(saved)):
        loss = forward()
    assert offloader.stats().recomputed - before.recomputed == 4 * 4000  # including the input of `exp`
    with Watching():
        loss.backward()
    directed.end_direct()
    assert [name for name in ran if name in ("aten::mul", "aten::sin", "aten::exp", "aten::tanh")].count(
        "aten::exp"
    ) == 1
    assert ran.count("aten::sin") == 1 and ran.count("aten::tanh") == 1
    del loss
    collect()
    assert not [one for one in gc.get_objects() if type(one).__name__ in ("RecomputeNode", "Recomputed")]


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.blocks[0](x)  # a second call, as with tied weights


def test_a_graph_assigns_operations_to_segments_and_unit_calls(offloader: ActivationOffloader) -> None:
    module = Blocks()
    x = torch.randn(8, 16)
    directed = Directed(offloader, list(module.blocks))
    with directed.record():
        loss = module(x).sum()
    directed.recorder.begin_backward()
    loss.backward()
    directed.recorder.end_backward()
    saved = directed.end_record()
    unit_calls = directed.graph.unit_calls()
    assert [(unit_call.unit, unit_call.call_index) for unit_call in unit_calls] == [(0, 0), (1, 0), (2, 0), (0, 1)]
    assert all(directed.graph.backward_seconds[unit_call] > 0 for unit_call in unit_calls)
    first, second = unit_calls[:2]
    of_first = [(item.name, item.is_unit_input, item.recomputable) for item in saved if item.unit_call == first]
    assert of_first == [("input", True, False), ("0:addmm", False, True)]
    of_second = [(item.name, item.is_unit_input, item.recomputable) for item in saved if item.unit_call == second]
    assert of_second == [("1:gelu", True, False), ("0:addmm", False, True)]
    assert all((operation.seconds > 0) != operation.func.is_view for operation in directed.graph.operations)


def test_backward_prefetches_while_it_uses_kept_storages(offloader: ActivationOffloader) -> None:
    """Offloaded storages are prefetched when backward begins, although it begins with kept ones."""
    value = torch.randn(1024, requires_grad=True)

    def forward() -> list[Tensor]:
        values = [value * 1]
        for _ in range(6):
            values.append(values[-1].sin())
        return values[-2:]  # other references are dropped: a storage that is in use is not offloaded

    directed = Directed(offloader)
    with directed.record():
        values = forward()
    torch.autograd.grad(values[-1].sum(), value)
    saved = directed.end_record()
    choices: dict[int, Choice] = {
        item.buffer: "host" if index < 3 else "keep" for index, item in enumerate(sorted(saved, key=lambda i: i.buffer))
    }
    with directed.direct(choices):
        values = forward()
    before = offloader.tiers["host"].bytes_in
    change_policy(offloader, window_bytes=2 * value.nbytes)
    torch.autograd.grad(values[-1].sum(), values[-2])
    change_policy(offloader, window_bytes=0)
    assert offloader.tiers["host"].bytes_in == before + 2 * value.nbytes
    del values
    directed.end_direct()


def assert_recomputed(
    offloader: ActivationOffloader,
    forward: Forward,
    later: Forward,
    backward: Callable[[Tensor], object] = Tensor.backward,
    shape: tuple[int, ...] = (100,),
) -> None:
    """Asserts that `later` has plain autograd's gradient under a plan that recomputes all that `forward` saves."""
    leaf = torch.randn(shape)
    directed = Directed(offloader)
    gradients(forward, [leaf], directed.record)
    choices = everything(directed.end_record())
    assert "recompute" in choices.values()
    found, before = [], offloader.stats().recomputed
    try:
        for hooks in (nullcontext, lambda: directed.direct(choices)):
            x = leaf.clone().requires_grad_()
            with hooks():
                loss = later(x)
            backward(loss)
            found.append(x.grad)
    finally:
        directed.end_direct()
    assert offloader.stats().recomputed > before
    assert found[0] is not None and found[1] is not None and torch.equal(found[0], found[1])


def backward_thrice(loss: Tensor) -> None:
    for _ in range(3):
        loss.backward(retain_graph=True)


def backward_under_autocast(loss: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()


@pytest.mark.parametrize("changes", [True, False])
def test_a_forward_that_changes_tensors_in_place_unlike_the_recorded_one(
    offloader: ActivationOffloader, changes: bool
) -> None:
    """Backward sees a change through an alias with its own version counter, as in plain autograd."""

    def forward(x: Tensor, changes: bool = False) -> Tensor:
        hidden = x.sin()
        out = hidden.exp() * hidden
        if changes:
            hidden.data.mul_(2)
        return (out * hidden.cos()).sum()

    assert_recomputed(offloader, forward, lambda x: forward(x, changes))


def test_a_retained_graph_is_recomputed_for_each_backward(offloader: ActivationOffloader) -> None:
    def forward(x: Tensor) -> Tensor:
        return (x * 2).sin().exp().sum()

    assert_recomputed(offloader, forward, forward, backward_thrice)


def test_a_second_backward_after_an_argument_was_changed(offloader: ActivationOffloader) -> None:
    """Values that can't be recomputed any more are kept for it."""

    offset = torch.ones(100)

    def forward(x: Tensor, changes: bool = False) -> Tensor:
        out = (x + offset).sin().sum()
        if changes:
            offset.mul_(2)
        return out

    def backward(loss: Tensor) -> None:
        backward_thrice(loss)
        offset.fill_(1)

    assert_recomputed(offloader, forward, lambda x: forward(x, changes=True), backward)


def test_a_backward_under_autocast_recomputes_what_the_forward_computed(offloader: ActivationOffloader) -> None:
    def forward(x: Tensor) -> Tensor:
        return (x @ x).sin().sum()

    assert_recomputed(offloader, forward, forward, backward_under_autocast, (16, 16))


def test_recomputation_ignores_data_that_is_assigned_after_the_operation(offloader: ActivationOffloader) -> None:
    """The operation is recomputed from its argument as it was."""
    alive = []

    def forward(x: Tensor) -> Tensor:
        hidden = x * 2
        out = hidden.exp()
        hidden.data = torch.zeros(100)
        alive.append(hidden)
        return out.sum()

    assert_recomputed(offloader, forward, forward)


def test_an_operation_that_returns_another_dtype_in_backward_is_refused(offloader: ActivationOffloader) -> None:
    counts = torch.arange(100)

    def forward(x: Tensor) -> Tensor:
        return (x * counts.sqrt()).sum()  # the root of integers has the default dtype

    def backward(loss: Tensor) -> None:
        torch.set_default_dtype(torch.float64)
        try:
            loss.backward()
        finally:
            torch.set_default_dtype(torch.float32)

    with pytest.raises(RuntimeError, match="it depends on more than its arguments"):
        assert_recomputed(offloader, forward, forward, backward)


def shifted(x: Tensor, constant: Tensor) -> Tensor:
    return (x - constant).sin().exp().sum()


def shifted_by_a_view(x: Tensor, constant: Tensor) -> Tensor:
    return (x - constant.view(1, 100)).sin().exp().sum()


def concatenated(x: Tensor, constant: Tensor) -> Tensor:
    return torch.cat([x, constant]).sin().exp().sum()


def shifted_by_a_result(x: Tensor, constant: Tensor) -> Tensor:
    """The shift is computed in inference mode if `constant` was."""
    with torch.inference_mode(constant.is_inference()):
        shift = x.detach().cos()
    return (x * 2 - shift).sin().exp().sum()


@pytest.mark.parametrize("forward", [shifted, shifted_by_a_view, concatenated, shifted_by_a_result])
@pytest.mark.parametrize("policy", ["recompute", "checking", "host", "none"])
def test_a_tensor_that_is_made_in_inference_mode_after_the_recorded_forward(
    offloader: ActivationOffloader, forward: Forward, policy: str
) -> None:
    """As a hook of user code may make it. Plain autograd accepts it where no operation saves it."""
    leaves, early = [torch.randn(100)], torch.ones(100)
    directed = Directed(offloader)
    gradients(lambda x: forward(x, early), leaves, directed.record)
    saved = directed.end_record()
    assert "recompute" in everything(saved).values()
    with torch.inference_mode():
        late = torch.full((100,), 0.5)
    expected = gradients(lambda x: forward(x, late), leaves)

    def hooks() -> AbstractContextManager[None]:
        if policy == "checking":
            return directed.check()
        choices: dict[int, Choice] = {item.buffer: "host" for item in saved} if policy == "host" else {}
        return directed.direct(everything(saved) if policy == "recompute" else choices)

    assert_same(gradients(lambda x: forward(x, late), leaves, hooks), expected)
    directed.end_direct()
