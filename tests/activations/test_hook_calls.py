"""Saved tensors that are kept on the device cost few Python calls each: a forward saves hundreds."""

import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import Tensor, nn

from lightning_ssd.activations import ActivationOffloader, mark_weights
from tests.support.offloader import open_offloader

COUNT = 50


def calls_of_hooks(offloader: ActivationOffloader, tensors: Sequence[Tensor]) -> int:
    """Packs and unpacks tensors, and returns the Python calls for it, without finalizers of earlier tests' garbage."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    offloader.begin_micro_batch()
    gc.disable()
    sys.setprofile(count)
    try:
        unpacked = [offloader.unpack(offloader.pack(tensor)) for tensor in tensors]
    finally:
        sys.setprofile(None)
        gc.enable()
    assert all(torch.equal(one, other) for one, other in zip(unpacked, tensors, strict=True))
    return calls


@pytest.mark.parametrize("saved", ["weights", "activations"])
def test_a_kept_tensor_costs_few_python_calls(tmp_path: Path, saved: str) -> None:
    """The limit is two calls above the present number. The hooks of `torch.compiler.disable` alone had six calls."""
    layer = nn.Linear(8, 8)
    mark_weights(layer)
    tensors: list[Tensor] = [layer.weight] * COUNT if saved == "weights" else [layer.weight.sin() for _ in range(COUNT)]
    with open_offloader(tmp_path, min_bytes=2**20) as offloader:
        assert calls_of_hooks(offloader, tensors) <= 12 * COUNT


def test_a_tensor_costs_few_python_calls_where_nothing_is_offloaded(tmp_path: Path) -> None:
    """Its bytes are counted all the same, for the message of an OutOfMemoryError. The limit is as above."""
    weight = torch.ones(8, 8, requires_grad=True)
    with open_offloader(tmp_path, offload="none") as offloader:
        for batch in (1, 2):
            tensors = [weight.sin() for _ in range(COUNT)]
            assert calls_of_hooks(offloader, tensors) <= 15 * COUNT
            assert offloader.resident_bytes() == COUNT * 8 * 8 * 4
            assert offloader.stats().saved == batch * COUNT * 8 * 8 * 4
