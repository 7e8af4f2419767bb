"""Lifetime of SSDs under the writes of a training."""

from lightning_ssd.planning.validation import check_positive

DAY = 86_400.0
"""Seconds of a day."""

YEAR = 365.0 * DAY
"""Seconds of a year."""


RATED_AMPLIFICATION = 2.5
"""Bytes that a drive writes for each byte of the random writes, after hard preconditioning (JESD218), of its rating."""


def large_write_endurance(rated: float) -> float:
    """Returns the bytes that may be written in large sequential writes, which drives don't amplify (SSDTrain III-D).

    Args:
        rated: rated endurance in bytes (TBW).
    """
    return rated * RATED_AMPLIFICATION


def lifetime_seconds(endurance: float, written: float, step_seconds: float) -> float:
    """Returns t_life = S_endurance t_step / S_activations (SSDTrain III-D) in seconds; infinite if nothing is written.

    Args:
        endurance: bytes that may be written to all drives together.
        written: bytes that a step writes.
        step_seconds: seconds of a step.
    """
    return endurance * step_seconds / written if written else float("inf")


def bytes_per_day(written: float, step_seconds: float) -> float:
    """Returns the bytes that a day of training writes."""
    check_positive("step_seconds", step_seconds)
    return written * DAY / step_seconds
