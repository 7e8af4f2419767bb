"""`ProfiledSteps`: profiles a few steps of a training, from a warm-up to a profile.

No profile precedes the first step: a trace would call `training_step` once more, whose effects on files and iterators
can't be undone.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor, nn

from lightning_ssd import torch_internals as internals
from lightning_ssd.activations import UnitProof
from lightning_ssd.autoplan.batches import BatchShape, SeenBatches
from lightning_ssd.autoplan.protocol import Training
from lightning_ssd.planning import ModelProfile
from lightning_ssd.profiling import Profiler, count_samples
from lightning_ssd.uncopied import Uncopied

MAX_WAIT = 4
"""Steps after the warm-up in which a large batch is waited for."""

Phase = Literal["idle", "waiting", "recording", "checking", "timing"]


class ProfiledSteps(Uncopied):
    """Warms up, records a micro-batch of the last warm-up step, times more steps, and makes a profile.

    In the micro-batch after the recorded one, recomputed tensors are compared with saved ones. All methods are called
    on the training thread, for each event of the training, whether or not it is being profiled.

    Args:
        training: the training.
        warm_up: steps up to and including the step of the recorded micro-batch.
        steps: timed steps.
        on_profile: called with the profile, at the end of the last timed step.

    Attributes:
        training: the training.
        phase: purpose of the present micro-batch, or of the last one.
        profiler: measures the training. A move of model states replaces it.
        checkpointed: modules of units that are checkpointed while a micro-batch is recorded, and in the next one, each
            with the proof that it may be.
        recordable: batches of which a large one is recorded, if there is one within `MAX_WAIT` steps; `None`: any is.
    """

    def __init__(
        self, training: Training, warm_up: int, steps: int, on_profile: Callable[[ModelProfile], None]
    ) -> None:
        self.training = training
        self.checkpointed: Mapping[nn.Module, UnitProof] = {}
        self.recordable: SeenBatches | None = None
        self._on_profile = on_profile
        self._num_timed = steps
        self._step = 0
        """Number of ended steps."""
        self._timed_from = 0
        """Number of the first timed step."""
        self._at_boundary = True
        """True if the next micro-batch is the first of a step."""
        self._had_backward = False
        """Whether a backward of the present micro-batch has begun."""
        self._samples = self._tokens = 1
        self._num_compiled = 0
        """Value of `count_compiled` when the recorded micro-batch began."""
        self.begin(warm_up)

    def begin(self, warm_up: int) -> None:
        """Profiles the training as it is set up now, after `warm_up` steps, at least one."""
        training = self.training
        # Manual optimization may step between a forward and its backward.
        self.profiler = Profiler(
            training.units(),
            training.offloader,
            training.states,
            training.optimizers,
            allow_recompute=training.automatic,
        )
        self.schedule(warm_up)

    def schedule(self, warm_up: int) -> None:
        """Profiles the training after `warm_up` more steps, at least one."""
        self._due = self._step + warm_up - 1
        self.phase: Phase = "waiting"

    def discard(self) -> None:
        """Discards the present profile: the next step is profiled instead."""
        if self.measuring:
            self.profiler.close()
            self.schedule(1)

    @property
    def measuring(self) -> bool:
        """True from the begin of the warm-up to the end of the last timed step."""
        return self.phase != "idle"

    # ---- events of the training ----

    def begin_micro_batch(self, batch: Any) -> None:
        """Called when a micro-batch begins."""
        at_boundary, self._at_boundary = self._at_boundary, False
        self._had_backward = False
        if self.phase == "waiting" and at_boundary and self._is_due(batch):
            self.phase = "recording"
            self._num_compiled = internals.count_compiled()
            self.profiler.begin_recording(self.checkpointed)
        elif self.phase == "recording":
            self.phase = "checking"
            self.profiler.begin_checking()
        elif self.phase == "checking" and at_boundary:
            self.phase = "timing"
            self._timed_from = self._step
            self.profiler.begin_timing()
        if self.phase in ("checking", "timing"):
            self._samples, self._tokens = count_samples(batch)
        if self.phase == "timing":
            self.profiler.begin_forward(of_step=at_boundary)

    def begin_backward(self, loss: Tensor) -> None:
        """Called before each backward; `loss` is its first argument."""
        self._had_backward = True
        self.profiler.begin_backward()

    def end_backward(self) -> None:
        """Called after each backward."""
        self.profiler.end_recording()
        if self.training.automatic:  # with manual optimization, more of the forward may follow
            self._end_timed_backward()

    def begin_optimizer(self) -> None:
        """Called before each optimizer step."""
        self.profiler.begin_optimizer()

    def end_micro_batch(self, *, ends_step: bool, short: bool = False) -> None:
        """Called when a micro-batch has ended.

        Args:
            ends_step: whether it was the last one of its step.
            short: whether that step had fewer micro-batches than others. A profile has times of micro-batches alone.
        """
        self.profiler.end_recording()  # the batch may have had no backward
        # With manual optimization, a backward without `manual_backward` is not seen.
        skipped = self.training.automatic and not self._had_backward
        if self.phase == "recording":
            # `training_step` may skip the batch, before its forward or after it. The time of compilation is no step's.
            compiled = internals.count_compiled() != self._num_compiled
            if skipped or compiled or not self.profiler.graph.operations:
                self.discard()
        self.profiler.end_optimizer()
        if not self.training.automatic:
            self._end_timed_backward()
        self.profiler.end_checking()
        if not ends_step:
            return
        self._step += 1
        self._at_boundary = True
        if self.phase == "timing" and self._step - self._timed_from >= self._num_timed:
            self.phase = "idle"
            self.profiler.end_timing()
            self._on_profile(self._profile(self._num_timed))

    def end_epoch(self) -> None:
        """Called when an epoch has ended, maybe because a hook of the module has skipped its last batches."""
        if self.phase == "recording" and not self._at_boundary:
            self.discard()
            self._at_boundary = True

    def pause(self) -> None:
        """Called when a validation begins."""
        if self.phase == "timing":
            self.profiler.pause()

    def resume(self) -> None:
        """Called when a validation has ended."""
        if self.phase == "timing":
            self.profiler.resume()

    def close(self) -> None:
        """Ends profiling: no hooks and modes are left."""
        self.phase = "idle"
        self.profiler.close()

    # ---- implementation ----

    def _is_due(self, batch: Any) -> bool:
        """Returns whether the warm-up has ended and `batch` may be recorded: it is large, or no large one has come."""
        large = self.recordable is None or self.recordable.is_large(BatchShape.of(batch))
        return self._step >= self._due + (0 if large else MAX_WAIT)

    def _profile(self, timed: int) -> ModelProfile:
        """Returns the profile; before steps were timed, without times of the host and between micro-batches."""
        training = self.training
        return self.profiler.profile(
            type(training.module).__name__,
            steps=timed,
            micro_batches=training.micro_batches,
            samples=self._samples,
            tokens=self._tokens,
            clip_norm=training.scales_gradients,
        )

    def _end_timed_backward(self) -> None:
        if self.phase == "timing":
            self.profiler.end_backward()
