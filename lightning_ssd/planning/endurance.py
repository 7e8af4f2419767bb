"""Lifetime of SSDs under the writes of a training, and the cost of a training."""

from lightning_ssd.planning.validation import check_positive

DAY = 86_400.0
"""Seconds of a day."""

YEAR = 365.0 * DAY
"""Seconds of a year."""


def large_write_endurance(rated: float, rated_amplification: float = 2.5, amplification: float = 1.0) -> float:
    """Returns the bytes that may be written in large sequential writes (SSDTrain III-D).

    Ratings are for random writes after hard preconditioning (JESD218), which the drive amplifies.

    Args:
        rated: rated endurance in bytes (TBW).
        rated_amplification: bytes that the drive wrote for each byte in the rating's test.
        amplification: bytes that the drive writes for each byte of large sequential writes.
    """
    check_positive("rated_amplification", rated_amplification)
    check_positive("amplification", amplification)
    return rated * rated_amplification / amplification


def lifetime_seconds(endurance: float, written: float, step_seconds: float) -> float:
    """Returns t_life = S_endurance t_step / S_activations (SSDTrain III-D) in seconds; infinite if nothing is written.

    Args:
        endurance: bytes that may be written to all drives together.
        written: bytes that a step writes.
        step_seconds: seconds of a step.
    """
    return endurance * step_seconds / written if written else float("inf")


def bytes_per_day(written: float, step_seconds: float) -> float:
    """Returns the bytes that a day of training writes.

    Args:
        written: bytes that a step writes.
        step_seconds: seconds of a step.
    """
    check_positive("step_seconds", step_seconds)
    return written * DAY / step_seconds


def cost_per_million_tokens(tokens_per_second: float, price_per_hour: float) -> float:
    """Returns the cost of training on a million tokens, in the currency of the price.

    Args:
        tokens_per_second: throughput of the training.
        price_per_hour: price of the machine.
    """
    check_positive("tokens_per_second", tokens_per_second)
    return price_per_hour / 3600 / tokens_per_second * 1e6
