"""The memory of a training is freed with its Trainer, model and strategy."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ssd import SSDOffloadStrategy, SwapPlanner
from tests.support.garbage import collect
from tests.support.models import Model
from tests.support.states import host, offloading, some_stay, ssd, train


class Looked(Model):
    """Reads, writes and saves weights and views of them in every step."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.views = [parameter[:1] for parameter in self.parameters()]
        self.aliases = [parameter.detach() for parameter in self.parameters()]
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.99)


class Failing(Model):
    """Raises an error in its third step."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.global_step == 2:
            raise ValueError("of user code")


@pytest.fixture
def count_created() -> Iterator[Callable[[], int]]:
    """Returns the number of live tensors that were created since the last call."""

    def count() -> int:
        collect()
        number = sum(issubclass(type(item), Tensor) for item in gc.get_objects())
        gc.freeze()  # objects that live now are not among those of the next call
        return number

    yield count
    gc.unfreeze()


STRATEGIES: dict[str, Callable[[Path], SSDOffloadStrategy]] = {
    "host": lambda path: host(offload="none"),
    "ssd": lambda path: ssd(path=path),
    "some stay": lambda path: some_stay(),
    "all saved tensors": lambda path: offloading(path=path, offload=1.0),
    "ssdtrain": lambda path: offloading(path=path, offload="ssdtrain"),
    "speculative": lambda path: offloading(clip="speculative"),
    "planned": lambda path: SSDOffloadStrategy(states="host", min_bytes=1, tier="host"),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if name == "planned" else ()) for name in STRATEGIES]
)
def test_no_tensor_outlives_its_training(tmp_path: Path, name: str, count_created: Callable[[], int]) -> None:
    def training(model: Model) -> None:
        callbacks = [SwapPlanner(gpu_memory="1GiB")] if name == "planned" else []
        train(tmp_path, STRATEGIES[name](tmp_path), model, callbacks=callbacks, gradient_clip_val=1.0, max_steps=4)

    training(Model())  # torch and Lightning cache a few tensors at first use
    count_created()
    training(Looked())
    with pytest.raises(ValueError, match="of user code"):
        training(Failing())
    assert count_created() == 0
