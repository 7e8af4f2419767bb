"""Saved tensors of subclasses that wrap other tensors: tensor parallelism, and others."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.activations import ActivationOffloader
from tests.support.compare import assert_same
from tests.support.offloader import Hooks, assert_same_gradients, open_offloader
from tests.support.plans import BOTH, draw, pinned, planner
from tests.support.trainings import make_trainer

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


class MLP(nn.Module):
    """Megatron's: the first layer's weight is split by columns, the second's by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return out


def parallel(mesh: DeviceMesh) -> nn.Module:
    """Two blocks, whose activations between the layers are DTensors, too."""
    torch.manual_seed(0)
    model = nn.Sequential(MLP(), MLP())
    for block in model:
        plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return model


def train(model: nn.Module, hooks: Hooks) -> list[Tensor]:
    """Returns the loss and the gradients of a forward and backward."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    with hooks():
        loss = model(x).square().sum()
    loss.backward()
    found = [loss.detach()]
    for parameter in model.parameters():
        assert parameter.grad is not None
        found.append(parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad)
        parameter.grad = None
    return found


def check_tensor_parallelism(offloader: ActivationOffloader, mesh: DeviceMesh) -> None:
    model = parallel(mesh)
    expected = train(model, nullcontext)
    for _ in range(3):
        offloader.begin_micro_batch()
        before = offloader.stats()
        assert all(map(torch.equal, train(model, offloader.hooks), expected))
        offloader.end_backward()
        after = offloader.stats()
        saved, stored = after.saved - before.saved, after.stored - before.stored
        assert saved >= 8 * (16 + 2 * 2 * 64 // mesh.size()) * 4  # of both blocks, the activations of both layers
        assert saved - stored <= 8 * (16 + 64 // mesh.size()) * 4  # the batch, and the storage needed first


def test_tensor_parallelism(offloader: ActivationOffloader, mesh: DeviceMesh) -> None:
    """The local tensors of DTensors are offloaded, and gradients are plain PyTorch's, bit for bit."""
    check_tensor_parallelism(offloader, mesh)


def _rank(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{path}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    scratch = Path(path) / str(rank)
    scratch.mkdir()
    with open_offloader(scratch) as offloader:
        check_tensor_parallelism(offloader, init_device_mesh("cpu", (2,)))
    distributed.destroy_process_group()


@pytest.mark.thorough
def test_tensor_parallelism_of_two_ranks(tmp_path: Path) -> None:
    multiprocessing.spawn(_rank, (str(tmp_path),), nprocs=2)


def test_every_kind_of_dtensor_is_rebuilt(offloader: ActivationOffloader, mesh: DeviceMesh) -> None:
    """Placement, shape, strides and dtype are those of the saved tensor."""
    for placement in (Shard(0), Shard(1), Replicate()):
        x = distribute_tensor(torch.randn(6, 8), mesh, [placement]).requires_grad_()

        def forward(x: DTensor) -> Tensor:
            hidden = (x * 2).t().sin().bfloat16()
            return (hidden * hidden).float().exp().full_tensor().sum()

        (expected,) = torch.autograd.grad(forward(x), x)
        offloader.begin_micro_batch()
        before = offloader.stats().stored
        with offloader.hooks():
            loss = forward(x)
        assert offloader.stats().stored > before
        (actual,) = torch.autograd.grad(loss, x)
        assert isinstance(actual, DTensor) and actual.placements == expected.placements
        assert torch.equal(actual.to_local(), expected.to_local())
        offloader.end_backward()


@pytest.mark.parametrize("through", ["itself", "view", "detach"])
def test_a_changed_wrapper_fails_where_pytorch_fails(
    offloader: ActivationOffloader, mesh: DeviceMesh, through: str
) -> None:
    """The wrapper's version counter counts changes, and that of the wrapped tensor does not."""
    for hooks in (nullcontext, offloader.hooks):
        x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]).requires_grad_()
        if hooks is not nullcontext:
            offloader.begin_micro_batch()
        with hooks():
            hidden = x * 1
            loss = hidden.sin().sum()
            alias = {"itself": hidden, "view": hidden.view(2, 8), "detach": hidden.detach()}[through]
            del hidden
            with torch.no_grad():
                alias.add_(1)
            del alias
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_sharded_weights_are_kept(offloader: ActivationOffloader, mesh: DeviceMesh) -> None:
    weight = nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)]))
    offloader.begin_micro_batch()
    with offloader.hooks():
        loss = (weight.t() @ weight).full_tensor().sum()
    assert offloader.stats().stored == 0
    loss.backward()
    assert weight.grad is not None


def _chain_of_two(x: Tensor) -> Tensor:
    return (x * 2).sin().exp().sum()


def _times_one_made_in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        constant = torch.full((8, 8), 0.5)
    return (x * TwoTensor(torch.linspace(-1, 1, 64).view(8, 8), constant)).sin().sum()


