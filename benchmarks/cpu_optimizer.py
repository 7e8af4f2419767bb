"""CPU AdamW alone, in parameters a second: our kernel, torch's, and DeepSpeed's where it is installed.

    python -m benchmarks.cpu_optimizer [--millions 200]

Each steps one flat parameter; the result is the median of 10 steps. DeepSpeed's kernel steps fp32 weights from fp32
gradients, without the conversions; ours steps from bf16 gradients to bf16 weights. Of each format of the states, GB/s
of the arrays that a step reads and writes are printed, and their share of the memory's bandwidth: that of a negation in
place, by the same number of threads.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from lightning_ssd.model_states import StepHalf
from lightning_ssd.model_states.optimizers.adam import STORE_TRIAL
from lightning_ssd.profiling import adam_step
from lightning_ssd.types import StateFormat


def rate(numel: int, step: Callable[[], object]) -> float:
    """Returns parameters a second."""
    seconds = []
    for _ in range(12):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return numel / statistics.median(seconds[2:])


FORMATS: dict[StateFormat, int] = {"fp32": 28, "split": 26, "bf16": 18, "8bit": 14}
"""Bytes that a step reads and writes for each parameter, by `state_format`. With "fp32" it reads and writes whole
master weights, and writes the compute weights."""


HALVES: tuple[StepHalf, StepHalf] = ("weights", "opt_state")


def bandwidth(numel: int) -> float:
    """Returns bytes a second, read and written in place by torch's threads."""
    values = torch.randn(numel)
    return 8 * rate(numel, values.neg_)


def deepspeed(numel: int) -> float:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = nn.Parameter(torch.randn(numel))
    parameter.grad = torch.randn(numel)
    return rate(numel, DeepSpeedCPUAdam([parameter], lr=1e-4, fp32_optimizer_states=True).step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=200, help="millions of parameters")
    numel = parser.parse_args().millions * 10**6 // 64 * 64
    print(f"{torch.get_num_threads()} threads, {numel / 1e6:.0f} M parameters, AdamW; 1e9 parameters/s")
    memory = bandwidth(numel)
    for name, nbytes in FORMATS.items():
        step = adam_step(numel, state_format=name)
        measured = rate(numel, step)
        moved, share = measured * nbytes, measured * nbytes / memory
        weights, rest = (rate(numel, partial(step, half)) / 1e9 for half in HALVES)
        print(
            f"  ours, {name:<16}{measured / 1e9:.2f}   {moved / 1e9:.0f} GB/s, {share:.0%} of {memory / 1e9:.0f}; "
            f"weights alone {weights:.2f}, the rest later {rest:.2f}"
        )
    for name in FORMATS:
        step = adam_step(numel, state_format=name, two_versions=True)
        rates = []
        for past_caches in (False, True):
            STORE_TRIAL.choose = lambda past=past_caches: past  # type: ignore[method-assign]
            rates.append(rate(numel, step) / 1e9)
        print(f"  ours, {name}, to a second version   {rates[0]:.2f}, with stores past the caches {rates[1]:.2f}")
    print(f"  torch, whole masters  {rate(numel, adam_step(numel, compiled=False)) / 1e9:.2f}")
    try:
        print(f"  DeepSpeed             {deepspeed(numel) / 1e9:.2f}")
    except ImportError:
        print("  DeepSpeed is not installed")


if __name__ == "__main__":
    main()
