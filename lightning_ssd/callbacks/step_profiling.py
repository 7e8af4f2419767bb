"""`StepProfiling`: a callback that has a few training steps measured, when they are due."""

from typing import Any

from torch import Tensor

from lightning_ssd._lightning import pl
from lightning_ssd.callbacks.tensor_cache import find_tensor_cache
from lightning_ssd.planning import ModelProfile
from lightning_ssd.profiler import Profiler, count_samples
from lightning_ssd.states import find_units


class StepProfiling(pl.Callback):
    """Lets some steps go by, records a micro-batch of the last of them, measures some more, and makes a profile.

    Args:
        warm_up: steps that go by.
        steps: steps that are measured.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, warm_up: int, steps: int) -> None:
        if warm_up < 1 or steps < 1:
            raise ValueError(f"`warm_up={warm_up}` and `steps={steps}` must be at least 1.")
        self._warm_up = warm_up
        self._steps = steps
        self._profiler: Profiler | None = None
        self._step = 0
        self._due: int | None = None
        """The step that is recorded, while that lies ahead or is under way; those that are measured follow."""
        self._recorded = False
        self._timing = False
        self._samples = self._tokens = 1

    def profiled(self, trainer: pl.Trainer, pl_module: pl.LightningModule, profile: ModelProfile) -> None:
        """The steps are measured. Called at the end of a step."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        cache = find_tensor_cache(trainer)
        if cache is None:
            raise ValueError(
                f"{type(self).__name__} needs `strategy='ssd_offload'`, or an `ActivationOffload` callback."
            )
        config = getattr(trainer.strategy, "states_config", None)
        units = find_units(pl_module, None if config is None else config.units)
        states = getattr(trainer.strategy, "model_states", None)
        self._profiler = Profiler(units, cache, states, trainer.optimizers)
        self._step = 0
        self._timing = False
        self.schedule(self._warm_up)

    def schedule(self, warm_up: int) -> None:
        """Begins anew: after `warm_up` steps from now on, at least one, others are measured."""
        self._due = self._step + warm_up - 1
        self._recorded = False

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._due is None or self._step < self._due:
            return
        assert self._profiler is not None
        if self._step == self._due:
            if not self._recorded:
                self._recorded = True
                self._profiler.begin_recording()
            return
        if not self._timing:
            self._timing = True
            self._profiler.begin_timing()
        self._samples, self._tokens = count_samples(batch)
        self._profiler.begin_forward()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        assert self._profiler is not None
        self._profiler.begin_backward()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._profiler is not None
        self._profiler.end_recording()
        if self._timing and pl_module.automatic_optimization:  # else more of the forward may follow
            self._profiler.end_backward()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._profiler is not None
        self._profiler.end_recording()  # of a batch without backward
        if self._timing and not pl_module.automatic_optimization:
            self._profiler.end_backward()
        if pl_module.automatic_optimization and trainer.fit_loop._should_accumulate():
            return
        self._step += 1
        if self._due is not None and self._step > self._due + self._steps:
            self._due = None
            self._timing = False
            self._profiler.end_timing()
            clips = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"
            clips |= trainer.precision == "16-mixed"  # a step is skipped where gradients are not finite
            profile = self._profiler.profile(
                type(pl_module).__name__,
                steps=self._steps,
                micro_batches=trainer.accumulate_grad_batches,
                samples=self._samples,
                tokens=self._tokens,
                clip_norm=clips,
            )
            self.profiled(trainer, pl_module, profile)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._timing:
            assert self._profiler is not None
            self._profiler.pause()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._end()

    def _end(self) -> None:
        profiler, self._profiler = self._profiler, None
        self._timing = False
        if profiler is not None:
            profiler.close()
