"""Tensors that a compiled region saves and drops are offloaded before the next one runs, if nothing else reaches them.

All that a region saves is packed after its forward, while a tuple holds it all.
"""

import functools
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._C import _to_dlpack as to_dlpack
from torch._dynamo.backends.common import aot_autograd
from torch.utils.dlpack import from_dlpack

from lightning_ssd.activations import ActivationOffloader, config
from lightning_ssd.device import CPUCopyEngine
from tests.support.offloader import open_offloader

UserReferences = list[Any]

Region = Callable[[Tensor], Tensor]


class CopyRecorder(CPUCopyEngine):
    """A copy engine that notes its copies from the device."""

    noted: list[str]

    def d2h(self, src: Tensor, dst: Tensor, after: Any, *, awaited: bool = False) -> Any:
        self.noted.append("copy")
        return super().d2h(src, dst, after, awaited=awaited)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(CopyRecorder, "noted", [], raising=False)
    monkeypatch.setattr(config, "make_copy_engine", CopyRecorder)
    return CopyRecorder.noted


@pytest.fixture
def offloader(events: list[str], tmp_path: Path) -> Iterator[ActivationOffloader]:
    with open_offloader(tmp_path, tier="host") as made:
        yield made


def make_region(keep: Callable[[Tensor], Any] = lambda tensor: None, kept: UserReferences | None = None) -> Region:
    """Returns a compiled function, whose backend appends `keep(tensor)` of the last saved tensor to `kept`."""

    def compile_forward(graph: Any, _: Any) -> Any:
        def run(*arguments: Any) -> Any:
            CopyRecorder.noted.append("region")
            results = graph(*arguments)
            if kept is not None:
                kept.append(keep(results[-1]))
            return results

        return make_boxed_func(run)

    torch.compiler.reset()  # all regions have the same code, of which Dynamo compiles few versions
    backend = aot_autograd(fw_compiler=compile_forward, bw_compiler=lambda graph, _: make_boxed_func(graph))
    return torch.compile(lambda tensor: (tensor.sin().cos() * tensor.sin()).tanh() * 2, backend=backend)


def test_copies_of_a_region_are_issued_before_the_next_one_runs(
    offloader: ActivationOffloader, events: list[str]
) -> None:
    region = make_region()
    leaf = torch.linspace(-1, 1, 64).requires_grad_()
    plain = torch.autograd.grad(region(region(region(leaf))).sum(), leaf)
    events.clear()
    offloader.begin_micro_batch()
    with offloader.hooks():
        loss = region(region(region(leaf))).sum()
    ends = [index for index, event in enumerate(events) if event == "region"][1:]
    first, second = events[1 : ends[0]], events[ends[0] + 1 : ends[1]]
    assert first and second and set(first) == set(second) == {"copy"}
    (found,) = torch.autograd.grad(loss, leaf)
    offloader.end_backward()
    assert torch.equal(found, plain[0])


def gradient_with_offloads(offloader: ActivationOffloader, run: Callable[[], Tensor], leaf: Tensor) -> Tensor:
    """Returns the gradient at `leaf` of a loss whose saved tensors are offloaded."""
    offloader.begin_micro_batch()
    with offloader.hooks():
        loss = run()
    (gradient,) = torch.autograd.grad(loss, leaf)
    offloader.end_backward()
    return gradient


def as_function(function: Callable[[Any], Any], argument: Any) -> Callable[[], Any]:
    """Returns a call of `function`: only objects of C++ reference the tensor until then."""
    return functools.partial(function, argument)


KEPT: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda tensor: tensor,
    "list": lambda tensor: [tensor],
    "view": lambda tensor: tensor[1:],
    "alias": lambda tensor: tensor.detach(),
    "data": lambda tensor: tensor.data,
    "storage": lambda tensor: tensor.untyped_storage(),
    "array": lambda tensor: tensor.numpy(),
    "closure": lambda tensor: lambda: tensor,
    "capsule": lambda tensor: as_function(from_dlpack, to_dlpack(tensor)),
    "C++ list": lambda tensor: as_function(operator.itemgetter(0), torch._C.ScriptList([tensor])),
}
"""Ways in which a backend may reach a saved tensor after its region."""


def change(kept: Any) -> None:
    """Changes the bytes without a version counter that autograd would check."""
    if callable(kept):
        kept = kept()
    if isinstance(kept, list):
        (kept,) = kept
    if isinstance(kept, torch.UntypedStorage):
        kept.fill_(1)
    elif isinstance(kept, Tensor):
        kept.data.fill_(5.0)
    else:
        kept[:] = 5.0


@pytest.mark.parametrize("name", KEPT)
def test_backward_sees_changes_of_saved_tensors_that_a_backend_has_kept(
    name: str, offloader: ActivationOffloader
) -> None:
    leaf = torch.linspace(-1, 1, 64).requires_grad_()

    def run() -> Tensor:
        result = region(leaf)
        change(kept.pop())
        return result.sum()

    (unchanged,) = torch.autograd.grad(make_region()(leaf).sum(), leaf)
    kept: UserReferences = []
    region = make_region(KEPT[name], kept)
    (plain,) = torch.autograd.grad(run(), leaf)
    assert not torch.equal(plain, unchanged)
    assert torch.equal(gradient_with_offloads(offloader, run, leaf), plain)


def test_inputs_and_outputs_of_functions_may_change_after_them(offloader: ActivationOffloader) -> None:
    class Exponential(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor) -> Any:  # type: ignore[override]
            whole = tensor.exp()
            ctx.save_for_backward(tensor, whole)
            return whole[1:]

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            tensor, whole = ctx.saved_tensors
            return torch.cat([gradient.new_zeros(1), gradient]) * (whole + tensor)

    leaf = torch.linspace(-1, 1, 64).requires_grad_()

    def run() -> Tensor:
        given = leaf * 3
        part: Tensor = Exponential.apply(given)  # type: ignore[no-untyped-call]
        loss = part.sum()
        given.data.fill_(7.0)
        part.data.fill_(9.0)
        return loss

    (plain,) = torch.autograd.grad(run(), leaf)
    assert torch.equal(gradient_with_offloads(offloader, run, leaf), plain)
