"""Who may hold staging memory while it waits: no order of user code, steps and prefetches ends in a deadlock."""

import contextlib
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_ssd import waits
from lightning_ssd.device import CPUCopyEngine, Worker
from lightning_ssd.futures import Future
from lightning_ssd.model_states.placement.state_storage import make_store
from lightning_ssd.model_states.stores.layout import Layout
from lightning_ssd.model_states.stores.staged import StagedFlats
from lightning_ssd.model_states.stores.state_store import StateStore
from lightning_ssd.model_states.units.flat import FlatParameter
from tests.support.compare import assert_same
from tests.support.faults import GatedBackend
from tests.support.models import ToyModel
from tests.support.state_stores import CPU, STATES, scratch_space, weights_of
from tests.support.states import offloading
from tests.support.trainings import make_trainer, nothing_left, rows, train  # noqa: F401

USER, STEP, PREFETCH = range(3)
NUMELS = (960, 64, 2048)
"""Elements of the flat parameters that user code, a step and a prefetch use. All of them need different memory."""


def make_flat(numel: int) -> Layout:
    parameters = [("weight", nn.Parameter(torch.zeros(numel)))]
    return Layout(FlatParameter(f"flat {numel}", parameters, torch.float32, CPU), False, STATES, True, 1)


class Waiters:
    """User code, a step and a prefetch, of a flat parameter each, beside staging memory for the largest one."""

    def __init__(self, path: Path, numels: tuple[int, ...], undo: contextlib.ExitStack) -> None:
        self.backend = GatedBackend()
        layouts = [make_flat(numel) for numel in numels]
        room = max(layout.flat.nbytes + layout.opt_state_bytes for layout in layouts) + 8192
        scratch = undo.enter_context(scratch_space(path, self.backend, staging=room // 4096 * 4096))
        copies = CPUCopyEngine(CPU)
        self.stores: list[StateStore] = []
        for layout in layouts:
            store = make_store(layout, ("ssd", "ssd"), scratch, copies, undo)
            store.assign(weights_of(layout))
            store.drain()
            self.stores.append(store)
        self.worker = Worker("cpu-optimizer")
        undo.callback(self.worker.close)
        by_flat = {store.flat: store for store in self.stores}
        self.staged = StagedFlats(
            by_flat,
            lambda: None,
            lambda flat: by_flat[flat].drain(),
            lambda _: None,
            lambda _: None,
            lambda _: None,
            lambda flat, masters: by_flat[flat].checkin(masters),
            on_ranks=False,
        )
        self.gradient: Future[None] = Future()
        """The gradient of the step arrives when the test says so."""

    def begin(self, waiter: int) -> Callable[[], object]:
        """Begins one of the three, and returns a function that waits for its end."""
        store = self.stores[waiter]
        if waiter == USER:
            self.staged.stage(store.flat).changed = True  # held until the end of the test
            return lambda: None
        if waiter == STEP:
            values = store.stage(step=True)
            made = self.worker.submit(
                lambda: store.unstage(values.result(), changed=True, step=True), [values, self.gradient]
            )
            store.announce_step(made, made)
            return lambda: made.result(60)
        store.announce_step(step := self._step(store), step)
        target = torch.zeros(store.flat.nbytes, dtype=torch.uint8)
        issued = store.prefetch_to(target, None)
        return lambda: issued.result(60)

    def _step(self, store: StateStore) -> "Future[None]":
        values = store.stage(step=True)
        return self.worker.submit(lambda: store.unstage(values.result(), changed=True, step=True), [values])


@pytest.mark.parametrize("numels", list(itertools.permutations(NUMELS)))
@pytest.mark.parametrize("order", list(itertools.permutations((USER, STEP, PREFETCH))))
def test_every_waiter_ends_while_user_code_holds_values(
    tmp_path: Path, order: tuple[int, ...], numels: tuple[int, ...]
) -> None:
    """The waiters begin in `order`, and all but user code at a closed gate. The gate opens, then the gradient arrives,
    or the other way round; user code holds its values all the time."""
    for gradient_first in (False, True):
        with contextlib.ExitStack() as undo:
            waiters = Waiters(tmp_path, numels, undo)
            ends: list[Callable[[], object]] = []
            for waiter in order:
                if waiter == USER:
                    waiters.backend.release()
                ends.append(waiters.begin(waiter))
                waiters.backend.hold()
            if gradient_first:
                waiters.gradient.set_result(None)
                waiters.backend.release()
            else:
                waiters.backend.release()
                waiters.gradient.set_result(None)
            for end in ends:
                end()
            assert list(waiters.staged._staged) == [waiters.stores[USER].flat]
            waiters.staged.unstage()
            for store in waiters.stores:
                store.drain()


class Unequal(ToyModel):
    """Layers of different sizes, of which staging memory for three has little room beside a small one in its middle.

    User code between two steps is drawn from `seed`: it reads and writes weights and held aliases, and averages the
    weights of a frozen target.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(lambda parameters: torch.optim.AdamW(parameters, 1e-2))
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.wide = nn.Linear(8, 160)
        self.narrow = nn.Linear(160, 8, bias=False)
        self.target = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 160)]).requires_grad_(False)
        self.random = random.Random(seed)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.narrow(self.wide(x).tanh()) + self.target[0](x)
        result: Tensor = self.last(x)
        return result

    def loss(self, batch: Tensor) -> Tensor:
        return (self(batch) - 1).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        weights = [self.first.weight, self.wide.weight, self.narrow.weight, self.last.bias]
        for _ in range(self.random.randrange(1, 6)):
            one, other = self.random.sample(weights, 2)
            action = self.random.randrange(6)
            if action == 0:
                self.losses.append(float(one.detach().sum()))
            elif action == 1:
                one.data.mul_(0.99)
            elif action == 2:
                for source, target in zip((self.first, self.wide), self.target, strict=True):
                    for p, q in zip(source.parameters(), target.parameters(), strict=True):
                        q.data.mul_(0.9).add_(p.data, alpha=0.1)
            elif action == 3:
                self.held = [one.detach(), other.data]
            elif action == 4 and hasattr(self, "held"):
                self.held[0].add_(0.01)
                self.losses.append(float(self.held[1].sum()))
            else:
                self.losses.append(float(sum(value.sum() for value in self.state_dict().values())))

    def on_train_end(self) -> None:
        self.__dict__.pop("held", None)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("seed", range(4))
def test_random_user_code_between_steps_sees_plain_values(tmp_path: Path, seed: int, precision: Any) -> None:
    arguments: dict[str, Any] = {"precision": precision, "max_epochs": 2, "gradient_clip_val": 1.0}
    plain = train(tmp_path, "auto", Unequal(seed), rows(5), **arguments)
    assert_same(train(tmp_path, offloading("ssd"), Unequal(seed), rows(5), **arguments), plain)


class Stuck(pl.Callback):
    """Closes the drive's gate amid a training, and opens it again after the error."""

    def __init__(self, backend: GatedBackend) -> None:
        self.backend = backend

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            self.backend.hold()

    def on_exception(self, *_: Any) -> None:
        self.backend.release()


def test_a_training_whose_drive_does_not_answer_ends_with_an_error_that_names_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "POLL_SECONDS", 0.01)
    backend = GatedBackend()
    strategy = offloading("ssd", backend=backend)
    with pytest.raises(RuntimeError) as error:
        make_trainer(tmp_path, strategy, callbacks=[Stuck(backend)]).fit(Unequal(0), rows(5))
    message = str(error.value)
    for part in ("MainThread waits for the", "no transfer, copy or job", "scratch", "in transfer (storage/engine.py"):
        assert part in message.replace("_transfer", "transfer"), message
