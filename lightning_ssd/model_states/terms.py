"""Settings of optimizer steps for a whole training, from the strategy's arguments and the Trainer."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from lightning_ssd.types import Clip, Overlap


@dataclass(frozen=True)
class StepTerms:
    """Settings of the optimizer steps of a training.

    Attributes:
        overlap: "none": steps are submitted at `optimizer.step`, which waits for them. "naive": each job reads, steps
            and writes back before the next one begins (LoHan's figure 3b). "optimized": the three overlap.
        needs_norm: whether a step needs all gradients before it is made, to clip them by their norm or to skip it if
            one is not finite.
        clip_value: largest absolute value of gradients' elements in every step; None: they are not clamped.
        loss_scaled: whether losses are scaled, and a step is skipped if a gradient is not finite.
        clip: "deferred": steps wait for their scale. "speculative": steps of flat parameters with two versions begin
            with the likely scale, and are made again if it was wrong. "auto": speculative while it is seldom wrong.
        defer_to_user_hooks: whether user code may read gradients or options between backward and `optimizer.step`, so
            that no step begins earlier.
        whole: optimizers that are stepped whole (see `WholeStep`); `defer_to_user_hooks` is set if there are any.
    """

    overlap: Overlap
    needs_norm: bool
    clip_value: float | None
    loss_scaled: bool
    clip: Clip
    defer_to_user_hooks: bool
    whole: Sequence[Optimizer] = ()
