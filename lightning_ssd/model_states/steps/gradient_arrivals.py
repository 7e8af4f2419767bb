"""A gradient, from its hook to the stepped weight.

Call by call, on the thread that runs backward unless a line names another one:

1. `GradientArrivals._post_accumulate_grad`: autograd has accumulated the gradient. The hook removes it from the
   parameter. `GradientOffloader.receive` waits until the step before has read the flat parameter's host memory.
2. `GradientNorms.measure`: its norm, on the device and with those of others, if the scale decision needs it.
3. `GradientOffloader.offload`: copies to host memory of the flat parameter's gradients, which `Gradient.on_device` owns
   until then. It is called when 64 MiB of gradients wait, for the flat parameter's last one, or when backward ends. The
   copies own the host memory until their mark is reached, `Gradient.mark`. `CopiesInFlight` owns the device memory
   until the compute stream waits for the mark: when there are more than 192 MiB of it, or when backward ends. If the
   scale is not decided then, the stream waits in `StepScheduler.end`: before that, the scale would wait for the copies.
4. `StepScheduler.submit`, after the flat parameter's last gradient, if no user code may read it before the step:
   evicts the weights. Otherwise `StepScheduler.end_backward`, or `StepScheduler.end` at `optimizer.step`, calls it.
   Where devices of several ranks read each other's memory, `RankSteps.keep_on_device` copies a complete gradient to a
   slot of `PeerMemory`, in place of 3. `RankSteps.sum` passes it to its owner, whose `PeerSums`, on the thread `sums`,
   writes the mean to host memory. The slot belongs to the rank again when the owner has read it. The owner alone makes
   5 to 9, with the mean as its gradient. `DeviceStates.step` takes the place of 8 where the states are on its device.
5. `GradientOffloader.hand_over` in `submit`: the step owns the gradient and the stored values from now on, until its
   future is done. Where steps accumulate, the worker sums the gradient in fp32 first.
6. `OptimizerStep.speculative`, `deferred` or `serial`: which one runs, `StepScheduler._begin_step` chooses.
   `StateStore.stage` reads values on SSDs to staging memory.
7. `StepScheduler.closure`, after the closure of an optimizer that runs it first, or `StepScheduler.end`, on the
   training thread at `optimizer.step`: `GradScaleDecision.decide` has the scale written to the host, and the thread
   `d2h-done` completes its future, for which a deferred step waits, and with whose scale a speculative one is compared.
   None skips the step. The scale precedes copies of gradients that were issued before: a deferred step then waits for
   those of its own gradient.
8. `OptimizerStep._make`, on the thread `cpu-optimizer`: `FlatOptimizer` computes the new values.
9. `OptimizerStep._end`, on the thread that completes the last of copy, scale and computation: `StateStore.commit` makes
   the new values the present ones. The step's future is done then, and `Gradient.host_grad` may be copied to again.
   Writes to SSDs may still run.
10. `StepScheduler.end` queues prefetches, and `ParamPrefetcher.pre_forward` those that are missing: the copy of the new
    compute weights to the device begins when they are stepped, on SSDs written. `pre_forward` waits, on the training
    thread, until it is issued. No other flat parameter's step is waited for.
"""

from functools import partial

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_ssd import torch_internals as internals
from lightning_ssd.interrupts import uninterrupted
from lightning_ssd.model_states.access import GradDtype, GradientAccess
from lightning_ssd.model_states.gradients import GradientOffloader
from lightning_ssd.model_states.optimizers import parameters_of
from lightning_ssd.model_states.steps.gradient_clipping import GradientClipping
from lightning_ssd.model_states.steps.running_step import RunningStep
from lightning_ssd.model_states.steps.step_scheduler import StepScheduler
from lightning_ssd.model_states.units import FlatParameter, hook_gradient
from lightning_ssd.model_states.weights import OffloadedModel, ParamPrefetcher


