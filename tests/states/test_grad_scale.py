"""The factor of a step reaches the host once, as it was, or its error does."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_ssd.device import CPUCopyEngine, Mark
from lightning_ssd.states import build
from lightning_ssd.states.grad_scale import GradScaleDecision
from tests.support.trainings import batches, make_trainer, offloading, small_model

CPU = torch.device("cpu")
pytestmark = pytest.mark.timeout(60)


class LateCopies(CPUCopyEngine):
    """Copies out whose ends are told when the test says so: a device that is behind the host."""

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__(device)
        self.pending: list[Future[None]] = []

    def on_d2h(self, mark: Mark) -> "Future[None]":
        self.pending.append(Future())
        return self.pending[-1]


def opened(gate: GradScaleDecision, norm: float) -> "Future[float | None]":
    """Returns the factor of a step whose gradient has the given norm, clipped to 1."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    gate.begin(hold=False)
    gate.clip([parameter], {parameter: torch.tensor(norm)}, limit=1.0)
    gate.decide()
    return gate.scale


def test_factors_of_many_steps_may_be_on_their_way_at_once() -> None:
    copies = LateCopies()
    gate = GradScaleDecision(copies, clip="deferred", needs_norm=True, loss_scaled=False)
    norms = [2.0 + step for step in range(GradScaleDecision.SLOTS)]
    factors = [opened(gate, norm) for norm in norms]
    assert not any(factor.done() for factor in factors)
    for copied in copies.pending:
        copied.set_result(None)
    assert [factor.result() for factor in factors] == pytest.approx([1 / norm for norm in norms], rel=1e-4)
    gate.close()


class LostDevice(CPUCopyEngine):
    """The device is lost while it copies: ends of copies out are errors from the `after`-th one on."""

    def __init__(self, device: torch.device, after: int) -> None:
        super().__init__(device)
        self.left = after

    def on_d2h(self, mark: Mark) -> "Future[None]":
        self.left -= 1
        if self.left >= 0:
            return super().on_d2h(mark)
        lost: Future[None] = Future()
        lost.set_exception(RuntimeError("CUDA error: the device is lost"))
        return lost


@pytest.mark.parametrize("clip", [None, "deferred", "speculative"])
@pytest.mark.parametrize("after", range(0, 9, 2))
def test_a_device_that_is_lost_at_any_copy_ends_training_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: Any, after: int
) -> None:
    """The norm's copy among them: jobs that wait for it do not wait for ever."""
    monkeypatch.setattr(build, "make_copy_engine", lambda device: LostDevice(device, after))
    strategy = offloading(states="host", min_bytes=1, offload="none", **({} if clip is None else {"clip": clip}))
    trainer: pl.Trainer = make_trainer(tmp_path, strategy, gradient_clip_val=None if clip is None else 0.01)
    with pytest.raises(RuntimeError, match="the device is lost"):
        trainer.fit(small_model(), batches())
