"""Random programs that share storages in every way torch has, and modules that write to parts of a storage."""

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.offloader import Hooks

SIDE = 4


aten = torch.ops.aten


def _as_complex(a: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(a.view(-1, 2)))


def _set(a: Tensor) -> Tensor:
    return torch.empty(0).set_(a.untyped_storage(), a.storage_offset(), a.size(), a.stride())


# Tensors that share the storage, or the memory, of one: with its version counter, or with another.
ALIASES: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "itself": lambda a: [a],
    "view": lambda a: [a.view(-1)],
    "t": lambda a: [a.transpose(0, -1)],
    "chunk": lambda a: a.chunk(2),
    "unsafe_chunk": lambda a: a.unsafe_chunk(2),
    "split": lambda a: a.split(1),
    "unsafe_split": lambda a: a.unsafe_split(1),
    "split_with_sizes": lambda a: a.split_with_sizes([1, a.size(0) - 1]),
    "unsafe_split_with_sizes": lambda a: a.unsafe_split_with_sizes([1, a.size(0) - 1]),
    "unbind": lambda a: a.unbind(),
    "narrow": lambda a: [a.narrow(0, 1, a.size(0) - 1)],
    "select": lambda a: [a.select(0, 0)],
    "diagonal": lambda a: [a.diagonal()],
    "unfold": lambda a: [a.unfold(0, 2, 1)],
    "expand": lambda a: [a.expand(2, *a.shape)],
    "as_strided": lambda a: [torch.as_strided(a, (a.numel(),), (1,), a.storage_offset())],
    "complex": lambda a: [_as_complex(a)],
    "detach": lambda a: [a.detach()],
    "data": lambda a: [a.data],
    "set_": lambda a: [_set(a)],
    "unsafe_view": lambda a: [aten._unsafe_view(a, [a.numel()])],
    "alias": lambda a: [aten.alias(a)],
    "numpy": lambda a: [torch.from_numpy(a.detach().numpy())],
    "dlpack": lambda a: [torch.from_dlpack(a.detach())],
}


class _Own(torch.autograd.Function):
    """Saves inputs, an output and numbers, and returns two results, of which one may have no gradient."""

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


def _complex(a: Tensor, b: Tensor) -> Tensor:
    value = torch.complex(a, b)
    out = torch.view_as_real(value.conj() * value.exp().resolve_conj() / (1 + value.abs()))
    return out[..., 0].tanh() + out[..., 1].tanh()


def _halves(a: Tensor, b: Tensor) -> Tensor:
    left, right = (a + b).chunk(2)
    return torch.cat((right.sin(), left.cos() * right))


def _jagged(a: Tensor, b: Tensor) -> Tensor:
    rows = torch.nested.nested_tensor_from_jagged(a * 1, torch.tensor([0, 1, len(a)]))
    return (rows.sin() * rows).values() * b


# Operations that save inputs, outputs, both, or copies.
SAVING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sin": lambda a, b: a.sin(),
    "tanh": lambda a, b: a.tanh(),
    "sigmoid": lambda a, b: a.sigmoid(),
    "softmax": lambda a, b: a.softmax(-1),
    "mul": lambda a, b: a * b,
    "outer": lambda a, b: torch.outer(a.flatten(), b.flatten()[:3]).sum(1).view(a.shape),
    "where": lambda a, b: torch.where(a > b, a, b.sin()),
    "cat": lambda a, b: torch.cat((a, b)),
    "layer_norm": lambda a, b: nn.functional.layer_norm(a, a.shape[-1:]),
    "matmul": lambda a, b: (a @ b).tanh(),
    "attend": lambda a, b: (a @ b.t()).softmax(-1) @ b,
    "half": lambda a, b: (a.bfloat16() @ b.bfloat16()).float().tanh(),
    "halves": _halves,
    "expand": lambda a, b: a[:1].expand_as(a) * b,
    "sort": lambda a, b: a.sort(0)[0] * b.argsort(0),
    "max": lambda a, b: a.max(0)[0] + b.min(-1, keepdim=True)[0],
    "cumsum": lambda a, b: a.cumsum(0).tanh(),
    "index": lambda a, b: a[b.detach().flatten().argsort()[: len(a)] % len(a)],
    "scatter": lambda a, b: a.scatter_add(0, b.argsort(0), b),
    "masked": lambda a, b: a.masked_fill(b > 0, 0.5).masked_scatter(a > 0, b),
    "sparse": lambda a, b: torch.sparse.mm(a.detach().relu().to_sparse(), b).tanh(),
    "recur": lambda a, b: torch.gru_cell(b, a, a.repeat(3, 1), b.repeat(3, 1)),
    "complex": _complex,
    "jagged": _jagged,
    "own": _own,
    "doubled": lambda a, b: _Doubled.apply(a),  # type: ignore[no-untyped-call, no-any-return]
}


