"""`ModelProfiler` measures a model's training step for the planner, and the lifetimes of its tensors."""

import logging
from dataclasses import replace
from pathlib import Path

from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.autoplan import ProfiledSteps
from lightning_ssd.callbacks.output_files import check_output
from lightning_ssd.callbacks.step_profiling import StepProfiling
from lightning_ssd.callbacks.training import LightningTraining
from lightning_ssd.planning import ModelProfile
from lightning_ssd.sizes import parse_path

log = logging.getLogger(__name__)


class ModelProfiler(StepProfiling):
    """Measures a few training steps, and writes a profile of the model for `lightning-ssd plan --profile FILE`.

    The profile has the forward and backward time of every unit and, for every tensor that autograd saves ("operator"),
    its bytes, the time and FLOPs to compute it, and whether it can be recomputed. These times are of one micro-batch,
    which is traced operation by operation, and is slower. Later steps are timed without synchronizing the host: the
    host's launches, and the time between micro-batches. The results of the training do not change. If several processes
    train, the files are those of the first one.

    Args:
        path: JSON file to write after the measured steps.
        warm_up: steps before the measured ones; a micro-batch of the last of them is traced.
        steps: later steps that are timed.
        lifetimes: JSON file for `lightning-ssd profile --profile FILE` and `lightning-ssd plan RECIPE --replay
            --lifetimes FILE`: when each weight, gradient, optimizer state, saved tensor and transient of the traced
            step is used by which operator of forward, backward and optimizer step. All of them are on the GPU in that
            step, which must have room for them. Collectives are operators, too, and sharded tensors have the bytes of
            their shard. None: no such file.

    Raises:
        ValueError: an argument is out of range, or a file can't be written; or lifetimes are wanted of a training that
            offloads model states, accumulates gradients, or optimizes manually.
    """

    def __init__(self, path: str | Path, warm_up: int = 3, steps: int = 3, lifetimes: str | Path | None = None) -> None:
        super().__init__(warm_up, steps)
        self._path = parse_path("path", path, "profile.json")
        self._lifetimes = None if lifetimes is None else parse_path("lifetimes", lifetimes, "lifetimes.json")
        if self._lifetimes == self._path:
            raise ValueError(f"`path` and `lifetimes` of ModelProfiler are both {str(path)!r}. Name two files.")
        self._done = False
        self._writes = True
        """Whether this process writes the files."""

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_output("`path` of ModelProfiler", self._path)
        if self._lifetimes is not None:
            check_output("`lifetimes` of ModelProfiler", self._lifetimes)
        self._done = False
        self._writes = trainer.is_global_zero
        super().on_train_start(trainer, pl_module)
        if self._lifetimes is not None and self._events is not None:
            if trainer.accumulate_grad_batches > 1 or not pl_module.automatic_optimization:
                raise ValueError(
                    "Lifetimes of tensors are measured in a step of one micro-batch. Set `accumulate_grad_batches=1` "
                    "and `automatic_optimization=True`, or leave out `lifetimes` of ModelProfiler."
                )
            self._events.profiler.record_lifetimes(pl_module)

    @override
    def make_events(self, training: LightningTraining) -> ProfiledSteps:
        return ProfiledSteps(training, self._warm_up, self._steps, self._write)

    def _write(self, profile: ModelProfile) -> None:
        """Writes the files, at the end of the last timed step."""
        self._done = True
        if not self._writes or self._events is None:
            return
        profile.to_json(self._path)
        log.info("profile of %d steps, in %s:\n%s", self._steps, self._path, profile.describe())
        if self._lifetimes is not None:
            found = self._events.profiler.lifetimes(profile.name)
            lifetimes = replace(found, samples=profile.samples, tokens=profile.tokens)
            lifetimes.to_json(self._lifetimes)
            log.info("lifetimes of all tensors, in %s:\n%s", self._lifetimes, lifetimes.describe())

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._done:
            log.warning("training ended before %d steps were profiled: there is no %s", self._steps, self._path)
