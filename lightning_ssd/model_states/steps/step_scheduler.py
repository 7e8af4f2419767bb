"""The step scheduler: when the optimizer step of a flat parameter begins, and which futures wait for it.

With `overlap="optimized"`, the step of a flat parameter is submitted during backward, when its last gradient was
offloaded; the next forward of its unit waits for that step alone. If user code may read gradients before
`optimizer.step`, all steps are submitted there.

`step` computes, `grad_scale` decides the scale, and `journal` writes records.
"""

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ssd.device import WorkCounter, Worker, all_of, finished, then
from lightning_ssd.model_states.gradients import (
    Clipping,
    Gradient,
    GradientOffloader,
    GradientState,
    GradScaleDecision,
    WaitingGradient,
    clip,
    is_power_of_two,
)
from lightning_ssd.model_states.journal import Journal, PlainData
from lightning_ssd.model_states.optimizers import GroupOptions, parameters_of, unscales_itself
from lightning_ssd.model_states.placement import Setup
from lightning_ssd.model_states.steps.device_stepper import DeviceStepper
from lightning_ssd.model_states.steps.device_steps import DeviceSteps
from lightning_ssd.model_states.steps.step import OptimizerStep, Submitted
from lightning_ssd.model_states.steps.step_history import StepHistory
from lightning_ssd.model_states.steps.weights_first import WeightsFirst
from lightning_ssd.model_states.stores import StagedFlats
from lightning_ssd.model_states.units import FlatParameter, SharedMemory
from lightning_ssd.model_states.weights import OffloadedModel, ParamPrefetcher
from lightning_ssd.shutdown import Shutdown
from lightning_ssd.waits import wait_for, wait_for_all


