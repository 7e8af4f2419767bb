"""How long SSDs last under what training writes, and what that costs."""

from dataclasses import dataclass

from lightning_ssd.planning.record import check_positive

DAY = 86_400.0
"""Seconds of a day."""

YEAR = 365.0 * DAY
"""Seconds of a year."""


@dataclass(frozen=True)
class Drive:
    """An SSD that a paper names. None of the papers prints endurance ratings; take those from the drive's data sheet.

    Attributes:
        name: as sold.
        capacity: bytes.
        price: US dollars in the paper's year; None: not in the papers.
        source: of these figures.
    """

    name: str
    capacity: float
    price: float | None
    source: str


DRIVES = {
    "samsung-980-pro-1tb": Drive("Samsung 980 PRO 1TB", 1e12, 90.0, "SSDTrain III-D and IV-D: four for US$360"),
    "intel-p5800x-1.6tb": Drive("Intel Optane P5800X 1.6TB", 1.6e12, None, "SSDTrain table II"),
    "intel-p5510-3.84tb": Drive("Intel P5510 3.84TB", 3.84e12, 308.0, "Fuyou tables 3 and 5"),
    "samsung-990-pro-2tb": Drive("Samsung 990 PRO 2TB", 2e12, None, "Teraio table 1"),
}


def endurance_bytes(capacity: float, drive_writes_per_day: float, years: float) -> float:
    """Returns the bytes that a rating in drive writes per day allows in all.

    Args:
        capacity: bytes of the drive.
        drive_writes_per_day: times that it may be written in full each day.
        years: of the warranty that the rating is for.
    """
    check_positive("drive_writes_per_day", drive_writes_per_day)
    check_positive("years", years)
    return capacity * drive_writes_per_day * years * YEAR / DAY


def large_write_endurance(rated: float, rated_amplification: float = 2.5, amplification: float = 1.0) -> float:
    """Returns the bytes that may be written in large sequential writes (SSDTrain III-D).

    Ratings are for random writes after hard preconditioning (JESD218), which the drive amplifies.

    Args:
        rated: bytes of the rating, TBW.
        rated_amplification: bytes that the drive wrote for each byte in the rating's test.
        amplification: bytes that it writes for each of ours.
    """
    check_positive("rated_amplification", rated_amplification)
    check_positive("amplification", amplification)
    return rated * rated_amplification / amplification


def lifetime_seconds(endurance: float, written: float, step_seconds: float) -> float:
    """Returns t_life = S_endurance t_step / S_activations (SSDTrain III-D) in seconds; infinite if nothing is written.

    Args:
        endurance: bytes that may be written to all drives together.
        written: bytes that a step writes.
        step_seconds: of a step.
    """
    return endurance * step_seconds / written if written else float("inf")


def bytes_per_day(written: float, step_seconds: float) -> float:
    """Returns the bytes that a day of training writes.

    Args:
        written: bytes that a step writes.
        step_seconds: of a step.
    """
    check_positive("step_seconds", step_seconds)
    return written * DAY / step_seconds


def cost_per_million_tokens(tokens_per_second: float, price_per_hour: float, wear_per_hour: float = 0.0) -> float:
    """Returns the cost of training on a million tokens, in the currency of the prices.

    Args:
        tokens_per_second: trained.
        price_per_hour: of the machine.
        wear_per_hour: price of the drives over the hours that they last (see `lifetime_seconds`).
    """
    check_positive("tokens_per_second", tokens_per_second)
    return (price_per_hour + wear_per_hour) / 3600 / tokens_per_second * 1e6
