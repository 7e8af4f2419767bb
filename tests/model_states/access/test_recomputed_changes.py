"""Weights that an operator changes in a forward or a recomputation, of which torch does not tell."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.access import PLACES, compare
from tests.support.models import Block, BlocksModel, ToyModel
from tests.support.trainings import nothing_left  # noqa: F401


@torch.library.custom_op("lightning_ssd_tests::decayed_product", mutates_args=())
def decayed_product(x: Tensor, bias: Tensor) -> Tensor:
    """Multiplies by a bias that it decays."""
    bias.detach().mul_(0.9)
    return x * bias


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*(value.detach().clone() for value in inputs))


def _backward(context: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, bias = context.saved_tensors
    return grad * bias, (grad * x).sum(0)


decayed_product.register_autograd(_backward, setup_context=_save)


class Decaying(BlocksModel):
    """The operator is not the first one of the recomputation that uses weights of its block."""

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor, block: Any) -> Tensor:
            x = nn.functional.linear(x, block.up.weight)
            return decayed_product(x, block.up.bias) + nn.functional.linear(x, block.down.weight, block.up.bias)

        for block in self.blocks:
            x = checkpoint(run, x, block, use_reentrant=False)
        return x


@pytest.mark.parametrize("states", PLACES)
def test_weights_that_an_operator_changes_in_a_recomputation_are_stored(tmp_path: Path, states: str) -> None:
    compare(tmp_path, Decaying, states)


class Normalizing(BlocksModel):
    """Blocks have running statistics that are frozen parameters.

    Args:
        norm: normalizes with a mean and a variance.
        call: calls a block.
    """

    def __init__(self, norm: Callable[[Tensor, Tensor, Tensor], Tensor], call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(functools.partial(torch.optim.SGD, lr=0.1))
        self.blocks = nn.ModuleList(_NormalizedBlock(norm) for _ in range(3))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


class _NormalizedBlock(Block):
    """A normalization is not the first operator that uses weights of the block, and the last one of the block."""

    def __init__(self, norm: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__(8, 8, norm=False)
        self.normalize = norm
        self.mean = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.var = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.normalize(self.up(x), self.mean, self.var)
        return self.normalize(x + self.down(x), self.mean, self.var)


def _batch_norm(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return nn.functional.batch_norm(x, mean, var, training=True)


def _evaluated(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return nn.functional.batch_norm(_batch_norm(x, mean, var), mean, var)


def _instance_norm(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return nn.functional.instance_norm(x[:, :, None] * torch.arange(3.0), mean, var).sum(2)


def _native(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    normalized: Tensor = torch.native_batch_norm(x, None, None, mean, var, True, 0.1, 1e-5)[0]
    return normalized


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    "call",
    [
        lambda block, x: block(x),
        lambda block, x: checkpoint(block, x, use_reentrant=False),
        lambda block, x: checkpoint(block.forward, x, use_reentrant=False),
        lambda block, x: checkpoint(block.forward, x.requires_grad_(), use_reentrant=True),
    ],
    ids=["forward", "module", "function", "reentrant"],
)
@pytest.mark.parametrize("norm", [_batch_norm, _evaluated, _instance_norm, _native])
def test_running_statistics_that_are_offloaded_parameters_are_stored(
    tmp_path: Path, norm: Any, call: Any, precision: str
) -> None:
    compare(tmp_path, functools.partial(Normalizing, norm, call), "host", precision=precision)


class Renormalized(ToyModel):
    """The embedding renormalizes its weights to a smaller norm each time, and is all that is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(8, 8))
        self.runs = 0

    def loss(self, batch: Tensor) -> Tensor:
        def run(index: Tensor) -> Tensor:
            self.runs += 1
            return nn.functional.embedding(index, self.embedding, max_norm=1 / self.runs)

        x: Tensor = checkpoint(run, batch.argsort(1), use_reentrant=False)
        return nn.functional.linear(x, self.embedding).square().mean()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_changes_of_the_operator_that_ends_a_recomputation_are_stored(tmp_path: Path, precision: str) -> None:
    compare(tmp_path, Renormalized, "host", precision=precision)
