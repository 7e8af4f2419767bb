"""Trainings on a device far behind the host: no wait is missing, and no buffer is reused too early."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ssd import SSDOffloadStrategy, shared_gradients
from lightning_ssd.activations import config
from lightning_ssd.model_states import build
from tests.support.compare import assert_same
from tests.support.late_device import LateCopies
from tests.support.models import Model
from tests.support.states import train
from tests.support.trainings import nothing_left  # noqa: F401

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("states", "accumulate", "limit", "precision", "clip"),
    [
        ("ssd", 1, None, "bf16-mixed", "auto"),
        ("ssd", 2, 8.0, "32-true", "auto"),
        ("host", 1, 8.0, "32-true", "auto"),
        ("host", 3, None, "bf16-mixed", "auto"),
        ("host", 1, 0.5, "32-true", "deferred"),
        ("ssd", 1, 0.5, "32-true", "speculative"),
    ],
)
def test_numbers_are_plain_lightnings(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    states: Any,
    accumulate: int,
    limit: float | None,
    precision: Any,
    clip: Any,
) -> None:
    """Bit for bit, with saved tensors and all states offloaded, and gradients that share the memory of two units."""
    engines: list[LateCopies] = []

    def make(device: torch.device) -> LateCopies:
        engines.append(LateCopies(device))
        return engines[-1]

    monkeypatch.setattr(shared_gradients, "AT_ONCE", 2)
    arguments = dict(accumulate_grad_batches=accumulate, gradient_clip_val=limit, precision=precision, max_epochs=1)
    expected = train(tmp_path, "auto", Model(), **arguments)
    for module in (build, config):
        monkeypatch.setattr(module, "make_copy_engine", make)
    strategy = SSDOffloadStrategy(
        states=states, tier=states, min_bytes=1, offload=1.0, gpu_memory="1B", ssd_capacity="128MiB",
        staging_memory="16MiB", clip=clip,
    )  # fmt: skip
    assert_same(train(tmp_path, strategy, Model(), **arguments), expected)
    assert len(engines) == 2
    assert [violation for engine in engines for violation in engine.violations] == []
