"""`assert_same`, which parity tests rest on, sees every kind of difference."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.compare import assert_same, difference
from tests.support.models import BlocksModel

NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), nn.Parameter(torch.zeros(2))),
        (torch.tensor(NAN), torch.tensor(1.0)),
        (torch.zeros(2, dtype=torch.complex64), torch.tensor([0, 1j])),
        (NAN, 1.0),
        (1.0, NAN),
        (1, 1.0),
        ([1, 2], [1, 2, 3]),
        ([1, 2], (1, 2)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": [torch.zeros(1)]}, {"a": [torch.ones(1)]}),
        (np.float32(1), np.float64(1)),
    ],
)
def test_differences_are_found(one: Any, other: Any) -> None:
    assert difference(one, other) is not None
    assert difference(other, one) is not None
    assert difference(one, one) is None and difference(other, other) is None


def test_modules_differ_by_losses_weights_and_buffers() -> None:
    one, other = BlocksModel(), BlocksModel()
    one.losses, other.losses = [1.0], [1.0]
    assert_same(one, other)
    other.losses = [2.0]
    with pytest.raises(AssertionError, match="losses.0"):
        assert_same(one, other)
    other.losses = [1.0]
    with torch.no_grad():
        other.blocks[1].up.weight[0, 0].add_(1e-3)
    with pytest.raises(AssertionError, match="blocks.1.up.weight"):
        assert_same(one, other)


def test_trainings_without_a_loss_are_refused() -> None:
    with pytest.raises(AssertionError, match="recorded nothing"):
        assert_same(BlocksModel(), BlocksModel())
