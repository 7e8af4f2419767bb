"""Forwards that save every kind of tensor."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from tests.support.offloader import Forward


def _broadcast(x: Tensor, bias: Tensor) -> Tensor:
    column, row = x[:, :1].expand(-1, 32), bias.expand(32, 32)
    return (column * row * x.t() * x.t()[::2].repeat(2, 1)).sum()


def _zero_size(x: Tensor, y: Tensor) -> Tensor:
    x = x * 1
    return (x[:0] * y[:0]).exp().sum() + (x * y).sum() + x.new_zeros(0).mul(y[:0, 0]).sum()


def _zero_stride_storage(x: Tensor, y: Tensor) -> Tensor:
    scalar = (x.sum() * y.mean()).sin()  # one element, shown as 1024
    return (scalar.expand(32, 32) * x).tanh().sum()


def _overlapping(x: Tensor, y: Tensor) -> Tensor:
    windows = (x * y).reshape(-1).unfold(0, 64, 16)
    return (windows * windows.sin()).sum()


def _indices_and_masks(x: Tensor, y: Tensor) -> Tensor:
    kept = nn.functional.dropout(x, 0.4, training=True) * y
    chosen = kept[torch.arange(0, 32, 3)]
    chosen = torch.where(chosen > 0, chosen, chosen.sin())
    values, _ = chosen.sort(dim=-1)
    values = values.gather(1, torch.randint(32, (11, 32))) * values.masked_fill(values > 1, 0.5)
    return values.max(dim=0).values.sum() + nn.functional.max_pool1d(values[None], 2).sum()


def _autocast(x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        hidden = nn.functional.layer_norm(x @ y, (32,)) @ y.t()
    return hidden.float().softmax(-1).square().sum()


def _no_grad_inside(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (x * y).exp()
    return (x * scale * y.detach()).sum()


def _complex(x: Tensor, y: Tensor) -> Tensor:
    z = torch.complex(x, y)
    # One storage, saved plain, conjugated and negated: flags of the tensor that are not in its bytes.
    loss = (z * z.sin()).sum() + (z.conj() * z.cos()).sum() + z.conj().imag.mul(x).sum() + z.imag.mul(y).sum()
    return torch.view_as_real(loss).square().sum()


def _sparse(x: Tensor, y: Tensor) -> Tensor:
    indices = torch.tensor([[0, 5, 31, 5], [1, 2, 3, 9]])
    matrix = torch.sparse_coo_tensor(indices, (x * y)[0, :4], (32, 32))
    rows = torch.eye(32).to_sparse_csr()
    return torch.sparse.mm(matrix, x).sin().sum() + torch.sparse.mm(rows, y).square().sum()


def _custom(x: Tensor, y: Tensor) -> Tensor:
    return (_SavesAll.apply(x * 1, y).square() + _SavesAll.apply(y, x)).sum()


def _checkpointed(reentrant: bool) -> Forward:
    def forward(x: Tensor, y: Tensor) -> Tensor:
        def block(hidden: Tensor) -> Tensor:
            return (nn.functional.dropout(hidden, 0.3) @ y).tanh() * hidden.sigmoid()

        for _ in range(3):
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x.square().sum()

    return forward


def _traced(x: Tensor, y: Tensor) -> Tensor:
    """A graph is traced that contains a backward."""

    def gradient(a: Tensor) -> Tensor:
        a = a.detach().requires_grad_()
        return torch.autograd.grad((a.sin() * a.exp()).sum(), a)[0]

    graph = make_fx(gradient)(x.detach() + 1)
    return (x * graph(y.detach()) * y).sum()


def _in_place(x: Tensor, y: Tensor) -> Tensor:
    hidden = (x @ y).relu_()
    hidden = (hidden * y).mul_(2).sin() + (x * 2).view(-1).view(32, 32).t().exp_().t()
    left, right = hidden.clone(), hidden[:, 16:] * 1
    left = left.split(16, dim=1)[0].clone()
    left[3].mul_(2)
    left[:, ::2] = right[:, 1::2]
    return (left.sigmoid_() * right).sum()


class _SavesAll(torch.autograd.Function):
    """Saves inputs, an output and an intermediate tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        middle = x.sin()
        out = (middle * y).exp()
        ctx.save_for_backward(x, y, middle, out, None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y, middle, out, nothing = ctx.saved_tensors
        assert nothing is None
        return grad * out * y * x.cos(), grad * out * middle


FORWARDS = [
    pytest.param(_broadcast, id="broadcast and non-contiguous"),
    pytest.param(_zero_size, id="zero size"),
    pytest.param(_zero_stride_storage, id="zero stride"),
    pytest.param(_overlapping, id="overlapping views"),
    pytest.param(_indices_and_masks, id="integers and masks"),
    pytest.param(_autocast, id="autocast"),
    pytest.param(_no_grad_inside, id="no_grad"),
    pytest.param(_complex, id="conjugated and negated"),
    pytest.param(_sparse, id="sparse"),
    pytest.param(_custom, id="custom function"),
    pytest.param(_in_place, id="in place"),
    pytest.param(_traced, id="make_fx"),
    pytest.param(_checkpointed(False), id="checkpoint"),
    pytest.param(_checkpointed(True), id="reentrant checkpoint"),
    pytest.param(lambda x, y: torch.func.vmap(lambda a, b: (a * b).exp().sum())(x, y).sin().sum(), id="vmap"),
    pytest.param(lambda x, y: torch.func.jvp(lambda a: (a * y).sin().sum(), (x,), (x,))[1], id="jvp"),
]
