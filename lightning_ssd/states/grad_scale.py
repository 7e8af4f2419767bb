"""What a step multiplies gradients with, or that it is skipped: known when backward has ended, on the device first.

The norm of all gradients, and whether all are finite, decide it. Nobody waits on the host: jobs hang on a future.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait

import torch
from torch import Tensor, nn

from lightning_ssd.device import CopyEngine, Mark, finished
from lightning_ssd.storage.slab import Slab
from lightning_ssd.types import Clip

_SLOT_BYTES = 8  # two fp32 numbers: the factor, and whether a gradient was not finite


class GradScaleDecision:
    """The gate that the jobs of one step after the other pass.

    Threads: the training thread's, and autograd's while that waits; the copy-out thread sets `known`, `_guess` and
    `_wrong`, of which the others only read whole values.

    Args:
        copies: copies of the device.
        clip: see `ModelStates`.
        gated: whether gradients are clipped or scaled at all; else the gate is always open.
        scaled: whether losses are scaled.
    """

    #: Share of wrong guesses, among the last steps, from which on clip="auto" makes no steps that may not count: each
    #: costs a second one.
    MANY_WRONG = 0.3
    #: How much the last step counts in that share.
    FORGETTING = 0.1
    #: Steps whose factors may be on their way to the host at once: steps of several optimizers need not wait for each
    #: other. A further one waits for the first.
    SLOTS = 16

    def __init__(self, copies: CopyEngine, *, clip: Clip, gated: bool, scaled: bool) -> None:
        self.gated = gated
        self.scaled = scaled
        self.known: Future[float | None] = finished(1.0)
        """Of the present step: the factor, or None if it is skipped."""
        self._copies = copies
        self._clip: Clip = clip
        self._opening = True
        """Whether the gate is open, or opens by the device's progress alone."""
        self._factor: Tensor | None = None
        """On the device, one element."""
        self._not_finite = torch.zeros(1, dtype=torch.float32, device=copies.device)
        """On the device, whether a gradient was not finite."""
        self._host = Slab(self.SLOTS * _SLOT_BYTES, pin=copies.device.type == "cuda")
        self._readers: deque[Future[float | None]] = deque()
        """`known` of the last steps: each slot of `_host` is its step's until that is done."""
        self._slot = 0
        self._guess = 1.0
        self._wrong = 1.0
        """Share of the last steps that the guess was wrong for: of the first ones it often is."""

    def begin(self, *, hold: bool) -> None:
        """A step begins; `hold`: what it multiplies with is applied before any job begins, and the gate open."""
        self._opening = not self.gated or hold
        self.known = finished(1.0) if self._opening else Future()

    @property
    def guess(self) -> float | None:
        """What the factor is, or most likely will be; None: not worth a try."""
        if self.known.done():
            return self.known.result()
        likely = self._clip == "speculative" or (self._clip == "auto" and self._wrong < self.MANY_WRONG)
        return self._guess if likely else None

    def check(self, gradient: Tensor) -> None:
        """Looks whether a gradient, on the device, is finite."""
        one = torch.ones_like(self._not_finite)
        torch._amp_foreach_non_finite_check_and_unscale_([gradient], self._not_finite, one)

    def forget(self) -> None:
        """The gradients that were looked at are dropped."""
        if self.scaled:
            self._not_finite = torch.zeros_like(self._not_finite)

    def unscale(self, scaler: torch.amp.GradScaler, found: dict[torch.device, Tensor]) -> None:
        """Has gradients divided by the scale of `scaler`, and adds to `found`, its own, whether one is not finite."""
        device = self._not_finite.device
        found[device] = found[device] + self._not_finite if device in found else self._not_finite.clone()
        self._not_finite = found[device].reshape(1).clone()  # of what stays on the device, too
        assert scaler._scale is not None
        self._factor = scaler._scale.double().reciprocal().float().view(1)

    def clip(self, parameters: Sequence[nn.Parameter], norms: Mapping[nn.Parameter, Tensor], limit: float) -> None:
        """Has gradients clipped by their norm, as `torch.nn.utils.clip_grad_norm_` does.

        Args:
            parameters: whose gradients, in the order in which their norms are put together.
            norms: of the gradients that have left, before they are unscaled; others are in `.grad`, and clipped here.
            limit: the largest norm.
        """
        resident = [parameter for parameter in parameters if parameter.grad is not None]
        grads = [parameter.grad for parameter in resident if parameter.grad is not None]
        here = dict(zip(resident, torch._foreach_norm(grads), strict=True)) if grads else {}
        device = self._copies.device
        scale = 1.0 if self._factor is None else self._factor.squeeze(0)
        every = [
            here[parameter].to(device) if parameter in here else norms[parameter].to(device) * scale
            for parameter in parameters
            if parameter in here or parameter in norms
        ]
        if not every:
            return
        total = torch.linalg.vector_norm(torch.stack(every))
        coefficient = torch.clamp(limit / (total + 1e-6), max=1.0).float()
        if grads:
            torch._foreach_mul_(grads, coefficient)
        self._factor = (coefficient * scale).view(1)

    def open(self) -> tuple[Tensor, Mark] | None:
        """Lets jobs pass as soon as the device knows with what.

        Returns:
            Device memory that the caller keeps until the mark is reached; None if it is known already.
        """
        if self._opening:
            return None
        self._opening = True
        known, factor, self._factor = self.known, self._factor, None
        if factor is None and not self.scaled:
            known.set_result(1.0)
            return None
        data = torch.cat((torch.ones_like(self._not_finite) if factor is None else factor, self._not_finite))
        if len(self._readers) == self.SLOTS:
            wait([self._readers.popleft()])
        self._readers.append(known)
        slot = self._host.tensor[self._slot * _SLOT_BYTES :][:_SLOT_BYTES]
        self._slot = (self._slot + 1) % self.SLOTS
        mark = self._copies.d2h(data.view(torch.uint8), slot, self._copies.mark(), awaited=True)
        self.forget()

        def arrived(copied: "Future[None]") -> None:
            try:
                copied.result()
                factor, not_finite = slot.view(torch.float32).tolist()
            except BaseException as error:  # jobs that wait for the factor fail, too
                known.set_exception(error)
                return
            wrong = bool(not_finite) or factor != self._guess
            self._wrong += self.FORGETTING * (wrong - self._wrong)
            if self.scaled and not not_finite:
                self._guess = factor  # the scale changes seldom
            known.set_result(None if not_finite else factor)

        self._copies.on_d2h(mark).add_done_callback(arrived)
        return data, mark

    def shut(self) -> None:
        """Jobs that still wait fail: training ended between backward and step."""
        if not self._opening:
            self._opening = True
            self.known.set_exception(RuntimeError("training ended before this optimizer step was made"))

    def close(self) -> None:
        """Gives its memory back; no copy is under way."""
        self._host.close()
