"""Optimizer steps on the device of values in host memory: the numbers of plain Lightning, and who owns what until when.

On a CPU "device", the device's kernels are those of the CPU.
"""

import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from lightning_ssd.model_states.device_share import DeviceShare, choose_for_device
from lightning_ssd.model_states.device_stepper import DeviceStepper
from lightning_ssd.model_states.flat import FlatParameter
from tests.support.compare import assert_same
from tests.support.models import Model
from tests.support.products import combinations
from tests.support.states import offloading, train

pytestmark = pytest.mark.timeout(120)

Numbers = some.lists(some.integers(1, 10**9), max_size=20)
Rate = some.floats(1e6, 1e11)


@given(Numbers, Rate, Rate)
def test_no_step_ends_later_than_if_the_cpu_made_all(
    parameters: list[int], cpu_rate: float, device_rate: float
) -> None:
    """And none could be moved to the other side and end earlier there, with those before it as they are."""
    chosen = choose_for_device(parameters, cpu_rate, device_rate)
    cpu = device = alone = 0.0
    for numel, on_device in zip(parameters, chosen, strict=True):
        ends = device + numel / device_rate, cpu + numel / cpu_rate
        if on_device:
            device = ends[0]
        else:
            cpu = ends[1]
        alone += numel / cpu_rate
        assert ends[0 if on_device else 1] == min(ends) <= alone * (1 + 1e-9)


class Shared:
    """Has the device make the steps of units that a random generator chooses, anew for each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int = 0, share: float = 0.6) -> None:
        self.steps = 0
        """Steps that the device has made."""
        self._random = random.Random(seed)
        monkeypatch.setattr(DeviceStepper, "PIECE_BYTES", 2**15)
        submit = DeviceStepper.submit

        def counted(stepper: DeviceStepper, *arguments: Any, **named: Any) -> Any:
            self.steps += 1
            return submit(stepper, *arguments, **named)

        monkeypatch.setattr(DeviceStepper, "submit", counted)
        self._share = share

        def note(share: DeviceShare, work: Any) -> None:
            assert share.select(self.choose(share._order))

        monkeypatch.setattr(DeviceShare, "note", note)

    def choose(self, order: Collection[FlatParameter]) -> list[FlatParameter]:
        return [flat for flat in order if self._random.random() < self._share]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, weight_decay=0.1, amsgrad=True)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), fused=True, maximize=True)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


@combinations(
    "optimizer, precision, state_format, accumulate, clip",
    [adamw, adam, fused, momentum],
    ["32-true", "bf16-mixed", "bf16-true"],
    ["fp32", "split"],
    [1, 3],
    [None, ("auto", "norm"), ("deferred", "norm"), ("speculative", "norm"), ("auto", "value")],
    quick=[
        (adamw, "32-true", "fp32", 1, ("deferred", "norm")),
        (adam, "bf16-mixed", "fp32", 1, ("auto", "norm")),
        (fused, "bf16-true", "split", 1, ("speculative", "norm")),
        (momentum, "bf16-true", "fp32", 3, ("auto", "value")),
        (fused, "32-true", "fp32", 1, None),
    ],
)
def test_numbers_are_plain_lightnings(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: Any,
    precision: Any,
    state_format: Any,
    accumulate: int,
    clip: Any,
) -> None:
    """Weights, losses and optimizer states, bit for bit; other units are stepped by the device in each step."""
    how: dict[str, Any] = dict(precision=precision, accumulate_grad_batches=accumulate)
    if clip is not None:
        how |= {"gradient_clip_val": 0.5 if clip[1] == "norm" else 1e-3, "gradient_clip_algorithm": clip[1]}
    strategy = dict(clip="auto" if clip is None else clip[0], state_format=state_format)
    plain = precision != "bf16-true"  # it has no fp32 masters
    expected = train(tmp_path, "auto" if plain else offloading(overlap="none", **strategy), Model(optimizer), **how)
    shared = Shared(monkeypatch)
    assert_same(train(tmp_path, offloading(**strategy), Model(optimizer), **how), expected)
    assert (shared.steps > 0) == (accumulate == 1)
