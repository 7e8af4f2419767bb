"""The step scheduler: when the optimizer step of a flat parameter begins, and which futures wait for it.

With `overlap="optimized"`, the step of a flat parameter is submitted during backward, when its last gradient was
offloaded; the next forward of its unit waits for that step alone. If user code may read gradients before
`optimizer.step`, all steps are submitted there.

`step` computes, `running_step` is the state of the present step, `grad_scale` decides the scale, `gradient_clipping`
clips between backward and step, and `step_records` names the steps that a killed run can resume from.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_ssd.device import WorkCounter, Worker
from lightning_ssd.futures import Future, all_of, finished, then
from lightning_ssd.model_states.gradients import GradientOffloader, GradientState, GradScaleDecision
from lightning_ssd.model_states.optimizers import GroupOptions, parameters_of, runs_closure_first
from lightning_ssd.model_states.placement import Setup
from lightning_ssd.model_states.steps.gradient_clipping import GradientClipping
from lightning_ssd.model_states.steps.rank_steps import RankSteps
from lightning_ssd.model_states.steps.running_step import RunningStep
from lightning_ssd.model_states.steps.step import OptimizerStep, Submitted
from lightning_ssd.model_states.steps.step_history import StepHistory
from lightning_ssd.model_states.steps.step_records import StepRecords
from lightning_ssd.model_states.steps.weights_first import WeightsFirst
from lightning_ssd.model_states.stores import StagedFlats
from lightning_ssd.model_states.units import FlatParameter, SharedMemory
from lightning_ssd.model_states.weights import OffloadedModel, ParamPrefetcher
from lightning_ssd.waits import wait_for, wait_for_all


class StepScheduler:
    """Submits the optimizer steps of flat parameters, and owns their futures.

    Duty: one step of one optimizer, from `begin` to `end`: which flat parameters are stepped when, with which scale;
    which future the next step, the records and the history wait for.

    Threads: all methods run on the training thread, or on autograd's thread while the training thread waits in
    `backward`. Callbacks run on other threads: `_count` on that of a job; those of a step's own futures where
    `OptimizerStep` says.

    Lock: `_lock` guards `_work`, which the worker's thread and those of callers share.

    Ownership: the gradient and the stored values of a flat parameter belong to its step from `submit` until the step's
    future is done. Values of the version that was committed last are kept until `_committed` and the last record are
    done: the next step, which overwrites the version before, waits for both.

    Args:
        offloaded: the flat parameters. Those of one unit have one priority: the first unit's are stepped first, because
            the next forward needs them first.
        gradients: their gradients.
        prefetcher: evicts the weights whose step begins.
        staged: values that user code has staged.
        decision: decides the scale of each step; the caller closes it.
        worker: runs the jobs; owned.
        setup: settings of the training.
        records: records the steps for `recover=True`.
        running: the step that runs.
        clipping: how the jobs of the next steps clip.
        ranks: sums gradients over ranks, and passes on the steps of other ranks; None: there is one rank.
    """

    def __init__(
        self,
        offloaded: OffloadedModel,
        gradients: GradientOffloader,
        prefetcher: ParamPrefetcher,
        staged: StagedFlats,
        decision: GradScaleDecision,
        worker: Worker,
        setup: Setup,
        records: StepRecords,
        running: RunningStep,
        clipping: GradientClipping,
        ranks: RankSteps | None,
    ) -> None:
        self._offloaded = offloaded
        self._stores = offloaded.stores
        self._groups = offloaded.groups
        self._gradients = gradients
        self._prefetcher = prefetcher
        self._staged = staged
        self._decision = decision
        self._worker = worker
        offloaded_units = [flat_params for _, flat_params in offloaded.units if flat_params]
        self._priorities = {flat: index for index, flat_params in enumerate(offloaded_units) for flat in flat_params}
        self._overlap = setup.config.overlap
        self._setup = setup
        self._records = records
        self._running = running
        self._clipping = clipping
        self._ranks = ranks
        self._weights_first = WeightsFirst(len(offloaded_units))
        self._waited = 0.0
        """Seconds that other code has waited for steps, since the last `end`."""
        self._options = GroupOptions(offloaded.groups)
        self.history = StepHistory(offloaded)
        self._submitted: dict[FlatParameter, Future[None]] = {}
        """Steps that were submitted since the last `end`."""
        self._committed: Future[None] = finished(None)
        """Done when the last optimizer step is committed and written in all flat parameters with two versions."""
        self._released: Future[None] = finished(None)
        """Done when the running step's scale is known, on the worker's thread. Deferred steps wait for it, so that all
        are queued before the worker begins the first one, of the unit that the next forward needs first."""
        self._lock = threading.Lock()
        self._work = WorkCounter(0, 0.0)
        """Number of parameters that the CPU has stepped, and the seconds of their steps."""

    # ---- an optimizer step, from its begin to its end ----

    def defer_inexact_clipping(self) -> None:
        """Delays steps from the next one on, if gradients are clipped by norm and the loss scale is no power of two.

        Unscaling and clipping both round then, and jobs multiply by one factor. Called between two steps.
        """
        if not self._setup.scales_exactly and self._setup.clip_norm():
            self._running.defer_next()

    def begin(self, optimizer: Optimizer) -> None:
        """Begins a step of `optimizer`: flat parameters that backward completes from here on are stepped at once.

        A step whose closure begins this one goes on after it.

        Raises:
            RuntimeError: such a step has begun in a flat parameter.
        """
        running = self._running
        if running.optimizer is not None:
            if self.has_submitted:
                raise RuntimeError(
                    "an optimizer is stepped within the step of another one, which has begun in backward. Override "
                    "`on_after_backward`: steps begin with `optimizer.step` then."
                )
            self._decision.cancel()
        running.begin(optimizer)
        if not running.defer_to_user_hooks:  # else calls of `clip` decide
            running.limit = self._setup.clip_value()
            self._gradients.norms.begin_step(needed=self._setup.needs_norm)
        self._decision.begin(defer_to_user_hooks=running.defer_to_user_hooks)
        scale = self._decision.scale
        self._released = finished(None) if scale.done() else self._worker.submit(lambda: None, [scale])

    def note_options(self, optimizer: Optimizer) -> None:
        """Notes the options of the parameter groups before the optimizer's own code; see `GroupOptions.note`."""
        if self._running.optimizer is optimizer:
            self._options.note(optimizer)

    @contextlib.contextmanager
    def closure(self, optimizer: Optimizer) -> Iterator[None]:
        """Surrounds a closure that `step` of `optimizer` calls: the optimizer's own code goes on after it."""
        if self._running.optimizer is optimizer:
            self._options.forget()
        yield
        self.note_options(optimizer)
        if self._running.optimizer is optimizer and self.has_submitted and self._is_decided_by_closure(optimizer):
            # If `end` decided, the scale would wait until the device has stepped parameters that are not offloaded.
            self._decision.decide(self._clipping.pending(optimizer).scale)

    def _is_decided_by_closure(self, optimizer: Optimizer) -> bool:
        """Whether the gradient scale of a step is known when its closure has ended."""
        later = self._running.defer_to_user_hooks or self._decision.loss_scaled
        return not later and runs_closure_first(optimizer)

    def overlaps(self, flat: FlatParameter) -> bool:
        """Whether the step of `flat` may be submitted while backward runs."""
        # Steps that wait for all gradients would keep shared memory, which the other gradients wait for.
        waits = self._decision.needs_norm and self._gradients.share_memory
        begins_later = self._overlap == "none" or waits or self._gradients.backward.steps_delayed
        return not begins_later and self._is_stepping(flat)

    def check_not_submitted(self, flat: FlatParameter, index: int) -> None:
        """Raises RuntimeError if the step of `flat` was submitted without the gradient of parameter `index`."""
        if flat in self._submitted:
            raise RuntimeError(
                f"a gradient of {flat.param_views[index].name} arrived after the optimizer step of {flat.name} had "
                "begun: it is used differently from step to step. Set `overlap='none'`."
            )

    def check_not_begun(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError if gradients of `optimizer` are clipped otherwise than was known when steps began."""
        if self._running.optimizer is optimizer and self.has_submitted:
            raise RuntimeError(
                "gradients are clipped otherwise than by `gradient_clip_val` and `gradient_clip_algorithm` of the "
                "Trainer when the step began. Change them before it, such as in `on_train_batch_start`."
            )

    def check_may_drop(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError if gradients of `optimizer` can't be dropped, because a running step uses them."""
        begun = [flat.name for flat in self._submitted if self._groups[flat][0] is optimizer]
        if self._running.optimizer is optimizer and begun:
            raise RuntimeError(
                f"`zero_grad` drops gradients of {', '.join(begun)}, whose optimizer step has begun: `training_step` "
                "has called `backward`, after which Lightning calls `zero_grad`. Set `overlap='none'`."
            )

    def submit(self, flat: FlatParameter) -> None:
        """Submits the step of `flat`, whose gradient is complete. User code's values are stored, and weights evicted.

        Raises:
            RuntimeError: its step before was not recorded, and a record can't name both.
        """
        self._staged.unstage()  # the step reads values of user code
        self._prefetcher.retire_for_step(flat)
        gradient, store = self._gradients[flat], self._stores[flat]
        self._gradients.resume_stepped(flat)
        options = self._options.submit(flat)  # the step owns these
        reduced = self._running.defer_to_user_hooks
        slot = None if reduced or self._ranks is None else self._ranks.keep_on_device(flat)
        arrived = self._gradients.hand_over(flat)
        # A step that is not committed must not change the values or the gradient. That of several ranks is their mean.
        kept = arrived is not None or (self._ranks is not None and not reduced)
        speculated = self._decision.speculate(revertible=store.layout.versions == 2 and kept)
        waits = arrived is not None and speculated is None and not self._decision.decided and self._ranks is None
        # A future of each copy would cost time in backward: a step that waits for the scale asks `copied` then.
        on_host = finished(None) if waits else self._gradients.on_host(flat, arrived)
        limit = self._running.limit
        if self._ranks is not None and not reduced:
            on_host = self._ranks.sum(flat, on_host, arrived, options, self._priorities[flat], slot)
            arrived = None
        elif reduced or (arrived is None and limit is None and not self._decision.needs_norm):
            gradient.retain(arrived, self._decision.scale, limit)
        stepped = [flat.param_views[index].parameter for index in gradient.mark_stepped()]
        torch.autograd.graph.increment_version(stepped)  # as the optimizer does
        # Values that a step may be rolled back to are not overwritten.
        ready: list[Future[Any]] = [] if store.layout.versions == 1 else [self._committed, self._records.last]
        if self._ranks is not None:
            ready.append(store.stepped)  # a change of user code, which the worker stores
            if reduced:
                ready.append(self._ranks.evicted(flat, options))
        self._records.check_recorded(flat)
        device_type = flat.device.type
        step = OptimizerStep(
            store,
            self._offloaded.flat_optimizers[flat],
            options,
            gradient,
            arrived,
            self._decision.scale,
            limit,
            self._worker,
            self._count,
            self._priorities[flat],
            # The second part is made when all weights are, and first of the unit whose gradients arrive first.
            opt_state_priority=2 * len(self._priorities) - self._priorities[flat],
            copied=partial(self._gradients.copied, gradient.mark),
            autocast=torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None,
        )
        self.history.submit(flat)
        if self._ranks is None or self._ranks.owns(flat):
            weights, done = self._begin_step(flat, step, speculated, on_host, ready)
        else:
            weights, done = self._ranks.follow(flat, options, reduced=reduced)
        gradient.submit_step(done)  # the owner of several ranks reads it until then, or this rank has reduced it
        if self._ranks is not None:
            self._ranks.announce(flat, weights, done, self._decision.scale)
        store.announce_step(weights, done)
        self._submitted[flat] = done

    def _begin_step(
        self,
        flat: FlatParameter,
        step: OptimizerStep,
        speculated: float | None,
        on_host: "Future[None]",
        ready: "list[Future[Any]]",
    ) -> Submitted:
        """Begins a step when `ready` are done: with the scale `speculated`; if that is None, when the scale is known.

        `on_host` is done when the gradient is in host memory; or it is done already, and the step calls
        `OptimizerStep.copied` when the scale is known. Returns the futures of the compute weights and of the whole
        step.
        """
        if self._overlap == "naive":
            return step.serial([on_host, *ready])
        on_device = None if self._ranks is None else self._ranks.device_states
        if on_device is not None and on_device.steps(flat):
            return step.on_device([on_host, *ready, self._released], on_device)
        if speculated is not None:
            return step.speculative(speculated, on_host, ready)
        return step.deferred(
            [on_host, *ready, self._released],
            weights_first=self._overlap == "optimized"
            and self._ranks is None  # which are bound by the host's memory: two parts transfer half more than one
            and self._weights_first.covers(self._priorities[flat]),
            drop_second=self._decision.given_up,
        )

    def end_backward(self, *, by_user: bool = False) -> None:
        """Submits the steps of gradients that the backward has completed, or their accumulation.

        If user code may read gradients before the step, they stay where they were copied to until it does.

        Args:
            by_user: whether gradients are about to be used, of a backward that user code may have called.

        Raises:
            RuntimeError: user code has called it, and there are several ranks; or another rank has failed.
        """
        if self._ranks is not None and by_user and self._gradients.backward.arriving:
            raise RuntimeError(
                "user code has called `backward` of a tensor, whose gradients several devices don't reduce. Call "
                "`self.manual_backward(loss)` instead."
            )
        self._gradients.end_backward()
        if self._decision.decided:  # Otherwise the scale would wait for these copies, and `end` releases their memory.
            self._gradients.in_flight.release()
        for flat, gradient in self._gradients.items():
            if any(gradient.arrived):
                if self._is_stepping(flat) and not flat.shared:
                    self.submit(flat)
                elif flat.shared or not (self._running.defer_to_user_hooks and gradient.may_stay):
                    self._gradients.accumulate(flat)
        if self._ranks is not None and not by_user:
            self._staged.unstage()  # other ranks, for which this one waits, may wait for its changes
            if not self._setup.last_micro_batch():
                return
            if self._running.defer_to_user_hooks:
                self._ranks.reduce()
            elif (optimizer := self._running.optimizer) is not None:
                self._submit_remaining(optimizer)

    def end(self) -> None:
        """Ends the step on the training thread; submitted jobs go on.

        Raises:
            RuntimeError: the step changes the same memory through two parameters.
            Exception: a job's error, with `overlap="none"`.
        """
        optimizer = self._running.optimizer
        assert optimizer is not None
        clipping = self._clipping.pop(optimizer)
        if self._running.defer_to_user_hooks:
            self._running.limit = clipping.limit
            self._decision.reset_checks()  # which are not of this step
            self._decision.merge_checks(dict(clipping.found))
        self._decision.decide(clipping.scale)
        self._gradients.in_flight.release()
        self._check_memory_is_stepped_once(optimizer)
        self._submit_remaining(optimizer)
        self._weights_first.note(self._gradients.pop_waited() + self._waited)
        self._waited = 0.0
        submitted = self._finish_step()
        self._running.end()
        self._options.end()
        for flat, _ in self._gradients.of(optimizer):
            self._gradients.norms.reset(flat)
        self._prefetcher.reset()
        if self._overlap == "none":
            for done in submitted.values():
                wait_for(done, "the step")
        for flat, done in submitted.items():
            if flat.shared:
                wait_for(done, "the step")
                self._staged.push(flat)
        if submitted:
            self._prefetcher.prefetch()
        self._begin_outer()

    def cancel(self) -> None:
        """Ends the step that has begun without a step of any flat parameter. Gradients stay until `zero_grad`."""
        assert self._running.optimizer is not None and not self._submitted
        self._clipping.pop(self._running.optimizer)
        self._decision.cancel()
        self._gradients.in_flight.release()
        self._running.end()
        self._options.end()
        self._prefetcher.reset()
        self._begin_outer()

    def _begin_outer(self) -> None:
        """Resumes the outer step, if the ended step was made by its closure."""
        if (outer := self._running.pop_outer()) is not None:
            self.begin(outer)

    @property
    def has_submitted(self) -> bool:
        """Whether the running step has submitted the step of a flat parameter."""
        return bool(self._submitted)

    def skip(self, optimizer: Optimizer) -> None:
        """Ends a step of `optimizer` that has not begun, because a gradient is not finite.

        The gradients are then like those that a step has used and kept: plain training has them until `zero_grad`.
        """
        clipping = self._clipping.pop(optimizer)
        scale = finished(None if clipping.scale is None else float(clipping.scale))
        for flat, gradient in self._gradients.of(optimizer):
            if GradientState.PRESENT in gradient.states:
                gradient.fold()
                arrived = self._gradients.hand_over(flat)
                wait_for(self._gradients.on_host(flat, arrived), "gradients")
                gradient.skip_step(arrived, scale, clipping.limit)
                self._gradients.norms.reset(flat)

    def _submit_remaining(self, optimizer: Optimizer) -> None:
        """Submits the steps of `optimizer` that backward has not submitted, and those of kept gradients."""
        for flat, gradient in self._gradients.of(optimizer):
            if flat in self._submitted:
                continue
            present = gradient.accumulating or any(gradient.arrived) or GradientState.STEPPED in gradient.states
            # Other ranks may have a gradient where this one has none.
            if present or (self._ranks is not None and not self._running.defer_to_user_hooks):
                self._staged.pull(flat)
                gradient.fold()
                self.submit(flat)
            elif self._ranks is not None:
                self._ranks.evicted(flat, None)

    def _finish_step(self) -> Mapping[FlatParameter, "Future[None]"]:
        """Passes the step's futures to the next step, the journal and the history, and returns those of its jobs."""
        submitted, self._submitted = self._submitted, {}
        self._records.add(submitted)
        stores = {flat: store for flat in submitted if (store := self._stores[flat]).layout.versions == 2}
        if stores:
            committed = all_of(
                submitted[flat] if store.buffers.in_memory else then(submitted[flat], store.written)
                for flat, store in stores.items()
            )
            self._committed = committed
        self.history.end(committed if stores else all_of(submitted.values()))
        return submitted

    def _is_stepping(self, flat: FlatParameter) -> bool:
        optimizer = self._running.optimizer
        return optimizer is not None and not self._running.defer_to_user_hooks and self._groups[flat][0] is optimizer

    def _check_memory_is_stepped_once(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError if a step of `optimizer` changes the same memory through two parameters."""
        stepped: list[tuple[str, SharedMemory]] = []
        for flat, gradient in self._gradients.of(optimizer):
            for index, memory in flat.shared.items():
                if gradient.states[index] is not GradientState.NONE:
                    stepped.append((flat.param_views[index].name, memory))
        if not stepped:
            return
        offloaded = self._offloaded.parameters
        for parameter in parameters_of(optimizer):
            if parameter not in offloaded and parameter.grad is not None:
                stepped.append(("a parameter that is not offloaded", SharedMemory(parameter)))
        for number, (name, memory) in enumerate(stepped):
            for other, of_other in stepped[:number]:
                if memory.overlaps(of_other):
                    raise RuntimeError(
                        f"{other} and {name} share memory, since `.data` of one was set to the other's, and both are "
                        "stepped. Make them one parameter, which both modules have, or set `states='gpu'`."
                    )

    def _count(self, parameters: int, seconds: float) -> None:
        """Adds a job's work. Runs on the thread that ends the job."""
        with self._lock:
            self._work = self._work.plus(parameters, seconds)

    def work(self) -> WorkCounter:
        """Returns the parameters that the CPU has stepped, and the seconds of these steps. Any thread may call."""
        with self._lock:
            return self._work

    # ---- waiting, ending ----

    def drain_flat(self, flat: FlatParameter) -> None:
        """Returns when the submitted step of `flat` is committed or skipped, and its values are stored.

        Raises:
            RuntimeError: the step has begun in a backward whose other steps have not: user code would read values that
                plain training does not have then.
        """
        self._prefetcher.check(flat)
        with self._waiting():
            self._stores[flat].drain()

    def drain(self) -> None:
        """Returns when every submitted step is committed or skipped, and its values are stored.

        Raises:
            Exception: the error of a step.
        """
        with self._waiting():
            for consumed in self._gradients.consumed():
                wait_for(consumed, "gradients")
            for store in self._stores.values():
                store.drain()

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Measures the time for which steps are waited for."""
        begun = perf_counter()
        try:
            yield
        finally:
            self._waited += perf_counter() - begun

    def close(self) -> None:
        """Ends the worker's thread after the submitted jobs."""
        try:
            if self._ranks is not None:
                self._ranks.end_failed_sums()
            wait_for_all(self._gradients.consumed(), "the last steps")
        finally:
            self._worker.close()
            if self._ranks is not None:
                self._ranks.close()
