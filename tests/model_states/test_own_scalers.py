"""Loss scalers of user code: fused optimizers divide gradients by the scale, and skip steps, within `step`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.compare import assert_same
from tests.support.models import BlocksModel
from tests.support.states import offloading
from tests.support.trainings import rows, train

STEPS = 5
OVERFLOW = 2
"""The step whose gradients are not finite."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-1, momentum=0.9, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2, fused=True),
    "not fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}


class Scaled(BlocksModel):
    """Scales the loss by a scaler of its own, in manual optimization, and reads gradients after the step.

    Args:
        make_optimizer: makes the optimizer.
        scale: first loss scale.
        unscale: whether it unscales gradients before the step.
    """

    automatic_optimization = False

    def __init__(self, make_optimizer: Any, scale: float, unscale: bool) -> None:
        super().__init__(make_optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        self.unscale = unscale
        self.norms: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers().optimizer  # type: ignore[union-attr]
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx) * (1e38 if batch_idx == OVERFLOW else 1)
        self.scaler.scale(loss).backward()
        self._step(optimizer)
        self.norms += [parameter.grad.norm() for parameter in self.parameters() if parameter.grad is not None]

    def _step(self, optimizer: Any) -> None:
        if self.unscale:
            self.scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        self.scaler.step(optimizer)
        self.scaler.update()


class Automatic(Scaled):
    """Scales the loss in `backward`, and steps in `optimizer_step`."""

    automatic_optimization = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = BlocksModel.training_step(self, batch, batch_idx)
        return loss * (1e38 if batch_idx == OVERFLOW else 1)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.scaler.scale(loss).backward()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        self._step(optimizer.optimizer)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("make_model", "scale"), [(Scaled, 2.0**10), (Scaled, 3000.0), (Automatic, 3000.0)])
def test_scalers_of_user_code(tmp_path: Path, make_model: Any, scale: float, optimizer: str, unscale: bool) -> None:
    model = make_model(OPTIMIZERS[optimizer], scale, unscale)
    expected = train(tmp_path, "auto", model, rows(STEPS))
    assert expected.scaler.get_scale() == scale * 2 * 0.5 * 2
    for strategy in (offloading(), offloading(min_bytes=100)):
        actual = train(tmp_path, strategy, model, rows(STEPS))
        assert_same(actual, expected)
        assert_same(actual.norms, expected.norms)
