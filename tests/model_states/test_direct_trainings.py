"""Trainings whose device steps values on SSDs without host memory: the numbers of plain Lightning."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_ssd.model_states import build
from lightning_ssd.model_states.stores import layout
from lightning_ssd.model_states.stores.buffers import SSDBuffer, SSDStep
from tests.support.compare import assert_same
from tests.support.delays import DELAYS, SlowBackend
from tests.support.device_steps import Shared
from tests.support.direct import DirectBackend
from tests.support.late_device import LateEngines
from tests.support.models import Block, MakeOptimizer, ToyModel, adamw
from tests.support.moves import TIERS, Mover
from tests.support.states import assert_nothing_is_left, offloading, train

pytestmark = pytest.mark.timeout(300)
WIDTH = 8


def amsgrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, weight_decay=0.1, amsgrad=True)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


class Blocks(ToyModel):
    """Blocks of several sizes on the tokens of a batch."""

    def __init__(self, make_optimizer: MakeOptimizer, sizes: tuple[int, ...]) -> None:
        super().__init__(make_optimizer)
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, size) for size in sizes)
        self.head = nn.Linear(WIDTH, 32)

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch[:, :-1])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.losses.append(self.loss(batch[0]).item())


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Asserts that no step was left to the CPU because the device has failed."""
    with caplog.at_level(logging.WARNING):
        yield caplog
    assert "because the GPU could not" not in caplog.text


PRECISIONS = [("32-true", "fp32"), ("bf16-mixed", "fp32"), ("bf16-true", "fp32"), ("bf16-true", "split"),
              ("bf16-true", "bf16")]  # fmt: skip
CLIPPING = [None, ("auto", "norm"), ("deferred", "norm"), ("speculative", "norm"), ("auto", "value")]


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(1, 600), min_size=1, max_size=4).map(tuple),
    optimizer=st.sampled_from([adamw, amsgrad, momentum]),
    precision=st.sampled_from(PRECISIONS),
    clip=st.sampled_from(CLIPPING),
    accumulate=st.sampled_from([1, 1, 3]),
    moves=st.booleans(),
    late=st.booleans(),
)
@example(0, (300, 40, 500), adamw, ("bf16-true", "split"), ("speculative", "norm"), 1, True, True)
@example(3, (300, 40, 500), adamw, ("bf16-true", "bf16"), ("speculative", "norm"), 1, True, True)
@example(1, (500, 300), adamw, ("32-true", "fp32"), None, 1, True, False)
@example(2, (400, 400), adamw, ("bf16-mixed", "fp32"), ("deferred", "norm"), 1, False, True)
def test_numbers_are_plain_lightnings(
    tmp_path: Path,
    warnings: pytest.LogCaptureFixture,
    seed: int,
    sizes: tuple[int, ...],
    optimizer: MakeOptimizer,
    precision: Any,
    clip: Any,
    accumulate: int,
    moves: bool,
    late: bool,
) -> None:
    """Weights, losses and optimizer states, bit for bit. In each step the device steps other units; values may move
    between all tiers, weights and others apart. Transfers of drives take random times, and copies are late."""
    kind, state_format = precision
    if optimizer is adamw and kind == "bf16-mixed":
        optimizer = amsgrad  # Lightning refuses to clip for a fused optimizer in mixed precision
    if state_format == "bf16":  # for Adam, and states on the GPU are exact
        optimizer = adamw
    how: dict[str, Any] = dict(precision=kind, accumulate_grad_batches=accumulate, limit_train_batches=6, max_epochs=1)
    if clip is not None:
        how |= {"gradient_clip_val": 0.5 if clip[1] == "norm" else 1e-3, "gradient_clip_algorithm": clip[1]}
    strategy: dict[str, Any] = dict(clip="auto" if clip is None else clip[0], state_format=state_format)
    plain = kind != "bf16-true"  # no fp32 masters there
    model = Blocks(optimizer, sizes)
    expected = train(tmp_path, "auto" if plain else offloading(overlap="none", **strategy), model, **how)
    DELAYS.seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "PAGED_ELEMENTS", 1)
        shared = Shared(patch, seed, share=0.8)
        patch.setattr(LateEngines, "made", [])
        if late:
            patch.setattr(build, "make_copy_engine", LateEngines)
        begun: list[SSDStep] = []
        step_on_device = SSDBuffer.step_on_device

        def noted(buffer: SSDBuffer) -> SSDStep:
            begun.append(step_on_device(buffer))
            return begun[-1]

        patch.setattr(SSDBuffer, "step_on_device", noted)
        backend = DirectBackend(SlowBackend())
        direct = offloading("ssd", backend=backend, checksum=False, ssd_capacity="64MiB", **strategy)
        callbacks: list[Any] = [Mover(seed, TIERS[1:] if state_format == "bf16" else TIERS)] if moves else []
        assert_same(train(tmp_path, direct, model, callbacks=callbacks, **how), expected)
        assert (shared.steps > 0) == (accumulate == 1)
        assert accumulate > 1 or begun or moves
        assert all(step.written.done() and step.written.exception() is None for step in begun)
        assert LateEngines.all_violations() == []
    assert "late-device" not in [thread.name for thread in threading.enumerate()]
    assert_nothing_is_left(tmp_path)
