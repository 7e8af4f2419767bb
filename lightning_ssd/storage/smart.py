"""Wear of a drive as the drive counts it (SMART), read by `smartctl`, which usually needs root."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 5.0
"""Time limit of `smartctl`."""

NVME_UNIT_BYTES = 512_000
"""Bytes of the unit in which NVMe drives count written data."""


@dataclass(frozen=True)
class DriveWear:
    """Lifetime wear of one drive, as the drive counts it.

    Attributes:
        device: the drive, such as `/dev/nvme0n1`.
        bytes_written: bytes ever written to the drive; None if the drive does not report them.
        endurance_used: share of the rated endurance that is used, 1.0 or more when all is; None if the drive does not
            report it.
    """

    device: str
    bytes_written: int | None
    endurance_used: float | None


def read_wears(paths: Iterable[Path]) -> list[DriveWear]:
    """Returns the wear of each drive that holds one of the directories `paths`, if it can be read."""
    found = (read_wear(path) for path in paths)
    return list({drive.device: drive for drive in found if drive is not None}.values())


def read_wear(path: Path) -> DriveWear | None:
    """Returns the wear of the drive that holds the directory `path`, or None if it cannot be read."""
    device = device_of(path)
    command = shutil.which("smartctl")
    if device is None or command is None:
        return None
    try:
        # The exit code of smartctl is a set of warnings, not a failure: its output is examined instead.
        result = subprocess.run(
            [command, "--json", "--all", device],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT_SECONDS,
        )
        report = json.loads(result.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError, RecursionError):
        return None
    units = _number(report, "nvme_smart_health_information_log", "data_units_written")
    used = _number(report, "nvme_smart_health_information_log", "percentage_used")
    if used is None:  # other kinds of drives
        used = _number(report, "endurance_used", "current_percent")
    if units is None and used is None:
        return None
    written = NVME_UNIT_BYTES * int(units) if units is not None else None
    return DriveWear(device, written, float(used) / 100 if used is not None else None)


def _number(report: Any, section: str, name: str) -> float | None:
    """Returns a number that smartctl printed, or None if it is missing or implausible for a drive."""
    value = report.get(section) if isinstance(report, Mapping) else None
    value = value.get(name) if isinstance(value, Mapping) else None
    plausible = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**63
    return value if plausible else None


def device_of(path: Path, sysfs: Path = Path("/sys")) -> str | None:
    """Returns the drive that holds the directory `path`, or None if the kernel names no single drive for it.

    Args:
        path: any directory.
        sysfs: mount point of the kernel's sysfs.
    """
    number: Any = os.stat(path).st_dev
    entry = (sysfs / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}").resolve()
    if not entry.is_dir():
        return None
    drive = entry.parent if (entry / "partition").is_file() else entry
    return f"/dev/{drive.name}"
