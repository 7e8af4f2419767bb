"""Recomputed operators return the same bytes as in forward, or are not recomputed: a table, modules, programs."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from lightning_ssd.activations import ActivationOffloader, is_random
from lightning_ssd.profiling import TraceMode
from lightning_ssd.types import Choice
from tests.support.aliases import MODULES, PROGRAMS, Program, input_of, run, same
from tests.support.offloader import CPU, Directed, Hooks, gradients, open_offloader

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def offloader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ActivationOffloader]:
    path: Path = tmp_path_factory.mktemp("scratch")
    with open_offloader(path, host_memory="64MiB") as offloader:
        yield offloader


def planned(
    directed: Directed, forward: Callable[[Hooks], object], *, tried: bool, others: Sequence[Choice] = ("host",)
) -> dict[int, Choice]:
    """Records `forward`, checks it, and returns a plan that recomputes all buffers that may be.

    Args:
        directed: the forwards.
        forward: a forward and backward under hooks.
        tried: recompute only what had the same bytes in a trial, as `SwapPlanner` does; else all that is declared to be
            recomputable.
        others: choices for the other buffers, in turn.
    """
    forward(directed.record)
    saved = directed.end_record()
    forward(directed.check)
    directed.end_direct()
    proved = directed.plan_mode.proved
    turns = itertools.cycle(others)
    return {
        item.buffer: "recompute" if item.recomputable and (item.buffer in proved or not tried) else next(turns)
        for item in saved
    }


# Operators whose results are lists, tuples, optional, views, integers, random, empty, shared, or written by `out=`.
OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor | tuple[Tensor, ...] | list[Tensor]]] = {
    "sin": lambda a, b: a.sin(),
    "mul": lambda a, b: a * b,
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.5),
    "where": lambda a, b: torch.where(a > b, a, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.25),
    "clamp": lambda a, b: a.clamp(-0.5, 0.5),
    "pow": lambda a, b: a.abs() ** b,
    "matmul": lambda a, b: a @ b,
    "bmm": lambda a, b: torch.bmm(a.view(2, 4, 8), b.view(2, 8, 4)),
    "baddbmm": lambda a, b: torch.baddbmm(a.view(1, 8, 8), b.view(1, 8, 8), a.view(1, 8, 8)),
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b),
    "addmm": lambda a, b: torch.addmm(a, b, a),
    "softmax": lambda a, b: a.softmax(0),
    "log_softmax": lambda a, b: a.log_softmax(1),
    "logsumexp": lambda a, b: a.logsumexp(1),
    "cumsum": lambda a, b: a.cumsum(0),
    "cumprod": lambda a, b: a.cumprod(0),
    "cummax": lambda a, b: a.cummax(0)[0],
    "logcumsumexp": lambda a, b: a.logcumsumexp(0),
    "max": lambda a, b: a.max(0)[0],
    "median": lambda a, b: a.median(0)[0],
    "mode": lambda a, b: a.mode(0)[0],
    "kthvalue": lambda a, b: a.kthvalue(2)[0],
    "sort": lambda a, b: a.sort(0)[0],
    "topk": lambda a, b: a.topk(3)[0],
    "aminmax": lambda a, b: torch.aminmax(a, dim=0),
    "var_mean": lambda a, b: torch.var_mean(a, 0),
    "std": lambda a, b: a.std(0),
    "norm": lambda a, b: a.norm(dim=0),
    "renorm": lambda a, b: a.renorm(2, 0, 0.5),
    "gather": lambda a, b: a.gather(0, b.argsort(0)),
    "scatter": lambda a, b: a.scatter(0, b.argsort(0), b),
    "scatter_add": lambda a, b: a.scatter_add(0, b.argsort(0), b),
    "scatter_reduce": lambda a, b: a.scatter_reduce(0, b.argsort(0), b, "prod"),
    "index": lambda a, b: a[b.argsort(0)[0]],
    "index_put": lambda a, b: a.index_put((torch.tensor([1, 2]),), b[:2]),
    "index_add": lambda a, b: a.index_add(0, torch.tensor([1, 1]), b[:2]),
    "index_select": lambda a, b: a.index_select(0, torch.tensor([3, 1])),
    "masked_select": lambda a, b: a.masked_select(a > 0),
    "masked_fill": lambda a, b: a.masked_fill(a > 0, 2.0),
    "masked_scatter": lambda a, b: a.masked_scatter(a > 0, b),
    "take_along_dim": lambda a, b: torch.take_along_dim(a, b.argsort(1), 1),
    "nonzero": lambda a, b: a[a.nonzero(as_tuple=True)],
    "unique": lambda a, b: a * a.detach().round().unique(return_inverse=True)[1],
    "bincount": lambda a, b: a * torch.bincount((b.detach() > 0).int().flatten(), minlength=8)[:8],
    "histc": lambda a, b: a * torch.histc(b.detach(), 8),
    "bucketize": lambda a, b: a * torch.bucketize(b.detach(), torch.tensor([-0.5, 0.0, 0.5])),
    "one_hot": lambda a, b: a * functional.one_hot(b.detach().argmax(0), 8),
    "split": lambda a, b: (a * b).split(3),
    "split_with_sizes_copy": lambda a, b: torch.split_with_sizes_copy(a, [3, 5]),
    "unsafe_split": lambda a, b: (a * b).unsafe_split(3),
    "unsafe_chunk": lambda a, b: (a * b).unsafe_chunk(2),
    "unbind_copy": lambda a, b: torch.unbind_copy(a),
    "unbind": lambda a, b: (a * b).unbind(),
    "tensor_split": lambda a, b: (a * b).tensor_split(3),
    "meshgrid": lambda a, b: torch.meshgrid(a[0], b[0], indexing="ij"),
    "broadcast_tensors": lambda a, b: torch.broadcast_tensors(a[:1] * 2, b),
    "view_copy": lambda a, b: torch.view_copy(a, (64,)),
    "contiguous": lambda a, b: a.t().contiguous(),
    "expand": lambda a, b: (a[:1] * b[:1]).expand(8, 8),
    "as_strided": lambda a, b: (a * b).as_strided((8, 8), (1, 8)),
    "unfold": lambda a, b: (a * b).unfold(0, 3, 2),
    "complex": lambda a, b: torch.view_as_real(torch.complex(a, b) ** 2),
    "conj": lambda a, b: (torch.complex(a, b).conj() * torch.complex(b, a)).abs(),
    "fft": lambda a, b: torch.fft.rfft(a * b).abs(),
    "stft": lambda a, b: torch.stft((a * b).view(-1), 16, window=torch.ones(16), return_complex=True).abs(),
    "linalg_svd": lambda a, b: torch.linalg.svd(a, full_matrices=False)[1],
    "linalg_qr": lambda a, b: torch.linalg.qr(a),
    "linalg_solve": lambda a, b: torch.linalg.solve(a + 8 * torch.eye(8), b),
    "linalg_slogdet": lambda a, b: torch.linalg.slogdet(a)[1],
    "linalg_eigh": lambda a, b: torch.linalg.eigh(a + a.t())[0],
    "cholesky": lambda a, b: torch.linalg.cholesky(a @ a.t() + torch.eye(8)),
    "inverse": lambda a, b: torch.inverse(a + 8 * torch.eye(8)),
    "lu": lambda a, b: torch.linalg.lu(a),
    "pinv": lambda a, b: torch.linalg.pinv(a),
    "linear": functional.linear,
    "bilinear": lambda a, b: functional.bilinear(a, b, torch.ones(2, 8, 8)),
    "conv1d": lambda a, b: functional.conv1d(a[None], b[:, :, None]),
    "conv2d": lambda a, b: functional.conv2d(a[None, None], b[None, None, :3, :3]),
    "conv_transpose": lambda a, b: functional.conv_transpose1d(a[None], b[:, :, None]),
    "max_pool": lambda a, b: functional.max_pool2d(a[None], 2),
    "max_pool indices": lambda a, b: functional.max_unpool2d(
        *functional.max_pool2d(a[None], 2, return_indices=True), 2
    ),
    "fractional_max_pool": lambda a, b: functional.fractional_max_pool2d(a[None], 2, output_size=4),
    "avg_pool": lambda a, b: functional.avg_pool2d(a[None], 2),
    "adaptive_pool": lambda a, b: functional.adaptive_max_pool1d(a[None], 3),
    "layer_norm": lambda a, b: functional.layer_norm(a, (8,), b[0], None),
    "group_norm": lambda a, b: functional.group_norm(a[None], 2),
    "rms_norm": lambda a, b: functional.rms_norm(a, (8,)),
    "instance_norm": lambda a, b: functional.instance_norm(a[None]),
    "batch_norm": lambda a, b: functional.batch_norm(a, torch.zeros(8), torch.ones(8), training=True),
    "batch_norm eval": lambda a, b: functional.batch_norm(a, torch.zeros(8), torch.ones(8)),
    "batch_norm no statistics": lambda a, b: functional.batch_norm(a, None, None, training=True),
    "dropout": lambda a, b: functional.dropout(a, 0.5),
    "alpha_dropout": lambda a, b: functional.alpha_dropout(a, 0.5, training=True),
    "feature_dropout": lambda a, b: functional.dropout1d(a, 0.5),
    "rrelu": lambda a, b: functional.rrelu(a, training=True),
    "bernoulli": lambda a, b: a * torch.bernoulli(b.detach().sigmoid()),
    "rand_like": lambda a, b: a * torch.rand_like(a),
    "randn": lambda a, b: a * torch.randn(8, 8),
    "randperm": lambda a, b: a[torch.randperm(8)] * b,
    "multinomial": lambda a, b: a[b.detach().softmax(-1).multinomial(1)[:, 0]] * b,
    "normal": lambda a, b: a * torch.normal(b.detach(), 1.0),
    "gumbel": lambda a, b: functional.gumbel_softmax(a, hard=True) * b,
    "own generator": lambda a, b: a * torch.rand(8, 8, generator=torch.Generator().manual_seed(3)),
    "embedding": lambda a, b: functional.embedding(b.argmax(0), a * 1),
    "embedding renorm": lambda a, b: functional.embedding(b.argmax(0), a.detach(), max_norm=0.5) * b,
    "embedding_bag": lambda a, b: functional.embedding_bag(b.argsort(0), a * 1, mode="max"),
    "attention": lambda a, b: functional.scaled_dot_product_attention(a[None, None], b[None, None], a[None, None]),
    "attention dropout": lambda a, b: functional.scaled_dot_product_attention(
        a[None, None], b[None, None], a[None, None], dropout_p=0.3
    ),
    "cross_entropy": lambda a, b: functional.cross_entropy(a, b.argmax(1), label_smoothing=0.1),
    "nll": lambda a, b: functional.nll_loss(a.log_softmax(1), b.argmax(1)),
    "ctc": lambda a, b: functional.ctc_loss(
        a[:, None].log_softmax(-1), torch.tensor([[1, 2]]), torch.tensor([8]), torch.tensor([2])
    ),
    "huber": lambda a, b: functional.huber_loss(a, b),
    "triplet": lambda a, b: functional.triplet_margin_loss(a, b, a.roll(1, 0)),
    "cdist": lambda a, b: torch.cdist(a, b),
    "interpolate": lambda a, b: functional.interpolate(a[None, None], scale_factor=2.0, mode="bicubic"),
    "grid_sample": lambda a, b: functional.grid_sample(a[None, None], b.view(1, 4, 8, 2), align_corners=False),
    "pixel_shuffle": lambda a, b: functional.pixel_shuffle((a * b).view(1, 4, 4, 4), 2),
    "pad": lambda a, b: functional.pad(a[None], (1, 2), mode="reflect"),
    "glu": lambda a, b: functional.glu(a),
    "prelu": lambda a, b: functional.prelu(a, b[0, :1]),
    "out=": lambda a, b: a * torch.mul(b.detach(), 2, out=torch.empty(8, 8)),
    "out= of two": lambda a, b: a * torch.sort(b.detach(), out=(torch.empty(8, 8), torch.empty(8, 8).long()))[0],
    "in place": lambda a, b: (a * b).sin().mul_(2).exp_(),
    "in place on a chunk": lambda a, b: _write_to_a_chunk(a * b),
    "in place on data": lambda a, b: _write_to_data(a * b),
    "zeros_like": lambda a, b: a * torch.zeros_like(b).add_(2),
    "empty_like": lambda a, b: a * torch.empty_like(b).fill_(2),
    "new_full": lambda a, b: a * b.new_full((8, 8), 3.0),
    "arange": lambda a, b: a * torch.arange(8.0),
    "tensor": lambda a, b: a * torch.tensor([float(i) for i in range(8)]),
    "item": lambda a, b: a * a.detach().sum().item(),
    "bfloat16": lambda a, b: (a.bfloat16() @ b.bfloat16()).float(),
    "double": lambda a, b: (a.double() @ b.double()).float(),
    "foreach": lambda a, b: torch._foreach_mul([a, b], [b, a]),
    "foreach_norm": lambda a, b: torch._foreach_norm([a, b]),
    "segment_reduce": lambda a, b: torch.segment_reduce(a, "max", lengths=torch.tensor([3, 5])),
    "sparse": lambda a, b: torch.sparse.mm(a.detach().relu().to_sparse(), b),
    "cond": lambda a, b: (a if bool(a.detach().sum() > 0) else b).sin(),
    "checkpoint": lambda a, b: torch.utils.checkpoint.checkpoint(lambda c: c.sin() * b, a, use_reentrant=False),
    "no grad": lambda a, b: _without_gradients(a, b),
    "autocast": lambda a, b: _autocast(a, b),
}


def _write_to_a_chunk(value: Tensor) -> Tensor:
    left, right = value.sin().unsafe_chunk(2)
    first = left.sigmoid_() * 2
    second = right.tanh_() * 3
    return first.exp() * second.sin()


def _write_to_data(value: Tensor) -> Tensor:
    hidden = value.sin()
    out = hidden.exp() * hidden
    hidden.data.mul_(2)
    return out * hidden.cos()


def _without_gradients(a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (a * b).exp().sort(0)[0]
    return (a * scale).sin() * b


def _autocast(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        hidden = functional.layer_norm(a @ b, (8,)) @ a
    return hidden.float().softmax(-1)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_operators(offloader: ActivationOffloader, name: str) -> None:
    """All buffers that the graph declares recomputable are restored exactly, checked or not, twice in a row."""

    def forward(x: Tensor, y: Tensor) -> Tensor:
        out = OPERATORS[name](x.sin(), y.cos() * x)
        parts = [out] if isinstance(out, Tensor) else out
        return torch.stack([(part.float().sigmoid() * part.float().exp()).sum() for part in parts]).sum()

    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(8, 8, generator=generator) for _ in range(2)]

    def once(hooks: Hooks) -> list[Tensor]:
        torch.manual_seed(1)
        return gradients(forward, leaves, hooks)

    expected = once(nullcontext)
    directed = Directed(offloader)
    choices = planned(directed, once, tried=False)
    assert set(choices) and "recompute" in choices.values()
    before = offloader.stats().recomputed
    for _ in range(2):
        actual = once(lambda: directed.direct(choices))
        directed.end_direct()
        assert all(map(same, actual, expected))
    assert offloader.stats().recomputed > before


@pytest.mark.parametrize("name", MODULES)
def test_modules(offloader: ActivationOffloader, name: str) -> None:
    """Recurrent modules write to chunks of a storage, and oneDNN's LSTM returns a workspace where gradients are on."""
    torch.manual_seed(0)
    forward, x = MODULES[name](), input_of(name)

    def once(hooks: Hooks) -> list[Tensor]:
        torch.manual_seed(1)
        return gradients(forward, [x], hooks)

    expected = once(nullcontext)
    directed = Directed(offloader)
    choices = planned(directed, once, tried=False)
    for _ in range(2):
        assert all(map(torch.equal, once(lambda: directed.direct(choices)), expected))
        directed.end_direct()


