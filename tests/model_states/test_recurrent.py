"""`flatten_parameters` of recurrent modules with offloaded weights, which user code calls anywhere: it does nothing."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ssd.model_states.access.parameter import OffloadedParameter
from tests.support.compare import assert_same
from tests.support.models import Model
from tests.support.states import host, ssd, train


class Flattening(nn.Module):
    """Calls `flatten_parameters` in its forward."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(16, 16, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.flatten_parameters()
        return self.layer(x)[0][..., :16]


class Recurrent(Model):
    """Calls `flatten_parameters` everywhere in a step, where torch finds the weights acceptable to cuDNN."""

    def __init__(self, kind: type[nn.RNNBase], *, compiled: bool = False) -> None:
        super().__init__()
        self.recurrent = Flattening(kind)
        self.copies: list[nn.Module] = []
        if compiled:
            self.recurrent.compile(backend="eager")

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embed(tokens)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.recurrent.layer.flatten_parameters()
        loss = super().training_step(batch, batch_idx)
        self.recurrent.layer.flatten_parameters()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.recurrent.layer.flatten_parameters()
        if self.global_step == 1:
            layer = self.recurrent.layer
            file = io.BytesIO()
            torch.save(layer, file)
            file.seek(0)
            self.copies = [
                copy.deepcopy(layer),
                torch.load(file, weights_only=False),
                copy.deepcopy(self).recurrent.layer,
            ]


@pytest.fixture
def acceptable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torch find offloaded weights acceptable to cuDNN, as on a GPU."""
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: True)
    monkeypatch.setattr(OffloadedParameter, "is_cuda", True, raising=False)


@pytest.mark.usefixtures("acceptable")
@pytest.mark.parametrize("make_strategy", [host, ssd])
@pytest.mark.parametrize(("kind", "compiled"), [(nn.LSTM, False), (nn.GRU, False), (nn.RNN, False), (nn.GRU, True)])
def test_user_code_may_call_it(
    tmp_path: Path, make_strategy: Callable[[], Any], kind: type[nn.RNNBase], compiled: bool
) -> None:
    """And modules and their copies have torch's own method after training."""
    ours = train(tmp_path, make_strategy(), Recurrent(kind, compiled=compiled), max_epochs=1)
    assert_same(ours, train(tmp_path, "auto", Recurrent(kind, compiled=compiled), max_epochs=1))
    assert "flatten_parameters" not in vars(ours.recurrent.layer)


def test_copies_have_torchs_own_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are trained themselves, after their training."""
    flattened: list[nn.Module] = []
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda layer: flattened.append(layer))
    first = train(tmp_path, host(), Recurrent(nn.GRU), max_epochs=1)
    second = Recurrent(nn.GRU)
    second.recurrent.layer = first.copies[0]
    second = train(tmp_path, host(), second, max_epochs=1)
    for layer in [*first.copies, *second.copies, second.recurrent.layer]:
        flattened.clear()
        layer.flatten_parameters()
        assert len(flattened) == 1 and flattened[0] is layer
