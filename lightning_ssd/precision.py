"""Precision plugins for gradients that are not where Lightning looks: lent to the user's hooks, and clipped."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ssd._lightning import pl
from lightning_ssd.states import ModelStates


def streaming_precision(precision: pl.plugins.Precision, states: ModelStates, *, lend: bool) -> pl.plugins.Precision:
    """Returns the plugin that does what `precision` does, for gradients that `states` keeps.

    Args:
        precision: the Trainer's plugin, of a class that `autocast_dtype` takes.
        states: who has the gradients.
        lend: whether hooks between backward and step see parameters and gradients whole, on the CPU.
    """
    streaming: _StreamingPrecision
    if isinstance(precision, pl.plugins.MixedPrecision):
        streaming = _StreamingMixedPrecision("bf16-mixed", precision.device)
    else:
        streaming = _StreamingPrecision()
    streaming.states = states
    streaming.lend = lend
    return streaming


def autocast_dtype(precision: pl.plugins.Precision) -> torch.dtype | None:
    """Returns the dtype that matrix products are cast to.

    Raises:
        ValueError: model states can't be streamed with this plugin.
    """
    if type(precision) is pl.plugins.Precision:
        return None
    if type(precision) is pl.plugins.MixedPrecision and precision.precision == "bf16-mixed":
        return torch.bfloat16
    raise ValueError(
        f"`states='host'` trains with `precision='32-true'` or `'bf16-mixed'`, and the Trainer has "
        f"{precision.precision!r}. Take one of those, or set `states='gpu'`."
    )


class _StreamingPrecision(pl.plugins.Precision):
    states: ModelStates
    lend: bool

    def post_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        self.states.end_backward()
        with self._lent():
            return super().post_backward(tensor, module)

    def _after_closure(self, model: pl.LightningModule, optimizer: Any) -> None:
        with self._lent():
            super()._after_closure(model, optimizer)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.states.clip(optimizer, clip_val, "value")

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.states.clip(optimizer, clip_val, "norm")

    def _lent(self) -> AbstractContextManager[None]:
        return self.states.lend_gradients() if self.lend else nullcontext()


class _StreamingMixedPrecision(_StreamingPrecision, pl.plugins.MixedPrecision):
    pass