class GradientArrivals:
    """Offloads gradients as autograd accumulates them, and submits the step of a flat parameter after its last one.

    Threads: the training thread, or autograd's while that waits in `backward`.

    Args:
        offloaded: the flat parameters.
        optimizers: optimizers of the model.
        gradients: copies gradients to the host.
        grads: `Tensor.grad` of offloaded parameters, which gradients in fp32 are added to.
        grad_dtype: flat parameters whose gradients are summed in fp32.
        prefetcher: checks the thread that calls.
        steps: submits steps.
        running: the step that runs.
        clipping: clips gradients before others are added to them.
    """

    def __init__(
        self,
        offloaded: OffloadedModel,
        optimizers: list[Optimizer],
        gradients: GradientOffloader,
        grads: GradientAccess,
        grad_dtype: GradDtype,
        prefetcher: ParamPrefetcher,
        steps: StepScheduler,
        running: RunningStep,
        clipping: GradientClipping,
    ) -> None:
        self._offloaded = offloaded
        self._optimizers = optimizers
        self._gradients = gradients
        self._grads = grads
        self._grad_dtype = grad_dtype
        self._prefetcher = prefetcher
        self._steps = steps
        self._running = running
        self._clipping = clipping

    def hook(self) -> list[RemovableHandle]:
        """Hooks the gradients of all offloaded parameters, and returns the handles of the hooks."""
        handles: list[RemovableHandle] = []
        for flat in self._offloaded.stores:
            for index, item in enumerate(flat.param_views):
                if flat in self._offloaded.flat_optimizers:
                    hook = partial(self._post_accumulate_grad, flat, index)
                else:
                    hook = partial(self._check_not_added, item.name)
                handles.append(hook_gradient(item.parameter, hook))
        return handles

    @uninterrupted
    def _post_accumulate_grad(self, flat: FlatParameter, index: int, parameter: nn.Parameter) -> None:
        """Offloads a gradient that autograd has accumulated, and submits the step of `flat` after its last one."""
        self._prefetcher.check_caller()
        with internals.without_torch_function():
            grad, parameter.grad = parameter.grad, None
        if grad is None:  # in mixed precision, the gradient of the fp32 weight: all of it was added on the host
            return
        gradients, ignored = self._gradients, self._gradients.backward.ignored
        if ignored and parameter in ignored:
            return
        self._steps.check_not_submitted(flat, index)
        if grad.requires_grad:
            gradients[flat].followed.add(index)
            grad = grad.detach()
        if self._running.defer_to_user_hooks:
            self._clipping.apply(self._offloaded.groups[flat][0])
        if grad.dtype != flat.dtype:  # summed in fp32
            gradients.norms.measure(flat, parameter, grad, check_finite=not self._running.defer_to_user_hooks)
            gradients.backward.note_sum(flat)
            self._grads.add(flat, index, grad)
            return
        gradients.receive(flat, index, grad)
        on_host = flat in self._grad_dtype.summed_on_host
        complete = (
            gradients.complete(flat)
            and self._steps.overlaps(flat)
            and not on_host
            and not flat.shared  # user code may write its weights until `optimizer.step`, unseen
        )
        gradients.norms.measure(flat, parameter, grad, check_finite=not self._running.defer_to_user_hooks)
        gradients.offload_later(flat, grad.nbytes)
        if complete:
            self._steps.submit(flat)
        elif not on_host and self._running.optimizer is None and gradients.frees_early(flat):
            gradients.accumulate(flat)

    def _check_not_added(self, name: str, parameter: nn.Parameter) -> None:
        """Checks a parameter that no optimizer steps, whose gradient is kept on the device for user code.

        Raises:
            RuntimeError: the parameter was added to an optimizer since its forward.
        """
        if any([member is parameter for optimizer in self._optimizers for member in parameters_of(optimizer)]):
            raise RuntimeError(
                f"{name} was added to an optimizer after the forward had begun. Add it before, such as in "
                "`on_train_batch_start`, or set `states='gpu'`."
            )
