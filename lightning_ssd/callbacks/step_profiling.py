"""`StepProfiling`: a callback that profiles a few training steps."""

from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.callbacks.obstacles import CompiledCode
from lightning_ssd.callbacks.offloader import find_model_states, find_offloader, get_offloader, trainer_callbacks
from lightning_ssd.callbacks.profiling_budget import ProfilingBudget
from lightning_ssd.model_states import find_units
from lightning_ssd.planning import ModelProfile
from lightning_ssd.profiling import Profiler, count_samples
from lightning_ssd.sizes import check_count

ProfilingPhase = Literal["idle", "waiting", "recording", "checking", "timing"]


class StepProfiling(pl.Callback):
    """Warms up, records a micro-batch of the last warm-up step, times more steps, and makes a profile.

    In the micro-batch after the recorded one, recomputed tensors are compared with saved ones.

    Args:
        warm_up: steps up to and including the step of the recorded micro-batch.
        steps: timed steps, if `has_time` allows all.

    Raises:
        TypeError, ValueError: an argument has a wrong type or is out of range.
    """

    def __init__(self, warm_up: int, steps: int) -> None:
        check_count("warm_up", warm_up, 1)
        check_count("steps", steps, 1)
        self._warm_up = warm_up
        self._steps = steps
        self._profiler: Profiler | None = None
        self._step = 0
        """Number of ended steps."""
        self._phase: ProfilingPhase = "idle"
        """Purpose of the present micro-batch, or of the last one."""
        self._due = 0
        """Number of the step whose first micro-batch is recorded."""
        self._timed_from = 0
        """Number of the first timed step."""
        self._at_boundary = True
        """True if the next micro-batch is the first of a step."""
        self._had_backward = False
        """Whether a backward of the present micro-batch has begun."""
        self._samples = self._tokens = 1
        self._profiling_budget = ProfilingBudget()
        self._code: CompiledCode | None = None

    def has_time(self, steps: int) -> bool:
        """Returns whether there is time to profile `steps` more steps; if not, warm-up or timing ends early."""
        return True

    def may_record(self, batch: Any) -> bool:
        """Returns whether the micro-batch of `batch` may be recorded; else a later one is recorded, if time allows."""
        return True

    def recorded(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Called at the end of the step after which timing begins: a micro-batch was recorded and checked.

        If it sets the phase to "idle", no steps are timed, and `profiled` is not called.
        """

    def profiled(self, trainer: pl.Trainer, pl_module: pl.LightningModule, profile: ModelProfile) -> None:
        """Called with the profile, at the end of the last timed step."""

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if find_offloader(trainer) is None:
            raise ValueError(
                f"{type(self).__name__} needs `strategy='ssd_offload'`, or an `ActivationOffload` callback."
            )
        others = [
            other for other in trainer_callbacks(trainer) if isinstance(other, StepProfiling) and other is not self
        ]
        if others:
            raise ValueError(
                f"{type(self).__name__} and {type(others[0]).__name__} both measure the first steps. Remove one."
            )
        self._end()  # Lightning's Tuner begins trainings without an end of the one before
        self._step = 0
        self._at_boundary = True
        self._profiling_budget = ProfilingBudget()
        self._code = CompiledCode()
        self._begin(trainer, pl_module, self._warm_up)

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule, warm_up: int) -> None:
        """Profiles the training as it is set up now, after `warm_up` steps."""
        config = getattr(trainer.strategy, "states_config", None)
        units = find_units(pl_module, None if config is None else config.units)
        offloader, states = get_offloader(trainer), find_model_states(trainer)
        # Manual optimization may step between a forward and its backward.
        self._profiler = Profiler(
            units, offloader, states, trainer.optimizers, allow_recompute=pl_module.automatic_optimization
        )
        self.schedule(warm_up)

    def schedule(self, warm_up: int) -> None:
        """Profiles the training after `warm_up` more steps, at least one."""
        self._due = self._step + warm_up - 1
        self._phase = "waiting"

    def discard(self) -> None:
        """Discards the present profile: the next step is profiled instead."""
        if self._phase != "idle":
            self.profiler.close()
            self.schedule(1)

    def continue_budget(self, budget: ProfilingBudget) -> None:
        """Counts the steps and seconds of `budget` as spent on profiling."""
        self._profiling_budget = budget

    @property
    def _compiled(self) -> CompiledCode:
        """Notices compiled code of the present training."""
        assert self._code is not None
        return self._code

    @property
    def profiler(self) -> Profiler:
        """Measures the present training. There is one from `on_train_start` to the end of the training."""
        assert self._profiler is not None
        return self._profiler

    @property
    def recording(self) -> bool:
        """Whether the present micro-batch, or the last one, is the recorded one."""
        return self._phase == "recording"

    @property
    def measuring(self) -> bool:
        """True from the begin of the warm-up to the end of the last timed step."""
        return self._phase != "idle"

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._phase != "waiting":
            self._compiled.close()
        at_boundary, self._at_boundary = self._at_boundary, False
        self._had_backward = False
        if at_boundary:
            self._profiling_budget.begin_step()
        if self._phase == "waiting" and at_boundary and (self._is_due(batch) or self._must_end_warm_up()):
            self._phase = "recording"
            self.profiler.begin_recording()
        elif self._phase == "recording":
            self._phase = "checking"
            self.profiler.begin_checking()
        elif self._phase == "checking" and at_boundary:
            self._phase = "timing"
            self._timed_from = self._step
            self.profiler.begin_timing()
        if self._phase in ("checking", "timing"):
            self._samples, self._tokens = count_samples(batch)
        if self._phase == "timing":
            self.profiler.begin_forward(of_step=at_boundary)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._check_not_compiled(self._compiled.ran_under_mode)
        self._had_backward = True
        self.profiler.begin_backward()

    def _check_not_compiled(self, compiled: bool) -> None:
        """Raises ValueError if `compiled`: code of the training is or should be compiled."""
        if compiled:
            self._compiled.forget()
            raise ValueError(
                "`torch.compile` compiles a part of `training_step`, whose single operations "
                f"{type(self).__name__} can't follow. Remove `torch.compile`, or remove the callback. (`torch.cond` "
                "and other operators that take functions compile them, too.)"
            )

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.profiler.end_recording()
        if pl_module.automatic_optimization:  # with manual optimization, more of the forward may follow
            self._end_backward()

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self.profiler.begin_optimizer()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.profiler.end_recording()  # the batch may have had no backward
        # Lightning sees no backward in manual optimization that calls `loss.backward()`.
        skipped = pl_module.automatic_optimization and not self._had_backward
        if self._phase == "recording" and (skipped or not self.profiler.graph.operations):
            self.discard()  # `training_step` skipped the batch, before its forward or after it
        self.profiler.end_optimizer()
        if not pl_module.automatic_optimization:
            self._end_backward()
        self.profiler.end_checking()
        if pl_module.automatic_optimization and trainer.fit_loop._should_accumulate():
            return
        self._step += 1
        self._at_boundary = True
        self._profiling_budget.end_step()
        with self._profiling_budget.counted():
            self._continue_profiling(trainer, pl_module)

    def _continue_profiling(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Calls `recorded` or `profiled` at the end of a step, if it is due."""
        if self._phase == "checking":
            self.recorded(trainer, pl_module)
            return
        timed = self._step - self._timed_from
        if self._phase == "timing" and timed and (timed == self._steps or not self.has_time(self._steps - timed)):
            if timed < self._steps:
                self._log_shortened(f"{timed} of {self._steps} steps were timed")
            self._phase = "idle"
            self.profiler.end_timing()
            self.profiled(trainer, pl_module, self._make_profile(trainer, pl_module, timed))

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._phase == "recording" and not self._at_boundary:
            self.discard()  # a hook of the module has skipped the batch, and the rest of the epoch
            self._at_boundary = True

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._profiling_budget.pause()
        if self._phase == "timing":
            self.profiler.pause()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._profiling_budget.resume()
        if self._phase == "timing":
            self.profiler.resume()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._end()

    def _is_due(self, batch: Any) -> bool:
        """Returns whether the warm-up has ended and `batch` may be recorded."""
        return self._step >= self._due and self.may_record(batch)

    def _must_end_warm_up(self) -> bool:
        """Returns whether there is no time for the rest of the warm-up."""
        rest = max(0, self._due - self._step)
        if self.has_time(rest + 2 + self._steps):  # one step is recorded, one is checked
            return False
        if rest:
            self._log_shortened(f"warm-up ends {rest} step{'s' if rest > 1 else ''} early")
        return True

    def _make_profile(self, trainer: pl.Trainer, pl_module: pl.LightningModule, steps: int) -> ModelProfile:
        """Returns the profile of the recorded micro-batch and of `steps` timed steps."""
        clips = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"
        clips |= trainer.precision == "16-mixed"  # a step is skipped if gradients are not finite
        return self.profiler.profile(
            type(pl_module).__name__,
            steps=steps,
            micro_batches=trainer.accumulate_grad_batches,
            samples=self._samples,
            tokens=self._tokens,
            clip_norm=clips,
        )

    def _log_shortened(self, change: str) -> None:
        pl.utilities.rank_zero_info(f"{type(self).__name__}: {change}: {self._profiling_budget.describe()}.")

    def _end_backward(self) -> None:
        if self._phase == "timing":
            self.profiler.end_backward()

    def _end(self) -> None:
        profiler, self._profiler = self._profiler, None
        self._phase = "idle"
        if self._code is not None:
            self._code.close()
        if profiler is not None:
            profiler.close()
