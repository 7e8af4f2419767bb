"""When the gradients of all ranks are reduced: once after the last backward before a step."""

from collections.abc import Callable

from torch.optim import Optimizer

from lightning_ssd.model_states.gradients import GradientOffloader, ResidentMeans
from lightning_ssd.model_states.steps.rank_steps import RankSteps
from lightning_ssd.model_states.steps.running_step import RunningStep
from lightning_ssd.model_states.weights import RankValues


class RankReduction:
    """Reduces the gradients of a micro-batch over ranks, in the same order on all of them.

    Threads: the training thread.

    Args:
        steps: sums and steps of flat parameters.
        residents: gradients of all other parameters.
        buffers: buffers of modules.
        gradients: gradients of flat parameters.
        running: the step that runs.
        last_micro_batch: whether a step follows the micro-batch whose backward ends.

    Attributes:
        steps: as the argument.
    """

    def __init__(
        self,
        steps: RankSteps,
        residents: ResidentMeans,
        buffers: RankValues,
        gradients: GradientOffloader,
        running: RunningStep,
        last_micro_batch: Callable[[], bool],
    ) -> None:
        self.steps = steps
        self._residents = residents
        self._buffers = buffers
        self._gradients = gradients
        self._running = running
        self._last_micro_batch = last_micro_batch
        self._buffers_differ = True
        """Whether buffers were not made those of rank 0 since the last reduction: as under DDP, they are then."""

    def begin_micro_batch(self) -> None:
        """Begins a micro-batch, with a backward or without.

        Raises:
            RankError: another rank has failed.
        """
        if self._buffers_differ:
            self._buffers_differ = False
            self._buffers.take()

    def check_backward(self) -> None:
        """Checks gradients that are about to be used.

        Raises:
            RuntimeError: user code has called a backward, which Lightning does not know, and no rank has reduced it.
        """
        if self._gradients.backward.arriving:
            raise RuntimeError(
                "user code has called `backward` of a tensor, whose gradients several devices don't reduce. Call "
                "`self.manual_backward(loss)` instead."
            )

    def end_backward(self, submit_remaining: Callable[[Optimizer], None]) -> None:
        """Reduces the gradients, if a step may follow.

        Args:
            submit_remaining: submits the steps of an optimizer's flat parameters that backward has not submitted.

        Raises:
            RankError: another rank has failed.
        """
        if not self._last_micro_batch():
            return
        self._buffers_differ = True
        if self._running.defer_to_user_hooks:
            self.steps.reduce()
        elif (optimizer := self._running.optimizer) is not None:
            submit_remaining(optimizer)
        self._residents.reduce()
