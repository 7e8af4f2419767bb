"""Modes and classes of user code that intercept calls of torch do not see those of the saved-tensor hooks."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ssd.activations import ActivationOffloader
from tests.support.compare import assert_same
from tests.support.offloader import Directed, Hooks

pytestmark = pytest.mark.timeout(120)


class Operators(TorchDispatchMode):
    """Adds a little to every new floating-point tensor, as simulated noise of a device, and lists the operators."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:  # by which autograd saves results, unless there are hooks
            self.calls.append(str(func))
        result = func(*args, **(kwargs or {}))
        changed = func.is_view or func._schema.is_mutable or not isinstance(result, Tensor)
        return result if changed or not result.is_floating_point() else result + 2**-10


class Functions(TorchFunctionMode):
    """Lists the functions of torch that are called."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Strict(Tensor):
    """A class with few functions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in ("sin", "mul", "add", "as_subclass", "exp"):
            raise NotImplementedError(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


class Product(torch.autograd.Function):
    """Torch calls no mode and no class for `apply`, so that they would see the hooks for the tensors that it saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        with torch._C.DisableTorchFunction():
            result = x * y
        ctx.save_for_backward(x, y, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, y, result = ctx.saved_tensors
        return gradient * y + 0 * result, gradient * x


Mode = Callable[[list[str]], AbstractContextManager[Any]]


def run(mode: Mode, hooks: Hooks, around_backward: bool) -> tuple[Tensor, list[str]]:
    """Returns the gradient of a forward, of which a part runs in `mode`, and the calls that the mode saw in forward."""
    x = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
    calls: list[str] = []
    with hooks():
        hidden = (x * 2).tanh()
        with mode(calls):
            hidden = Product.apply(hidden.sin(), hidden.exp()) * hidden
        loss = hidden.sigmoid().square().sum()
    with mode([]) if around_backward else nullcontext():  # it sees loads, and recomputation as with checkpoints
        (gradient,) = torch.autograd.grad(loss, x)
    return gradient, calls


@pytest.mark.parametrize("mode", [Operators, Functions])
@pytest.mark.parametrize("around_backward", [False, True], ids=["forward", "backward"])
def test_modes_see_no_call_of_the_hooks(offloader: ActivationOffloader, mode: Mode, around_backward: bool) -> None:
    expected = run(mode, nullcontext, around_backward)
    for _ in range(2):
        offloader.begin_micro_batch()
        before = offloader.stats().stored
        assert_same(run(mode, offloader.hooks, around_backward), expected)
        assert offloader.stats().stored > before
        offloader.end_backward()


@pytest.mark.parametrize("mode", [Operators, Functions])
def test_modes_see_no_call_under_a_plan(offloader: ActivationOffloader, mode: Mode) -> None:
    """The results that the mode has changed are recomputed."""
    expected = run(mode, nullcontext, around_backward=False)
    directed = Directed(offloader)
    assert_same(run(mode, directed.record, around_backward=False), expected)
    saved = directed.end_record()
    choices: Any = {item.buffer: "recompute" if item.recomputable else "host" for item in saved}
    assert_same(run(mode, lambda: directed.direct(choices), around_backward=False), expected)
    assert offloader.stats().recomputed
    directed.end_direct()


def test_classes_see_no_call_of_the_hooks(offloader: ActivationOffloader) -> None:
    gradients = []
    for hooks in (nullcontext, offloader.hooks):
        x = torch.linspace(-1, 1, 64).requires_grad_()
        offloader.begin_micro_batch()
        with hooks():
            hidden = (x * 2).as_subclass(Strict)
            loss = (Product.apply(hidden.sin(), hidden.exp()).as_subclass(Tensor) * x).sum()
        gradients += torch.autograd.grad(loss, x)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("readers", [1, 2])
def test_a_backward_that_changes_its_saved_tensor(offloader: ActivationOffloader, readers: int) -> None:
    """It may, if no other node has saved that tensor. Otherwise torch raises an error, here as in plain training."""

    class Changes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:  # type: ignore[override]
            ctx.save_for_backward(value)
            return value * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            (value,) = ctx.saved_tensors
            return gradient * value.mul_(3.0)

    gradients = []
    for hooks in (nullcontext, offloader.hooks):
        x = torch.linspace(-1, 1, 64).requires_grad_()
        offloader.begin_micro_batch()
        with hooks():
            hidden = x * 2
            loss = hidden[:3].clone().square().sum() if readers == 1 else hidden.sin().sum()
            loss = loss + Changes.apply(hidden).sum()
            del hidden
        if readers == 1:
            gradients += torch.autograd.grad(loss, x)
            continue
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert readers == 2 or torch.equal(*gradients)
