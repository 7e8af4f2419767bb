"""Garbage collections that have run."""

import gc
import threading
from typing import Any


def collect() -> int:
    """Collects garbage; returns the number of unreachable objects.

    `gc.collect` returns 0 and does nothing while another thread of the process collects, and the collection of that
    thread may have begun before the present objects became garbage.
    """
    thread = threading.get_ident()
    ended = False

    def note(phase: str, details: dict[str, Any]) -> None:
        nonlocal ended
        if phase == "stop" and details["generation"] == 2 and threading.get_ident() == thread:
            ended = True

    gc.callbacks.append(note)
    try:
        found = 0
        while not ended:
            found += gc.collect()
    finally:
        gc.callbacks.remove(note)
    return found
