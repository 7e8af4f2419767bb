"""The optimizer step of one flat parameter, from its gradient's arrival on the host until the step is committed."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import Tensor

from lightning_ssd.device import Worker, all_of, ended, finished, pass_on, then
from lightning_ssd.model_states.device_stepper import DeviceStep, DeviceStepper
from lightning_ssd.model_states.gradient import Gradient
from lightning_ssd.model_states.optimizers import FlatOptimizer, Options, Part
from lightning_ssd.model_states.state_store import StagedState, StateStore
from lightning_ssd.spans import OPTIMIZER, span


@dataclass(frozen=True)
class OptimizerStep:
    """One step of one flat parameter.

    Duty: stages the values, computes the step, writes the new values back, and commits the step or skips it. Each of
    `speculative`, `deferred` and `serial` returns a future that is done when the step was committed or skipped.

    Values in host memory as a whole are staged when the job begins, on the worker's thread. If the scale is known by
    then, the step is made with it. Else the second version is allocated for the speculation; if there is no memory for
    it, the step waits for the scale, and is made in place.

    A deferred step of values in host memory may be made in two parts: first the compute weights, which the next forward
    waits for, then master weights and optimizer states, under the next backward. The first part moves about half of a
    step's bytes, and both together half more than a whole step.

    Threads: these three are called on the training thread or autograd's. The computation (`_make`) runs on the
    worker's thread. `_commit_or_redo` runs on the thread that completes the last future it depends on: the worker's
    (gradient, computation) or `d2h-done` (scale); or on the calling thread where all of them are done.

    Ownership: the gradient belongs to the step until the returned future is done. Staged values belong to the reads,
    then to the worker's job, then to the writes (see `StateStore`).

    Attributes:
        store: where the flat parameter's values are stored.
        flat_optimizer: its optimizer.
        options: options of its parameter group.
        gradient: its gradient.
        arrived: for each parameter, whether `gradient.host_grad` has its gradient; None: the step uses the accumulated
            gradients.
        scale: future of the number that the gradient is multiplied with; None: the step is skipped.
        limit: largest absolute value of a gradient's element, after that; None: no limit.
        worker: runs the jobs.
        count: called after each job, on the worker's thread, with the parameters stepped and the seconds it took.
        priority: of the jobs and their reads; the lowest goes first.
        rest_priority: of the second part of a step.
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
    rest_priority: int = 0

    def speculative(
        self, speculated: float, on_host: "Future[None]", ready: "Sequence[Future[None]]"
    ) -> "Future[None]":
        """Makes the step with a speculated scale as soon as possible, and again if the scale is another.

        Args:
            speculated: the speculated scale.
            on_host: done when the gradient is on the host.
            ready: done when the values may be staged. Before that, staging memory must not be allocated: earlier steps,
                which `ready` waits for, may need it.
        """
        if not self.store.in_memory:
            # Reads begin before the gradient is on the host: they overlap with backward.
            staged = then(all_of(ready), lambda _: self.store.stage(step=True, priority=self.priority))
            made = self._submit_on(staged, lambda: self._make(staged.result(), speculated), [on_host])
            return then(all_of([made, self.scale]), lambda _: self._commit_or_redo(speculated))
        used: float | None = None

        def run() -> None:  # on the worker's thread
            nonlocal used
            used = self._scale_now(speculated)
            if used is not None:
                self._make(self.store.stage(step=True).result(), used)

        made = self._submit(run, [on_host, *ready])
        return then(all_of([made, self.scale]), lambda _: self._commit_or_redo(used))

    def deferred(self, after: "Sequence[Future[Any]]", *, drop_second: bool = False) -> "Future[None]":
        """Makes the step when the scale is known.

        Nothing is staged before: staging buffers held while waiting would block units that the next forward needs
        first.

        Args:
            after: futures that the step depends on besides.
            drop_second: whether the second version in host memory is freed before, since no step is to use it soon.
        """
        return then(all_of([*after, self.scale]), lambda _: self._commit_or_redo(None, drop_second=drop_second))

    def weights_first(
        self, after: "Sequence[Future[Any]]", *, drop_second: bool = False
    ) -> "tuple[Future[None], Future[None]]":
        """Makes the step of values in host memory when the scale is known, in two parts if that can be.

        Args:
            after: as in `deferred`.
            drop_second: as in `deferred`.

        Returns:
            A future that is done when the compute weights have their new values, and one for the whole step.
        """
        rest: Future[None] = Future()

        def run() -> None:  # on the worker's thread
            scale = self.scale.result()
            if scale is None:
                self._end(committed=False)
                rest.set_result(None)
                return
            if drop_second:
                self.store.drop_second()
            staged = self.store.stage(step=True).result()
            has_grad = self._has_grad()
            whole = self._gradient()
            in_parts = (
                self.limit is None and all(has_grad) and self.flat_optimizer.has_parts(self.options, staged, whole)
            )
            self._make(staged, scale, "weights" if in_parts else "whole")
            if not in_parts:
                self._end(committed=True)
                rest.set_result(None)
                return

            def run_rest() -> None:
                self._make(self.store.stage(step=True).result(), scale, "rest")
                self._end(committed=True)

            made = self.worker.submit(run_rest, priority=self.rest_priority)
            made.add_done_callback(lambda done: pass_on(done, rest))

        weights = self._submit(run, [*after, self.scale])
        return weights, then(weights, lambda _: rest)

    def on_device(
        self, stepper: DeviceStepper, after: "Sequence[Future[Any]]", *, drop_second: bool = False
    ) -> "tuple[Future[None], Future[None]]":
        """Makes the step of values in host memory on the device, when the scale is known.

        Args:
            stepper: makes it.
            after: as in `deferred`.
            drop_second: as in `deferred`.

        Returns:
            As `weights_first`.
        """
        weights: Future[None] = Future()

        def begin(_: None) -> "Future[None]":  # on the thread that completes the last of `after`, or the caller's
            scale, gradient = self.scale.result(), self._gradient()
            staged = self.store.stage(step=True).result()
            if scale is None or not self.flat_optimizer.steps_on_device(
                self.options, staged, gradient, self._has_grad()
            ):
                return self._commit_or_redo(None, drop_second=drop_second)
            step = DeviceStep(self.store, self.flat_optimizer, self.options, gradient, scale, self.limit, drop_second)
            first, whole = stepper.submit(step, priority=self.priority)
            if drop_second or not self.store.has_second:  # else the new weights are read from the commit on
                first.add_done_callback(pass_first)
            return then(whole, commit)

        def pass_first(first: "Future[None]") -> None:
            if first.exception() is None:
                weights.set_result(None)

        def commit(_: None) -> "Future[None]":  # on the thread that completes the copies
            self._end(committed=True)
            return finished(None)

        def pass_done(done: "Future[None]") -> None:
            if not weights.done():  # `first` is done before `whole`, unless the step failed or was not made there
                pass_on(done, weights)

        done = then(all_of([*after, self.scale]), begin)
        done.add_done_callback(pass_done)
        return weights, done

    def serial(self, after: "Sequence[Future[Any]]") -> "Future[None]":
        """Reads, steps and writes in one job, which excludes all others (LoHan's figure 3b)."""

        def run() -> None:
            if (scale := self.scale.result()) is not None:
                self._make(self.store.stage(step=True).result(), scale)
            self._end(committed=scale is not None)
            self.store.written().result()

        return self._submit(run, [*after, self.scale])

    def _submit_on(
        self, staged: "Future[StagedState]", run: Callable[[], None], after: "Sequence[Future[Any]]"
    ) -> "Future[None]":
        """Submits a job that unstages `staged`; if the job never begins, since `after` has an error, this does.

        Else the staging memory would stay allocated, and other steps, and the end of training, would wait for it.
        """
        begun = False

        def begin() -> None:  # on the worker's thread
            nonlocal begun
            begun = True
            run()

        def unstage(_: "Future[None]") -> None:  # on the thread that completes the last of both
            if not begun and staged.exception() is None:
                self.store.unstage(staged.result(), changed=False, step=True)

        done = self._submit(begin, [*after, staged])
        all_of([ended(done), ended(staged)]).add_done_callback(unstage)
        return done

    def _submit(self, run: Callable[[], None], after: "Sequence[Future[Any]]") -> "Future[None]":
        return self.worker.submit(run, after, priority=self.priority)

    def _gradient(self) -> Tensor:
        whole = self.gradient.host_grad if self.arrived is not None else self.gradient.accum
        assert whole is not None
        return whole

    def _make(self, staged: StagedState, scale: float, part: Part = "whole") -> None:
        """Computes the step, or a part of it, and submits the writes of the new values."""
        begun = perf_counter()
        changed = False
        try:
            whole = self._gradient()
            if self.limit is not None:
                whole, scale = (whole.float() * scale).clamp_(-self.limit, self.limit), 1.0
            has_grad = self._has_grad()
            with span(OPTIMIZER + self.store.flat.name):
                self.flat_optimizer.step(self.options, staged, whole, has_grad, scale, part)
            changed = True
            seconds = perf_counter() - begun
        finally:
            self.store.unstage(staged, changed=changed, step=True)
        if part != "weights":  # the rest moves about the bytes of a whole step: its rate is comparable
            slices = zip(self.store.flat.param_views, has_grad, strict=True)
            self.count(sum(item.numel for item, stepped in slices if stepped), seconds)

    def _scale_now(self, speculated: float) -> float | None:
        """Returns the scale that the step is made with now: the known or the speculated one; None: not yet possible."""
        if self.scale.done():
            return self.scale.result()
        return speculated if self.store.add_second() else None

    def _commit_or_redo(self, used: float | None, *, drop_second: bool = False) -> "Future[None]":
        """Commits the step that was made with the scale `used` if that was right; else makes it now.

        Args:
            used: None: the step was not made.
            drop_second: as in `deferred`.
        """
        scale = self.scale.result()
        if scale is None or scale is used or scale == used:  # a NaN is no other scale than itself
            self._end(committed=scale is not None)
            return finished(None)
        if self.store.in_memory:

            def run_in_memory() -> None:
                if drop_second:
                    self.store.drop_second()
                self._make(self.store.stage(step=True).result(), scale)
                self._end(committed=True)

            return self._submit(run_in_memory, [])
        staged = self.store.stage(step=True, priority=self.priority)

        def run() -> None:
            self._make(staged.result(), scale)
            self._end(committed=True)

        return self._submit_on(staged, run, [])

    def _end(self, *, committed: bool) -> None:
        if committed:
            self.flat_optimizer.commit(self._has_grad())
            self.store.commit()
        self.gradient.has_accum = [False] * len(self.gradient.has_accum)

    def _has_grad(self) -> Sequence[bool]:
        return self.gradient.has_accum if self.arrived is None else self.arrived
