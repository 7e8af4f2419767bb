"""The gradient of a flat parameter that waits on the device for its optimizer step there."""

from collections.abc import Sequence

from torch import Tensor

from lightning_ssd.device import CopyEngine, Mark
from lightning_ssd.model_states.gradients.gradient import Gradient
from lightning_ssd.model_states.units import FlatParameter


class WaitingGradient:
    """The gradient of a flat parameter on the device, which the training's compute stream has computed.

    Threads: made on the thread that runs backward. `copy_elements` and `offload` run on the thread `device-optimizer`,
    on its side stream; `release` on the thread that ends the step.

    Ownership: the memory belongs to this object until `release`, which is called when no stream uses it any more: the
    allocator gives it to the compute stream, which is not ordered after the side stream.

    Args:
        flat: the flat parameter.
        values: gradients of its parameters, as `ParamView.flatten` returns them.
        ready: mark of the compute stream after which the values are there.
        gradient: the gradient, to whose host memory they may be copied.
    """

    def __init__(self, flat: FlatParameter, values: Sequence[Tensor], ready: Mark, gradient: Gradient) -> None:
        self._flat = flat
        self._values = values
        self._ready = ready
        self._gradient = gradient

    def copy_elements(self, start: int, end: int, target: Tensor, copies: CopyEngine) -> None:
        """Copies the elements from `start` to before `end` of the flat parameter to `target`, on the current stream."""
        copies.wait(self._ready)
        for view, values in zip(self._flat.param_views, self._values, strict=True):
            low, high = max(start, view.start), min(end, view.start + view.numel)
            if low < high:
                target[low - start : high - start].copy_(values[low - view.start : high - view.start])

    def offload(self, copies: CopyEngine) -> Mark:
        """Copies the gradient to host memory, since the CPU makes the step after all. Returns the copies' mark."""
        return self._gradient.copy(dict(enumerate(self._values)), copies, self._ready, awaited=True)

    def release(self) -> None:
        """Frees the memory."""
        self._values = ()
