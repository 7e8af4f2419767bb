"""Host memory of model states."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_ssd.futures import Future
from lightning_ssd.model_states.gradients.gradient import GradientPool
from lightning_ssd.model_states.steps.step_scheduler import StepScheduler
from tests.support.models import Model
from tests.support.states import Large, loader, memory, offloading, ssd, train


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("states", ["host", "ssd"])
def test_the_end_of_a_training_needs_no_more_memory(tmp_path: Path, states: str) -> None:
    """Whole weights are allocated while other states are freed, one flat parameter after the other."""

    class Ending(Large):
        def on_train_batch_end(self, *_: Any) -> None:
            self.trainer.strategy.model_states.drain()  # type: ignore[attr-defined]
            self.most = self.before = memory()

        def on_fit_end(self) -> None:
            watcher.start()

    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.0005):
            model.most = max(model.most, memory())

    model = Ending()
    watcher = threading.Thread(target=watch)
    trainer = pl.Trainer(accelerator="cpu", strategy=ssd(states=states), max_steps=2, default_root_dir=tmp_path,
                         logger=False, enable_checkpointing=False, enable_progress_bar=False)  # fmt: skip
    trainer.fit(model, loader())
    ended.set()
    watcher.join()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    # From host memory, weights replace weights, gradients and two states; from SSDs, weights replace gradients.
    assert model.most - model.before < weights / 2
    if states == "host":
        assert memory() - model.before < -weights


def test_a_gradient_without_memory_waits_for_steps() -> None:
    """It waits only while steps are running."""
    pool = GradientPool(4 * 4096, pin=False)
    allocated = [pool.allocate(4096, list) for _ in range(4)]

    class Steps(list["Future[None]"]):
        """Steps that end one after the other, each after it was read."""

        looked = False

        def __iter__(self) -> Iterator["Future[None]"]:
            if not self.looked:
                self.looked = True
                threading.Thread(target=self.end).start()
            return super().__iter__()

        def end(self) -> None:
            for index, step in enumerate(list.__iter__(self)):
                allocated[index][1]()
                step.set_result(None)

    steps = Steps([Future(), Future()])
    gradient, release = pool.allocate(8192, lambda: list(steps))  # the first step that ends frees too little
    assert gradient.data_ptr() == allocated[0][0].data_ptr()
    release()
    other, release = pool.allocate(4 * 4096, lambda: list(steps))  # no step will free memory
    assert other.numel() == 4 * 4096
    release()
    pool.close()


def host_bytes(path: Path, limit: float | None, **arguments: Any) -> list[int]:
    """Returns the host memory of model states after each step, whose gradients are clipped to `limit`."""
    found: list[int] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            states = trainer.strategy.model_states
            states.drain()
            buffers = [buffer for store in states.stores.values() for buffer in store.buffers.host]
            second = sum(buffer.nbytes for buffer in buffers if buffer.has_second)
            assert states.nbytes.spare.reserved == second
            found.append(states.nbytes.host)

    end = StepScheduler.end

    def after_jobs(steps: StepScheduler) -> None:  # steps that backward has submitted, without a known norm
        steps._worker.submit(lambda: None, priority=1000).result()
        end(steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepScheduler, "end", after_jobs)
        train(path, offloading(**arguments), Model(), batches=12, gradient_clip_val=limit, callbacks=[Watch()])
    return found


def test_clipping_takes_no_more_memory_unless_steps_are_speculated(tmp_path: Path) -> None:
    """Whether all steps are clipped or none. A new training defers its steps until a few norms are known."""
    (plain,) = set(host_bytes(tmp_path, None))
    assert set(host_bytes(tmp_path, 1e-3)) == set(host_bytes(tmp_path, 1e-3, clip="deferred")) == {plain}
    never = host_bytes(tmp_path, 1e6)
    assert never[0] == plain < never[-1]


def test_a_small_budget_has_steps_wait_for_the_norm(tmp_path: Path) -> None:
    (plain,) = set(host_bytes(tmp_path, None))
    assert set(host_bytes(tmp_path, 1e6, host_memory=f"{plain}B")) == {plain}
