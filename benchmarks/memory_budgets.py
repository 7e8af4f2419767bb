"""`ssd_offload` beside `activation_memory_budget`, at the same peak memory: every layer of a Llama compiled, one GPU.

    python -m benchmarks.memory_budgets --out memory_budgets.json [--budgets 0.5 0.3 0.7 0.1] [--seconds 500]

The first cases are plain Lightning and `ssd_offload`, both without a limit, unless `--limited` is given. Then, for
each budget, plain Lightning compiles with that `torch._functorch.config.activation_memory_budget`, and `ssd_offload`
trains with its defaults in a process whose memory fraction is such that its plans may use the peak of plain Lightning
with that budget, and no more.
`--out` is written after each case. Each case has a process of its own, which is ended after `--case-seconds`; no case
begins after `--seconds`. Model, batches and measurements are those of `benchmarks.default`, to which arguments after
`--` are passed (`-- --batch 16`).
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import run_alone
from lightning_ssd.device.memory import FRAGMENTS, GPU_USABLE


def run_case(mode: str, gpu_bytes: float | None, seconds: float, arguments: Sequence[str]) -> dict[str, Any]:
    """Trains one mode of `benchmarks.default` once, in a process of its own; returns its result, or its `error`.

    Args:
        mode: the mode.
        gpu_bytes: bytes of the GPU that the process may use; `None`: all.
        seconds: the process is ended after so many.
        arguments: further arguments of `benchmarks.default`.
    """
    command = [sys.executable, "-m", "benchmarks.default", "--one", "--modes", mode]
    command += [] if gpu_bytes is None else ["--gpu", str(gpu_bytes / 2**30)]
    began = time.monotonic()
    result = run_alone([*command, *arguments], seconds)
    return result | {"wall": time.monotonic() - began}


def process_bytes(peak: float) -> float:
    """Returns the bytes that a process may use so that its automatic budgets are `peak` bytes."""
    return max(peak / GPU_USABLE, peak + FRAGMENTS)


def row(name: str, result: dict[str, Any], anchor: float | None) -> str:
    """Returns a row of the table; `anchor`: step of the case to compare with, seconds."""
    if "error" in result:
        return f"| {name} | {result['error']} | | | | | | |"
    ratio = "" if anchor is None else f"{result['step'] / anchor:.3f}"
    stalls = 1e3 * (result.get("store_stall", 0) + result.get("load_stall", 0))
    return (
        f"| {name} | {result['step']:.4f} s | {ratio} | {result['peak'] / 2**30:.1f} GiB | "
        f"{result.get('stored', 0) / 2**30:.2f} of {result.get('saved', 0) / 2**30:.2f} GiB, {stalls:.1f} ms | "
        f"{result.get('memory_budget', 1.0):g} | {result['outcome']} after {result['warm_up']} steps | "
        f"{result['wall']:.0f} s |"
    )


def main() -> None:
    """Measures, prints the table, and writes all results to `--out` after each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument(
        "--budgets", nargs="+", type=float, default=[0.5, 0.3, 0.7, 0.1], help="values of `activation_memory_budget`"
    )
    parser.add_argument("--limited", action="store_true", help="only cases with a budget or a limit")
    parser.add_argument("--seconds", type=float, default=500, help="no case begins later than that")
    parser.add_argument("--case-seconds", type=float, default=120, help="time limit of a case")
    parser.add_argument("others", nargs="*", help="arguments of `benchmarks.default`, after `--`")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    results: dict[str, dict[str, Any]] = {}

    def run(name: str, mode: str, gpu_bytes: float | None = None) -> dict[str, Any]:
        left = deadline - time.monotonic()
        seconds = min(left, arguments.case_seconds)
        results[name] = (
            run_case(mode, gpu_bytes, seconds, arguments.others) if left > 0 else {"error": "no time was left"}
        )
        print(name, json.dumps(results[name]), flush=True)
        arguments.out.write_text(json.dumps(results, indent=1))
        return results[name]

    if not arguments.limited:
        run("plain", "plain")
        run("ours", "ours")
    for budget in arguments.budgets:
        plain = run(f"plain, budget {budget:g}", f"plain={budget:g}")
        if "peak" in plain:
            run(f"ours at the peak of {budget:g}", "ours", process_bytes(plain["peak"]))
    print("| case | step | of plain at that peak | peak | offloaded a step, stalls | budget | decision | wall |")
    print("|---|---|---|---|---|---|---|---|")
    anchors = {"ours": "plain"} | {
        f"ours at the peak of {budget:g}": f"plain, budget {budget:g}" for budget in arguments.budgets
    }
    for name, result in results.items():
        print(row(name, result, results.get(anchors.get(name, ""), {}).get("step")))


if __name__ == "__main__":
    main()
