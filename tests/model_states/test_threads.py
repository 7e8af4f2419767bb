"""User code that uses a model with offloaded states on other threads than the one that has called `fit`."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.support.access import PLACES
from tests.support.compare import assert_same
from tests.support.models import ToyModel
from tests.support.states import offloading
from tests.support.trainings import make_trainer, nothing_left, rows, train  # noqa: F401

REFUSED = "uses a model whose weights are offloaded, and another thread has called `fit`"


class Blocks(ToyModel):
    """Four blocks that are called on `threads` threads; 0: on the thread of `training_step`."""

    def __init__(self, threads: int = 0, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.threads = threads

    def forward(self, x: Tensor) -> Tensor:
        if not self.threads:
            return torch.stack([block(x) for block in self.blocks]).sum(0)
        with ThreadPoolExecutor(self.threads) as pool:
            return torch.stack(list(pool.map(lambda block: block(x), self.blocks))).sum(0)

    def loss(self, batch: Tensor) -> Tensor:
        return (self(batch) - 1).square().mean()


def on_thread(function: Callable[[], Any]) -> Any:
    """Returns the result of `function`, called on a new thread, or raises its error."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(timeout=60)


@pytest.mark.parametrize(("precision", "states", "threads"), [("32-true", "host", 2), ("bf16-mixed", "ssd", 8)])
def test_blocks_that_are_called_on_threads_are_refused_by_name(
    tmp_path: Path, precision: Any, states: str, threads: int
) -> None:
    """Autocast is local to a thread, so that plain Lightning computes in fp32 there."""
    with pytest.raises(RuntimeError, match=f"ThreadPoolExecutor.*{REFUSED}"):
        train(tmp_path, offloading(states), Blocks(threads), rows(4), precision=precision)


@pytest.mark.parametrize("states", PLACES)
def test_threads_may_call_blocks_in_whole_weights(tmp_path: Path, states: str) -> None:
    class Evaluated(Blocks):
        def on_train_batch_end(self, *_: Any) -> None:
            weights = getattr(self.trainer.strategy, "whole_weights", None)
            with torch.no_grad(), weights() if weights else torch.no_grad():
                self.threads = 4
                self.losses.append(self(torch.ones(4, 8)).sum())
                self.threads = 0

    assert_same(*(train(tmp_path, one, Evaluated(), rows(4)) for one in (offloading(states), "auto")))


USES: dict[str, Callable[[Any], Any]] = {
    "read": lambda model: model.blocks[0][0].weight.sum(),
    "read an alias": lambda model: model.alias.sum(),
    "read a gradient": lambda model: model.blocks[0][0].weight.grad,
    "write": lambda model: model.blocks[0][0].weight.data.mul_(0.9),
    "set data": lambda model: setattr(model.blocks[0][0].weight, "data", torch.ones(8, 8)),
    "copy the model": copy.deepcopy,
    "state dict": lambda model: model.state_dict(),
    "state of the optimizer": lambda model: model.optimizers().optimizer.state_dict(),
    "step": lambda model: model.optimizers().optimizer.step(),
    "drop gradients": lambda model: model.optimizers().optimizer.zero_grad(),
    "forward": lambda model: model.blocks[0](torch.ones(4, 8)),
    "forward without a graph": lambda model: torch.no_grad()(model.blocks[0])(torch.ones(4, 8)),
    "backward": lambda model: model.kept.backward(retain_graph=True),
    "gradient of an input": lambda model: torch.autograd.grad(model.kept, model.input, retain_graph=True),
    "whole weights": lambda model: model.trainer.strategy.whole_weights().__enter__(),
}


@pytest.mark.parametrize("states", PLACES)
def test_another_thread_is_refused_before_it_changes_or_reads_anything(tmp_path: Path, states: str) -> None:
    """Each use is made between two steps, and amid a forward of the weights, which makes them resident."""
    refused: list[str] = []

    class Used(Blocks):
        def attempt(self) -> None:
            if self.global_step and isinstance(self.trainer.strategy, type(offloading(states))):
                for name, use in USES.items():
                    with pytest.raises(RuntimeError, match=REFUSED):
                        on_thread(lambda use=use: use(self))
                    refused.append(name)

        def on_train_start(self) -> None:
            self.alias = self.blocks[0][0].weight.detach()
            self.blocks[0].register_forward_pre_hook(lambda *_: self.attempt())

        def on_train_batch_start(self, *_: Any) -> None:
            self.input = torch.ones(4, 8, requires_grad=True)
            self.attempted, self.attempt = self.attempt, lambda: None  # type: ignore[method-assign]
            self.kept = self.blocks[0](self.input).sum()
            self.attempt = self.attempted  # type: ignore[method-assign]
            self.attempt()

        def on_train_end(self) -> None:
            del self.alias, self.kept, self.input, self.attempt, self.attempted

    assert_same(*(train(tmp_path, one, Used(), rows(4)) for one in (offloading(states), "auto")))
    assert len(refused) == 6 * len(USES)


def test_a_loader_that_reads_weights_on_a_thread_of_its_own_is_refused(tmp_path: Path) -> None:
    model = Blocks()

    class Reading(torch.utils.data.Dataset[Tensor]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> Tensor:
            return on_thread(lambda: model.blocks[0][0].weight.detach().sum(0) + index)

    loader = torch.utils.data.DataLoader(Reading(), batch_size=4, num_workers=0)
    with pytest.raises(RuntimeError, match=REFUSED):
        make_trainer(tmp_path, offloading()).fit(model, loader)


@pytest.mark.parametrize(("states", "trainers"), [("ssd", 2), ("host", 4)])
def test_several_trainers_train_on_threads_at_once(tmp_path: Path, states: str, trainers: int) -> None:
    """As Optuna's `n_jobs` does. All of them begin each batch together."""
    barrier = threading.Barrier(trainers)

    class Together(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            barrier.wait(60)

    models = [Blocks(seed=seed) for seed in range(trainers)]
    expected = [train(tmp_path, "auto", model, rows(4)) for model in models]

    def fit(model: Any) -> Any:
        make_trainer(tmp_path, offloading(states), callbacks=[Together()]).fit(model, rows(4))
        return model

    with ThreadPoolExecutor(trainers) as pool:
        for trained, plain in zip(pool.map(fit, copy.deepcopy(models)), expected, strict=True):
            assert_same(trained, plain)
