"""Runs a benchmark's case in a process of its own, so that neither memory nor settings of another case are in it.

Nothing heavy is imported here: a program that only starts commands begins them at once. One thread starts and watches
all cases, because a process that is forked while another thread holds a lock never gets that lock.
"""

import contextlib
import ctypes
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
_forks = multiprocessing.get_context("fork")


def cap_gpu_memory(gib: float, index: int = 0) -> None:
    """Limits the memory of this process on GPU number `index` to `gib` GiB, or to all of the GPU's."""
    import torch

    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total), index)


def exit_on_sigterm() -> None:
    """Has SIGTERM raise `SystemExit`, so that processes of cases are ended, and the caller can print its results."""
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
    """Runs `command`, and returns its result, as `run_all` does for a case.

    Args:
        command: program and arguments.
        limit: seconds after which the command is ended; None: no limit.
        tell: called with each result so far.
    """
    result: dict[str, Any] = {}
    case = (command[0], lambda place: os.execvp(command[0], command))
    with contextlib.closing(run_all([case], limit=limit)) as results:
        for _, result, ended in results:
            if tell is not None and not ended:
                tell(result)
    return result


def run_all(
    cases: Iterable[tuple[str, Callable[[int], object]]], places: int = 1, limit: float | None = None
) -> Generator[tuple[str, dict[str, Any], bool], None, None]:
    """Runs each case in a process that is forked from this one, and yields results.

    A result is a JSON object that a case has printed, with the largest RAM in use as `ram`, in bytes: the decrease of
    the machine's available memory, also if another program is the cause. Each process leads a group, which is killed
    when the generator is closed; it is killed, too, if this process is.

    Args:
        cases: names, and functions that are called in processes of their own, with the number of a place.
        places: cases that run at once. The next case is taken when a place is free.
        limit: seconds after which a case is ended, counted from its fork; None: no limit.

    Yields:
        The name of a case, its result, and whether its process has ended. The result of an ended case is the last one,
        or has `error` if the process has printed none.
    """
    queue, free = iter(cases), list(reversed(range(places)))
    running: list[_Process] = []
    try:
        while True:
            while free and (case := next(queue, None)) is not None:
                running.append(_Process(*case, free.pop(), limit))
            if not running:
                return
            printed = multiprocessing.connection.wait(running, timeout=0.2)
            for process in running:
                process.watch()
            for process in printed:
                for result in process.results():
                    yield process.name, result, False
                if process.ended:
                    result = process.close()
                    running.remove(process)
                    free.append(process.place)
                    yield process.name, result, True
    finally:
        for process in running:
            process.kill()
            process.close()


class _Process:
    """The process of a case, which leads a group.

    Args:
        name: name of the case.
        body: function of the case.
        place: argument of `body`.
        limit: seconds after which the group is killed.

    Attributes:
        ended: True once the process, and those that it has started, have closed their output.
    """

    def __init__(self, name: str, body: Callable[[int], object], place: int, limit: float | None) -> None:
        self.name = name
        self.place = place
        self.ended = False
        self._limit = math.inf if limit is None else limit
        self._late = False
        self._before = self._least = _available_memory()
        self._line = b""
        self._result: dict[str, Any] = {}
        read, output = os.pipe()
        self._output = open(read, "rb", buffering=0)
        self._process = _forks.Process(target=_lead_group, args=(output, body, place))
        self._process.start()
        os.close(output)  # else the end of the process would not end the output
        self._deadline = time.monotonic() + self._limit

    def fileno(self) -> int:
        """Returns the descriptor that is readable when the process has printed, or has ended."""
        return self._output.fileno()

    def watch(self) -> None:
        """Measures RAM in use, and kills the group at its limit."""
        self._least = min(self._least, _available_memory())
        if time.monotonic() > self._deadline and not self._late:
            self._late = True
            self.kill()

    def results(self) -> Iterator[dict[str, Any]]:
        """Yields the results in the next bytes of the output."""
        read = self._output.read(1 << 16)
        self.ended = not read
        *lines, self._line = (self._line + read).split(b"\n")
        for line in lines:
            if (found := _json_object(line)) is not None:
                self._result = found
                yield self._with_ram()

    def kill(self) -> None:
        """Kills the group."""
        assert self._process.pid is not None
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:  # the process leads no group yet, and has started no others
            self._process.kill()

    def close(self) -> dict[str, Any]:
        """Waits for the end of the process, and returns its last result."""
        self._process.join()
        self._output.close()
        if self._result:
            return self._with_ram()
        return {"error": f"no result in {self._limit:g} s" if self._late else f"exit code {self._process.exitcode}"}

    def _with_ram(self) -> dict[str, Any]:
        return self._result | {"ram": self._before - self._least}


def _lead_group(output: int, body: Callable[[int], object], place: int) -> None:
    """Calls `body` in a process of a new group."""
    end_with_parent()
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(output, 1)
    os.close(output)
    sys.stdout = open(1, "w", closefd=False)  # that of the parent may be another file
    body(place)


def end_with_parent() -> None:
    """Has the kernel kill this process when its parent ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _json_object(line: bytes) -> dict[str, Any] | None:
    """Returns the object of a line; None: it is other output, or was cut when its process was killed."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _available_memory() -> int:
    """Returns the bytes of the machine's RAM that programs can still allocate."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