class StepScheduler:
    """Submits the optimizer steps of flat parameters, and owns their futures.

    Duty: one step of one optimizer, from `begin` to `end`: which flat parameters are stepped when, with which scale;
    which future the next step, the journal and the history wait for.

    Threads: all methods run on the training thread, or on autograd's thread while the training thread waits in
    `backward`. Callbacks run on other threads: `_count` on that of a job; those of a step's own futures where
    `OptimizerStep` says. The future of the journal's last record completes on the journal's thread, and has no callback
    of this class.

    Lock: `_lock` guards the fields below it, which the worker's thread and those of callers share. It is held for
    look-ups and assignments only: never while a future is waited for, completed, or given a callback.

    Ownership: the gradient and the stored values of a flat parameter belong to its step from `submit` until the step's
    future is done. Values of the version that was committed last are kept until `_committed` and `_recorded` are done:
    the next step, which overwrites the version before, waits for both.

    Args:
        offloaded: the flat parameters. Those of one unit have one priority: the first unit's are stepped first, because
            the next forward needs them first.
        gradients: their gradients.
        prefetcher: evicts the weights whose step begins.
        staged: values that user code has staged.
        decision: decides the scale of each step; the caller closes it.
        worker: runs the jobs; owned.
        setup: settings of the training.
        journal: records steps for `recover=True`; owned. None: steps are not recorded.
        device_steps: the flat parameters that the device steps; owned.
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
        journal: Journal | None,
        device_steps: DeviceSteps,
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
        self._journal = journal
        self.defer_to_user_hooks = setup.defer_to_user_hooks
        """Whether user code may read gradients between backward and step, so that no step begins earlier."""
        self._defer_next = setup.defer_to_user_hooks
        self._weights_first = WeightsFirst(len(offloaded_units))
        self._device_steps = device_steps
        self._waited = 0.0
        """Seconds that other code has waited for whole steps, since the last `end`."""
        self._limit: float | None = None
        """Absolute value at which the jobs of the running step clamp gradients; None: they don't."""
        self._clippings: defaultdict[Optimizer, Clipping] = defaultdict(Clipping)
        """Clipping that the next step of an optimizer has to do."""
        self.optimizer: Optimizer | None = None
        """The optimizer whose step has begun and not ended."""
        self._outer: list[Optimizer] = []
        """Optimizers whose closures, one within the other, have begun the running step."""
        self._options = GroupOptions(offloaded.groups)
        self.history = StepHistory(offloaded)
        self._lock = threading.Lock()
        self._submitted: dict[FlatParameter, Future[None]] = {}
        """Steps that were submitted since the last `end`."""
        self._accumulations: dict[FlatParameter, Future[None]] = {}
        """Accumulations that those steps use; their norms are known when they are done."""
        self._committed: Future[None] = finished(None)
        """Done when the last optimizer step is committed and written in all flat parameters with two versions."""
        self._recorded: Future[None] = finished(None)
        """Done when the journal's last record is written."""
        self._unrecorded: dict[FlatParameter, Future[None]] = {}
        """Steps that no record names."""
        self._released: Future[None] = finished(None)
        """Done when the running step's scale is known, on the worker's thread. Deferred steps wait for it, so that all
        are queued before the worker begins the first one, of the unit that the next forward needs first."""
        self._work = WorkCounter(0, 0.0)
        """Number of parameters that the CPU has stepped, and the seconds of their steps."""

    # ---- an optimizer step, from its begin to its end ----

    def defer_next(self) -> None:
        """Delays the next steps until `optimizer.step`, because user code has a hook that may read gradients."""
        self._defer_next = True
        if self.optimizer is None:
            self.defer_to_user_hooks = True  # else when the running step ends

    def defer_inexact_clipping(self) -> None:
        """Delays steps from the next one on, if gradients are clipped by norm and the loss scale is no power of two.

        Unscaling and clipping both round then, and jobs multiply by one factor. Called between two steps.
        """
        if not self._setup.scales_exactly and self._setup.clip_norm():
            self.defer_next()

    @property
    def defers_next(self) -> bool:
        """`defer_to_user_hooks` of the next step."""
        return self._defer_next

    def begin(self, optimizer: Optimizer) -> None:
        """Begins a step of `optimizer`: flat parameters that backward completes from here on are stepped at once.

        A step whose closure begins this one goes on after it.

        Raises:
            RuntimeError: such a step has begun in a flat parameter.
        """
        if self.optimizer is not None:
            if self.has_submitted:
                raise RuntimeError(
                    "an optimizer is stepped within the step of another one, which has begun in backward. Override "
                    "`on_after_backward`: steps begin with `optimizer.step` then."
                )
            self._decision.cancel()
            self._outer.append(self.optimizer)
        self.optimizer = optimizer
        self._limit = None
        if not self.defer_to_user_hooks:  # else calls of `clip` decide
            self._limit = self._setup.clip_value()
            self._gradients.measure_norms(self._setup.needs_norm)
        self._decision.begin(defer_to_user_hooks=self.defer_to_user_hooks)
        scale = self._decision.scale
        self._released = finished(None) if scale.done() else self._worker.submit(lambda: None, [scale])

    def note_options(self, optimizer: Optimizer) -> None:
        """Notes the options of the parameter groups before the optimizer's own code; see `GroupOptions.note`."""
        if self.optimizer is optimizer:
            self._options.note(optimizer)

    @contextlib.contextmanager
    def closure(self, optimizer: Optimizer) -> Iterator[None]:
        """Surrounds a closure that `step` of `optimizer` calls: the optimizer's own code goes on after it."""
        if self.optimizer is optimizer:
            self._options.forget()
        yield
        self.note_options(optimizer)

    def overlaps(self, flat: FlatParameter) -> bool:
        """Whether the step of `flat` may be submitted while backward runs."""
        # Steps that wait for all gradients would keep shared memory, which the other gradients wait for.
        waits = self._decision.needs_norm and self._gradients.share_memory
        return self._overlap != "none" and not (waits or self._gradients.steps_delayed) and self._is_stepping(flat)

    def keeps_gradient(self, flat: FlatParameter) -> bool:
        """Whether a gradient of `flat`, which a plan keeps, stays on the device: its step may be made there."""
        return (
            self._device_steps.stepper_of(flat) is not None
            and self._overlap == "optimized"
            and self.overlaps(flat)
            and not (flat.shared or self._gradients[flat].accumulating)
        )

    def check_not_submitted(self, flat: FlatParameter, index: int) -> None:
        """Raises RuntimeError if the step of `flat` was submitted without the gradient of parameter `index`."""
        if self._is_submitted(flat):
            raise RuntimeError(
                f"a gradient of {flat.param_views[index].name} arrived after the optimizer step of {flat.name} had "
                "begun: it is used differently from step to step. Set `overlap='none'`."
            )

    def check_not_begun(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError if gradients of `optimizer` are clipped otherwise than was known when steps began."""
        if self.optimizer is optimizer and self.has_submitted:
            raise RuntimeError(
                "gradients are clipped otherwise than by `gradient_clip_val` and `gradient_clip_algorithm` of the "
                "Trainer when the step began. Change them before it, such as in `on_train_batch_start`."
            )

    def resume_stepped(self, optimizer: Optimizer) -> None:
        """Makes gradients that the last step of `optimizer` has used gradients of its next step.

        Those that `zero_grad` has dropped are gone.
        """
        if self.defer_to_user_hooks:
            for flat, _ in self._gradients_of(optimizer):
                if not self._is_submitted(flat):
                    self._gradients.resume_stepped(flat)

    def check_may_drop(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError if a step of `optimizer` that has not ended uses gradients, which can't be dropped."""
        with self._lock:
            begun = [flat.name for flat in self._submitted if self._groups[flat][0] is optimizer]
        if self.optimizer is optimizer and begun:
            raise RuntimeError(
                f"`zero_grad` drops gradients of {', '.join(begun)}, whose optimizer step has begun: `training_step` "
                "has called `backward`, after which Lightning calls `zero_grad`. Set `overlap='none'`."
            )

    def submit(self, flat: FlatParameter) -> None:
        """Submits the step of `flat`, whose gradient is complete, and whose weights are retired; nothing is staged.

        Raises:
            RuntimeError: its step before was not recorded, and a record can't name both.
        """
        gradient, store = self._gradients[flat], self._stores[flat]
        self._gradients.resume_stepped(flat)
        options = self._options.submit(flat)  # the step owns these
        stepper = self._device_steps.stepper_of(flat) if self._overlap == "optimized" else None
        waiting: WaitingGradient | None = None
        arrived: list[bool] | None
        if stepper is not None and len(gradient.on_device) == len(flat.param_views):
            waiting, arrived = self._gradients.hand_over_on_device(flat)
            on_host = finished(None)  # no copy to host memory is waited for
        else:
            on_host, arrived = self._gradients.hand_over(flat)
        if arrived is None:
            with self._lock:
                self._accumulations[flat] = on_host
        limit = self._limit
        if self.defer_to_user_hooks or (arrived is None and limit is None and not self._decision.needs_norm):
            gradient.retain(arrived, self._decision.scale, limit)
        for index in gradient.mark_stepped():
            torch.autograd.graph.increment_version(flat.param_views[index].parameter)  # as the optimizer does
        with self._lock:
            recorded = flat not in self._unrecorded
            # Values that a step may be rolled back to are not overwritten.
            ready = [] if store.layout.versions == 1 else [self._committed, self._recorded]
        if not recorded:
            raise RuntimeError(
                f"{flat.name} is stepped twice in one `training_step`, and `recover=True` can record one step of each "
                "parameter there. Step once, or set `recover=False`."
            )
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
            waiting=waiting,
        )
        self.history.submit(flat)
        weights, done = self._begin_step(flat, step, stepper, on_host, ready)
        gradient.submit_step(done)
        store.announce_step(weights, done)
        with self._lock:
            self._submitted[flat] = done

    def _begin_step(
        self,
        flat: FlatParameter,
        step: OptimizerStep,
        stepper: DeviceStepper | None,
        on_host: "Future[None]",
        ready: "list[Future[None]]",
    ) -> Submitted:
        """Begins the step of `flat`: on the device, speculatively, or when the scale is known.

        Args:
            flat: the flat parameter.
            step: its step.
            stepper: makes the step on the device; None: the CPU makes it.
            on_host: done when its gradient is in host memory, or at once if the gradient waits on the device.
            ready: futures that the step waits for.

        Returns:
            The futures of the compute weights and of the whole step.
        """
        speculated, accumulated = self._decision.speculated, step.arrived is None
        # A step that is not committed must not change the values or the gradient.
        revertible = self._decision.scale.done() or (self._stores[flat].layout.versions == 2 and not accumulated)
        if self._overlap == "naive":
            return step.serial([on_host, *ready])
        if stepper is not None and not accumulated:  # accumulated gradients are not in page-locked memory
            after = [on_host, *ready, self._released]
            return step.on_device(stepper, after, drop_second=self._decision.given_up)
        if speculated is not None and revertible:
            return step.speculative(speculated, on_host, ready)
        return step.deferred(
            [on_host, *ready, self._released],
            weights_first=self._overlap == "optimized" and self._weights_first.covers(self._priorities[flat]),
            drop_second=self._decision.given_up,
        )

    def end_backward(self) -> None:
        """Submits the steps of gradients that the backward has completed, or their accumulation.

        If user code may read gradients before the step, they stay where they were copied to until it does.
        """
        self._gradients.end_backward()
        for flat, gradient in self._gradients.items():
            if any(gradient.arrived):
                if self._is_stepping(flat) and not flat.shared:
                    self._retire_and_submit(flat)
                elif flat.shared or not (self.defer_to_user_hooks and gradient.may_stay):
                    self._gradients.accumulate(flat)

    # ---- clipping ----

    def may_clip(self, optimizer: Optimizer, algorithm: str, limit: float) -> bool:
        """Whether the jobs of the next step of `optimizer` may clip: else the caller has to.

        Args:
            optimizer: optimizer whose parameters have the gradients.
            algorithm: "norm" or "value".
            limit: the largest norm, or value.
        """
        if self.defer_to_user_hooks:
            return optimizer not in self._setup.whole
        known = self._decision.needs_norm if algorithm == "norm" else limit == self._limit
        return known and self.optimizer is optimizer

    def clip(self, optimizer: Optimizer, algorithm: str, limit: float) -> None:
        """Clips resident gradients, and leaves the clipping of offloaded ones to the jobs of the next step.

        Args:
            optimizer: as in `may_clip`, as the others.
            algorithm: "norm" or "value".
            limit: the largest norm, or value.
        """
        clipping = self._clippings.get(optimizer)
        if algorithm == "norm" and clipping is not None and clipping.clips:
            self.apply_clipping(optimizer)  # the norm is that of clipped gradients
        self.resume_stepped(optimizer)
        clipping = self._clippings[optimizer]
        parameters = parameters_of(optimizer)
        if algorithm == "norm":
            self._decision.needs_norm = True
            clipping.coefficient = self._decision.clip(parameters, self.norms(optimizer), limit, clipping.unscale)
        else:
            clipping.limit = limit if clipping.limit is None else min(limit, clipping.limit)
            if resident := [parameter for parameter in parameters if parameter.grad is not None]:
                torch.nn.utils.clip_grad_value_(resident, limit)
        self._clip_assigned(optimizer)

    def unscale(self, optimizer: Optimizer, scaler: torch.amp.GradScaler, found: dict[torch.device, Tensor]) -> None:
        """Leaves it to the jobs of the next step to divide offloaded gradients by the scale of `scaler`.

        Args:
            optimizer: optimizer whose parameters have the gradients.
            scaler: Lightning's scaler.
            found: its record, by device, of gradients of `optimizer` that are not finite.
        """
        assert scaler._scale is not None
        unscale = scaler._scale.double().reciprocal().float().view(1)
        if not self.defer_to_user_hooks:
            self._clippings[optimizer].unscale = unscale
            return
        factor = float(unscale)
        exact = is_power_of_two(factor)
        clipping = self._clippings[optimizer]
        if not exact or clipping.unscale is not None:  # the scaler has skipped the last step
            self.apply_clipping(optimizer)
            clipping = self._clippings[optimizer]
        if clipping.limit is not None:
            clipping.limit *= factor
        clipping.unscale = unscale
        if not exact:
            self.apply_clipping(optimizer)
        self._clip_assigned(optimizer)
        if unscales_itself(optimizer):
            self._clippings[optimizer].found = found

    def _clip_assigned(self, optimizer: Optimizer) -> None:
        """Clips the gradients of `optimizer` if user code may use some through tensors that it has assigned."""
        if any(gradient.assigned for _, gradient in self._gradients_of(optimizer)):
            self.apply_clipping(optimizer)

    def apply_clipping(self, optimizer: Optimizer) -> None:
        """Clips gradients whose clipping was left to the next step of `optimizer`: user code is about to use them."""
        if not self.defer_to_user_hooks or (clipping := self._clippings.pop(optimizer, None)) is None:
            return
        scale = None if clipping.scale is None else float(clipping.scale)
        for flat, gradient in self._gradients_of(optimizer):
            if gradient.accumulating or any(gradient.arrived):
                if any(gradient.arrived):
                    self._gradients.accumulate(flat)
                wait_for(gradient.consumed, "gradients")
                for index, item in enumerate(flat.param_views):
                    if index in gradient.assigned:
                        clip(gradient.assigned[index].detach(), scale, clipping.limit)
                    elif gradient.has_accum[index]:
                        clip(item.of(gradient.accumulated()), scale, clipping.limit)
                        self._gradients.remeasure(flat, [index])

    def apply_all_clipping(self) -> None:
        """Clips the gradients of all optimizers; see `apply_clipping`."""
        for optimizer in list(self._clippings):
            self.apply_clipping(optimizer)

    def drop_clipping(self, optimizer: Optimizer) -> None:
        """Clips no gradients of `optimizer`: they were dropped."""
        if self.defer_to_user_hooks:
            self._clippings.pop(optimizer, None)

    def norms(self, optimizer: Optimizer) -> dict[nn.Parameter, Tensor]:
        """Returns the norms of offloaded gradients of `optimizer`, before the clipping that is left to jobs.

        It does not wait for submitted steps, which wait for the scale that these norms decide.
        """
        norms: dict[nn.Parameter, Tensor] = {}
        for flat, gradient in self._gradients_of(optimizer):
            with self._lock:
                submitted, accumulation = flat in self._submitted, self._accumulations.get(flat)
            known = accumulation if submitted else gradient.consumed if gradient.accumulating else None
            if known is not None:
                wait_for(known, "gradients")
            norms |= self._gradients.norms(flat)
        return norms

    def end(self) -> None:
        """Ends the step on the training thread; submitted jobs go on.

        Raises:
            RuntimeError: the step changes the same memory through two parameters.
            Exception: a job's error, with `overlap="none"`.
        """
        optimizer = self.optimizer
        assert optimizer is not None
        clipping = self._clippings.pop(optimizer, Clipping())
        if self.defer_to_user_hooks:
            self._limit = clipping.limit
            self._decision.reset_checks()  # which are not of this step
            self._decision.merge_checks(dict(clipping.found))
        if (in_flight := self._decision.decide(clipping.scale)) is not None:
            self._gradients.keep_alive(*in_flight)
        self._check_memory_is_stepped_once(optimizer)
        self._submit_remaining(optimizer)
        self._weights_first.note(self._gradients.pop_waited() + self._waited)
        self._waited = 0.0
        submitted = self._finish_step()
        self.optimizer = None
        self._options.end()
        self.defer_to_user_hooks = self._defer_next
        for flat, _ in self._gradients_of(optimizer):
            self._gradients.reset_norms(flat)
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
        assert self.optimizer is not None and not self._submitted
        self._clippings.pop(self.optimizer, None)
        self._decision.cancel()
        self.optimizer = None
        self._options.end()
        self.defer_to_user_hooks = self._defer_next
        self._prefetcher.reset()
        self._begin_outer()

    def _begin_outer(self) -> None:
        """Begins the step again whose closure has made the step that has ended."""
        if self._outer:
            self.begin(self._outer.pop())

    @property
    def has_submitted(self) -> bool:
        """Whether the running step has submitted the step of a flat parameter."""
        with self._lock:
            return bool(self._submitted)

    def skip(self, optimizer: Optimizer) -> None:
        """Ends a step of `optimizer` that has not begun, because a gradient is not finite.

        The gradients are then like those that a step has used and kept: plain training has them until `zero_grad`.
        """
        clipping = self._clippings.pop(optimizer, Clipping())
        scale = finished(None if clipping.scale is None else float(clipping.scale))
        for flat, gradient in self._gradients_of(optimizer):
            if GradientState.PRESENT in gradient.states:
                gradient.fold()
                on_host, arrived = self._gradients.hand_over(flat)
                wait_for(on_host, "gradients")
                gradient.skip_step(arrived, scale, clipping.limit)
                self._gradients.reset_norms(flat)

    def _submit_remaining(self, optimizer: Optimizer) -> None:
        """Submits the steps of `optimizer` that could not begin in backward, and those of gradients that are kept."""
        for flat, gradient in self._gradients_of(optimizer):
            if self._is_submitted(flat):
                continue
            if gradient.accumulating or any(gradient.arrived) or GradientState.STEPPED in gradient.states:
                self._staged.pull(flat)
                gradient.fold()
                self._retire_and_submit(flat)

    def _retire_and_submit(self, flat: FlatParameter) -> None:
        """Submits a step after backward, which may have left weights on the device, and user code staged values."""
        self._staged.unstage()
        self._prefetcher.retire_for_step(flat)
        self.submit(flat)

    def _finish_step(self) -> Mapping[FlatParameter, "Future[None]"]:
        """Passes the step's futures to the next step, the journal and the history, and returns those of its jobs."""
        with self._lock:
            submitted, self._submitted = self._submitted, {}
            self._accumulations = {}
            if self._journal is not None:
                self._unrecorded |= submitted
        stores = {flat: store for flat in submitted if (store := self._stores[flat]).layout.versions == 2}
        if stores:
            committed = all_of(
                submitted[flat] if store.in_memory else then(submitted[flat], store.written)
                for flat, store in stores.items()
            )
            with self._lock:
                self._committed = committed
        self.history.end(committed if stores else all_of(submitted.values()))
        return submitted

    def _gradients_of(self, optimizer: Optimizer) -> list[tuple[FlatParameter, Gradient]]:
        """Returns the flat parameters that `optimizer` steps, and their gradients."""
        return [item for item in self._gradients.items() if self._groups[item[0]][0] is optimizer]

    def _is_stepping(self, flat: FlatParameter) -> bool:
        return self.optimizer is not None and not self.defer_to_user_hooks and self._groups[flat][0] is self.optimizer

    def _is_submitted(self, flat: FlatParameter) -> bool:
        with self._lock:
            return flat in self._submitted

    def _check_memory_is_stepped_once(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError if a step of `optimizer` changes the same memory through two parameters."""
        stepped: list[tuple[str, SharedMemory]] = []
        for flat, gradient in self._gradients_of(optimizer):
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

    # ---- waiting, recording, ending ----

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
        """Measures the time for which whole steps are waited for."""
        begun = perf_counter()
        try:
            yield
        finally:
            self._waited += perf_counter() - begun

    @property
    def recorded(self) -> bool:
        """Whether steps are recorded, so that a killed run can resume."""
        return self._journal is not None

    @property
    def unrecorded(self) -> bool:
        """Whether a step was submitted that no record names, and steps are recorded."""
        with self._lock:
            return bool(self._unrecorded)

    def record(self, training_state: Callable[[], PlainData]) -> None:
        """Submits a record of the submitted steps; the next steps wait for it.

        Args:
            training_state: returns all other state to resume from, on the CPU; called on the journal's thread.

        Raises:
            RuntimeError: a flat parameter without a step has gradients, which a record does not contain.
        """
        assert self._journal is not None
        with self._lock:
            unrecorded, before = dict(self._unrecorded), self._recorded
        for flat, gradient in self._gradients.items():
            if flat not in unrecorded and (gradient.accumulating or any(gradient.arrived)):
                raise RuntimeError(
                    f"{flat.name} keeps gradients from one batch to the next while others are stepped, and "
                    "`recover=True` does not record them. Call `zero_grad` of its optimizer, too, or set "
                    "`recover=False`."
                )
        needed = [then(unrecorded.get(flat, finished(None)), store.written) for flat, store in self._stores.items()]
        record = self._journal.write([before, *needed], training_state)
        with self._lock:
            self._unrecorded, self._recorded = {}, record

    def wait_for_record(self) -> None:
        """Returns when the last record is written.

        Raises:
            Exception: it could not be written.
        """
        wait_for(self._last_record(), "the record of the last step")

    def _last_record(self) -> "Future[None]":
        with self._lock:
            return self._recorded

    def drop_record(self) -> None:
        """Removes the last record, since values that it names are about to change: a killed run would begin anew."""
        if self._journal is not None:
            wait_for_all([self._last_record()], "the record of the last step")
            self._journal.forget()

    def close_journal(self) -> None:
        """Ends the journal's thread after its last record."""
        if self._journal is not None:
            wait_for_all([self._last_record()], "the record of the last step")
            self._journal.close()

    def end_record(self, shutdown: Shutdown) -> bool:
        """Removes the last record if training has ended without an error, before the values that it names are freed.

        Args:
            shutdown: the end of training.

        Returns:
            Whether a record is kept for the next run.
        """
        assert self._journal is not None
        if shutdown.failure is None:
            shutdown.run(self._journal.forget)
        return self._journal.written

    def close(self) -> None:
        """Ends the worker's thread after the submitted jobs."""
        try:
            wait_for_all(self._gradients.consumed(), "the last steps")
        finally:
            self._worker.close()
            self._device_steps.close()
