"""Seconds and bandwidth of committing and page-locking host memory, by the number of threads.

    python -m benchmarks.pinning [--gib 16] [--threads 1 2 4 8 16] [--rounds 2]

Per row: seconds to commit the pages of new slabs of 1 GiB (`touch`), to page-lock them then (`lock`), GiB/s of both,
and the longest time that a launch of a small kernel took meanwhile on the main thread. `cuda` is CUDA's own: one thread
page-locks memory that nothing has touched. The first row of a virtual machine may be slow, since the host gives it the
pages. Without a GPU, memory is committed only.
"""

import argparse
import threading
import time

import torch

from lightning_ssd.storage import Slab, commit, slab


def seconds_of(slabs: list[Slab], *, pin: bool) -> float:
    start = time.perf_counter()
    commit(slabs, pin=pin)
    return time.perf_counter() - start


def measure(num_slabs: int, num_threads: int) -> tuple[float, float, float]:
    """Returns the seconds to commit slabs, to page-lock them, and of the longest launch. No threads: CUDA's own."""
    slabs = [Slab(2**30, pin=False) for _ in range(num_slabs)]
    slab.MOST_THREADS = num_threads
    seconds = [0.0, 0.0]

    def work() -> None:
        if num_threads == 0:
            start = time.perf_counter()
            for one in slabs:
                one.pin()
            seconds[1] = time.perf_counter() - start
            return
        seconds[0] = seconds_of(slabs, pin=False)
        if torch.cuda.is_available():
            seconds[1] = seconds_of(slabs, pin=True)

    longest = 0.0
    worker = threading.Thread(target=work)
    value = torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")
    value.add_(1)
    worker.start()
    while worker.is_alive():
        start = time.perf_counter()
        value.add_(1)
        longest = max(longest, time.perf_counter() - start)
        time.sleep(0.001)
    worker.join()
    for one in slabs:
        one.close()
    return seconds[0], seconds[1], longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=16)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    print("| threads | touch | lock | GiB/s | longest launch |\n|---|---|---|---|---|")
    for _ in range(args.rounds):
        for num_threads in [*sorted(args.threads, reverse=True), *([0] if torch.cuda.is_available() else [])]:
            touch, lock, launch = measure(args.gib, num_threads)
            name = num_threads or "cuda"
            print(
                f"| {name} | {touch:.2f} s | {lock:.2f} s | {args.gib / (touch + lock):.1f} | {launch * 1e3:.0f} ms |",
                flush=True,
            )


if __name__ == "__main__":
    main()
