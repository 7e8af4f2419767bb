"""`WearLine`: the log line that names the wear of SSDs, with the bytes that a training writes to them in a day."""

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

from lightning_ssd._lightning import pl
from lightning_ssd.planning import DAY, YEAR, bytes_per_day, lifetime_seconds
from lightning_ssd.storage import DriveWear, read_wears

UNTIMED_STEPS = 10
"""First optimizer steps, which may be slower than later ones: their writes are not counted for the line about wear."""

TIMED_STEPS = 10
"""Following steps, whose writes and seconds are."""

ASSUMED_ENDURANCE = 600e12
"""Rated endurance of a drive whose rating is not known, bytes: that of many consumer drives of 1 TB."""


class WearLine:
    """Times some steps of a training, and logs one line about the wear that their writes cause.

    Args:
        endurance: rated endurance of the drives together, bytes; None: `ASSUMED_ENDURANCE` a drive.

    Attributes:
        logged: whether the line was logged.
    """

    def __init__(self, endurance: int | None) -> None:
        self.logged = False
        self._endurance = endurance
        self._steps = 0
        self._before = (perf_counter(), 0.0)
        """When the timed steps began, and bytes written until then."""

    def is_due(self) -> bool:
        """Counts a step. Returns whether `log` is to be called: before the timed steps, and after them."""
        self._steps += 1
        return self._steps in (UNTIMED_STEPS, UNTIMED_STEPS + TIMED_STEPS)

    def log(self, written: float, paths: Callable[[], Sequence[Path]], *, ended: bool) -> None:
        """Logs the line if the timed steps or the training have ended, and bytes were written.

        Args:
            paths: returns the directories of the scratch files; called only if bytes were written.
        """
        seconds, nbytes = perf_counter() - self._before[0], written - self._before[1]
        if self._steps == UNTIMED_STEPS and not ended:
            self._before = perf_counter(), written
            return
        if not nbytes or seconds <= 0:
            return
        self.logged = True
        directories = paths()
        drives = read_wears(directories)
        count = len({path.stat().st_dev for path in directories})
        line, years = describe_wear(bytes_per_day(nbytes, seconds), drives, count, self._endurance)
        if years >= 1 or ended:  # a training of a few steps wears nothing out
            pl.utilities.rank_zero_info(line)
        else:
            pl.utilities.rank_zero_warn(
                f"{line}. Model states that `states` leaves in host memory, and activations with `tier='host'`, are "
                "not written."
            )


def describe_wear(
    per_day: float, drives: Sequence[DriveWear], count: int, endurance: float | None
) -> tuple[str, float]:
    """Returns the line about the wear of drives, and the years that they last.

    Args:
        drives: counters of those drives that have some, each once.
        count: number of drives.
        endurance: as of `WearLine`.
    """
    parts = [f"OffloadMonitor: SSDs get {per_day / 1e12:.3g} TB a day"]
    for drive in drives:
        counts = [] if drive.bytes_written is None else [f"{drive.bytes_written / 1e12:.3g} TB in its life"]
        counts += [] if drive.endurance_used is None else [f"{drive.endurance_used:.0%} of its rated endurance"]
        parts.append(f"{drive.device} counts {' and '.join(counts)}")
    used = sum(drive.bytes_written or 0 for drive in drives)
    rated = ASSUMED_ENDURANCE * count if endurance is None else endurance
    years = lifetime_seconds(max(0.0, rated - used), per_day, DAY) / YEAR
    assumed = " (give yours by `OffloadMonitor(endurance=)`)" if endurance is None else ""
    last = f"{years:.2g} years" if years >= 1 else f"{round(years * YEAR / DAY)} days"
    parts.append(f"at this rate, drives rated for {rated / 1e12:.0f} TB{assumed} last {last}")
    return "; ".join(parts), years
