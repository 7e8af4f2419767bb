"""Norms of the gradients of the next step, which decide its scale."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_ssd import torch_internals as internals
from lightning_ssd.model_states.gradients.copies_in_flight import CopiesInFlight
from lightning_ssd.model_states.gradients.grad_scale import GradScaleDecision
from lightning_ssd.model_states.gradients.gradient import Gradient, GradientState
from lightning_ssd.model_states.units import FlatParameter
from lightning_ssd.waits import wait_for


class GradientNorms:
    """Measures the norm of each offloaded gradient once, before it is unscaled: as it arrives, or as it is summed.

    Gradients that arrive are measured in groups: the host takes 0.1 ms to launch the kernels of one norm, and a model
    has hundreds of parameters, most of them small.

    Threads: the training thread, or autograd's while that waits; `measure_summed` runs on the worker's thread.

    Ownership: a norm is a one-element tensor, on the device for a gradient that was copied, on the host for a summed
    one. The norms of a flat parameter belong to its next step. A job that sums gradients writes to the mapping of the
    step that it was submitted for, which the step reads after `Gradient.summed`. `_waiting` keeps the device memory of
    its gradients, which are read alone: by their copies to the host, and by the kernels of their norms.

    Args:
        decision: whether norms are needed.
        copied: returns when the gradients of a flat parameter that have arrived are in host memory.
    """

    GROUP_BYTES = CopiesInFlight.MAX_BYTES
    """Bytes of gradients on the device that are measured at once: those whose copies are in flight anyway."""

    def __init__(
        self,
        gradients: Mapping[FlatParameter, Gradient],
        decision: GradScaleDecision,
        device: torch.device,
        copied: Callable[[FlatParameter], None],
    ) -> None:
        self._gradients = gradients
        self._decision = decision
        self._device = device
        self._copied = copied
        self._norms: dict[FlatParameter, dict[nn.Parameter, Tensor]] = {flat: {} for flat in gradients}
        self._waiting: list[tuple[FlatParameter, nn.Parameter, Tensor]] = []
        """Gradients on the device whose norms are not computed yet."""
        self._waiting_bytes = 0

    def measure(self, flat: FlatParameter, parameter: nn.Parameter, grad: Tensor, *, check_finite: bool) -> None:
        """Has the norm of a new gradient computed, or whether it is finite, on the device, for the scale decision.

        Args:
            grad: the gradient, on the device, which autograd does not follow.
            check_finite: whether the running step is skipped if the gradient is not finite.
        """
        if check_finite and self._decision.loss_scaled:
            self._decision.check(grad)
        gradient = self._gradients[flat]
        # Several ranks clip by the norm of their mean gradient, which is not known yet.
        if self._decision.needs_norm and not gradient.accumulating and not gradient.is_shared:
            self._waiting.append((flat, parameter, grad))
            self._waiting_bytes += grad.nbytes
            if self._waiting_bytes >= self.GROUP_BYTES:
                self.measure_waiting()

    def measure_waiting(self) -> None:
        """Computes the norms of the gradients that wait, whose device memory is free then.

        Each norm has the bits that it has alone.
        """
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        for dtype in dict.fromkeys([grad.dtype for _, _, grad in waiting]):  # kernels take gradients of one dtype
            group = [item for item in waiting if item[2].dtype == dtype]
            norms = _norms_in_fp32([grad for _, _, grad in group])
            for (flat, parameter, _), norm in zip(group, norms, strict=True):
                self._norms[flat][parameter] = norm

    def to_sum(self, flat: FlatParameter) -> dict[nn.Parameter, Tensor] | None:
        """Returns the mapping that a job which sums gradients of `flat` measures into; None: norms are not needed."""
        self.measure_waiting()  # before the norms of sums, which replace them
        return self._norms[flat] if self._decision.needs_norm else None

    def remeasure(self, flat: FlatParameter, indices: Sequence[int]) -> None:
        """Measures the norms of gradients again that user code has changed or dropped, or that are used again."""
        if not self._decision.needs_norm:
            return
        self.measure_waiting()
        gradient, norms = self._gradients[flat], self._norms[flat]
        for index in indices if norms or gradient.accumulating else ():
            norms.pop(flat.param_views[index].parameter, None)
            if gradient.accumulating:  # else `has_accum` belongs to the last step
                measure_summed(gradient, flat, index, norms)

    def begin_step(self, *, needed: bool) -> None:
        """Has norms measured as gradients arrive, or not, from the step on that begins now.

        Norms of earlier micro-batches are measured when they are needed.
        """
        if self._decision.needs_norm and not needed:
            for flat in self._gradients:
                self.reset(flat)
        self._decision.needs_norm = needed

    def of(self, flat: FlatParameter) -> Mapping[nn.Parameter, Tensor]:
        """Returns the norms of the gradients of `flat`, before the clipping that is left to its step.

        It waits for sums, and not for a submitted step, which waits for the scale that these norms decide. Gradients
        that user code has assigned, and may have changed since, and those that arrived before norms were needed are
        measured now: on the device, unless they were summed.
        """
        self.measure_waiting()
        gradient, norms = self._gradients[flat], self._norms[flat]
        wait_for(gradient.summed, "gradients")
        for index, item in enumerate(flat.param_views):
            if index in gradient.assigned:
                norms[item.parameter] = _norm(gradient.assigned[index].detach())
            if gradient.states[index] is not GradientState.PRESENT or item.parameter in norms:
                continue
            if gradient.arrived[index]:
                self._copied(flat)
                norms[item.parameter] = _norm(item.of(gradient.host_grad).to(self._device).float())
            else:
                measure_summed(gradient, flat, index, norms)
        return norms

    def reset(self, flat: FlatParameter) -> None:
        """Starts the norms of the next step of `flat`."""
        self._norms[flat] = {}
        if self._waiting:  # the gradients of a backward that has failed
            self._waiting = [item for item in self._waiting if item[0] is not flat]


def measure_summed(gradient: Gradient, flat: FlatParameter, index: int, norms: dict[nn.Parameter, Tensor]) -> None:
    """Measures the norm of a gradient of `flat` in host memory, if there is one."""
    item = flat.param_views[index]
    if gradient.has_accum[index]:
        norms[item.parameter] = _norm(item.of(gradient.accumulated()))


def _norm(gradient: Tensor) -> Tensor:
    return internals.foreach_norm([gradient])[0]


def _norms_in_fp32(gradients: list[Tensor]) -> list[Tensor]:
    """Returns the norms of gradients of one dtype, with the bits of those of their values in fp32."""
    if gradients[0].device.type == "cpu" or gradients[0].itemsize > torch.float32.itemsize:
        # The CPU's kernel adds numbers of 16 bits in another order. No kernel narrows numbers.
        gradients = [gradient.float() for gradient in gradients]
    return internals.foreach_norm(gradients, dtype=torch.float32)
