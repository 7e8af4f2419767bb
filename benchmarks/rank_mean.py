"""The mean of n ranks' gradients, and its norm, in gradients a second of one process: by our kernel and by torch.

    python -m benchmarks.rank_mean [--millions 30] [--processes 2]

Each process sums gradients of its own; all begin together, with an equal share of the threads, or with all of them
(`--all-threads`). The result is the best of 10 sums, and GB/s of the arrays that are read and written, beside a copy.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.multiprocessing as processes
from torch import Tensor

from lightning_ssd.model_states.optimizers import RankMean

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def best(run: Callable[[], object]) -> float:
    """Returns the shortest seconds of 10 runs."""
    seconds = []
    for _ in range(10):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def measure(process: int, numel: int, threads: int, barrier: "processes.Barrier") -> None:
    torch.set_num_threads(threads)
    total, values = torch.zeros(numel), torch.randn(numel)
    runs: list[tuple[str, int, Callable[[], object]]] = [("copy", 8, partial(total.copy_, values))]
    for dtype, name in NAMES.items():
        for ranks in (2, 4):
            sources: list[Tensor] = [torch.randn(numel).to(dtype) for _ in range(ranks)]
            nbytes, mean = ranks * dtype.itemsize, RankMean(sources, 1.0 / ranks)
            runs.append((f"{ranks} x {name}, ours", 4 + nbytes, partial(mean.write, total)))
            runs.append((f"{ranks} x {name}, norm", nbytes, partial(mean.norm, slice(None))))
            runs.append((f"{ranks} x {name}, torch", 4 + nbytes, partial(mean.write_by_torch, total)))
    for name, nbytes, run in runs:
        barrier.wait()
        rate = numel / best(run)
        if process == 0:
            print(f"  {name:<16}{rate / 1e9:6.2f} e9/s   {nbytes * rate / 1e9:5.1f} GB/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=30, help="millions of gradients of each rank")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--all-threads", action="store_true", help="each process has as many threads as all together")
    given = parser.parse_args()
    threads = torch.get_num_threads() // (1 if given.all_threads else given.processes)
    print(f"{given.processes} processes of {max(1, threads)} threads, {given.millions} M gradients of each rank")
    barrier = processes.get_context("spawn").Barrier(given.processes)
    processes.spawn(measure, (given.millions * 10**6, max(1, threads), barrier), given.processes)


if __name__ == "__main__":
    main()
