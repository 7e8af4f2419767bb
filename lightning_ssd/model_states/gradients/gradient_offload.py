"""Gradient offloading: from `Tensor.grad` on the device to host memory, and accumulation in fp32.

Gradients are copied soon after autograd has accumulated them (LoHan's active gradient offloading), while backward
continues, several at once. Gradients of several micro-batches are summed on the host.
"""

import contextlib
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from time import perf_counter

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ssd import torch_internals as internals
from lightning_ssd.device import CopyEngine, Mark, Worker
from lightning_ssd.futures import Future, finished, then
from lightning_ssd.model_states.gradients.copies_in_flight import CopiesInFlight
from lightning_ssd.model_states.gradients.grad_scale import GradScaleDecision
from lightning_ssd.model_states.gradients.gradient import Gradient, GradientPool, GradientState
from lightning_ssd.model_states.gradients.norms import GradientNorms, measure_summed
from lightning_ssd.model_states.gradients.running_backward import RunningBackward
from lightning_ssd.model_states.units import FlatParameter, with_stride
from lightning_ssd.model_states.weights import ParamPrefetcher
from lightning_ssd.ranks import PeerMemory
from lightning_ssd.waits import wait_for


class GradientOffloader:
    """Offloads the gradients of the flat parameters that are stepped.

    Duty: copies a gradient to the host, accumulates micro-batches, and passes the result to a step. The step scheduler
    decides when a step begins.

    Threads: all methods run on the training thread, or on autograd's thread while the training thread waits in
    `backward`; two of them never call at a time. Two callbacks run elsewhere: `run` in `accumulate` on the worker's
    thread, and the completion of a copy's future on the `d2h-done` thread, which touches no field.

    Ownership: a gradient on the device belongs to `Gradient.on_device` until `offload` copies it; a copied one to
    `in_flight`, until the compute stream is ordered after the copy. Host memory: see `Gradient`.

    Args:
        gradients: the gradient of each flat parameter that is stepped; owned.
        groups: optimizer of each of these flat parameters, and index of the parameter group.
        pool: memory that the gradients share; owned. None: each has its own memory.
        prefetcher: counts the forwards of a unit, each of which yields a gradient.
        worker: runs accumulations.
        decision: receives the gradients of a step that clips or scales.
        recorded: whether steps are recorded, so that no gradient may outlive its step.
        peers: device memory that all ranks read, for gradients that are complete; None: there is none.

    Attributes:
        in_flight: device memory of gradients that are being copied.
        backward: the backward that runs, which may fail.
    """

    def __init__(
        self,
        gradients: Mapping[FlatParameter, Gradient],
        groups: Mapping[FlatParameter, tuple[Optimizer, int]],
        pool: GradientPool | None,
        prefetcher: ParamPrefetcher,
        copies: CopyEngine,
        worker: Worker,
        decision: GradScaleDecision,
        *,
        recorded: bool,
        peers: PeerMemory | None = None,
    ) -> None:
        self.norms = GradientNorms(gradients, decision, copies.device, self._wait_for_copies)
        self.in_flight = CopiesInFlight(copies)
        self.backward = RunningBackward(gradients, self.norms, self.in_flight)
        self._gradients = gradients
        self._groups = groups
        self._pool = pool
        self._prefetcher = prefetcher
        self._copies = copies
        self._worker = worker
        self._decision = decision
        self._recorded = recorded
        self._peers = peers
        self._most_waiting = self.in_flight.group_bytes if peers is None else peers.nbytes
        """Bytes of gradients that wait on the device until they are offloaded."""
        self._expected: dict[tuple[FlatParameter, tuple[bool, ...], bool], int] = {}
        """Gradients of a flat parameter in its last backward, by which of its parameters required a gradient, and by
        whether the weights of its unit were used outside of forwards, too."""
        self._waiting: dict[FlatParameter, int] = {}
        """Flat parameters with gradients on the device that are offloaded soon, and the bytes of these gradients."""
        self._waiting_bytes = 0
        self._stream: int | None = None
        """The compute stream of the backward's last gradient."""
        self._waited = 0.0

    def __getitem__(self, flat: FlatParameter) -> Gradient:
        """Returns the gradient of a flat parameter."""
        return self._gradients[flat]

    def items(self) -> ItemsView[FlatParameter, Gradient]:
        """Returns the flat parameters that are stepped, and their gradients."""
        return self._gradients.items()

    def of(self, optimizer: Optimizer) -> list[tuple[FlatParameter, Gradient]]:
        """Returns the flat parameters that `optimizer` steps, and their gradients."""
        return [item for item in self._gradients.items() if self._groups[item[0]][0] is optimizer]

    @property
    def share_memory(self) -> bool:
        """Whether gradients share host memory, which has no room for all of them."""
        return self._pool is not None

    @property
    def pending(self) -> bool:
        """Whether there are gradients that no step has used."""
        return any([gradient.accumulating or any(gradient.arrived) for gradient in self._gradients.values()])

    def delay_steps(self) -> None:
        """Begins a backward without steps: they are submitted after its end, and gradients can be dropped if it fails.

        The steps overlap with the next forward only. With a shared pool steps are not delayed, and with `peers` only
        those of the first gradients: other gradients need the memory that they free.
        """
        if self._pool is None and not self.backward.arriving:
            self.accumulate_all()  # gradients that user code may read are of an earlier backward
            self.backward.delay_steps()

    # ---- one gradient, on the thread that runs backward ----

    def receive(self, flat: FlatParameter, index: int, grad: Tensor) -> None:
        """Registers a new gradient of a parameter, which stays on the device, and allocates host memory for it.

        Raises:
            RuntimeError: it would be added to a gradient that a step has used and not kept.
        """
        # User code may compute on several streams: this one also copies and measures gradients of the one before.
        self._stream = self._copies.follow(self._stream)
        gradient = self._gradients[flat]
        is_sum = gradient.accumulating or bool(gradient.assigned) or gradient.arrived[index]
        if gradient.assigned:
            self.backward.note_added(flat)
            gradient.fold()
        if gradient.states[index] is GradientState.STEPPED:
            self.resume_accumulation(flat, index)
        if gradient.arrived[index]:  # the second gradient in one backward, as with reentrant checkpointing
            self.accumulate(flat)
        if not any(gradient.arrived):
            self._waited += self._allocate(gradient)
        gradient.arrive(index, grad, is_sum=is_sum)

    def _allocate(self, gradient: Gradient) -> float:
        """Allocates host memory for a gradient, which the last step may use. Returns the seconds of the device's wait.

        When the host begins to wait, the device may still have kernels to run. Its own wait begins after the last one,
        at a time that the thread `d2h-done` notes.
        """
        idle: Future[float] | None = None
        if not (gradient.accumulating or gradient.consumed.done()):
            issued = self._copies.on_d2h(self._copies.mark(awaited=True))
            idle = then(issued, lambda _: finished(perf_counter()))
        gradient.allocate(lambda: [other.consumed for other in self._gradients.values()])
        return perf_counter() - idle.result() if idle is not None and idle.done() else 0.0

    def complete(self, flat: FlatParameter) -> bool:
        """Returns True if the running backward is known to accumulate no further gradient of `flat`."""
        if self._gradients[flat].num_arrived != len(flat.param_views):  # most calls: one for each gradient
            return False
        required = _requires_grad(flat)
        # Backward may need the weights of a parameter that was frozen since the forward, until its end.
        if not all(required):
            return False
        expected = self._expected.get((flat, required, self._prefetcher.used_outside(flat)))
        if expected is not None:  # a gradient in several parts is complete at the end of backward only
            return expected == sum(required)
        # In the first backward, the end of backward decides; where memory is shared, that would be too late.
        return (self._pool is not None or self._peers is not None) and self._prefetcher.has_one_gradient(flat)

    def frees_early(self, flat: FlatParameter) -> bool:
        """Returns True if the complete gradient of `flat` should be accumulated before backward ends.

        That is so in micro-batches without a step where gradients share memory, which has no room for all of them.
        """
        return self._pool is not None and not self.backward.steps_delayed and not flat.shared and self.complete(flat)

    def offload_later(self, flat: FlatParameter, nbytes: int) -> None:
        """Has a gradient of `flat` offloaded together with others: events around each copy would delay backward.

        `nbytes` are its bytes. All waiting gradients are offloaded once they have `CopiesInFlight.group_bytes`; if
        complete ones stay on the device, once they have as many bytes as those may have.
        """
        self._waiting[flat] = self._waiting.get(flat, 0) + nbytes
        self._waiting_bytes += nbytes
        if self._waiting_bytes >= self._most_waiting:
            self._offload_waiting()
            if self._peers is not None:  # host memory has no room for all gradients
                self.backward.end_delay()

    def _offload_waiting(self) -> None:
        for flat in list(self._waiting):
            self.offload(flat)

    def offload(self, flat: FlatParameter) -> None:
        """Copies the gradients of `flat` that are on the device to the host.

        The compute stream waits for older copies, if there are many.
        """
        self._waiting_bytes -= self._waiting.pop(flat, 0)
        gradient = self._gradients[flat]
        grads, gradient.on_device = gradient.on_device, {}
        if not grads:
            return
        self._stream = self._copies.follow(self._stream)
        grads = {index: with_stride(grad, flat.param_views[index].stride) for index, grad in grads.items()}
        # Few awaited marks may be pending, and a step waits for the copy of its last gradient alone. Where a parameter
        # has no gradient, no mark is awaited, and the thread `d2h-done` occupies a processor while it waits.
        last = gradient.num_arrived >= len(flat.param_views)
        gradient.mark = gradient.copy(grads, self._copies, awaited=last)
        self.in_flight.add(list(grads.values()), gradient.mark)

    def end_backward(self) -> None:
        """Issues all copies, and records how many gradients each flat parameter has had."""
        self.backward.end()
        self._offload_waiting()
        self._stream = None
        self.norms.measure_waiting()  # the next forward may come before the step, and needs the memory
        for flat, gradient in self._gradients.items():
            if num_arrived := gradient.end_backward():
                self._expected[flat, _requires_grad(flat), self._prefetcher.used_outside(flat)] = num_arrived

    def resume_accumulation(self, flat: FlatParameter, index: int) -> None:
        """Makes a new gradient add to the one that the last step has used, as in plain training without `zero_grad`.

        Raises:
            RuntimeError: the step has not kept its gradient.
        """
        gradient = self._gradients[flat]
        if not gradient.retained:
            raise RuntimeError(
                f"a gradient of {flat.param_views[index].name} is added to the one that the last step has used, "
                "which is gone. Call `optimizer.zero_grad()` between a step and the next backward, or, if only "
                "gradients of inputs are needed, `torch.autograd.grad` instead of `backward`."
            )
        if self._recorded:
            raise RuntimeError(
                f"the gradient of {flat.param_views[index].name} that the last step has used is added to, or stepped "
                "again, and `recover=True` does not record it. Call `optimizer.zero_grad()` between a step and the "
                "next backward or step, or set `recover=False`."
            )
        gradient.resume(index)
        self.backward.note_resumed()

    def resume_stepped(self, flat: FlatParameter) -> None:
        """Makes gradients that an earlier step has used, and `zero_grad` has not dropped, gradients of the next step.

        In plain training, `optimizer.step` uses them again.

        Raises:
            RuntimeError: the step has not kept them.
        """
        gradient = self._gradients[flat]
        for index, state in enumerate(gradient.states if GradientState.STEPPED in gradient.states else ()):
            if state is not GradientState.STEPPED:
                continue
            if not gradient.retained:
                raise RuntimeError(
                    f"`optimizer.step` would use the gradient of {flat.param_views[index].name} again, which the last "
                    "step has used and not kept. Call `optimizer.zero_grad()` between two steps, or override "
                    "`on_after_backward`: steps wait for the end of backward then, and keep gradients."
                )
            self.resume_accumulation(flat, index)
            self.norms.remeasure(flat, [index])

    def used(self) -> dict[nn.Parameter, Tensor | None]:
        """Returns copies of the gradients that steps have used; None: the step has not kept it. No step runs."""
        return {
            item.parameter: item.of(gradient.used()).clone() if gradient.retained else None
            for flat, gradient in self._gradients.items()
            for item, state in zip(flat.param_views, gradient.states, strict=True)
            if state is GradientState.STEPPED
        }

    def restore_used(self, gradients: Mapping[nn.Parameter, Tensor | None]) -> None:
        """Restores what `used` of earlier model states has returned, before the first backward.

        A gradient of a parameter that is on the device now becomes its `.grad`.
        """
        for flat, gradient in self._gradients.items():
            gradient.restore_used(
                {
                    index: gradients[item.parameter]
                    for index, item in enumerate(flat.param_views)
                    if item.parameter in gradients
                }
            )
        offloaded = self._parameters()
        for parameter, value in gradients.items():
            if value is not None and parameter not in offloaded:
                parameter.grad = value.to(parameter.device, parameter.dtype)

    def restore_accumulated(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Accumulates gradients of earlier micro-batches, of parameters that were on the device then.

        Called before the next backward. They are fp32 tensors in host memory. Those of parameters that are still there
        become their `.grad`.
        """
        for flat, gradient in self._gradients.items():
            for index, item in enumerate(flat.param_views):
                if item.parameter not in gradients:
                    continue
                item.of(gradient.accumulated()).copy_(gradients[item.parameter])
                gradient.set_accumulated(index)
                if self._decision.loss_scaled:
                    self._decision.check_value(item.of(gradient.accumulated()))
                self.norms.remeasure(flat, [index])
        offloaded = self._parameters()
        for parameter, value in gradients.items():
            if parameter not in offloaded:
                parameter.grad = value.to(parameter.device)

    def _parameters(self) -> set[nn.Parameter]:
        return {item.parameter for flat in self._gradients for item in flat.param_views}

    # ---- accumulation on the host ----

    def accumulate(self, flat: FlatParameter) -> None:
        """Submits the accumulation of the gradients that were copied, to `Gradient.accum`."""
        self.backward.note_added(flat)
        gradient = self._gradients[flat]
        self.offload(flat)
        arrived = gradient.begin_accumulation()
        norms = self.norms.to_sum(flat)

        def run() -> None:  # on the worker's thread
            gradient.add(arrived)
            if norms is not None:
                for index in range(len(flat.param_views)):
                    measure_summed(gradient, flat, index, norms)

        gradient.summed = self._worker.submit(run, [self._copies.on_d2h(gradient.mark)])
        gradient.set_consumed(gradient.summed)

    def accumulate_all(self) -> None:
        """Submits the accumulation of every gradient that was copied."""
        for flat, gradient in self._gradients.items():
            if any(gradient.arrived):
                self.accumulate(flat)

    def pop_waited(self) -> float:
        """Returns the seconds that the device has waited for steps to free memory of gradients, and resets them."""
        waited, self._waited = self._waited, 0.0
        return waited

    # ---- towards a step, or user code ----

    def stay_on_device(self, flat: FlatParameter, number: int) -> int | None:
        """Copies the complete gradient of `flat`, with this number, to a slot of `PeerMemory`, before `hand_over`.

        Returns:
            The slot's offset; None: the gradient is not whole, or in part in host memory, or has to go there.
        """
        gradient = self._gradients[flat]
        on_device = gradient.on_device
        if self._peers is None or gradient.accumulating or len(on_device) < len(flat.param_views):
            return None
        if (slot := self._peers.acquire(number, flat.nbytes)) is None:
            return None
        self._waiting_bytes -= self._waiting.pop(flat, 0)
        gradient.on_device = {}
        self._stream = self._copies.follow(self._stream)
        target = self._peers.slot(slot, flat.nbytes)
        for index, grad in on_device.items():
            item = flat.param_views[index]
            self._copies.d2d(with_stride(grad, item.stride), target[item.start * flat.dtype.itemsize :])
        return slot

    def hand_over(self, flat: FlatParameter) -> list[bool] | None:
        """Passes the ownership of a gradient to a step; the caller passes the step's future to `set_consumed`.

        Gradients on the device are offloaded. The step waits for `on_host`.

        Returns:
            For each parameter, whether it has a gradient in `Gradient.host_grad`; None: the step uses the accumulated
            gradients.
        """
        gradient = self._gradients[flat]
        self.offload(flat)
        arrived = gradient.begin_step()
        if arrived is None and any(gradient.arrived):
            self.accumulate(flat)
        return arrived

    def on_host(self, flat: FlatParameter, arrived: Sequence[bool] | None) -> "Future[None]":
        """Returns a future that is done when a gradient is in host memory; `arrived` is the result of `hand_over`."""
        gradient = self._gradients[flat]
        return gradient.consumed if arrived is None else self._copies.on_d2h(gradient.mark)

    def copied(self, mark: Mark) -> "Future[None]":
        """Returns a future that is done when the mark of a copy is reached. Any thread may call."""
        return finished(None) if self._copies.reached(mark) else self._copies.on_d2h(mark)

    @contextlib.contextmanager
    def as_grads(self) -> Iterator[None]:
        """Makes the accumulated gradients the `.grad` of the parameters, which are whole tensors on the CPU meanwhile.

        No accumulation and no step may run. Changes count, including assignments and None: norms are measured again,
        and a gradient that is not finite skips a step with a loss scale.
        """
        parameters = [
            (flat, item, gradient, index)
            for flat, gradient in self._gradients.items()
            for index, item in enumerate(flat.param_views)
        ]
        for gradient in self._gradients.values():
            gradient.fold()
        for _, item, gradient, index in parameters:
            if gradient.has_accum[index]:
                item.parameter.grad = item.of(gradient.accumulated())
        try:
            yield
        finally:
            for flat, item, gradient, index in parameters:
                grad, item.parameter.grad = item.parameter.grad, None
                gradient.replace_accumulated(index, present=grad is not None)
                if grad is not None and grad.data_ptr() != item.of(gradient.accumulated()).data_ptr():
                    item.of(gradient.accumulated()).copy_(grad)
                if grad is not None and self._decision.loss_scaled:
                    self._decision.check_value(item.of(gradient.accumulated()))
                self.norms.remeasure(flat, [index])

    def consumed(self) -> "Sequence[Future[None]]":
        """Returns the futures of the last use of every gradient."""
        return [gradient.consumed for gradient in self._gradients.values()]

    def free(self) -> None:
        """Frees the host memory; every gradient was consumed."""
        for gradient in self._gradients.values():
            gradient.free()

    def _wait_for_copies(self, flat: FlatParameter) -> None:
        """Returns when the gradients of `flat` that have arrived are in host memory."""
        self.offload(flat)
        wait_for(self._copies.on_d2h(self._gradients[flat].mark), "gradients")


def _requires_grad(flat: FlatParameter) -> tuple[bool, ...]:
    with internals.without_torch_function():
        return tuple([item.parameter.requires_grad for item in flat.param_views])
