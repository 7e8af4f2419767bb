"""Runs a benchmark's case in a process of its own, so that neither memory nor settings of another case are in it."""

import json
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

import torch

from lightning_ssd.device import available_memory


def cap_gpu_memory(gib: float, index: int = 0) -> None:
    """Limits the memory of this process on GPU number `index` to `gib` GiB, or to all of the GPU's."""
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total), index)


def run_alone(command: Sequence[str], limit: float | None = None) -> dict[str, Any]:
    """Runs `command`, and returns the last JSON object that it prints, with the largest RAM in use as `ram`, in bytes.

    A process that prints no object gives its exit code as `error`.

    Args:
        command: program and arguments.
        limit: seconds after which the process is killed; None: no limit. It has printed its earlier objects by then.
    """
    before = least = available_memory()
    ended = threading.Event()

    def watch() -> None:
        nonlocal least
        while not ended.wait(0.2):
            least = min(least, available_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            printed, _ = process.communicate(timeout=limit)
            error = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            printed, _ = process.communicate()
            error = f"no result in {limit:g} s"
    ended.set()
    watcher.join()
    lines = [line for line in printed.splitlines() if line.startswith("{") and line.endswith("}")]
    if not lines:
        return {"error": error}
    return json.loads(lines[-1]) | {"ram": before - least}