@pytest.mark.parametrize(("forward", "stored"), [(_chain_of_two, 4), (_times_one_made_in_inference_mode, 3)])
def test_a_subclass_of_two_tensors(offloader: ActivationOffloader, forward: Any, stored: int) -> None:
    """Both are offloaded, and both have their gradient. One that is made in inference mode is kept.

    Plain autograd saves such a wrapper, too.
    """
    grads = []
    for hooks in (nullcontext, offloader.hooks):
        torch.manual_seed(0)
        x = TwoTensor(torch.randn(8, 8), torch.randn(8, 8)).requires_grad_()
        offloader.begin_micro_batch()
        with hooks():
            loss = forward(x)
        loss.backward()
        assert isinstance(x.grad, TwoTensor)
        grads.append(x.grad)
    assert offloader.stats().stored == stored * 8 * 8 * 4
    assert torch.equal(grads[0].a, grads[1].a) and torch.equal(grads[0].b, grads[1].b)


def test_jagged_tensors_are_kept(offloader: ActivationOffloader) -> None:
    """Their sizes are tied to their offsets, which must be the same object in backward."""

    def forward(values: Tensor) -> Tensor:
        jagged = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, 10]))
        return (jagged.sin() * jagged).values().sum()  # type: ignore[no-any-return]

    assert_same_gradients(offloader, forward, torch.randn(10, 4))


class Doubled(Tensor):
    """A wrapper of one tensor that can't be flattened."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Doubled":
        made = Tensor._make_wrapper_subclass(cls, inner.size(), strides=inner.stride(), dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Doubled, lambda wrapper: wrapper.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, func(*args, **kwargs))


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # type: ignore[override]
        return Doubled(value.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Tensor:  # type: ignore[override]
        return gradient.inner  # type: ignore[no-any-return]


class _Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Any) -> Tensor:  # type: ignore[override]
        return value.inner.clone()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return Doubled(gradient)


def _unflattened(hidden: Tensor) -> Tensor:
    wrapped = _Wrap.apply(hidden)
    return _Unwrap.apply((wrapped.sin() * wrapped.exp()).tanh())  # type: ignore[no-any-return]


def _jagged(hidden: Tensor) -> Tensor:
    ragged = torch.nested.nested_tensor_from_jagged(hidden, torch.tensor([0, 3, 8]))
    return (ragged.sin() * ragged).values() + torch.nested.to_padded_tensor(ragged.exp(), 0.0).sum()


def _jagged_attention(hidden: Tensor) -> Tensor:
    heads = torch.nested.nested_tensor_from_jagged(hidden, torch.tensor([0, 3, 8])).unflatten(-1, [2, 8])
    heads = heads.transpose(1, 2)
    mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads)
    return mixed.transpose(1, 2).flatten(-2).values()


def _nested(hidden: Tensor) -> Tensor:
    ragged = torch.nested.as_nested_tensor([hidden[:3], hidden[3:]], layout=torch.strided)
    return torch.nested.to_padded_tensor(nn.functional.gelu(ragged * 2), 0.0).sin()


def _masked(hidden: Tensor) -> Tensor:
    some = torch.masked.masked_tensor(hidden, hidden > 0)  # type: ignore[attr-defined]
    return hidden + (some * some.sin()).sum(1).to_tensor(0.0)[:, None]  # type: ignore[no-any-return]


def _two(hidden: Tensor) -> Tensor:
    pair = TwoTensor(hidden, hidden * 2).sin().exp()
    return hidden + (pair.a * pair.b).detach()


SUBCLASSES = [_unflattened, _jagged, _jagged_attention, _nested, _masked, _two]


class Subclasses(pl.LightningModule):
    """Linear layers around operators of a tensor subclass."""

    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.use = use
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        first, second, third = self.layers
        loss = third(second(self.use(first(batch).tanh())).sin()).square().mean()
        self.losses.append(loss.detach())
        return loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("use", SUBCLASSES)
def test_trainings_with_subclasses_are_plain_lightnings(use: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    """Offloaded, profiled, and under a plan, whose modes intercept the operators of the wrapped tensors."""

    def fit(strategy: Any, *callbacks: pl.Callback) -> list[Tensor]:
        module = Subclasses(use)
        data = DataLoader(torch.randn(64, 16, generator=torch.Generator().manual_seed(1)), batch_size=8)
        make_trainer(tmp_path, strategy, callbacks=list(callbacks)).fit(module, data)
        return [*module.losses, *module.parameters()]

    expected = fit("auto")
    assert_same(fit(SSDOffloadStrategy(offload=1.0, min_bytes=1, states="gpu", ssd_capacity="4MiB")), expected)
    first = planner()
    assert_same(fit(SSDOffloadStrategy(**BOTH), first), expected)
    assert first.cycle.plan is not None
    drawn = draw(first.cycle.plan, first.cycle.runner.profile, 0, recompute=1.0)
    assert_same(fit(SSDOffloadStrategy(**BOTH), pinned(drawn)), expected)
