"""Under a plan, kernels that call operators have autocast as without one."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightning_ssd.activations import ActivationOffloader
from tests.support.compare import assert_same
from tests.support.offloader import Directed

OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "affine_grid": lambda x: functional.affine_grid(x.view(4, 4, 4)[:, :2, :3], [4, 2, 5, 5], align_corners=False),
    "bilinear": lambda x: functional.bilinear(x, x.tanh(), x.exp().view(1, 8, 8)),
    "pinv": lambda x: torch.linalg.pinv(x[:, :5]),
    "product": lambda x: x @ x.t(),
    "convolution": lambda x: functional.conv1d(x[None], x[:, :, None]),
    "sum": lambda x: x.softmax(0).sum(),
}


class Doubled(torch.autograd.Function):
    """Its backward has the autocast of the forward."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * 2 + 1e-2 * functional.bilinear(x, x, x.view(1, 8, 8))


def run(operator: Callable[[Tensor], Tensor], hooks: Callable[[], AbstractContextManager[Any]]) -> list[Tensor]:
    """Returns results of an operator within autocast and within a part where it is disabled, and the gradient."""
    x = torch.linspace(-1, 1, 64).view(8, 8).cos().requires_grad_()
    with hooks(), torch.autocast("cpu", torch.bfloat16):
        hidden = Doubled.apply(x.sin())
        cast = operator(hidden.detach())  # backward of some has products of two dtypes, which torch refuses
        with torch.autocast("cpu", enabled=False):
            whole = operator(hidden)
        loss = whole.square().mean() * cast.float().mean()
    (gradient,) = torch.autograd.grad(loss, x)
    return [cast.detach(), whole.detach(), gradient]


@pytest.mark.parametrize("name", OPERATORS)
def test_results_are_those_of_plain_autocast(offloader: ActivationOffloader, name: str) -> None:
    operator = OPERATORS[name]
    expected = run(operator, nullcontext)
    directed = Directed(offloader)
    assert_same(run(operator, directed.record), expected)
    saved = directed.end_record()
    choices: Any = {item.buffer: "recompute" if item.recomputable else "host" for item in saved}
    assert_same(run(operator, lambda: directed.direct(choices)), expected)
    directed.end_direct()
