"""`ProfilingBudget` limits the steps and seconds of profiling before the first plan."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

MAX_STEPS = 25
MAX_SECONDS = 30.0


class ProfilingBudget:
    """Counts steps and their wall time from its construction, and extrapolates by the last step's duration.

    Waits that are no profiling are not counted: for the first batches, between steps, and for validations. Neither is
    what the first step takes more than the second one: it loads libraries and page-locks memory, which may take most of
    `MAX_SECONDS`.

    The time is the host's, because `MAX_SECONDS` limits the user's waiting time. The host is at most the GPU's launch
    queue ahead of the GPU, which is less than a step if steps take seconds.
    """

    def __init__(self) -> None:
        self.steps = 0
        """Ended steps since the start."""
        self._ended_seconds = 0.0
        """Counted seconds before the present span."""
        self._span_began: float | None = None
        """Begin of the present counted span; `None`: there is none."""
        self._paused = False
        """Whether the present step is interrupted by a validation."""
        self._step_began = 0.0
        """Counted seconds when the present step began."""
        self._step_seconds = 0.0
        """Seconds of the last step."""

    def begin_step(self) -> None:
        """Called when a step begins."""
        self._span_began, self._paused = perf_counter(), False
        self._step_began = self._ended_seconds

    def end_step(self) -> None:
        """Called when a step has ended."""
        self._end_span()
        self.steps += 1
        before, self._step_seconds = self._step_seconds, self._ended_seconds - self._step_began
        if self.steps == 2:
            self._ended_seconds -= max(0.0, before - self._step_seconds)

    def pause(self) -> None:
        """Called when a validation begins, in a step or between two of them."""
        self._paused = self._span_began is not None
        self._end_span()

    def resume(self) -> None:
        """Called when a validation has ended."""
        if self._paused:
            self._span_began, self._paused = perf_counter(), False

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts the time in the context, in which the planner computes between two steps."""
        self._span_began = perf_counter()
        try:
            yield
        finally:
            self._end_span()

    def _end_span(self) -> None:
        self._ended_seconds, self._span_began = self.seconds, None

    @property
    def seconds(self) -> float:
        """Counted wall time since the start."""
        span = 0.0 if self._span_began is None else perf_counter() - self._span_began
        return self._ended_seconds + span

    def describe(self) -> str:
        """Returns the limits and the share of them that is spent, for a log line."""
        limits = f"profiling is limited to {MAX_STEPS} steps or {MAX_SECONDS:.0f} s"
        return f"{limits}, and has taken {self.steps} steps and {self.seconds:.0f} s"

    def allows(self, steps: int) -> bool:
        """Returns whether `steps` more steps are expected to end within the budget."""
        return self.steps + steps <= MAX_STEPS and self.seconds + steps * self._step_seconds <= MAX_SECONDS
