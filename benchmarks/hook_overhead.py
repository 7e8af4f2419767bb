"""CPU time that the tensor cache adds to each saved tensor (pack and unpack together).

    python -m benchmarks.hook_overhead [--device cuda]

A chain of cheap operations, each of which saves tensors, is run forward and backward with and without the cache; the
difference is divided by the saved tensors. The training thread's own time, not the GPU's: the tensors are small.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_ssd.activations import OffloadConfig, make_tensor_cache

OPERATIONS = 400


def run(x: torch.Tensor, weight: torch.Tensor) -> None:
    """A forward and backward that saves activations, weights and small tensors, as a transformer's does."""
    for _ in range(OPERATIONS // 2):
        x = torch.nn.functional.gelu(x @ weight)
    x.sum().backward()


def seconds(device: torch.device, x: torch.Tensor, weight: torch.Tensor) -> float:
    """Returns the host's time of one forward and backward; the device is drained before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run(x, weight)
    elapsed = time.perf_counter() - start
    if device.type == "cuda":
        torch.cuda.synchronize()
    return elapsed


def main() -> None:
    """Prints a table: microseconds a saved tensor, by what becomes of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=512, help="rows of the 512-wide activations")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    x = torch.randn(arguments.rows, 512, device=device)
    weight = torch.nn.Parameter(torch.randn(512, 512, device=device) / 512**0.5)
    counted = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal counted
        counted += 1
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor):
        run(x, weight)
    print(f"{counted} saved tensors a pass, activations of {x.nbytes} bytes, on {device}")
    print("| what becomes of the activations | us a saved tensor | spread |")
    print("|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for name, config in (
            ("kept: below min_bytes", OffloadConfig(tier="host", offload=1.0, min_bytes="1GiB", host_memory="2GiB")),
            ("a quarter to host memory", OffloadConfig(tier="host", offload=0.25, min_bytes=1, host_memory="2GiB")),
            ("all to host memory", OffloadConfig(tier="host", offload=1.0, min_bytes=1, host_memory="2GiB")),
        ):
            cache = make_tensor_cache(config, device, default_path=Path(directory))
            added = []
            for index in range(arguments.rounds + 3):
                plain = seconds(device, x, weight)
                cache.begin_micro_batch()
                with cache.hooks():
                    cached = seconds(device, x, weight)
                cache.end_backward()
                if index >= 3:
                    added.append((cached - plain) / counted * 1e6)
            cache.close()
            print(f"| {name} | {statistics.median(added):.1f} | {min(added):.1f} to {max(added):.1f} |")


if __name__ == "__main__":
    main()
