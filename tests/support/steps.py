"""The optimizer step of one flat parameter, outside of any training."""

from collections.abc import Iterator, Sequence

import pytest
import torch

from lightning_ssd.device import Worker
from lightning_ssd.futures import Future, finished
from lightning_ssd.model_states.gradients.gradient import Gradient
from lightning_ssd.model_states.optimizers.optimizers import make_flat_optimizer
from lightning_ssd.model_states.optimizers.step_work import do_together
from lightning_ssd.model_states.steps.step import OptimizerStep
from lightning_ssd.model_states.stores.state_store import StateStore
from lightning_ssd.storage import Slab
from tests.support.state_stores import weights_of

ARRIVED = [True, False]  # the second parameter has no gradient, and is not stepped


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker("test", do_together)
    yield made
    made.close()


class Stepped:
    """A step of a store, and the work that it has reported."""

    def __init__(
        self,
        store: StateStore,
        worker: Worker,
        scale: "Future[float | None]",
        limit: float | None = None,
        arrived: Sequence[bool] = ARRIVED,
    ) -> None:
        optimizer = torch.optim.AdamW([item.parameter for item in store.flat.param_views], lr=0.1, fused=True)
        options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
        self.gradient = Gradient(store.flat, Slab(store.flat.nbytes, pin=False))
        for item, values in zip(store.flat.param_views, weights_of(store.layout, seed=2), strict=True):
            item.of(self.gradient.host_grad).copy_(values)
        self.jobs: list[int] = []
        self.step = OptimizerStep(
            store,
            make_flat_optimizer(optimizer, store.flat),
            options,
            self.gradient,
            arrived,
            scale,
            limit,
            worker,
            lambda parameters, seconds: self.jobs.append(parameters),
            priority=0,
            copied=lambda: finished(None),
        )
