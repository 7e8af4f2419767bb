"""What states take of the host's memory."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_ssd.model_states.gradient import GradientPool
from tests.support.states import Large, loader, memory, ssd


@pytest.mark.parametrize("states", ["host", "ssd"])
def test_the_end_of_a_training_takes_no_more_memory(tmp_path: Path, states: str) -> None:
    """The weights are whole again while the rest goes, flat after flat."""

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
    # Weights, gradients and two states went, and weights came; from SSDs weights came and gradients went.
    assert model.most - model.before < weights / 2
    if states == "host":
        assert memory() - model.before < -weights


def test_who_finds_no_memory_for_a_gradient_waits_for_steps() -> None:
    """As long as any is under way, and no longer."""
    landing = GradientPool(4 * 4096, pin=False)
    taken = [landing.allocate(4096, list) for _ in range(4)]

    class Steps(list["Future[None]"]):
        """Come to their ends, one after the other, once somebody has looked."""

        looked = False

        def __iter__(self) -> Iterator["Future[None]"]:
            if not self.looked:
                self.looked = True
                threading.Thread(target=self.end).start()
            return super().__iter__()

        def end(self) -> None:
            for index, step in enumerate(list.__iter__(self)):
                taken[index][1]()
                step.set_result(None)

    steps = Steps([Future(), Future()])
    room, give_back = landing.allocate(8192, lambda: list(steps))  # the first to end has not enough
    assert room.data_ptr() == taken[0][0].data_ptr()
    give_back()
    beside, give_back = landing.allocate(4 * 4096, lambda: list(steps))  # nobody will give any back
    assert beside.numel() == 4 * 4096
    give_back()
    landing.close()
