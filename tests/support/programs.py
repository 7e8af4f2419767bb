"""Random programs of tensor operations."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.offloader import Hooks

SIDE = 6


Operation = Callable[[Tensor, Tensor], Tensor]


def _attend(a: Tensor, b: Tensor) -> Tensor:
    q, k, v = torch.cat((a, b, a * b), dim=1).chunk(3, dim=1)
    return (q @ k.t()).softmax(-1) @ v


def _halves(a: Tensor, b: Tensor) -> Tensor:
    left, right = (a + b).view(2, SIDE // 2, SIDE).unbind(0)
    return torch.cat((right.sin(), left.cos() * right))


class _Own(torch.autograd.Function):
    """Saves an input, an output and numbers, and returns a changed input, a view and a matrix."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out = (a * b).exp().clamp(max=3.0)
        ctx.save_for_backward(a, b, out)
        ctx.scale, ctx.shape = scale, a.shape
        ctx.set_materialize_grads(False)
        return out * scale, out.sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, summed: Tensor | None) -> tuple[Tensor, Tensor, None]:
        a, b, out = ctx.saved_tensors
        total = torch.zeros(ctx.shape)
        if grad is not None:
            total = total + grad * ctx.scale
        if summed is not None:
            total = total + summed
        total = total * out * (out < 3)
        return total * b, total * a, None


class _Doubled(torch.autograd.Function):
    """Changes its input in place."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        a.mul_(2)
        ctx.mark_dirty(a)
        ctx.save_for_backward(a)
        return a

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (doubled,) = ctx.saved_tensors
        return grad * 2 + 0 * doubled


def _own(a: Tensor, b: Tensor) -> Tensor:
    out, summed = _Own.apply(a, b, 0.5)
    return out + summed.tanh()  # type: ignore[no-any-return]


def _change_parts(a: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Changes parts of `a` in place, the last of them by another one."""
    parts[0].mul_(0.5)
    parts[-1].copy_(parts[0][..., : parts[-1].shape[-1]].sin())
    return a


def _complex(a: Tensor, b: Tensor) -> Tensor:
    value = torch.complex(a, b)
    out = torch.view_as_real(value.conj() * value.exp().resolve_conj() / (1 + value.abs()))
    return out[..., 0].tanh() + out[..., 1].tanh()


def _bags(a: Tensor, b: Tensor) -> Tensor:
    indices = b.detach().argsort(1)[:, :3].reshape(-1)
    return nn.functional.embedding_bag(
        indices, a, torch.arange(0, 3 * SIDE, 3), mode="sum", per_sample_weights=indices / 9
    )


def _convolve(a: Tensor, b: Tensor) -> Tensor:
    out = nn.functional.conv2d(a[None, None], b[None, None, :3, :4], stride=(2, 3), padding=(3, 2), dilation=(1, 2))
    return nn.functional.interpolate(out, size=(SIDE, SIDE))[0, 0].tanh()


def _recur(a: Tensor, b: Tensor) -> Tensor:
    hidden = a
    for _ in range(2):
        hidden = torch.gru_cell(b, hidden, a.repeat(3, 1), b.repeat(3, 1))
    return hidden


def _put(a: Tensor, b: Tensor) -> Tensor:
    a.index_put_((torch.tensor([1, 4, 1]), torch.tensor([0, 2, 0])), b[0, :3], accumulate=True)
    return a


def _sparse(a: Tensor, b: Tensor) -> Tensor:
    indices = torch.tensor([[0, 3, SIDE - 1, 3], [1, 2, 3, 2]])
    return torch.sparse.mm(torch.sparse_coo_tensor(indices, a[0, :4], (SIDE, SIDE)), b).tanh()


def _jagged(a: Tensor, b: Tensor) -> Tensor:
    rows = torch.nested.nested_tensor_from_jagged(a * 1, torch.tensor([0, 2, 3, SIDE]))
    return (rows.sin() * rows).values() * b


