"""What a drive says of its own wear (SMART), where the machine lets us ask: by `smartctl`, which mostly wants root."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 5.0
"""That a drive may take to answer."""

NVME_UNIT = 512_000
"""Bytes of the unit that NVMe drives count what was written in."""


@dataclass(frozen=True)
class DriveWear:
    """Wear of one drive since it was made, as it counts itself.

    Attributes:
        device: such as `/dev/nvme0n1`.
        bytes_written: by all who ever wrote to it; None: it does not say.
        endurance_used: share of its rated endurance, 1.0 and more when that is used up; None: it does not say.
    """

    device: str
    bytes_written: int | None
    endurance_used: float | None


def read_wear(path: Path) -> DriveWear | None:
    """Returns the wear of the drive that the directory `path` is on; None: nobody says."""
    device = device_of(path)
    command = shutil.which("smartctl")
    if device is None or command is None:
        return None
    try:
        # Its exit code is a set of warnings; what it prints tells whether there is anything.
        asked = subprocess.run(
            [command, "--json", "--all", device], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=SECONDS
        )
        said = json.loads(asked.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError, RecursionError):
        return None
    units = _number(said, "nvme_smart_health_information_log", "data_units_written")
    used = _number(said, "nvme_smart_health_information_log", "percentage_used")
    if used is None:  # other kinds of drives
        used = _number(said, "endurance_used", "current_percent")
    if units is None and used is None:
        return None
    written = NVME_UNIT * int(units) if units is not None else None
    return DriveWear(device, written, float(used) / 100 if used is not None else None)


def _number(said: Any, section: str, name: str) -> float | None:
    """Returns a number that smartctl printed; None where there is none, or none that a drive can have counted."""
    value = said.get(section) if isinstance(said, Mapping) else None
    value = value.get(name) if isinstance(value, Mapping) else None
    plausible = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**63
    return value if plausible else None


def device_of(path: Path, sysfs: Path = Path("/sys")) -> str | None:
    """Returns the drive that the directory `path` is on; None: it is on none, or on something that hides it.

    Args:
        path: any directory.
        sysfs: where the kernel tells of devices.
    """
    number: Any = os.stat(path).st_dev
    entry = (sysfs / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}").resolve()
    if not entry.is_dir():
        return None
    drive = entry.parent if (entry / "partition").is_file() else entry
    return f"/dev/{drive.name}"
