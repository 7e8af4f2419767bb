"""Step hooks that user code registers during training: they find the gradients that plain training has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.compare import assert_same
from tests.support.models import BlocksModel
from tests.support.states import offloading
from tests.support.trainings import rows, train

STEPS = 4


class Hooked(BlocksModel):
    """Normalizes gradients in a step hook, in manual optimization.

    Args:
        registers_at: the hook of Lightning that registers it.
    """

    automatic_optimization = False

    def __init__(self, registers_at: str) -> None:
        super().__init__()
        self.registers_at = registers_at
        self.seen: list[Tensor] = []

    def on_fit_start(self) -> None:
        self._register("on_fit_start")

    def on_train_start(self) -> None:
        self._register("on_train_start")

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 1:
            self._register("on_train_batch_start")

    def _register(self, hook: str) -> None:
        if hook == self.registers_at:
            self.trainer.optimizers[0].register_step_pre_hook(self._normalize)
            self.trainer.optimizers[0].register_step_post_hook(self._look)

    def _normalize(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                self.seen.append(parameter.grad.norm())
                parameter.grad.div_(parameter.grad.norm() + 1e-3)

    def _look(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.seen += [parameter.detach().norm() for parameter in self.parameters()]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss: Tensor = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        if batch_idx == 1:
            self._register("training_step")
        optimizer.step()


@pytest.mark.parametrize("registers_at", ["on_fit_start", "on_train_start", "on_train_batch_start", "training_step"])
def test_step_hooks_that_are_registered_during_training(tmp_path: Path, registers_at: str) -> None:
    model = Hooked(registers_at)
    expected = train(tmp_path, "auto", model, rows(STEPS))
    for strategy in (offloading(), offloading(min_bytes=100)):
        assert_same(train(tmp_path, strategy, model, rows(STEPS)), expected)
