"""Measurements of the machine on few bytes, for trainings that take less time than these measurements."""

from collections.abc import Callable
from typing import Any

from lightning_ssd.activations import config
from lightning_ssd.profiling import machine
from lightning_ssd.storage import timed_transfers


def measure_few_bytes(replace: Callable[[Any, str, int], None] = setattr) -> None:
    """Has this process measure drives, copies and CPU steps on few bytes.

    Args:
        replace: sets an attribute; that of pytest's `monkeypatch` restores it after the test.
    """
    replace(timed_transfers, "_MAX_BYTES", 2**20)
    replace(config, "_MEASURED_BYTES", 2**20)
    replace(machine, "COPY_BYTES", 2**22)
    replace(machine, "STEP_PARAMETERS", 2**20)
