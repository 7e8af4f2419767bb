"""`MicroBatchRetry`: runs a micro-batch that has run out of device memory again, with less and less on the device.

The peak memory of a micro-batch is not known before the first backward, and a later prediction may be wrong: other
processes allocate memory, fragments grow, inputs outside of the batch's tensors get longer. A failed attempt has no
effect: its graph and gradients are dropped, the state that `training_step` may have changed is restored (`StepState`),
and `training_step` runs again with the same random numbers: with all saved tensors offloaded or recomputed, and if that
fails, too, with model states offloaded that were on the device. Hooks between forward and backward are not repeated.

The micro-batch is not run again where user code could tell the difference: where hooks of the module run between
forward and backward or callbacks set its attributes there, where hooks of modules or parameters run in backward, where
parameters or the batch were changed in place. Nor is it where other processes could: where it has run collectives, or
has passed on gradients, which those with offloaded states do for steps that begin during backward. Then the error is
raised as before, with a note of the reason.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_ssd import torch_internals as internals
from lightning_ssd._lightning import pl
from lightning_ssd.activations import backward_nodes
from lightning_ssd.model_states import ModelStates
from lightning_ssd.remedies import CHUNKED_LOSS, SMALLER
from lightning_ssd.retry.out_of_memory import NamedOperators
from lightning_ssd.retry.step_state import StepState, random_states, set_random_states

_BETWEEN = ("on_before_backward", "on_before_zero_grad", "optimizer_zero_grad", "backward")
"""Methods of a module that run between forward and backward, or contain backward."""


class MicroBatchRetry:
    """Runs one micro-batch, several times if needed.

    All methods are called on the training thread.

    Args:
        states: returns the offloaded model states; `None`: all are on the device.
        save_memory: called before the second attempt, with the part of the first one that has failed ("forward" or
            "backward"); applies a policy that needs less device memory.
        offload_states: called before the third attempt, with the part of the second one that has failed, and whether
            gradients of the step before were zeroed; offloads model states. `None`: there is no third attempt.
        delay_steps: whether the optimizer steps of offloaded gradients begin after backward. Else they may have begun
            when it runs out of memory, and the micro-batch can't be run again.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        inputs: object,
        states: Callable[[], ModelStates | None],
        forward: Callable[[], Any],
        save_memory: Callable[[str], None],
        offload_states: Callable[[str, bool], None] | None,
        *,
        delay_steps: bool,
    ) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._inputs = inputs
        self._forward = forward
        self._save_memory: Callable[[str], None] | None = save_memory
        self._offload_states = offload_states
        self._states = states
        self._delay_steps = delay_steps
        self._state: StepState | None = self._record_state()
        """The state before the micro-batch; `None`: it was run for the last time."""
        self._collectives = internals.collectives_begun()
        """Collectives before the micro-batch: other processes, whose memory suffices, do not run them again."""
        self._gradients = _Gradients(self._state.leaves)
        self._zeroed = False
        """Whether gradients of the step before were zeroed: a backward has begun."""
        self._attributes: dict[str, Any] = {}
        """Attributes of the module after `training_step`."""
        self._output: Any = None
        """Result of `training_step`, whose graph is dropped before another attempt."""

    def _record_state(self) -> StepState:
        states = self._states()
        offloaded = set() if states is None else states.parameters
        groups = [optimizer.param_groups for optimizer in self._trainer.optimizers]
        schedulers = [config.scheduler for config in self._trainer.lr_scheduler_configs]
        reached = (self._inputs, groups, schedulers)
        return StepState(self._module, reached, self._trainer._results, offloaded)

    def forward(self) -> Any:
        """Runs `training_step`, and returns its result."""
        while not self._try_forward():
            self._prepare_attempt("forward")
        return self._output

    def _try_forward(self) -> bool:
        """Runs `training_step`. Returns False if it has run out of memory, and may be run again."""
        try:
            with self._explained("forward"):
                self._output = self._forward()
            self._attributes = dict(vars(self._module))
            return True
        except torch.OutOfMemoryError as error:
            if self._state is None:
                raise
            obstacle = self._gradients.obstacle() or self._obstacle()
            if obstacle is not None:
                _refuse(error, obstacle)
                raise
            # The exception, and with it the frames of the failed attempt, are freed at the end of this block.
            return False

    def backward(
        self, losses: tuple[Tensor, Tensor], run: Callable[[Tensor], object], scale: Callable[[Tensor], Tensor]
    ) -> None:
        """Runs the backward of the micro-batch.

        Args:
            losses: the loss as Lightning gives it to the strategy, and the scaled one.
            run: runs the backward of a scaled loss.
            scale: returns a scaled loss.
        """
        random = random_states()
        self._zeroed = True
        self._gradients = _Gradients([] if self._state is None else self._state.leaves)
        changed = self._attribute_set_since_forward()
        states = self._states()
        if states is not None and self._delay_steps:
            states.gradients.delay_steps()
        if self._try_backward(losses[1], run, changed, losses[0]):
            return
        for loss in losses:
            _drop_graph(loss)
        first, self._output = _Output(self._output), None
        name = self._module._current_fx_name
        part = "backward"
        while True:
            self._prepare_attempt(part)
            if not self._try_forward():
                part = "forward"
                continue
            part = "backward"
            first.fill(self._output)
            self._module._current_fx_name = name
            set_random_states(random)  # hooks between forward and backward may have drawn numbers
            loss = scale(self._own_loss())
            with self._gradients.kept(), _named_operators():
                if self._try_backward(loss, run, None, None):
                    return
            del loss
            self._output = None

    def _try_backward(
        self, loss: Tensor, run: Callable[[Tensor], object], changed: str | None, given: Tensor | None
    ) -> bool:
        """Runs a backward of the scaled loss. Returns False if it runs out of memory, and the micro-batch may be run
        again.

        `changed` is an attribute of the module that was set between forward and backward, `given` the loss before it
        was scaled, if user code has passed it on.
        """
        try:
            with self._explained("backward"):
                run(loss)
            return True
        except torch.OutOfMemoryError as error:
            if self._state is None:
                raise
            obstacle = self._obstacle_in_backward(loss)
            if changed is not None and obstacle is None:
                obstacle = f"a hook before backward has set `{changed}` of the module"
            if given is not None and obstacle is None and not self._is_own_loss(given):
                obstacle = "code between `training_step` and backward has changed the loss"
            if obstacle is not None:
                _refuse(error, obstacle)
                raise
            return False

    def _own_loss(self) -> Tensor:
        """Returns the loss of which Lightning runs the backward, if no user code changes it."""
        return _loss_of(self._output) / self._trainer.accumulate_grad_batches

    def _is_own_loss(self, loss: Tensor) -> bool:
        """Returns whether a loss is that of `training_step`, of which other attempts run the backward."""
        with torch.no_grad():
            return bool(torch.isclose(loss, self._own_loss(), rtol=0.0, atol=0.0, equal_nan=True).all())

    def _prepare_attempt(self, part: str) -> None:
        """Restores the state before the micro-batch, and has the next attempt need less memory."""
        state, self._state = self._state, None
        assert state is not None
        gc.collect()
        self._gradients.drop()
        state.restore()
        states = self._states()
        if states is not None:
            states.gradients.backward.drop()
            states.begin("train")
        save_memory, self._save_memory = self._save_memory, None
        if save_memory is not None:
            save_memory(part)
        else:
            offload_states, self._offload_states = self._offload_states, None
            assert offload_states is not None
            self._offload_states_and_gradients(offload_states, part)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # segments of small blocks, which the next attempt needs otherwise
        if self._offload_states is not None:
            self._state = self._record_state()

    def _offload_states_and_gradients(self, offload_states: Callable[[str, bool], None], part: str) -> None:
        """Offloads states and gradients that wait for their step; the next attempt does not add to complete ones."""
        complete, self._gradients = self._gradients.pop_complete(), _Gradients([])  # which would keep device memory
        offload_states(part, self._zeroed)
        states = self._states()
        assert states is not None
        states.gradients.backward.ignored = states.parameters.intersection(complete)
        self._gradients.set_complete({one: grad for one, grad in complete.items() if one not in states.parameters})

    @contextlib.contextmanager
    def _explained(self, part: str) -> Iterator[None]:
        """Adds a note to an OutOfMemoryError of the last attempt."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if self._state is None:
                states = "" if self._states() is None else ", and model states offloaded"
                error.add_note(
                    f"lightning_ssd: memory has run out again in the {part}, with all saved tensors offloaded, one at "
                    f"a time, or recomputed{states}: all other tensors together need more memory than there is. "
                    f"{SMALLER}, or {CHUNKED_LOSS}."
                )
            raise

    def _obstacle_in_backward(self, loss: Tensor) -> str | None:
        """Returns why the micro-batch can't be run again; `None`: it can."""
        module = self._module
        for name in _BETWEEN:
            if getattr(type(module), name) is not getattr(pl.LightningModule, name) or name in vars(module):
                return f"`{name}` of the module can't be run again"
        if any([part._backward_hooks or part._backward_pre_hooks for part in module.modules()]):
            return "hooks of modules have run in backward"
        states = self._states()
        leaves = [] if self._state is None else self._state.leaves
        if self._gradients.are_hooked(leaves) or (states is not None and states.gradients_are_hooked):
            return "hooks of parameters have run in backward"
        if self._gradients.accumulated() and _has_nested_backward(loss):
            return "gradients of a backward within backward were accumulated"
        return self._obstacle()

    def _attribute_set_since_forward(self) -> str | None:
        """Returns an attribute of the module that callbacks have set, and that a second attempt would reset, if any."""
        before, self._attributes = self._attributes, {}  # its tensors may keep the graph alive
        for name, value in vars(self._module).items():
            if value is not before.get(name) and name != "_current_fx_name":  # Lightning sets it for each hook
                return name
        return None

    def _obstacle(self) -> str | None:
        """Returns why the state before the micro-batch can't be restored; `None`: it can."""
        assert self._state is not None
        states = self._states()
        if states is not None and not states.can_run_again:
            return "gradients of offloaded parameters may have been stepped, or their weights were changed"
        if internals.collectives_begun() != self._collectives:
            return "it has run collectives, which other processes do not run again"
        return self._state.obstacle()


