"""Whole trainings with model states on SSD, or where budgets put them, against plain Lightning."""

import threading
from pathlib import Path
from typing import Any

import pytest

from lightning_ssd import SSDOffloadStrategy
from tests.states.test_training import Model, assert_same, train


def ssd(**arguments: Any) -> SSDOffloadStrategy:
    return SSDOffloadStrategy(states="ssd", min_bytes=1, offload="none", **arguments)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("overlap", ["optimized", "naive", "none"])
@pytest.mark.parametrize("gpu_memory", [1, "auto"])
def test_numbers_are_plain_lightnings(
    tmp_path: Path, accumulate: int, clip: float | None, overlap: Any, gpu_memory: int | str
) -> None:
    """Bit for bit in 32-true, with a checksum of every byte; and nothing is left behind."""
    arguments = dict(accumulate_grad_batches=accumulate, gradient_clip_val=clip)
    expected = train(tmp_path, "auto", Model(), **arguments)
    strategy = ssd(overlap=overlap, gpu_memory=gpu_memory, checksum=True)
    assert_same(train(tmp_path, strategy, Model(), **arguments), expected)
    assert not list(tmp_path.glob("lightning_ssd-*"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lightning_ssd")]
