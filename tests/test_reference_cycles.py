"""Steps of a training leave no tensors in cycles of references, whose memory only a garbage collection would free."""

import gc
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import Tensor

from lightning_ssd import SSDOffloadStrategy
from tests.support.garbage import collect
from tests.support.models import Model
from tests.support.plans import planner
from tests.support.states import loader, train
from tests.support.trainings import fit

STRATEGIES: dict[str, dict[str, Any]] = {
    "activations in host memory": {"states": "gpu", "offload": 1.0, "tier": "host", "host_memory": "64MiB"},
    "activations on SSD": {"states": "gpu", "offload": 1.0, "host_memory": 0},
    "SSDTrain's rule": {"states": "gpu", "offload": "ssdtrain"},
    "states in host memory": {"states": "host", "offload": "none"},
    "states on SSD": {"states": "ssd", "offload": "none"},
    "states on SSD, naive": {"states": "ssd", "offload": "none", "overlap": "naive"},
    "speculative steps": {"states": "ssd", "offload": "none", "clip": "speculative"},
    "split masters": {"states": "host", "offload": "none", "state_format": "split"},
    "recoverable steps": {"states": "ssd", "offload": "none", "recover": True},
    "everything on SSD": {"states": "ssd", "offload": 1.0},
}

QUICK = ("activations in host memory", "activations on SSD", "everything on SSD")


class Garbage(pl.Callback):
    """Collects no garbage during two steps, and finds the tensors of that which they have left.

    Tensors that are older than these steps are not counted, because an earlier test's may become garbage in them, nor
    are views of memory that is used again, such as staging memory.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self.older: list[weakref.ref[Tensor]] = []
        self.found: list[str] | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.first and self.found is None:
            while collect():  # finalizers of earlier tests' objects leave further garbage
                pass
            gc.disable()
            self.older = [weakref.ref(item) for item in gc.get_objects() if issubclass(type(item), Tensor)]
            gc.set_debug(gc.DEBUG_SAVEALL)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.first + 2 and self.found is None:
            older = {id(item) for ref in self.older if (item := ref()) is not None}
            collect()
            left = [
                (weakref.ref(item.untyped_storage()), f"{item.dtype} {list(item.shape)}")
                for item in gc.garbage
                if issubclass(type(item), Tensor) and id(item) not in older
            ]
            self.end()
            while collect():
                pass
            self.found = [name for storage, name in left if storage() is None]

    def on_exception(self, *_: Any) -> None:
        self.end()

    def end(self) -> None:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "strategy", [n if n in QUICK else pytest.param(n, marks=pytest.mark.thorough) for n in STRATEGIES]
)
def test_steps_leave_no_tensors_to_the_garbage_collector(tmp_path: Path, strategy: str, precision: Any) -> None:
    garbage = Garbage(3)
    arguments = {"ssd_capacity": "16MiB"} | STRATEGIES[strategy]
    train(
        tmp_path,
        SSDOffloadStrategy(tmp_path, min_bytes=1, **arguments),
        Model(),
        max_epochs=1,
        precision=precision,
        gradient_clip_val=1.0 if precision == "32-true" else None,  # fused optimizers under autocast can't be clipped
        callbacks=[garbage],
    )
    assert garbage.found == []


def test_steps_under_a_plan_leave_no_tensors_to_the_garbage_collector(tmp_path: Path) -> None:
    garbage = Garbage(6)
    swaps = planner(gpu_memory="least")
    strategy = SSDOffloadStrategy(tmp_path, min_bytes=1, states="gpu", host_memory="64MiB", ssd_capacity="16MiB")
    train(tmp_path, strategy, Model(), max_epochs=1, batches=12, callbacks=[garbage, swaps])
    assert swaps.cycle.plan is not None
    assert garbage.found == []


class KeepsGraph(Model):
    """Keeps a result with its graph, as code does that stores a loss without `detach`."""

    def loss(self, batch: Tensor) -> Tensor:
        decay = sum(parameter.square().sum() for parameter in self.parameters())
        self.kept = super().loss(batch) + 0.01 * decay
        self.kept_weight = self.blocks[0].up.weight * 2
        self.kept_view = self.blocks[0].up.weight[0]
        return self.kept


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("states", ["gpu", "host", "ssd"])
def test_a_model_that_keeps_a_graph_is_freed_after_the_training(tmp_path: Path, states: Any, precision: Any) -> None:
    def trained() -> list[weakref.ref[Any]]:
        strategy = SSDOffloadStrategy(tmp_path, min_bytes=1, states=states, offload=1.0, ssd_capacity="16MiB")
        model = KeepsGraph()
        fit(tmp_path, strategy, model, loader(2), precision=precision)
        return [weakref.ref(model), weakref.ref(strategy)]

    kept = trained()
    while collect():
        pass
    assert [reference() for reference in kept] == [None, None]
