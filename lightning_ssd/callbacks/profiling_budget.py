"""`ProfilingBudget` limits the steps and seconds of profiling before the first plan."""

from time import perf_counter

MAX_STEPS = 25
MAX_SECONDS = 30.0


class ProfilingBudget:
    """Counts steps and wall time from its construction, and extrapolates by the last step's duration.

    What the first step takes more than the second one is not counted: it loads libraries and page-locks memory, which
    may take most of `MAX_SECONDS`, and is no profiling.

    The time is the host's, because `MAX_SECONDS` limits the user's waiting time. The host is at most the GPU's launch
    queue ahead of the GPU, which is less than a step if steps take seconds.
    """

    def __init__(self) -> None:
        self.steps = 0
        """Ended steps since the start."""
        self._started = self._step_began = perf_counter()
        self._step_seconds = 0.0
        """Seconds of the last step."""

    def begin_step(self) -> None:
        """Called when a step begins."""
        self._step_began = perf_counter()

    def end_step(self) -> None:
        """Called when a step has ended."""
        self.steps += 1
        before, self._step_seconds = self._step_seconds, perf_counter() - self._step_began
        if self.steps == 2:
            self._started += max(0.0, before - self._step_seconds)

    @property
    def seconds(self) -> float:
        """Counted wall time since the start."""
        return perf_counter() - self._started

    def describe(self) -> str:
        """Returns the limits and the share of them that is spent, for a log line."""
        limits = f"profiling is limited to {MAX_STEPS} steps or {MAX_SECONDS:.0f} s"
        return f"{limits}, and has taken {self.steps} steps and {self.seconds:.0f} s"

    def allows(self, steps: int) -> bool:
        """Returns whether `steps` more steps are expected to end within the budget."""
        return self.steps + steps <= MAX_STEPS and self.seconds + steps * self._step_seconds <= MAX_SECONDS
