"""Endurance.

SSDTrain's figure 5 is a plot without numbers; the statements of its text are tested by the method of III-D.
"""

import pytest

from lightning_ssd.planning.endurance import (
    DAY,
    YEAR,
    bytes_per_day,
    large_write_endurance,
    lifetime_seconds,
)

RETENTION = 86
"""III-D: times the cycles that flash lasts when it has to keep its content for a day, and not for three years."""


def test_lifespan_of_figure_5() -> None:
    """III-D: four Samsung 980 PRO 1TB for each GPU, at 12.1 GB/s at most, last more than two years.

    The drive's rating, 600 TB, is from its data sheet: the paper doesn't print it. It relaxes the retention, too.
    """
    step = 1.0
    activations = 12.1e9 * step / 2  # all are written within half a step
    endurance = 4 * large_write_endurance(600e12) * RETENTION
    assert 2 * YEAR < lifetime_seconds(endurance, activations, step) < 5 * YEAR


def test_ratings() -> None:
    """Large sequential writes wear a drive less than the random writes of its rating."""
    assert large_write_endurance(1e15) == 2.5e15


def test_life_and_daily_writes_agree() -> None:
    """The days of a life times a day's bytes are the endurance."""
    assert lifetime_seconds(1e15, 1e9, 2.0) / DAY * bytes_per_day(1e9, 2.0) == pytest.approx(1e15)
    assert lifetime_seconds(1e15, 0, 2.0) == float("inf")
