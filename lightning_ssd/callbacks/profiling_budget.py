"""`ProfilingBudget`: the steps and seconds that profiling may take before the first plan is in force."""

from time import perf_counter

MAX_STEPS = 25
MAX_SECONDS = 30.0


class ProfilingBudget:
    """Counts steps and wall time since a start, and extrapolates by the last step's duration.

    Time is the host's: `MAX_SECONDS` are seconds that a user waits. A host that runs ahead of its GPU is at most the
    GPU's launch queue ahead, which is less than a step of a model whose steps take seconds.
    """

    def __init__(self) -> None:
        self.steps = 0
        """Steps that have ended since the start."""
        self._started = self._step_began = perf_counter()
        self._pace = 0.0
        """Seconds of the last step."""

    def begin_step(self) -> None:
        """A step begins."""
        self._step_began = perf_counter()

    def end_step(self) -> None:
        """A step has ended."""
        self.steps += 1
        self._pace = perf_counter() - self._step_began

    @property
    def seconds(self) -> float:
        """Wall time since the start."""
        return perf_counter() - self._started

    def describe(self) -> str:
        """Returns the limits and the share of them that is spent, for a log line."""
        limits = f"profiling is limited to {MAX_STEPS} steps or {MAX_SECONDS:.0f} s"
        return f"{limits}, and has taken {self.steps} steps and {self.seconds:.0f} s"

    def allows(self, steps: int) -> bool:
        """Returns whether so many more steps are expected to end within the budget."""
        return self.steps + steps <= MAX_STEPS and self.seconds + steps * self._pace <= MAX_SECONDS