# Changes without an operator that has a schema.
OTHER_CHANGES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "assign data": lambda a, b: setattr(a, "data", b.detach().clone()),
    "assign data of another": lambda a, b: setattr(a, "data", b.data),
    "numpy": lambda a, b: a.detach().numpy().fill(0.25),
    "storage": lambda a, b: a.untyped_storage().fill_(0),
    "set_": lambda a, b: a.set_(b.detach().clone()),
    "setitem": lambda a, b: a.__setitem__(0, b[0]),
    "add_": lambda a, b: a.add_(matching(b, a)),
    "relu_": lambda a, b: a.relu_(),
    "transpose_": lambda a, b: a.transpose_(0, 1),
}


# Operators that only change flags, need uninitialized memory, or draw random numbers in backward.
LEFT_OUT = ("resize", "set_", "requires_grad", "retain_grad", "empty", "sparse", "coalesced", "rename", "detach_")


class Change(NamedTuple):
    """An operator that changes its first argument."""

    func: Any
    arguments: Sequence[str]
    """Of the other arguments, how they are made: the name of their type."""

    def __call__(self, a: Tensor, b: Tensor) -> None:
        made: dict[str, Any] = {
            "Tensor": b,
            "Scalar": 0.75,
            "number": 0.75,
            "float": 0.75,
            "int": 0,
            "SymInt": 0,
            "bool": True,
            "mask": b > 0,
            "index": torch.zeros(1, dtype=torch.long),
        }
        self.func(a, *(made[name] for name in self.arguments))


@functools.cache
def changes() -> dict[str, Change]:
    """Returns torch's operators that change their first argument and can be called with tensors and numbers."""
    found = {}
    for schema in torch._C._jit_get_all_schemas():
        first, *others = schema.arguments or [None]
        if not schema.name.startswith("aten::") or any(word in schema.name for word in LEFT_OUT) or first is None:
            continue
        if first.alias_info is None or not first.alias_info.is_write or str(first.type) != "Tensor":
            continue
        if any(argument.alias_info is not None and argument.alias_info.is_write for argument in others):
            continue
        packet = getattr(aten, schema.name.removeprefix("aten::"), None)
        func = None if packet is None else getattr(packet, schema.overload_name or "default", None)
        if func is None:
            continue
        required = [str(argument.type) for argument in others if argument.default_value is None]
        required = [name for name in required if not name.startswith("Optional") and name != "Generator"]
        variants = [required]
        for kind in ("mask", "index"):
            if "Tensor" in required:
                variants.append([kind if i == required.index("Tensor") else name for i, name in enumerate(required)])
        for number, arguments in enumerate(variants):
            change = Change(func, arguments)
            a = torch.rand(SIDE, SIDE)
            before = a.clone()
            try:
                change(a, torch.rand(SIDE, SIDE))
            except (RuntimeError, KeyError, TypeError, IndexError, ValueError, NotImplementedError):
                continue
            if a.shape != before.shape or a.dtype != before.dtype or not torch.equal(a, before):
                found[f"{func}/{number}"] = change
    return found


STEP = st.one_of(
    st.tuples(st.just("alias"), st.sampled_from(sorted(ALIASES)), st.integers(0, 99), st.integers(0, 99)),
    st.tuples(st.just("save"), st.sampled_from(sorted(SAVING)), st.integers(0, 99), st.integers(0, 99)),
    st.tuples(st.just("save"), st.sampled_from(sorted(SAVING)), st.integers(0, 99), st.integers(0, 99)),
    st.tuples(st.just("change"), st.integers(0, 999), st.integers(0, 99), st.integers(0, 99)),
    st.tuples(st.just("change without grad"), st.integers(0, 999), st.integers(0, 99), st.integers(0, 99)),
    st.tuples(st.just("change data"), st.integers(0, 999), st.integers(0, 99), st.integers(0, 99)),
    st.tuples(st.just("other change"), st.sampled_from(sorted(OTHER_CHANGES)), st.integers(0, 99), st.integers(0, 99)),
    st.tuples(st.just("delete"), st.just(""), st.integers(0, 99), st.integers(0, 99)),
    st.tuples(st.just("delete"), st.just(""), st.integers(0, 99), st.integers(0, 99)),
)


