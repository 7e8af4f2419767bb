"""Scale decision: the gradient scale of a step (clip coefficient, loss scale), or the decision to skip the step.

Clipping by norm and loss scaling need all gradients, so the decision is made when backward has ended, on the device.
The host does not wait for it: optimizer jobs depend on a future.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_ssd import torch_internals as internals
from lightning_ssd.device import CopyEngine
from lightning_ssd.futures import Future, finished
from lightning_ssd.interrupts import uninterrupted
from lightning_ssd.storage import Slab
from lightning_ssd.types import Clip
from lightning_ssd.waits import wait_for_all

_SLOT_BYTES = 8  # two fp32 numbers: the scale, and 1.0 if a gradient was not finite


@dataclass
class Clipping:
    """Scaling and clipping of an optimizer's offloaded gradients that is left to the jobs of its next step.

    Attributes:
        unscale: reciprocal of the loss scale, on the device, one element; None: the gradients are not unscaled.
        coefficient: factor that clips by norm, on the device, one element; None: there is none.
        limit: absolute value at which the scaled gradients are clamped; None: they are not.
        found: the scaler's record, by device, of gradients that are not finite, if the optimizer skips the step itself.
    """

    unscale: Tensor | None = None
    coefficient: Tensor | None = None
    limit: float | None = None
    found: dict[torch.device, Tensor] = field(default_factory=dict)

    @property
    def scale(self) -> Tensor | None:
        """Factor of the gradients, applied before `limit`; None: there is none."""
        if self.unscale is None or self.coefficient is None:
            return self.coefficient if self.unscale is None else self.unscale
        return self.coefficient * self.unscale

    @property
    def clips(self) -> bool:
        """Whether it changes gradients by more than the reciprocal of the loss scale."""
        return self.coefficient is not None or self.limit is not None


class GradScaleDecision:
    """The scale of one optimizer step after the other.

    Duty: computes the scale of a step on the device, copies it to the host, and completes the future `scale`.

    Threads: all methods run on the training thread, or on autograd's thread while the training thread waits in
    `backward`. One callback, `on_host` in `decide`, runs on the `d2h-done` thread: it completes `scale`, so that
    callbacks of `scale` (a deferred step begins, a speculative one is compared) run on that thread, too. It also sets
    `_speculated` and `_miss_rate`, which other threads read as whole values.

    Ownership: each slot of `_host` belongs to the kernel that writes a step's scale, until that step's `scale` is done.

    Args:
        clip: "deferred": no step begins before its scale is known. "speculative": a step begins with the scale that is
            most likely. "auto": it does so while few of the last speculations were wrong.
        needs_norm: whether gradients are clipped by their norm, or losses are scaled; else the scale is always 1. User
            code that clips by norm between backward and step sets it.
        loss_scaled: whether losses are scaled.

    Attributes:
        scale: future of the running step's scale; None: the step is skipped.
        decided: whether `scale` is done, or completes by the device's progress alone.
    """

    MISS_THRESHOLD = 0.3
    """Share of wrong speculations among the last steps above which clip="auto" defers: each costs a second step."""
    GIVE_UP_THRESHOLD = 0.5
    """Share of wrong speculations above which the memory for speculation is freed. It is larger than `MISS_THRESHOLD`,
    so that memory is not freed and allocated again every few steps."""
    EMA_WEIGHT = 0.1
    """Weight of the last step in that share, an exponential moving average."""
    SLOTS = 16
    """Scales that may be copied to the host at once, so that steps of several optimizers don't wait for each other."""

    def __init__(self, copies: CopyEngine, *, clip: Clip, needs_norm: bool, loss_scaled: bool) -> None:
        self.needs_norm = needs_norm
        self.loss_scaled = loss_scaled
        self.scale: Future[float | None] = finished(1.0)
        self._copies = copies
        self._clip: Clip = clip
        self.decided = True
        self._not_finite = torch.zeros(1, dtype=torch.float32, device=copies.device)
        """On the device, 1.0 if a gradient was not finite."""
        self._host = Slab(self.SLOTS * _SLOT_BYTES, pin=copies.device.type == "cuda")
        self._mapped = copies.mapped(self._host.tensor)
        """The same bytes as a tensor on the device."""
        self._in_flight: deque[Future[float | None]] = deque()
        """`scale` of the last steps, each of which has a slot of `_host`."""
        self._slot = 0
        self._speculated = 1.0
        self._miss_rate = 1.0  # the scale of the first steps is seldom the speculated one

    def begin(self, *, defer_to_user_hooks: bool) -> None:
        """Begins a step. `defer_to_user_hooks`: user code may read and clip gradients before any job begins."""
        self.decided = not (self.needs_norm or defer_to_user_hooks)
        self.scale = finished(1.0) if self.decided else Future()

    def speculate(self, *, revertible: bool) -> float | None:
        """Returns the scale of a step that begins now; None: the step is to be deferred, or skipped.

        The thread `d2h-done` may complete `scale` meanwhile, so that the caller can't ask later whether it was known.

        Args:
            revertible: whether the step can be made again, so that it may begin with the most likely scale.
        """
        if self.scale.done():
            return self.scale.result()
        return self._speculated if revertible and not self.defers else None

    @property
    def defers(self) -> bool:
        """Whether steps whose scale is not known wait for it, as the speculated scale is not likely enough."""
        return self._clip == "deferred" or (self._clip == "auto" and self._miss_rate >= self.MISS_THRESHOLD)

    @property
    def given_up(self) -> bool:
        """Whether no step is to be speculated soon."""
        return self._clip == "deferred" or (self._clip == "auto" and self._miss_rate >= self.GIVE_UP_THRESHOLD)

    def check(self, gradient: Tensor) -> None:
        """Checks on the device whether a gradient is finite."""
        one = torch.ones_like(self._not_finite)
        internals.check_finite_([gradient], self._not_finite, one)

    def check_value(self, gradient: Tensor) -> None:
        """Checks whether a gradient in host memory is finite."""
        if not gradient.isfinite().all():
            self.note_not_finite()

    def note_not_finite(self) -> None:
        """Notes that a gradient is not finite."""
        self._not_finite = torch.ones_like(self._not_finite)

    def reset_checks(self) -> None:
        """Forgets the gradients that were checked: they are dropped."""
        if self.loss_scaled:
            self._not_finite = torch.zeros_like(self._not_finite)

    def merge_checks(self, found: dict[torch.device, Tensor]) -> None:
        """Skips the step if an offloaded or a resident gradient is not finite.

        Args:
            found: the record of Lightning's scaler, by device, of resident gradients that are not finite; offloaded
                gradients are added.
        """
        add_check(found, self._not_finite.view(()).clone())
        # Including the gradients of resident parameters.
        self._not_finite = found[self._not_finite.device].reshape(1).clone()

    def clip(
        self,
        parameters: Sequence[nn.Parameter],
        norms: Mapping[nn.Parameter, Tensor],
        limit: float,
        unscale: Tensor | None = None,
    ) -> Tensor | None:
        """Clips resident gradients by the global norm, as `torch.nn.utils.clip_grad_norm_` does.

        Args:
            parameters: parameters of all gradients, in the order of the optimizer.
            norms: norms of the offloaded gradients, before they are unscaled. Other gradients are in `.grad`.
            limit: the largest norm.
            unscale: factor of the offloaded gradients that precedes clipping, as in `Clipping`.

        Returns:
            The factor that clips the offloaded gradients, as in `Clipping`; None: there are no gradients.
        """
        device = self._copies.device
        known = _on_device([norms.get(parameter) for parameter in parameters], device)
        resident = [
            parameter
            for parameter, norm in zip(parameters, known, strict=True)
            if norm is None and parameter.grad is not None  # in that order: `.grad` of an offloaded one takes long
        ]
        grads = [parameter.grad for parameter in resident if parameter.grad is not None]
        here = dict(zip(resident, internals.foreach_norm(grads), strict=True)) if grads else {}
        scale = None if unscale is None else unscale.squeeze(0)

        every: list[Tensor] = []
        dtypes: list[torch.dtype] = []
        for parameter, norm in zip(parameters, known, strict=True):
            if norm is not None:
                every.append(norm if scale is None else norm * scale)
                dtypes.append(torch.float32)
            elif parameter in here:
                every.append(here[parameter].to(device))
                dtypes.append(parameter.grad.dtype)  # type: ignore[union-attr]
        if not every:
            return None
        total = torch.linalg.vector_norm(torch.stack([every[index] for index in _grouped(dtypes, device)]))
        coefficient = torch.clamp(limit / (total + 1e-6), max=1.0)  # fp64 if a gradient is
        if grads:
            torch.nn.utils.clip_grads_with_norm_(resident, limit, total)
        return coefficient.float().view(1)

    @uninterrupted  # as `decide`
    def cancel(self) -> None:
        """Ends a step in which no flat parameter is stepped, so that no job waits for the scale."""
        if not self.decided:
            self.decided = True
            self.scale.set_result(None)

    @uninterrupted  # callbacks of `scale` may run on this thread, and begin steps
    def decide(self, scale: Tensor | None) -> None:
        """Completes the future `scale` as soon as the device has computed it: backward and clipping are over.

        Copies of gradients may still be under way. The scale does not wait for them.

        Args:
            scale: the scale, on the device, one element; None: 1.
        """
        if self.decided:
            return
        self.decided = True
        decided = self.scale
        if scale is None and not self.loss_scaled:
            decided.set_result(1.0)
            return
        try:
            data = torch.cat((torch.ones_like(self._not_finite) if scale is None else scale, self._not_finite))
            if len(self._in_flight) == self.SLOTS:
                wait_for_all([self._in_flight.popleft()], "the scale of gradients")
            self._in_flight.append(decided)
            place = slice(self._slot * _SLOT_BYTES, (self._slot + 1) * _SLOT_BYTES)
            slot = self._host.tensor[place]
            self._slot = (self._slot + 1) % self.SLOTS
            # A kernel writes the slot. `copy_` would issue a copy, which waits for those of the gradients.
            torch.bitwise_or(data.view(torch.uint8), 0, out=self._mapped[place])
            mark = self._copies.mark(awaited=True)
            self.reset_checks()
        except BaseException as error:  # jobs wait for the scale, and the end of training for the jobs
            decided.set_exception(error)
            raise

        def on_host(copied: "Future[None]") -> None:  # on the d2h-done thread
            try:
                copied.result()
                scale, not_finite = slot.view(torch.float32).tolist()
            except BaseException as error:  # jobs that wait for the scale fail, too
                decided.set_exception(error)
                return
            missed = bool(not_finite) or scale != self._speculated
            self._miss_rate += self.EMA_WEIGHT * (missed - self._miss_rate)
            if self.loss_scaled and not not_finite:
                self._speculated = scale  # the loss scale changes seldom
            decided.set_result(None if not_finite else scale)

        self._copies.on_d2h(mark).add_done_callback(on_host)

    def fail(self) -> None:
        """Fails jobs that wait for an undecided scale: training ended between backward and step."""
        if not self.decided:
            self.decided = True
            self.scale.set_exception(RuntimeError("training ended before this optimizer step was made"))

    def close(self) -> None:
        """Frees the host memory; no copy is under way."""
        self._host.close()


