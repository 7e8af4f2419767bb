"""`ModelProfiler`: what a training step of a model does, measured, for the planner."""

import logging
from pathlib import Path

from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.callbacks.step_profiling import StepProfiling
from lightning_ssd.planning import ModelProfile

log = logging.getLogger(__name__)


class ModelProfiler(StepProfiling):
    """Measures a few training steps, and writes what they do as a profile: `lightning-ssd plan --profile FILE`.

    Of every unit: the time of its forward and backward. Of what its operations make and autograd saves ("operators"):
    the bytes, the time and the FLOP that it takes to make them, and whether that can be done again. One micro-batch is
    followed operation by operation, which takes longer; while the steps after it are measured nobody waits for the
    device. The numbers of the training stay as they are.

    Args:
        path: JSON file to write when the steps are over.
        warm_up: steps before; a micro-batch of the last of them is the one that is followed.
        steps: steps that are measured; times are their means.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, path: str | Path, warm_up: int = 3, steps: int = 3) -> None:
        super().__init__(warm_up, steps)
        self._path = Path(path)
        self._done = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._done = False

    def profiled(self, trainer: pl.Trainer, pl_module: pl.LightningModule, profile: ModelProfile) -> None:
        self._done = True
        profile.to_json(self._path)
        log.info("profile of %d steps, in %s:\n%s", self._steps, self._path, profile.describe())

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._done:
            log.warning("training ended before %d steps were profiled: there is no %s", self._steps, self._path)
