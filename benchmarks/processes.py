"""Runs a benchmark's case in a process of its own, so that neither memory nor settings of another case are in it.

Nothing heavy is imported here: a program that only starts cases begins them at once.
"""

import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def cap_gpu_memory(gib: float, index: int = 0) -> None:
    """Limits the memory of this process on GPU number `index` to `gib` GiB, or to all of the GPU's."""
    import torch

    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total), index)


def exit_on_sigterm() -> None:
    """Has SIGTERM raise `SystemExit`, so that `run_alone` ends its process, and the caller can print its results."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def save(results: object, out: Path | None) -> None:
    """Replaces the JSON file `out`, if there is one: a program that is killed meanwhile leaves the file of before."""
    if out is not None:
        new = out.with_suffix(".new")
        new.write_text(json.dumps(results, indent=1))
        new.replace(out)


def run_alone(
    command: Sequence[str], limit: float | None = None, tell: Callable[[dict[str, Any]], object] | None = None
) -> dict[str, Any]:
    """Runs `command`, and returns the last JSON object that it prints, with the largest RAM in use as `ram`, in bytes.

    RAM in use is the decrease of the machine's available memory, also if another program is the cause. A process that
    prints no object gives its exit code as `error`. If this process is killed, the process of the command is, too.

    Args:
        command: program and arguments. Its process leads a group, which is killed if this function is interrupted.
        limit: seconds after which the group is killed, counted from its start; None: no limit.
        tell: called with each object when it is printed, in the form that is returned.
    """
    before = least = _available_memory()
    deadline = math.inf if limit is None else time.monotonic() + limit
    late = False
    ended = threading.Event()

    def watch() -> None:
        nonlocal least, late
        while not ended.wait(0.2):
            least = min(least, _available_memory())
            if time.monotonic() > deadline and not late:
                late = True
                os.killpg(process.pid, signal.SIGKILL)  # its leader is waited for after `ended`: the id is its own

    result: dict[str, Any] = {}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=end_with_parent
    ) as process:
        assert process.stdout is not None
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for line in process.stdout:
                if (found := _json_object(line)) is not None:
                    result = found | {"ram": before - least}
                    if tell is not None:
                        tell(result)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            ended.set()
            watcher.join()
    if not result:
        return {"error": f"no result in {limit:g} s" if late else f"exit code {process.returncode}"}
    return result | {"ram": before - least}


def end_with_parent() -> None:
    """Has the kernel kill this process when its parent ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _json_object(line: str) -> dict[str, Any] | None:
    """Returns the object of a line; None: it is other output, or was cut when its process was killed."""
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def _available_memory() -> int:
    """Returns the bytes of the machine's RAM that programs can still allocate."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
