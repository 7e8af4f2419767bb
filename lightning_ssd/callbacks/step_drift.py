"""`StepDrift`: finds lasting changes of the duration of steps under one plan."""

__all__ = ["MEDIAN_STEPS", "TOLERANCE", "StepDrift"]

MEDIAN_STEPS = 8
"""Number of steps whose median duration is compared with earlier ones, and with a prediction."""

PATIENCE = 2
"""Drifted medians in a row after which the training is planned again."""

TOLERANCE = 0.1
"""Relative difference of a step's duration, up to which it has not drifted."""


class StepDrift:
    """Compares the median durations of steps under one plan with the first of them.

    Args:
        tolerance: relative difference of medians, up to which there is no drift.

    Attributes:
        usual: the first median, in seconds; `None`: there is none.
    """

    def __init__(self, tolerance: float = TOLERANCE) -> None:
        self.usual: float | None = None
        self._tolerance = tolerance
        self._compared_steps = 0
        """Steps up to the last median."""
        self._drifted = 0
        """Medians in a row that have drifted."""

    def is_due(self, num_steps: int) -> bool:
        """Returns whether another median should be added, after `num_steps` steps in all."""
        return num_steps >= self._compared_steps + MEDIAN_STEPS

    def add(self, num_steps: int, seconds: float) -> bool:
        """Adds the median of the last steps; returns whether steps have drifted, so that another plan may be faster.

        Args:
            num_steps: steps in all.
            seconds: their median.
        """
        self._compared_steps = num_steps
        if self.usual is None:
            self.usual = seconds
        drifted = abs(seconds / self.usual - 1) > self._tolerance
        self._drifted = self._drifted + 1 if drifted else 0
        return self._drifted == PATIENCE
