"""The optimizer step of one flat parameter, from the arrival of its gradient on the host until the step is committed.

`OptimizerStep` can be made in four ways, which `StepScheduler` chooses from: `speculative`, `deferred`, `on_device` and
`serial`.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lightning_ssd.device import Worker
from lightning_ssd.futures import Future, all_of, ended, finished, pass_on, then
from lightning_ssd.model_states.gradients import Gradient
from lightning_ssd.model_states.optimizers import (
    FlatOptimizer,
    Options,
    RankMean,
    StepHalf,
    StepInput,
    StepWork,
    do_together,
)
from lightning_ssd.model_states.steps.device_states import DeviceStates
from lightning_ssd.model_states.stores import StagedState, StateStore
from lightning_ssd.spans import OPTIMIZER, span

Jobs = Generator[StepWork, None, None]
"""A job of the worker: it yields the arithmetic of a step, then ends the step."""

Submitted = tuple["Future[None]", "Future[None]"]
"""Futures of a step: done when the compute weights have their new values, and when the step is committed or skipped."""


@dataclass(eq=False)
class OptimizerStep:
    """One step of one flat parameter.

    Duty: stages the values, computes the step, writes the new values back, and commits the step or skips it.

    A step of values on SSDs stages them before its job begins, so that reads overlap with other jobs. A step of values
    in host memory stages them, without a copy, when its job begins.

    Threads: `speculative`, `deferred`, `on_device` and `serial` are called on the training thread or autograd's. The
    computation runs on the worker's thread (`_make`), or on the thread `sums` (`on_device`). `_commit_or_redo` runs on
    the thread that completes the last future it depends on: the worker's (gradient, computation) or `d2h-done` (scale);
    or on the calling thread if all are done.

    Ownership: the gradient belongs to the step until the step's last future is done. Staged values belong to the reads,
    then to the worker's job, then to the writes (see `StateStore`).

    Attributes:
        store: store of the flat parameter.
        flat_optimizer: its optimizer.
        options: options of its parameter group.
        gradient: its gradient.
        arrived: for each parameter, whether `gradient.host_grad` has its gradient; None: the step uses the accumulated
            gradients.
        scale: future of the gradient scale; None: the step is skipped.
        limit: largest absolute value of the scaled gradient's elements; None: no limit.
        worker: runs the jobs.
        count: called after each job with the parameters stepped and the seconds that it took.
        priority: priority of the jobs and their reads; the lowest goes first.
        copied: called when the scale is known; returns a future that is done when the gradient is in host memory.
        opt_state_priority: priority of the second job of a step in two halves.
        autocast: dtype of matrix products of the optimizer, if `optimizer.step` is called within autocast, as in manual
            optimization; None: it is not.
    """

    store: StateStore
    flat_optimizer: FlatOptimizer
    options: Options
    gradient: Gradient
    arrived: Sequence[bool] | None
    scale: "Future[float | None]"
    limit: float | None
    worker: Worker
    count: Callable[[int, float], None]
    priority: int
    copied: "Callable[[], Future[None]]"
    opt_state_priority: int = 0
    autocast: torch.dtype | None = None

    def speculative(self, speculated: float, on_host: "Future[None]", ready: "Sequence[Future[None]]") -> Submitted:
        """Makes the step with a speculated scale as soon as possible, and again if the scale is another.

        With values in host memory, the job uses the scale if it is known by then. Else it allocates the second version,
        which the speculation writes to; without memory for it, the step waits for the scale, and is made in place.

        Args:
            speculated: the speculated scale.
            on_host: done when the gradient is on the host.
            ready: done when the values may be staged. Before that, staging memory must not be allocated: earlier steps,
                which `ready` waits for, may need it.
        """
        used: float | None = speculated
        if self.store.buffers.in_memory:

            def run() -> Jobs:  # on the worker's thread
                nonlocal used
                if self.scale.done():
                    used = self.scale.result()
                elif not self.store.buffers.add_second():
                    used = None
                if used is not None:
                    yield from self._make(self.store.stage(step=True).result(), used)

            made = self._submit(run, [on_host, *ready])
        else:
            # Reads begin before the gradient is on the host: they overlap with backward.
            staged = then(all_of(ready), lambda _: self.store.stage(step=True, priority=self.priority))
            made = self._submit_on(staged, lambda: self._make(staged.result(), speculated), [on_host])
        done = then(all_of([made, self.scale]), lambda _: self._commit_or_redo(used))
        return done, done

    def deferred(
        self, after: "Sequence[Future[Any]]", *, weights_first: bool = False, drop_second: bool = False
    ) -> Submitted:
        """Makes the step when the scale is known.

        Nothing is staged before: staging buffers held while waiting would block units that the next forward needs
        first.

        Args:
            after: further futures that the step depends on.
            weights_first: whether a step of values in host memory is made in two halves where that is possible: the
                compute weights, which the next forward waits for, and later, during the next backward, master weights
                and optimizer states. The first half transfers about half of a step's bytes, and both halves transfer
                half more than a whole step.
            drop_second: whether the second version in host memory is freed before, since no step is to use it soon.
        """
        if not self.store.buffers.in_memory:
            copied = then(all_of([*after, self.scale]), lambda _: self.copied())
            whole = then(copied, lambda _: self._commit_or_redo(None))
            return whole, whole
        done: Future[None] = Future()
        opt_state: Future[None] | None = None

        def run() -> "Jobs | Future[None]":  # on the worker's thread
            copied = self.copied()
            return make() if copied.done() else self._submit(make, [copied])

        def make() -> Jobs:
            nonlocal opt_state
            scale = self.scale.result()
            if scale is not None and drop_second:
                self.store.buffers.drop_second()
            if scale is not None and weights_first and self._has_halves(scale):
                yield from self._make(self.store.stage(step=True).result(), scale, "weights")
                opt_state = self._submit(lambda: self._make_in_memory(scale, "opt_state"), [], self.opt_state_priority)
            else:
                yield from self._make_in_memory(scale)

        def end(weights: "Future[None]") -> None:  # on that thread, or the one that fails the job
            if opt_state is None or weights.exception() is not None:
                pass_on(weights, done)
            else:
                opt_state.add_done_callback(lambda made: pass_on(made, done))

        weights = self._submit(run, [*after, self.scale])
        weights.add_done_callback(end)
        return weights, done

    def on_device(self, after: "Sequence[Future[Any]]", states: DeviceStates) -> Submitted:
        """Makes the step on the device when the scale is known, or on the CPU if the device can't make it.

        Args:
            after: further futures that the step depends on; the gradient is in host memory then.
            states: the states on the device.
        """

        def run() -> "Future[None] | None":  # on the thread `sums`
            scale = self.scale.result()
            if scale is not None and (self.limit is not None or not states.step(self.store.flat, self._input(scale))):
                states.copy_to_host(self.store.flat)
                return self._submit(lambda: self._make_in_memory(scale), [])
            self._end(committed=scale is not None)
            return None

        done = states.submit(run, [*after, self.scale], self.priority)
        return done, done

    def serial(self, after: "Sequence[Future[Any]]") -> Submitted:
        """Reads, steps and writes in one job, which excludes all others (LoHan's figure 3b)."""

        def run() -> None:
            self.copied().result()
            for work in self._make_in_memory(self.scale.result()):
                do_together([work])
            self.store.written().result()

        done = self._submit(run, [*after, self.scale])
        return done, done

    def _commit_or_redo(self, used: float | None) -> "Future[None]":
        """Commits the step if it was made with the right scale, or skips it; else makes it now.

        `used` is the scale that it was made with; None: it was not made.
        """
        scale = self.scale.result()
        if scale is None or scale is used or scale == used:  # a NaN is no other scale than itself
            self._end(committed=scale is not None)
            return finished(None)
        if self.store.buffers.in_memory:
            return self._submit(lambda: self._make_in_memory(scale), [])
        return self._make_staged(self.store.stage(step=True, priority=self.priority), scale)

    def _make_staged(self, staged: "Future[StagedState]", scale: float) -> "Future[None]":
        """Submits the step of values in staging memory, and its commit."""

        def run() -> Jobs:
            yield from self._make(staged.result(), scale)
            self._end(committed=True)

        return self._submit_on(staged, run, [])

    def _submit_on(
        self, staged: "Future[StagedState]", run: Callable[[], Jobs], after: "Sequence[Future[Any]]"
    ) -> "Future[None]":
        """Submits a job that unstages `staged`. If an error in `after` keeps it from beginning, this method unstages.

        Otherwise the staging memory would never be freed, for which other steps and the end of training wait.
        """
        begun = False

        def begin() -> Jobs:  # on the worker's thread
            nonlocal begun
            begun = True
            return run()

        def unstage(_: "Future[None]") -> None:  # on the thread that completes the last of both
            if not begun and staged.exception() is None:
                self.store.unstage(staged.result(), changed=False, step=True)

        done = self._submit(begin, [*after, staged])
        all_of([ended(done), ended(staged)]).add_done_callback(unstage)
        return done

    def _submit(
        self,
        run: "Callable[[], Jobs | Future[None] | None]",
        after: "Sequence[Future[Any]]",
        priority: int | None = None,
    ) -> "Future[None]":
        return self.worker.submit(run, after, priority=self.priority if priority is None else priority)

    # ---- on the worker's thread ----

    def _make_in_memory(self, scale: float | None, half: StepHalf = "whole") -> Jobs:
        """Stages, makes and commits the step, or skips it if `scale` is None."""
        if scale is not None:
            yield from self._make(self.store.stage(step=True).result(), scale, half)
        self._end(committed=scale is not None)

    def _has_halves(self, scale: float) -> bool:
        """Returns whether the step can be made in two halves."""
        given = self._input(scale)
        staged = self.store.stage(step=True).result()
        return self.limit is None and all(given.has_grad) and self.flat_optimizer.has_halves(given, staged)

    def _make(self, staged: StagedState, scale: float, half: StepHalf = "whole") -> Jobs:
        """Computes the step, or a half of it, and submits the writes of the new values."""
        begun = perf_counter()
        changed = False
        try:
            given = self._input(scale)
            if self.limit is not None:
                clamped = (given.gradient[:].float() * scale).clamp_(-self.limit, self.limit)
                given = replace(given, gradient=clamped, scale=1.0)
            autocast = _NO_AUTOCAST if self.autocast is None else _autocast(self.autocast)
            with span(OPTIMIZER + self.store.flat.name), autocast:
                calls = self.flat_optimizer.begin_step(given, staged, half)
            work = StepWork(self.store.flat.name, calls, perf_counter() - begun)
            if calls:
                yield work
            changed = True
        finally:
            self.store.unstage(staged, changed=changed, step=True)
        if half != "weights":  # of two halves only the second is counted: `calibrate_step_rate` corrects that
            self.count(self.store.flat.numel_of(given.has_grad), work.seconds)

    def _input(self, scale: float) -> StepInput:
        return StepInput(self.options, self._gradient(), self._has_grad(), scale)

    def _gradient(self) -> Tensor | RankMean:
        if self.arrived is not None:
            return self.gradient.host_grad
        gradient = self.gradient.accum if self.gradient.mean is None else self.gradient.mean
        assert gradient is not None
        return gradient

    def _has_grad(self) -> Sequence[bool]:
        return self.gradient.has_accum if self.arrived is None else self.arrived

    def _end(self, *, committed: bool) -> None:
        """Commits or skips the step. Runs on the thread of `_commit_or_redo`, too."""
        if committed:
            self.flat_optimizer.commit(self._has_grad(), self.options)
            self.store.commit()
        self.gradient.end_step()


_NO_AUTOCAST = contextlib.nullcontext()


@contextlib.contextmanager
def _autocast(dtype: torch.dtype) -> Iterator[None]:
    """Casts matrix products on the CPU to `dtype` on the calling thread, within the context.

    Not `torch.autocast`: its end clears the cache of cast weights, which the forward on the training thread may use.
    """
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", dtype)
    torch.set_autocast_enabled("cpu", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_dtype("cpu", before)
