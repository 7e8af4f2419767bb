"""Clipping and unscaling of offloaded gradients between backward and step, most of which is left to the step's jobs."""

from collections import defaultdict
from collections.abc import Container

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ssd.model_states.gradients import Clipping, GradientOffloader, GradScaleDecision, clip, is_power_of_two
from lightning_ssd.model_states.optimizers import parameters_of, unscales_itself
from lightning_ssd.model_states.placement import Setup
from lightning_ssd.model_states.steps.running_step import RunningStep
from lightning_ssd.waits import wait_for


class GradientClipping:
    """Notes how the next step of each optimizer scales and clamps its gradients; clips them itself if they are read.

    Threads: the training thread, or autograd's while that waits.

    Args:
        gradients: the offloaded gradients.
        decision: clips resident gradients, and computes the factor of the offloaded ones.
        running: the step that runs.
        setup: settings of the training.
    """

    def __init__(
        self, gradients: GradientOffloader, decision: GradScaleDecision, running: RunningStep, setup: Setup
    ) -> None:
        self._gradients = gradients
        self._decision = decision
        self._running = running
        self._setup = setup
        self._pending: defaultdict[Optimizer, Clipping] = defaultdict(Clipping)
        """Clipping that the next step of an optimizer has to do."""

    def is_known(self, optimizer: Optimizer, algorithm: str, limit: float) -> bool:
        """Whether the jobs of the next step of `optimizer` may clip: else the caller has to.

        Args:
            optimizer: optimizer whose parameters have the gradients.
            algorithm: "norm" or "value".
            limit: the largest norm, or value.
        """
        if self._running.defer_to_user_hooks:
            return optimizer not in self._setup.whole
        known = self._decision.needs_norm if algorithm == "norm" else limit == self._running.limit
        return known and self._running.optimizer is optimizer

    def clip(self, optimizer: Optimizer, algorithm: str, limit: float) -> None:
        """Clips resident gradients, and leaves the clipping of offloaded ones to the jobs of the next step.

        Arguments as those of `is_known`.
        """
        clipping = self._pending.get(optimizer)
        if algorithm == "norm" and clipping is not None and clipping.clips:
            self.apply(optimizer)  # the norm is that of clipped gradients
        self.resume_stepped(optimizer)
        clipping = self._pending[optimizer]
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
        if not self._running.defer_to_user_hooks:
            self._pending[optimizer].unscale = unscale
            return
        factor = float(unscale)
        exact = is_power_of_two(factor)
        clipping = self._pending[optimizer]
        if not exact or clipping.unscale is not None:  # the scaler has skipped the last step
            self.apply(optimizer)
            clipping = self._pending[optimizer]
        if clipping.limit is not None:
            clipping.limit *= factor
        clipping.unscale = unscale
        if not exact:
            self.apply(optimizer)
        self._clip_assigned(optimizer)
        if unscales_itself(optimizer):
            self._pending[optimizer].found = found

    def _clip_assigned(self, optimizer: Optimizer) -> None:
        """Clips the gradients of `optimizer` if user code may use some through tensors that it has assigned."""
        if any([gradient.assigned for _, gradient in self._gradients.of(optimizer)]):
            self.apply(optimizer)

    def apply(self, optimizer: Optimizer) -> None:
        """Clips gradients whose clipping was left to the next step of `optimizer`: user code is about to use them."""
        if not self._running.defer_to_user_hooks or (clipping := self._pending.pop(optimizer, None)) is None:
            return
        scale = None if clipping.scale is None else float(clipping.scale)
        for flat, gradient in self._gradients.of(optimizer):
            if gradient.accumulating or any(gradient.arrived):
                if any(gradient.arrived):
                    self._gradients.accumulate(flat)
                wait_for(gradient.consumed, "gradients")
                for index, item in enumerate(flat.param_views):
                    if index in gradient.assigned:
                        clip(gradient.assigned[index].detach(), scale, clipping.limit)
                    elif gradient.has_accum[index]:
                        clip(item.of(gradient.accumulated()), scale, clipping.limit)
                        self._gradients.norms.remeasure(flat, [index])

    def apply_all(self) -> None:
        """Clips the gradients of all optimizers; see `apply`."""
        for optimizer in list(self._pending):
            self.apply(optimizer)

    def drop(self, optimizer: Optimizer) -> None:
        """Clips no gradients of `optimizer`: they were dropped."""
        if self._running.defer_to_user_hooks:
            self._pending.pop(optimizer, None)

    def pending(self, optimizer: Optimizer) -> Clipping:
        """Returns how the running step of `optimizer` scales and clamps its gradients, as far as that is known."""
        return self._pending.get(optimizer, Clipping())

    def pop(self, optimizer: Optimizer) -> Clipping:
        """Returns how the step of `optimizer` that ends now scales and clamps its gradients."""
        return self._pending.pop(optimizer, Clipping())

    def resume_stepped(self, optimizer: Optimizer) -> None:
        """Makes gradients that the last step of `optimizer` has used gradients of its next step.

        Those that `zero_grad` has dropped are gone.
        """
        if self._running.defer_to_user_hooks:
            for flat, _ in self._gradients.of(optimizer):
                self._gradients.resume_stepped(flat)

    def norms(self, optimizer: Optimizer) -> dict[nn.Parameter, Tensor]:
        """Returns the norms of offloaded gradients of `optimizer`, before the clipping that is left to jobs."""
        norms: dict[nn.Parameter, Tensor] = {}
        for flat, _ in self._gradients.of(optimizer):
            norms |= self._gradients.norms.of(flat)
        return norms


def unscale_as_optimizer(optimizer: Optimizer, offloaded: Container[nn.Parameter]) -> bool:
    """Does for offloaded gradients what a fused `step` does for others, by the attributes that a scaler has set.

    Lightning's scaler sets them, too, after it has unscaled gradients, which leaves no scale to divide by.

    Args:
        optimizer: an optimizer that unscales its gradients itself.
        offloaded: parameters whose gradients are offloaded.

    Returns:
        Whether the step is made: all gradients are finite.
    """
    scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if found is not None and bool(found):
        return False
    if scale is not None:
        for parameter in parameters_of(optimizer):
            if parameter in offloaded and (gradient := parameter.grad) is not None:
                scale = scale.to(gradient.device)  # once: all of them are on one device
                gradient.div_(scale)
    return True
