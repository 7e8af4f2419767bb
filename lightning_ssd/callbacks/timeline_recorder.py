"""`TimelineRecorder` writes the activity of every resource in a training step as a Chrome trace and a picture."""

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_ssd import torch_internals as internals
from lightning_ssd._lightning import pl
from lightning_ssd.callbacks.output_files import check_output
from lightning_ssd.sizes import check_count, parse_path
from lightning_ssd.timeline import BETWEEN, TimelineProfile

log = logging.getLogger(__name__)


class TimelineRecorder(pl.Callback):
    """Records the activity of every resource in a few training steps, and writes a Chrome trace and a picture.

    Rows: compute (GPU kernels; on a CPU, the operators of forward and backward on the training thread), copies from
    host memory to the device and back, reads and writes of the SSDs, the optimizer on the CPU, and waiting (on a GPU:
    no kernel runs; on a CPU: the training thread is blocked). Above them are the phases of the training: forward,
    backward, optimizer. The percentage of a row is the share of the time in which it is busy. In the trace, a wait of
    a GPU is named after its cause: "host" (the host has not launched the next kernel yet), what the host waits for
    meanwhile ("wait for weights", "cudaStreamSynchronize"), or the copy that the launched kernel waits for.

    The callback works under every strategy, including plain Lightning's, on CPU and CUDA devices, and does not change
    results. Outside of the recorded steps it does nothing. Within them, recording takes a few microseconds per
    operator, and the GPU is synchronized before the first step and after the last. Work that began before the first
    step or ends after the last is not shown. Of several processes, the first one records.

    Example:
        >>> trainer = Trainer(strategy="ssd_offload", callbacks=[TimelineRecorder(step=20, path="runs/step20")])

    Args:
        step: number of the first recorded step, counted from 0 as loggers count. Early steps are not typical: caches
            are cold, and `offload="auto"` is still measuring.
        path: path of the written files without their suffixes: `PATH.json` (for chrome://tracing or ui.perfetto.dev)
            and `PATH.png` (needs matplotlib). Default: `timeline` in the Trainer's `default_root_dir`.
        steps: number of recorded steps.

    Raises:
        ValueError: `step` or `steps` is out of range; or, when training starts, `path` can't be written, or the
            Trainer's profiler is torch's, of which a process has one.
    """

    def __init__(self, step: int = 20, path: str | Path | None = None, steps: int = 1) -> None:
        check_count("step", step, 0)
        check_count("steps", steps, 1)
        self._step = step
        self._steps = steps
        self._path = None if path is None else parse_path("path", path, "timeline")
        self._profile: TimelineProfile | None = None
        """The recording, while steps are recorded."""
        self._done = False
        self._boundary = True
        """True if the next batch is the first one of a step."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if isinstance(getattr(trainer, "profiler", None), pl.profilers.PyTorchProfiler):
            raise ValueError(
                "TimelineRecorder and `Trainer(profiler='pytorch')` both use torch's profiler, of which a process has "
                "one. Remove one of the two."
            )
        if not trainer.is_global_zero:
            return
        for file in self._files(trainer):
            check_output("`path` of TimelineRecorder", file)
        if find_spec("matplotlib") is None:
            log.warning("TimelineRecorder writes the Chrome trace alone: `pip install matplotlib` for the picture.")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._done = not trainer.is_global_zero
        self._boundary = True

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._done:
            return
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        if self._profile is not None and step >= self._step + self._steps:
            self._finish(trainer)
        elif self._profile is None and step == self._step:
            self._begin(trainer)
        if self._profile is not None:
            if self._boundary:
                self._profile.mark(f"step {step}")
            self._profile.mark("forward")
            self._boundary = False

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._mark("backward")

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._mark("optimizer")

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._mark(BETWEEN)
        self._boundary = not trainer.fit_loop._should_accumulate()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._mark("validation")

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._mark(BETWEEN)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._finish(trainer)
        if not self._done:
            log.warning("training ended before step %d: TimelineRecorder has written nothing", self._step)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._finish(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._finish(trainer)

    def _mark(self, name: str) -> None:
        if self._profile is not None:
            self._profile.mark(name)

    def _begin(self, trainer: pl.Trainer) -> None:
        if internals.is_recording():
            self._done = True
            log.warning("another torch profiler records: there is no timeline of step %d", self._step)
            return
        self._profile = TimelineProfile(trainer.strategy.root_device)
        self._profile.start()

    def _finish(self, trainer: pl.Trainer) -> None:
        """Ends a running recording and writes it. Errors are logged, so that they do not end the training."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        self._done = True
        trace, picture = self._files(trainer)
        try:
            profile.mark("end")
            profile.stop()
            timeline = profile.timeline(trace.parent)
            timeline.save_trace(trace)
            written = str(trace)
            if find_spec("matplotlib") is not None:
                timeline.save_picture(picture)
                written += f" and {picture}"
        except Exception as error:  # a full disk, a lost GPU: the training's own error must not be hidden
            log.warning("the timeline could not be written to %s: %s", trace.parent, error)
            return
        numbers = [str(step) for step, _ in timeline.steps]
        log.info("timeline of step %s in %s", " to ".join(dict.fromkeys((numbers[0], numbers[-1]))), written)

    def _files(self, trainer: pl.Trainer) -> tuple[Path, Path]:
        """Returns the files of the trace and of the picture."""
        base = Path(trainer.default_root_dir) / "timeline" if self._path is None else self._path
        return base.with_name(f"{base.name}.json"), base.with_name(f"{base.name}.png")
