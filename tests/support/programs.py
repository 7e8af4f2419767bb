"""Random programs of tensor operations."""

from collections.abc import Callable
from contextlib import suppress

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
    "relu_": lambda a, b: a.relu_(),
    "sin_": lambda a, b: a.sin_(),
    "add_": lambda a, b: a.add_(b),
    "mul_": lambda a, b: a.mul_(b),
    "fill_row_": lambda a, b: a[1].copy_(b[0]).expand(SIDE, SIDE),
    "scale_column_": lambda a, b: (a[:, 1:3].mul_(0.5), a)[1],
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
