"""Weights that an operator of user code changes in a recomputation, of which torch does not tell."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.access import PLACES, compare
from tests.support.models import BlocksModel
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
