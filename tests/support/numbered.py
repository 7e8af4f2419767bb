"""Saved tensors whose values are a number, and the events that concern them."""

from typing import Any

import torch
from torch import Tensor

from lightning_ssd.device import CPUCopyEngine

SIZE = 64
"""Elements of a saved tensor."""

noted: list[tuple[str, int]] = []
"""Events in their order: loads and backwards of tensors by their numbers, and what a test adds."""


class NotingEngine(CPUCopyEngine):
    """A copy engine that notes the copies to the device by their values."""

    def h2d(self, src: Tensor, dst: Tensor, after: Any, *, awaited: bool = False) -> Any:
        mark = super().h2d(src, dst, after, awaited=awaited)
        first = dst.view(torch.float32)[0]
        if first.isfinite():  # the copies whose speed is measured have any values
            noted.append(("load", int(first)))
        return mark


class Saving(torch.autograd.Function):
    """Saves one tensor, whose values are a number, and notes the backward that needs it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, number: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(torch.full((SIZE,), float(number)))
        return tensor + 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (saved,) = ctx.saved_tensors
        noted.append(("backward", int(saved[0])))
        return gradient * saved, None
