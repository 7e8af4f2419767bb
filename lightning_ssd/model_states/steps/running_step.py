"""The optimizer step that runs: of which optimizer it is, and whether it may begin in backward."""

from torch.optim import Optimizer


class RunningStep:
    """Which optimizer's step has begun and not ended, and whether user code may read gradients before it.

    Threads: the training thread, or autograd's while that waits.

    Args:
        defer_to_user_hooks: whether user code may read gradients between backward and the first step.

    Attributes:
        optimizer: the optimizer whose step has begun and not ended; None between two steps.
        defer_to_user_hooks: whether user code may read gradients between backward and step, so that no step begins
            earlier.
        defers_next: `defer_to_user_hooks` of the next step.
        limit: absolute value at which the jobs of the step clamp gradients; None: they don't.
    """

    def __init__(self, *, defer_to_user_hooks: bool) -> None:
        self.optimizer: Optimizer | None = None
        self.defer_to_user_hooks = self.defers_next = defer_to_user_hooks
        self.limit: float | None = None
        self._outer: list[Optimizer] = []
        """Optimizers whose closures, one within the other, have begun the running step."""

    def defer_next(self) -> None:
        """Delays the next steps until `optimizer.step`, because user code has a hook that may read gradients."""
        self.defers_next = True
        if self.optimizer is None:
            self.defer_to_user_hooks = True  # else when the running step ends

    def begin(self, optimizer: Optimizer) -> None:
        """Begins a step of `optimizer`, maybe within the closure of the running step."""
        if self.optimizer is not None:
            self._outer.append(self.optimizer)
        self.optimizer = optimizer
        self.limit = None

    def end(self) -> None:
        """Ends the step."""
        self.optimizer = None
        self.defer_to_user_hooks = self.defers_next

    def pop_outer(self) -> Optimizer | None:
        """Returns the optimizer whose closure has made the step that has ended, which goes on; None: there is none."""
        return self._outer.pop() if self._outer else None
