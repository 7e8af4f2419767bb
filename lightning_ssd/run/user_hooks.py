"""Hooks of user code that may read or change gradients between backward and the optimizer step."""

from lightning_ssd import torch_internals as internals
from lightning_ssd._lightning import pl


def user_sees_gradients(trainer: pl.Trainer) -> bool:
    """Returns whether user code may read or change gradients between backward and step, or keep them after it."""
    module = trainer.lightning_module
    hooks = ("on_after_backward", "on_before_optimizer_step")
    own = (*hooks, "configure_gradient_clipping", "backward", "optimizer_step", "optimizer_zero_grad")
    if any([_overridden(hook, module, pl.LightningModule) for hook in own]):
        return True
    if any([part._backward_hooks or part._backward_pre_hooks for part in module.modules()]):
        return True
    for parameter in module.parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return True
    if any([isinstance(callback, pl.callbacks.StochasticWeightAveraging) for callback in trainer.callbacks]):  # type: ignore[attr-defined]
        if any([isinstance(part, internals.BatchNorm) for part in module.modules()]):
            return True  # Lightning's epoch for the statistics of BatchNorm ends with a step of the last gradients
    return any(
        [
            _overridden(hook, callback, pl.Callback) and not _is_ours(getattr(callback, hook, None))
            for callback in trainer.callbacks  # type: ignore[attr-defined]
            for hook in hooks
        ]
    )


def _is_ours(function: object) -> bool:
    return str(getattr(function, "__module__", None)).startswith("lightning_ssd.")


def _overridden(hook: str, owner: object, base: type) -> bool:
    # An instance may have hooks of its own, such as a LambdaCallback. The class of a mock has none.
    return hook in vars(owner) or getattr(type(owner), hook, None) is not getattr(base, hook)