# Each maps two matrices to one; those whose name ends in `_` change the first one, or a view of it.
OPERATIONS: dict[str, Operation] = {
    "sin": lambda a, b: a.sin(),
    "tanh": lambda a, b: a.tanh(),
    "sigmoid": lambda a, b: a.sigmoid(),
    "softmax": lambda a, b: a.softmax(-1),
    "layer_norm": lambda a, b: nn.functional.layer_norm(a, (SIDE,)),
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "matmul": lambda a, b: (a @ b).tanh(),
    "where": lambda a, b: torch.where(a > b, a, b.sin()),
    "maximum": torch.maximum,
    "attend": _attend,
    "halves": _halves,
    "transpose": lambda a, b: a.t(),
    "contiguous": lambda a, b: a.t().contiguous(),
    "view": lambda a, b: a.reshape(-1).view(SIDE, SIDE),
    "rows": lambda a, b: a[::2].repeat(2, 1),
    "expand_row": lambda a, b: a[:1].expand(SIDE, SIDE),
    "expand_column": lambda a, b: b[:, 2:3].expand(SIDE, SIDE),
    "flip": lambda a, b: a.flip(0),
    "narrow": lambda a, b: torch.cat((a, b), dim=1)[:, 3 : 3 + SIDE],
    "chunk": lambda a, b: torch.cat((a, b)).chunk(2)[1],
    "index": lambda a, b: a[torch.arange(SIDE - 1, -1, -1)],
    "detach": lambda a, b: a.detach(),
    "clone": lambda a, b: a.clone(),
    "half": lambda a, b: (a.bfloat16() @ b.bfloat16()).float().tanh(),
    "own": _own,
    "cumsum": lambda a, b: a.cumsum(0).tanh(),
    "sort": lambda a, b: a.sort(1)[0] * b.argsort(0),
    "topk": lambda a, b: a.topk(SIDE, 0, sorted=True)[0],
    "max": lambda a, b: a.max(0)[0] + b.min(1, keepdim=True)[0],
    "fft": lambda a, b: torch.fft.irfft(torch.fft.rfft(a) * torch.fft.rfft(b), n=SIDE).tanh(),
    "complex": _complex,
    "bags": _bags,
    "convolve": _convolve,
    "recur": _recur,
    "scatter": lambda a, b: a.scatter_add(0, b.argsort(0), b),
    "masked": lambda a, b: a.masked_fill(b > 0, 0.5).masked_scatter(a > 0, b),
    "var_mean": lambda a, b: torch.mul(*torch.var_mean(a, 0)).tanh() + b,
    "sparse": _sparse,
    "jagged": _jagged,
    "strided": lambda a, b: (a * 1).as_strided((SIDE, SIDE), (1, SIDE)).unfold(0, SIDE, 1)[0].t(),
    "relu_": lambda a, b: a.relu_(),
    "sin_": lambda a, b: a.sin_(),
    "add_": lambda a, b: a.add_(b),
    "mul_": lambda a, b: a.mul_(b),
    "fill_row_": lambda a, b: a[1].copy_(b[0]).expand(SIDE, SIDE),
    "scale_column_": lambda a, b: (a[:, 1:3].mul_(0.5), a)[1],
    "doubled_": lambda a, b: _Doubled.apply(a),
    "split_": lambda a, b: _change_parts(a, a.detach().split(4, dim=1)),
    "unsafe_split_": lambda a, b: _change_parts(a, a.unsafe_split(2, dim=1)),
    "unbind_": lambda a, b: _change_parts(a, a.detach().unbind(0)),
    "views_": lambda a, b: (a.view(-1)[6:].view(5, SIDE).t()[1:4].mul_(b[1:4, :5]), a)[1],
    "put_": _put,
    "scatter_": lambda a, b: a.scatter_(1, b.argsort(1)[:, :2], b[:, 1:3]),
    "cumsum_": lambda a, b: a.cumsum_(1),
    "masked_": lambda a, b: a.masked_fill_(b > 0, 0.25),
    "triangle_": lambda a, b: a.tril_().t(),
    "detached_": lambda a, b: (a.detach()[0].zero_(), a)[1],
}


STEPS = st.lists(
    st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=16
)


def run(steps: list[tuple[str, int, int]], losses: int, hooks: Hooks) -> tuple[list[Tensor | None], str, int]:
    """Runs a program forward, and its last values backward one after the other.

    Returns:
        The leaves' gradients, the error that ended it (or nothing), and how many operations were legal.
    """
    noise = torch.Generator().manual_seed(0)
    values = [torch.randn(SIDE, SIDE, generator=noise) for _ in range(4)]
    leaves = [nn.Parameter(values[0]), nn.Parameter(values[1].t()), values[2].clone().requires_grad_()]
    values = [*leaves, values[3]]
    legal = 0
    a = b = value = values[0]
    with hooks():
        for name, first, second in steps:
            a, b = values[first % len(values)], values[second % len(values)]
            try:
                values.append(OPERATIONS[name](a, b))
                legal += 1
            except RuntimeError:  # not allowed in place: a leaf, an expanded tensor, a part of a chunk
                continue
        sums = []
        for value in values[-losses:]:
            with suppress(RuntimeError):  # a part of a chunk whose base was changed can't be read any more
                if value.requires_grad:
                    sums.append(value.sum())
        del values, value, a, b  # a storage that is in use is not offloaded
    error = ""
    for index, loss in enumerate(sums):
        try:
            loss.backward(retain_graph=index < len(sums) - 1)
        except RuntimeError as caught:
            error = "in place" if "inplace" in str(caught) else str(caught)
            break
    return [leaf.grad for leaf in leaves], error, legal
