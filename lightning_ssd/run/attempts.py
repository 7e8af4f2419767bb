"""The second and third attempt at a micro-batch that runs out of memory, as the planner of the training decides."""

import functools
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ssd._lightning import pl
from lightning_ssd.autoplan import MicroBatchPlanner
from lightning_ssd.model_states import runs_within_step, steps_whole
from lightning_ssd.retry import UNRECORDED, MicroBatchRetry
from lightning_ssd.run.precision import scale
from lightning_ssd.run.states import RunStates


def prepare_retry(
    run: RunStates, trainer: pl.Trainer, inputs: object, forward: Callable[[], Any]
) -> MicroBatchRetry | None:
    """Returns an object that can run the present micro-batch again; `None`: memory is expected to suffice.

    Args:
        run: the offloader and the model states of the training.
    """
    planner, automatic = run.planner, trainer.lightning_module.automatic_optimization
    if planner is None or not planner.may_run_out or not automatic:
        return None
    if trainer.world_size > 1 and run.model_states is None:  # torch's DDP reduces gradients in backward
        return None
    movable = not runs_within_step(trainer.strategy.optimizers) and run.can_offload_states()
    return MicroBatchRetry(
        trainer,
        inputs=inputs,
        states=lambda: run.model_states,
        forward=forward,
        save_memory=functools.partial(planner.save_memory, note=UNRECORDED),
        offload_states=functools.partial(_offload_states, run, planner) if movable else None,
        delay_steps=planner.begins_rule,
    )


def retry_backward(plugin: pl.plugins.Precision, retry: MicroBatchRetry, loss: Tensor) -> None:
    """Has the next `backward` of a precision plugin run as often as the micro-batch, between hooks that run once.

    Lightning's `Strategy.backward` calls it, so that code that wraps that method sees one call for each micro-batch.

    Args:
        plugin: the Trainer's plugin, whose `pre_backward` is about to be called.
        loss: the loss before the plugin scales it.
    """
    vars(plugin)["backward"] = _RetriedBackward(plugin, retry, loss)


def end_retry(plugin: pl.plugins.Precision) -> None:
    """Restores a plugin whose `backward` was not called after `retry_backward`, because a hook has failed."""
    if isinstance(retried := vars(plugin).get("backward"), _RetriedBackward):
        retried.end()


def run_before_step(run: RunStates, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    """Runs the closure of an optimizer step before the step, if model states may be offloaded for a third attempt.

    The optimizer's `step` would run the closure, within which states could not be offloaded.

    Args:
        run: the offloader and the model states of the training.

    Returns:
        The closure for the step.
    """
    may_run_out = run.planner is not None and run.planner.may_run_out
    if not may_run_out or run.model_states is not None or not run.tiers_may_change() or steps_whole(optimizer):
        return closure
    with torch.enable_grad():  # as in `step`
        results = [closure()]
    return lambda: results.pop() if results else closure()


class _RetriedBackward:
    """The attribute `backward` of a precision plugin, from before its `pre_backward` until it is called.

    `loss` is not scaled yet: the plugin does so.
    """

    def __init__(self, plugin: pl.plugins.Precision, retry: MicroBatchRetry, loss: Tensor) -> None:
        self._plugin, self._retry, self._loss = plugin, retry, loss
        self._backward = plugin.backward
        self._replaced = vars(plugin).get("backward")

    def __call__(self, scaled: Tensor, *args: Any, **kwargs: Any) -> None:
        self.end()
        self._retry.backward(
            (self._loss, scaled),
            lambda loss: self._backward(loss, *args, **kwargs),
            lambda loss: scale(self._plugin, loss),
        )

    def __reduce__(self) -> Any:  # in a copy of the plugin that a hook before backward makes
        return MethodType, (type(self._plugin).backward, self._plugin)

    def end(self) -> None:
        """Restores the plugin's attribute."""
        if self._replaced is None:
            del vars(self._plugin)["backward"]
        else:
            vars(self._plugin)["backward"] = self._replaced


def _offload_states(run: RunStates, planner: MicroBatchPlanner, part: str, zeroed: bool) -> None:
    """Offloads model states, because a forward or backward (`part`) of a second attempt ran out of memory.

    `zeroed`: gradients of the step before were zeroed.
    """
    waiting: dict[nn.Parameter, Tensor] = {}
    if zeroed or not planner.begins_step:  # the next step uses all gradients that are there
        waiting = _pop_gradients(run.find_offloadable(fitting=True))
    try:
        run.offload_states()
    except Exception as error:
        error.add_note(
            f"lightning_ssd: model states were offloaded because memory had run out in the {part} of a "
            "micro-batch, with all saved tensors offloaded or recomputed."
        )
        raise
    assert run.model_states is not None
    run.model_states.gradients.restore_accumulated(waiting)
    planner.restart_after_offload(part)
    run.begin_micro_batch("train")


def _pop_gradients(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Removes the gradients of parameters, and returns them in host memory."""
    gradients: dict[nn.Parameter, Tensor] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradients[parameter] = parameter.grad.detach().to("cpu")
            parameter.grad = None
    return gradients