Program = list[tuple[str, Any, int, int]]


def matching(b: Tensor, a: Tensor) -> Tensor:
    """Returns a value of the shape of `a`: `b` itself if it has that shape."""
    if b.shape == a.shape or not b.numel() or not a.numel():
        return b
    return b.reshape(-1).repeat(1 + a.numel() // b.numel())[: a.numel()].view(a.shape)


def run(
    program: Program, hooks: Hooks, survivors: int = 0, backwards: int = 1
) -> tuple[list[Tensor | None], list[str]]:
    """Returns the leaves' gradients, and the outcome of each step and of the backwards, which share the graph.

    `survivors` values are alive after the forward, and are changed before backward.
    """
    torch.manual_seed(0)
    leaves = [nn.Parameter(torch.randn(SIDE, SIDE)), torch.randn(SIDE, SIDE).requires_grad_()]
    constant = torch.randn(SIDE, SIDE)
    # The leaves' own storages are weights, or in use.
    values = [leaves[0] * 2, leaves[1].t().clone(), constant]
    losses: list[Tensor] = [values[0].sum() * 0]
    told = []
    assigned = []  # plain autograd keeps assigned data; the package sees it as long as the tensor is alive
    with hooks():
        for kind, name, first, second in program:
            a = values[first % len(values)]
            b = values[second % len(values)]
            try:
                if kind == "alias":
                    values.extend(ALIASES[name](a)[:3])
                elif kind == "save":
                    values.append(SAVING[name](a, matching(b, a)))
                    losses.append(values[-1].sum())
                elif kind == "change":
                    change(name, a, matching(b, a))
                elif kind == "change without grad":
                    with torch.no_grad():
                        change(name, a, matching(b, a))
                elif kind == "change data":
                    change(name, a.data, matching(b, a).data)
                elif kind == "other change":
                    with torch.no_grad():
                        OTHER_CHANGES[name](a, b)
                    if name.startswith("assign"):
                        assigned.append(a)
                elif len(values) > 2:
                    values.pop(first % len(values))
                told.append("")
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                told.append(type(error).__name__)
            del a, b
        sums = [torch.stack(part).sum() for first in range(backwards) if (part := losses[first::backwards])]
        values = values[len(values) - survivors :]
        del losses
    for value in values:
        with suppress(RuntimeError):  # an expanded tensor can't be written to
            value.data.mul_(0.5)
    for number, loss in enumerate(sums):
        try:
            if loss.requires_grad:
                loss.backward(retain_graph=number < len(sums) - 1)
        except RuntimeError as error:
            told.append("in place" if "inplace" in str(error) else str(error))
            break
    return [leaf.grad for leaf in leaves], told


def change(number: int, a: Tensor, b: Tensor) -> None:
    named = changes()
    named[sorted(named)[number % len(named)]](a, b)


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Returns whether two tensors have the same bits, including NaN."""
    if one is None or other is None:
        return one is other
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


PROGRAMS = st.lists(STEP, min_size=1, max_size=24)


def _cell(cell: nn.Module, steps: int = 3) -> Callable[..., Tensor]:
    def forward(x: Tensor) -> Tensor:
        hidden: Any = None
        for _ in range(steps):
            hidden = cell(x, hidden)
        return (hidden[0] if isinstance(hidden, tuple) else hidden).square().sum()

    return forward


def _layer(module: nn.Module) -> Callable[..., Tensor]:
    def forward(x: Tensor) -> Tensor:
        out = module(x)
        return (out[0] if isinstance(out, tuple) else out).square().sum()

    return forward


MODULES: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "LSTMCell": lambda: _cell(nn.LSTMCell(8, 16)),
    "GRUCell": lambda: _cell(nn.GRUCell(8, 16)),
    "RNNCell": lambda: _cell(nn.RNNCell(8, 16)),
    "LSTM": lambda: _layer(nn.LSTM(8, 16, 2, dropout=0.3)),
    "GRU": lambda: _layer(nn.GRU(8, 16, 2, bidirectional=True)),
    "RNN": lambda: _layer(nn.RNN(8, 16, 2)),
    "TransformerEncoderLayer": lambda: _layer(nn.TransformerEncoderLayer(8, 2, 16)),
}


def input_of(name: str) -> Tensor:
    return torch.randn((32, 8) if name.endswith("Cell") else (5, 32, 8))