def add_check(found: dict[torch.device, Tensor], flag: Tensor) -> None:
    """Adds 0 or 1, without a dimension, to a scaler's record of gradients that are not finite.

    A fused optimizer subtracts the record from its number of steps, so that it has to be 0 or 1 afterwards, too.
    """
    device = flag.device
    found[device] = torch.maximum(found[device], flag) if device in found else flag


def is_power_of_two(factor: float) -> bool:
    """Returns whether products with `factor` are exact, so that several factors may be multiplied first."""
    return math.frexp(factor)[0] == 0.5


def _on_device(norms: Sequence[Tensor | None], device: torch.device) -> list[Tensor | None]:
    """Returns norms on the device. Those in host memory are copied at once, as the host waits in each copy."""
    host = [norm for norm in norms if norm is not None and norm.device != device]
    copied = iter(torch.stack(host).to(device).unbind() if host else ())
    return [norm if norm is None or norm.device == device else next(copied) for norm in norms]


def _grouped(dtypes: Sequence[torch.dtype], device: torch.device) -> list[int]:
    """Returns the order in which torch combines the norms of gradients with these dtypes: dtype by dtype."""
    if len(set(dtypes)) == 1:  # most trainings: a tensor for each gradient would take 3 us
        return list(range(len(dtypes)))
    gradients: list[Tensor | None] = [torch.empty(0, dtype=dtype, device=device) for dtype in dtypes]
    return internals.dtype_order(gradients)
