"""Times the steps of a Lightning training, for the benchmarks that report seconds per step."""

import sys
import time
from typing import Any

import torch

from lightning_ssd._lightning import pl


class StepTimes(pl.Callback):
    """Records the begin of every step, after the GPU has finished the step before.

    Args:
        losses: record the loss of every step, too, and print it during training.

    Attributes:
        begun: seconds on the host's clock at which each step began, and then at which training ended.
        losses: loss of every step, if they are recorded.
    """

    def __init__(self, *, losses: bool = True) -> None:
        self.begun: list[float] = []
        self.losses: list[float] = []
        self._records_losses = losses

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._record_time(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        if self._records_losses:
            self.losses.append(outputs["loss"].item())
            print(f"  step {len(self.losses)}: loss {self.losses[-1]:.3f}", file=sys.stderr, flush=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._record_time(trainer)

    def seconds(self, warm_up: int) -> list[float]:
        """Returns the seconds of each step after the first `warm_up` ones."""
        return [end - begin for begin, end in zip(self.begun, self.begun[1:], strict=False)][warm_up:]

    def _record_time(self, trainer: Any) -> None:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        self.begun.append(time.perf_counter())