def check(offloader: ActivationOffloader, program: Program, survivors: int, backwards: int) -> None:
    expected, told = run(program, nullcontext, survivors, backwards)
    directed = Directed(offloader)
    choices = planned(
        directed,
        lambda hooks: run(program, hooks, survivors, backwards),
        tried=True,
        others=("host", "keep", "ssd"),
    )
    for _ in range(2):
        actual, actually_told = run(program, lambda: directed.direct(choices), survivors, backwards)
        directed.end_direct()
        assert actually_told == told
        assert all(map(same, actual, expected))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=PROGRAMS, survivors=st.integers(0, 2), backwards=st.integers(1, 3))
def test_random_programs(offloader: ActivationOffloader, program: Program, survivors: int, backwards: int) -> None:
    """Storages that are shared and changed in every way: buffers that the check has proved equal are recomputed."""
    check(offloader, program, survivors, backwards)


@pytest.mark.thorough
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=PROGRAMS, survivors=st.integers(0, 2), backwards=st.integers(1, 3))
def test_many_random_programs(offloader: ActivationOffloader, program: Program, survivors: int, backwards: int) -> None:
    check(offloader, program, survivors, backwards)


@pytest.mark.parametrize(("device", "deterministic"), [("cpu", True), ("meta", False)])
def test_random_operators_of_other_devices_are_not_recomputed(device: str, deterministic: bool) -> None:
    """The state of the training device's generator is no state of theirs: a mask that is drawn on the CPU, say."""
    with TraceMode([], CPU) as recorder:
        torch.bernoulli(torch.ones(4, device=device))
    random = [one.deterministic for one in recorder.graph.operations if is_random(one.func)]
    assert random == [deterministic]
