"""Precision plugins that clip and scale offloaded gradients, which Lightning does not find on the parameters."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ssd._lightning import pl
from lightning_ssd.model_states import ModelStates, is_power_of_two, unscales_itself


def scales_only(precision: pl.plugins.Precision) -> bool:
    """Returns whether the plugin's `pre_backward` is Lightning's own: it calls hooks, and at most scales the loss."""
    base, mixed = pl.plugins.Precision.pre_backward, pl.plugins.MixedPrecision.pre_backward
    return type(precision).pre_backward in (base, mixed)


def scales_exactly(precision: pl.plugins.Precision) -> bool:
    """Returns whether losses are scaled by powers of two, so that gradients are unscaled and clipped by one factor."""
    scaler = getattr(precision, "scaler", None)
    if scaler is None or not scaler.is_enabled():
        return True
    factors = (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor())
    return all(is_power_of_two(factor) for factor in factors)


def scale(precision: pl.plugins.Precision, loss: Tensor) -> Tensor:
    """Returns the loss that `pre_backward` of the plugin returns, without a call of its hooks."""
    scaler = getattr(precision, "scaler", None)
    return loss if scaler is None else scaler.scale(loss)


def offload_precision(precision: pl.plugins.Precision, states: ModelStates) -> pl.plugins.Precision:
    """Returns the plugin that does the same as `precision` for the gradients of `states`.

    Args:
        precision: the Trainer's plugin, of a class that `autocast_dtype` accepts.
    """
    streaming: _OffloadPrecision
    if isinstance(precision, pl.plugins.MixedPrecision):
        mixed: Literal["16-mixed", "bf16-mixed"] = "bf16-mixed" if precision.precision == "bf16-mixed" else "16-mixed"
        streaming = _OffloadMixedPrecision(mixed, precision.device, precision.scaler)
    elif isinstance(precision, pl.plugins.HalfPrecision):
        streaming = _OffloadHalfPrecision("bf16-true")
    else:
        streaming = _OffloadPrecision()
    streaming.states = states
    return streaming


def autocast_dtype(precision: pl.plugins.Precision, states: str, *, fitting: bool) -> torch.dtype | None:
    """Returns the dtype to which autocast casts matrix products, or None without autocast.

    Args:
        states: argument `states` of the strategy, for the message.
        fitting: whether the model is trained; fp64 and fp16 models can only be evaluated.

    Raises:
        ValueError: model states can't be offloaded with this plugin.
    """
    if type(precision) is pl.plugins.Precision:
        return None
    if type(precision) is pl.plugins.MixedPrecision:
        return torch.bfloat16 if precision.precision == "bf16-mixed" else torch.float16
    if type(precision) is pl.plugins.HalfPrecision and precision.precision == "bf16-true":
        return None
    if type(precision) in (pl.plugins.DoublePrecision, pl.plugins.HalfPrecision) and not fitting:
        return None
    raise ValueError(
        f"`states={states!r}` trains with `precision='32-true'`, `'bf16-mixed'`, `'16-mixed'` or `'bf16-true'`, and "
        f"the Trainer has `{type(precision).__qualname__}` with {precision.precision!r}. Take one of those, or set "
        "`states='gpu'`."
    )


class _OffloadPrecision(pl.plugins.Precision):
    states: ModelStates

    @override
    def post_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        self.states.end_backward()
        return super().post_backward(tensor, module)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.states.clip(optimizer, clip_val, "value")

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.states.clip(optimizer, clip_val, "norm")


class _OffloadHalfPrecision(_OffloadPrecision, pl.plugins.HalfPrecision):
    @override
    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        # It changes the default dtype in all threads, and steps may make tensors of that dtype.
        self.states.end_generic_steps()
        with super().forward_context():
            yield
            self.states.end_generic_steps()  # those of manual optimization


class _OffloadMixedPrecision(_OffloadPrecision, pl.plugins.MixedPrecision):
    @override
    def state_dict(self) -> dict[str, Any]:
        return {}  # Lightning would save it under the name of this class, which plain Lightning does not look up

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if state := super().state_dict():
            checkpoint[pl.plugins.MixedPrecision.__qualname__] = state

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if (state := checkpoint.get(pl.plugins.MixedPrecision.__qualname__)) is not None:
            self.load_state_dict(state)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self.scaler is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        # As in Lightning's, except that the step begins before backward, and that offloaded gradients are unscaled on
        # the host.
        torch_optimizer: Optimizer = getattr(optimizer, "optimizer", optimizer)
        self.states.begin_scaled_step(torch_optimizer)
        result = closure()
        skipped = result is None and model.automatic_optimization
        by_optimizer = unscales_itself(torch_optimizer)  # hooks read scaled gradients then
        if not skipped and not by_optimizer:
            self.states.unscale(torch_optimizer, self.scaler)
        self._after_closure(model, optimizer)
        if not skipped and by_optimizer:
            self.states.unscale(torch_optimizer, self.scaler)
        if not skipped:
            result = self.scaler.step(torch_optimizer, **kwargs)
            self.scaler.update()
            self.states.skip_step(torch_optimizer)  # if its `step` was not called
        else:  # plain Lightning steps nothing, and the next `zero_grad` drops the gradients of earlier micro-batches
            self.states.cancel_step(torch_optimizer)
        return result
