"""Processes that are started during a training, such as workers of a DataLoader, and use its model."""

import copy
import multiprocessing
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


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("make", [read, compute])
@pytest.mark.parametrize(("method", "message"), [("fork", "a forked process"), ("spawn", "a new process")])
def test_workers_that_are_given_the_model_are_refused(tmp_path: Path, make: Any, method: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=rf"{message}, such as a worker(.|\n)*copy\.deepcopy"):
        fit(tmp_path, make, method, copied=False)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("make", [read, compute])
def test_workers_may_have_a_copy(tmp_path: Path, make: Any) -> None:
    assert fit(tmp_path, make, "fork", copied=True).losses


class Adversarial(Dataset[Tensor]):
    """Rows that the gradient of a network of the data set has changed."""

    def __init__(self) -> None:
        self.network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        row = torch.full((8,), float(index), requires_grad=True)
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(self.network(row).square().sum(), row)
        return row.detach() + gradient


class Inner(Wrapped):
    """Iterates over the rows of another loader, whose workers are forked in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = Adversarial()

    def loss(self, batch: Tensor) -> Tensor:
        inner = DataLoader(self.rows, batch_size=4, num_workers=1, multiprocessing_context="fork")
        return super().loss(batch) + sum(super(Inner, self).loss(rows) for rows in inner)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("states", ["gpu", "host"])
@pytest.mark.parametrize("tier", ["host", "ssd"])
def test_workers_that_are_forked_in_the_forward_use_autograd(tmp_path: Path, tier: Any, states: str) -> None:
    """Their processes have the hooks for saved tensors, without the threads and the memory that these need."""
    rows = DataLoader(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), batch_size=4)
    losses = []
    for strategy in ("auto", offloading(states, offload=1.0, tier=tier)):
        torch.manual_seed(1)
        model = Inner()
        make_trainer(tmp_path, strategy, max_epochs=2).fit(model, rows)
        losses.append(model.losses)
    assert losses[0] == losses[1]


def _loss(model: Wrapped, batch: Tensor) -> Tensor:
    return Wrapped.loss(model, batch)


def _loss_without_saved_tensors(model: Wrapped, batch: Tensor) -> Tensor:
    return next(model.parameters()).sum()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("states", "offload", "loss"),
    [
        ("gpu", 1.0, _loss),
        ("host", 1.0, _loss),
        ("host", "none", _loss),
        ("host", "none", _loss_without_saved_tensors),
    ],
)
def test_backward_of_a_forked_process_through_the_graph_of_the_training_is_refused(
    tmp_path: Path, states: str, offload: Any, loss: Any
) -> None:
    """Saved tensors, weights and gradients are copied by threads, for which that process would wait forever."""
    found: list[str] = []

    class Forks(Wrapped):
        def loss(self, batch: Tensor) -> Tensor:
            own = loss(self, batch)

            def differentiate(connection: Any) -> None:
                try:
                    own.backward()
                except RuntimeError as error:
                    connection.send(str(error))
                connection.close()

            ours, theirs = multiprocessing.get_context("fork").Pipe()
            process = multiprocessing.get_context("fork").Process(target=differentiate, args=(theirs,))
            process.start()
            theirs.close()
            found.append(ours.recv())
            process.join()
            return super().loss(batch)

    rows = DataLoader(torch.ones(4, 8), batch_size=4)
    make_trainer(tmp_path, offloading(states, offload=offload), max_epochs=1).fit(Forks(), rows)
    assert "a forked process" in found[0]
