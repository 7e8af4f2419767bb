"""Processes that are started during a training, such as workers of a DataLoader, and use its model."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.support.garbage import collect
from tests.support.models import BlocksModel
from tests.support.states import offloading
from tests.support.trainings import make_trainer


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Iterators of loaders wait for 5 s by default for workers that have failed, when they are freed."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    yield
    collect()


def read(model: nn.Module, row: Tensor) -> Tensor:
    return row + 0 * next(model.parameters()).detach().sum()


def compute(model: nn.Module, row: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(row)
    return result


class Rows(Dataset[Tensor]):
    """Rows that are made by a model."""

    def __init__(self, model: nn.Module, make: Callable[[nn.Module, Tensor], Tensor]) -> None:
        self.model = model
        self.make = make

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return self.make(self.model, torch.full((8,), float(index)))


class Wrapped(BlocksModel):
    """Has its blocks in one module, which a data set may have, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(*self.blocks)
        del self.blocks

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def fit(path: Path, make: Any, method: str, *, copied: bool) -> Wrapped:
    model = Wrapped()
    data = Rows(copy.deepcopy(model.inner) if copied else model.inner, make)
    loader = DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context=method)
    make_trainer(path, offloading(), max_epochs=1).fit(model, loader)
    return model


@pytest.mark.parametrize("make", [read, compute])
@pytest.mark.parametrize(("method", "message"), [("fork", "a forked process"), ("spawn", "a new process")])
def test_workers_that_are_given_the_model_are_refused(tmp_path: Path, make: Any, method: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=rf"{message}, such as a worker(.|\n)*copy\.deepcopy"):
        fit(tmp_path, make, method, copied=False)


@pytest.mark.parametrize("make", [read, compute])
def test_workers_may_have_a_copy(tmp_path: Path, make: Any) -> None:
    assert fit(tmp_path, make, "fork", copied=True).losses
