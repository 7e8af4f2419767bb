"""Saved tensors that are kept on the device cost few Python calls each: a forward saves hundreds."""

import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import Tensor, nn

from lightning_ssd.activations import mark_weights
from tests.support.offloader import open_offloader

COUNT = 50


@pytest.mark.parametrize("saved", ["weights", "activations"])
def test_a_kept_tensor_costs_few_python_calls(tmp_path: Path, saved: str) -> None:
    """The limit is two calls above the present number. The hooks of `torch.compiler.disable` alone had six calls."""
    layer = nn.Linear(8, 8)
    mark_weights(layer)
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    tensors: list[Tensor] = [layer.weight] * COUNT if saved == "weights" else [layer.weight.sin() for _ in range(COUNT)]
    with open_offloader(tmp_path, min_bytes=2**20) as offloader:
        offloader.begin_micro_batch()
        sys.setprofile(count)
        try:
            unpacked = [offloader.unpack(offloader.pack(tensor)) for tensor in tensors]
        finally:
            sys.setprofile(None)
        assert all(torch.equal(one, other) for one, other in zip(unpacked, tensors, strict=True))
    assert calls <= 12 * COUNT