class _Gradients:
    """The gradients of parameters, and of other leaves of graphs, before a backward."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        with internals.without_torch_function():  # classes of the user see no reads
            trained = [parameter for parameter in parameters if parameter.requires_grad and parameter.is_leaf]
            self._before = [
                (one, one.grad, 0 if one.grad is None else internals.version_of(one.grad)) for one in trained
            ]
        self._complete: dict[Tensor, Tensor] = {}
        """Gradients to which failed backwards have added their own, by parameter. They are not in `.grad`."""

    def obstacle(self) -> str | None:
        """Returns why a forward can't be run again: a backward has run in it."""
        changed = any([one.grad is not grad or _is_changed(grad, version) for one, grad, version in self._before])
        return "a backward has run in `training_step`" if changed else None

    def accumulated(self) -> bool:
        """Returns whether a gradient of earlier micro-batches was changed in place."""
        return bool(self._complete) or any([_is_changed(grad, version) for _, grad, version in self._before])

    def are_hooked(self, parameters: Sequence[Tensor]) -> bool:
        """Returns whether some parameters have hooks of other code on their gradients."""
        return any(
            [
                one._backward_hooks
                or (one._post_accumulate_grad_hooks and one not in self._complete)  # a hook of `kept`
                for one in parameters
            ]
        )

    def drop(self) -> None:
        """Removes the gradients of a failed backward, except those that were added to earlier micro-batches'.

        These are complete: a parameter's gradient is accumulated once in a backward.
        """
        for index, (parameter, grad, version) in enumerate(self._before):
            if grad is not None and _is_changed(grad, version):
                self._complete[parameter] = grad
                self._before[index] = parameter, None, 0
            parameter.grad = self._before[index][1]

    def pop_complete(self) -> dict[Tensor, Tensor]:
        """Puts the gradients that `drop` has not dropped back, and returns them, by parameter."""
        complete, self._complete = self._complete, {}
        for parameter, grad in complete.items():
            parameter.grad = grad
        return complete

    def set_complete(self, complete: Mapping[Tensor, Tensor]) -> None:
        """Sets the gradients, by parameter, to which the next backward is not to add."""
        self._complete = dict(complete)
        for parameter in complete:
            parameter.grad = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keeps complete gradients while a backward runs within the context, which would accumulate them again."""
        handles = [
            one.register_post_accumulate_grad_hook(partial(_set_grad, grad)) for one, grad in self._complete.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for parameter, grad in self._complete.items():
                parameter.grad = grad


def _is_changed(grad: Tensor | None, version: int) -> bool:
    return grad is not None and internals.version_of(grad) != version


def _set_grad(grad: Tensor, parameter: Tensor) -> None:
    parameter.grad = grad


class _Output:
    """The result of the first `training_step`, which Lightning has already: its tensors are empty until `fill`."""

    def __init__(self, output: Any) -> None:
        self._emptied: list[tuple[int, Tensor]] = []
        for index, value in enumerate(internals.tree_leaves(output)):
            if isinstance(value, Tensor) and _drop_graph(value):
                value.data = value.data.new_empty(0)
                self._emptied.append((index, value))

    def fill(self, output: Any) -> None:
        """Gives the tensors the equal values of the second result."""
        values = internals.tree_leaves(output)
        for index, tensor in self._emptied:
            tensor.data = values[index].detach()


def _drop_graph(tensor: Tensor) -> bool:
    """Frees the graph of a tensor, unless another tensor has it, too. Returns whether there was one."""
    if tensor.grad_fn is None or internals.is_view(tensor):
        return False
    tensor.detach_()
    return True


def _loss_of(output: Any) -> Tensor:
    """Returns the loss of the result of a `training_step`."""
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss


def _named_operators() -> contextlib.AbstractContextManager[object]:
    """Returns a context in which errors of a backward have their operator in the traceback."""
    # Dynamo would not compile forwards that a checkpoint runs again inside of a dispatch mode.
    return contextlib.nullcontext() if internals.compile_seconds() else NamedOperators()  # type: ignore[no-untyped-call]


def _has_nested_backward(loss: Tensor) -> bool:
    """Returns whether nodes of a graph run a backward of their own, as reentrant checkpointing does."""
    return any(["Checkpoint" in node.name() for node in backward_nodes(loss)])


def _refuse(error: BaseException, obstacle: str) -> None:
    error.add_note(f"lightning_ssd: the micro-batch could not be run again with less memory: {obstacle}.")
