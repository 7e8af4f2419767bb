"""The meeting of a training, its strategy and its planner: three protocols, typed on all sides.

`Training` is the training as the planner sees it; `callbacks/training.py` implements it for a Trainer. `StatesOwner` is
the part of a strategy that places model states; `run/states.py` implements it. `MicroBatchPlanner` answers the
strategy, for each micro-batch; `AutoPlan` implements it.

Note:
    With several processes, some decisions are local to a process, and others must be the same in all of them.

    Local, as no other process can see them: whether a saved tensor is kept, offloaded or recomputed, and whether a unit
    is checkpointed; the window of transfers; the row of a plan that a micro-batch follows.

    The same in all processes, as collectives or shared memory depend on them: tiers of model states (`move_states`),
    and the step between which and the next one states are moved; a second attempt at a micro-batch (`save_memory`) if
    its backward has begun collectives.
    These are the methods below that say "agreed".
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from lightning_ssd.activations import ActivationOffloader
from lightning_ssd.model_states import ModelStates, Unit
from lightning_ssd.planning import Plan
from lightning_ssd.types import StateFormat


class StatesOwner(Protocol):
    """Owns the model states of a training, and moves them between two steps. Called on the training thread."""

    user_plan: Plan | None
    """Plan of the user, which a callback sets before the strategy's `setup`: it places model states from the start."""
    planner: "MicroBatchPlanner | None"
    """Answers for the micro-batches of the present training, which a callback sets when training starts."""
    planned_by: str | None
    """Name of the user's callback that plans saved tensors, for log lines; `None`: there is none."""

    def can_move_states(self) -> bool:
        """Returns whether `move_states` may be called: the user chose no tiers, and states are or can be offloaded."""

    def param_budget(self) -> int:
        """Returns the bytes of the device for prefetched weights, once states are offloaded."""

    def move_states(self, plan: Plan) -> None:
        """Moves weights and optimizer states to their tiers in `plan`, which replaces the training's offloader. Agreed.

        Results do not change, except the last digits of optimizers that step on another device from then on.

        Raises:
            ValueError: nothing was moved, because the plan is not one for this model, there is no room for it,
                gradients wait for a step, or states can't be offloaded.
            RuntimeError: the move failed half-way; training can't continue.
            StorageError: a drive failed.
        """


class MicroBatchPlanner(Protocol):
    """Answers the strategy's questions about the present micro-batch. Called on the training thread."""

    @property
    def may_run_out(self) -> bool:
        """Whether the micro-batch may run out of memory, so that it has to be able to run again."""

    @property
    def spare_bytes(self) -> int:
        """Bytes of the device that the micro-batch and its step do not need; 0 while it may run out of memory."""

    @property
    def begins_rule(self) -> bool:
        """Whether it is one of the very first under its rule: most micro-batches that run out of memory are."""

    @property
    def begins_step(self) -> bool:
        """Whether it is the first micro-batch of a step."""

    def save_memory(self, part: str, note: str) -> None:
        """Prepares the second attempt, with all saved tensors offloaded or recomputed. Agreed if backward has begun.

        Args:
            part: "forward" or "backward", which has failed.
            note: a sentence for the log about state that is not restored.
        """

    def restart_after_offload(self, part: str) -> None:
        """Prepares the third attempt, for which all model states were offloaded. Agreed; `part` as above."""


class Training(Protocol):
    """A training, as its planner sees it. Attributes are read when they are needed, as moves of states change them."""

    @property
    def module(self) -> nn.Module:
        """The model."""

    @property
    def offloader(self) -> ActivationOffloader:
        """Its activation offloader. A move of model states replaces it."""

    @property
    def states(self) -> ModelStates | None:
        """Its offloaded model states; `None`: all are on the device."""

    @property
    def owner(self) -> StatesOwner | None:
        """The strategy, if it can offload model states."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Its optimizers."""

    @property
    def automatic(self) -> bool:
        """Whether optimization is automatic: a forward, its backward, and after the last micro-batch the step."""

    @property
    def replicated(self) -> bool:
        """Whether each process has all weights, so that its forward and backward read those of no other process."""

    @property
    def repeats_digits(self) -> bool:
        """Whether no digit may depend on this process's measurements: a killed run has to resume bit for bit
        (`recover=True`), or other processes train the same weights."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches in a step."""

    @property
    def scales_gradients(self) -> bool:
        """Whether gradients are clipped by their norm, or a step is skipped if they are not finite."""

    @property
    def state_format(self) -> StateFormat:
        """Format of offloaded master weights and optimizer states."""

    @property
    def fixed_window(self) -> bool:
        """Whether the user has fixed the window of transfers."""

    def units(self) -> list[Unit]:
        """Returns the units of the model, in the order of the forward."""

    def set_window(self, window_bytes: int | None) -> None:
        """Sets the window of transfers from the next micro-batch on; `None`: it adapts to the training."""

    def inform(self, text: str) -> None:
        """Logs a line for the user, in one of the processes."""

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Passes metrics to the user's loggers."""
