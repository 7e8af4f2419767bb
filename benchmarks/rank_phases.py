"""Where several GPUs of one host take their time before the first step and after the last one.

    python -m benchmarks.rank_phases --ranks 2 [--case host:3072x34,warm-up=1,steps=2] [--gib 24]

First, seconds in which processes prepare and free `--gib` of shared memory, half of which each of two writes (of four a
quarter), in one file, in a file of each, and in eight of each:

  commit   pages are committed by their process, by several threads
  map      those of the other processes are mapped
  lock     all are page-locked (with a GPU)
  unlock   and unlocked, on one thread
  remove   pages of a half of the process's own memory are freed
  exit     the processes end, and the kernel frees the others

Then a case of `several_gpus`: for each rank, the functions that its main thread is in outside of imports and batches,
whenever they change, and its threads' seconds, mapped shared memory and the host's, until the process has ended.
"""

import argparse
import multiprocessing
import multiprocessing.synchronize
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

SECONDS = 0.5
"""Time between two looks at a process."""

PIECE = 2**28
"""Bytes of a slab."""

_LIMIT = 120
"""Seconds after which a process ends whose peer has failed."""


def prepare_and_free(
    rank: int,
    ranks: int,
    descriptors: list[int],
    nbytes: int,
    barrier: multiprocessing.synchronize.Barrier,
    end: multiprocessing.synchronize.Barrier,
) -> None:
    """Prints the seconds of a process; see the module's docstring."""
    import torch

    from lightning_ssd.ranks import RankMemory
    from lightning_ssd.storage import commit, page_lock

    memory = [RankMemory(descriptor) for descriptor in descriptors]
    per_rank = max(2, nbytes // ranks // PIECE)
    files = [[memory[(one + ranks * number) % len(memory)] for number in range(per_rank)] for one in range(ranks)]
    slabs = [[file.allocate(PIECE) for file in of_rank] for of_rank in files]
    own, every = slabs[rank], [slab for of_rank in slabs for slab in of_rank]
    phases: dict[str, Callable[[], object]] = {
        "commit": lambda: commit(own, pin=False),
        "map": lambda: commit([slab for slab in every if slab not in own], pin=False),
    }
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        torch.zeros(1, device="cuda")
        phases["lock"] = lambda: page_lock(every)
        phases["unlock"] = lambda: [slab.unpin() for slab in every]
    halves = list(zip(files[rank], own, strict=True))[::2]
    phases["remove"] = lambda: [file.release(slab.tensor) for file, slab in halves]
    seconds = {}
    for name, run in phases.items():
        barrier.wait(_LIMIT)
        begin = time.perf_counter()
        run()
        seconds[name] = round(time.perf_counter() - begin, 2)
    print(f"  rank {rank}: {seconds}", flush=True)
    end.wait(_LIMIT)
    os._exit(0)


def measure_memory(ranks: int, files: int, nbytes: int) -> None:
    """Has processes prepare and free shared memory in `files` files."""
    from lightning_ssd.ranks.rank_memory import make_files

    print(f"{nbytes / 2**30:.0f} GiB in files: {files}", flush=True)
    context = multiprocessing.get_context("fork")
    barrier, end, descriptors = context.Barrier(ranks), context.Barrier(ranks + 1), make_files(files)
    processes = [
        context.Process(target=prepare_and_free, args=(rank, ranks, descriptors, nbytes, barrier, end))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for descriptor in descriptors:
        os.close(descriptor)
    end.wait(_LIMIT)
    begin = time.perf_counter()
    for process in processes:
        process.join()
    print(f"  exit: {time.perf_counter() - begin:.2f}", flush=True)


def follow(case: str, devices: int) -> None:
    """Prints what the ranks of a training do; see the module's docstring."""
    with tempfile.TemporaryDirectory() as path:
        command = [sys.executable, "-m", "benchmarks.rank_phases", "--ranks", str(devices), "--traced", path, case]
        begin, looks = time.time(), dict[str, list[str]]()
        training = subprocess.Popen(command)
        while training.poll() is None:
            for trace in Path(path).iterdir():
                looks.setdefault(trace.name, []).append(f"{time.time() - begin:.1f} s: {look_at(trace.name)}")
            time.sleep(SECONDS)
        print(f"all processes have ended after {time.time() - begin:.1f} s")
        for process, lines in looks.items():
            print(f"process {process}", *lines[:: max(1, len(lines) // 40)], sep="\n  ")
            for line in (Path(path) / process).read_text().splitlines():
                at, _, functions = line.partition(" ")
                print(f"  {float(at) - begin:.1f} s in {functions}")


def look_at(process: str) -> str:
    """Returns a process's state, seconds of its threads, and shared memory."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        mapped = re.search(r"RssShmem:\s*(\d+)", Path(f"/proc/{process}/status").read_text())
    except OSError:
        return "ended"
    user, system = (int(ticks) / os.sysconf("SC_CLK_TCK") for ticks in fields[10:12])
    host = re.search(r"Shmem:\s*(\d+)", Path("/proc/meminfo").read_text())
    gib = [0.0 if found is None else int(found[1]) / 2**20 for found in (mapped, host)]
    return f"{state}, user {user:.1f} s, system {system:.1f} s, maps {gib[0]:.1f} of {gib[1]:.1f} GiB"


def trace(thread: int, out: TextIO) -> None:
    """Writes the functions that a thread is in, whenever they change."""
    last = ""
    while True:
        frame, names = sys._current_frames().get(thread), list[str]()
        while frame is not None:
            names.append(f"{frame.f_code.co_name} {Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
            frame = frame.f_back
        text = " < ".join(names[:6])
        if text != last and not any(name.startswith(("_find_and_load ", "advance ")) for name in names):
            last = text
            print(time.time(), text, file=out, flush=True)
        time.sleep(SECONDS)


def train_traced(case: str, devices: int, path: str) -> None:
    """Trains a case of `several_gpus` as one rank, and the others in further processes."""
    from benchmarks.several_gpus import parse, start_ranks, train

    out = (Path(path) / str(os.getpid())).open("w")
    threading.Thread(target=trace, args=(threading.get_ident(), out), daemon=True).start()
    started = start_ranks(devices)
    train(parse(case), devices, tempfile.gettempdir())
    for process in started:
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes, and GPUs")
    parser.add_argument("--gib", type=float, default=0, help="shared memory that is prepared and freed")
    parser.add_argument("--case", help="case of `several_gpus`")
    parser.add_argument("--traced", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.traced:
        path, case = arguments.traced
        train_traced(case, arguments.ranks, path)
        return
    for files in (1, arguments.ranks, 8 * arguments.ranks) if arguments.gib else ():
        measure_memory(arguments.ranks, files, int(arguments.gib * 2**30))
    if arguments.case:
        follow(arguments.case, arguments.ranks)


if __name__ == "__main__":
    main()
