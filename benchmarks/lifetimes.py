"""Teraio's characterisation and roofline for five models, traced without memory; needs no GPU.

    python -m benchmarks.lifetimes [--shapes NAME ...] [--out benchmarks/results] [--tflops 51] [--gpu 94]

Each model's training step runs on tensors without memory, in full precision (32-true, AdamW, one micro-batch, nothing
recomputed). Times are calculated from FLOPs and bytes for one GPU of `--tflops` and `--gpu` GB: by default an H100 NVL
in fp32 without TF32, which is torch's default and the paper's "full precision". Results are added to `lifetimes.json`,
from which `lifetimes.md` and `lifetimes_roofline.png` (throughput by bandwidth, figure 3) are made. A picture for each
model shows active bytes of each operator (figure 1), inactive periods (figure 2), and the bandwidth of migrations over
a planned step (figure 8). Planning is the CPU time of Teraio's planner for a step with four drives and host memory.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lightning_ssd.dry_run import profile_lifetimes
from lightning_ssd.planning import HardwareProfile, MigrationMachine
from lightning_ssd.recipes import read_recipe
from lightning_ssd.replay import (
    BANDWIDTHS,
    LifetimeProfile,
    MigrationPrediction,
    active_share,
    by_hardware,
    draw_active,
    draw_inactive,
    median_period,
    migratable_share,
    plan_teraio,
    roofline,
    simulate_migrations,
)
from lightning_ssd.timeline import COLORS

ROOT = Path(__file__).parents[1]
PLAIN = ["--model.gradient_checkpointing=false", "--trainer.precision=32-true"]
LLAMA = ["--model.chunked_loss=false", *PLAIN]
SHAPES = {
    "BERT-Large": ("bert", "bert-large", PLAIN, ["input_ids=16x512:int64", "labels=16x512:int64"]),
    "Llama3-8B": ("finetune", "llama-8b", LLAMA, ["input_ids=4x2048:int64"]),
    "GPT2-40B": ("gpt", "gpt-40b", PLAIN, ["input_ids=8x1024:int64"]),
    "T5-11B": ("t5", "t5-11b", PLAIN, ["input_ids=16x512:int64", "labels=16x128:int64"]),
    "Llama3-70B": ("finetune", "llama-70b", LLAMA, ["input_ids=4x2048:int64"]),
}
"""Recipe, configuration of the model, further options, and the batch of each shape."""

PAPER_DRIVE = (6.7e9, 6.5e9)
"""Bytes/s that one drive of the paper reads and writes."""

BINS = 200
"""Intervals of a step in which bandwidth is drawn."""

HOSTS, DRIVES = (0, 64 * 10**9, 128 * 10**9), (1, 2, 4)
"""Bytes of host memory and numbers of drives that are varied (figure 9)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="models to trace")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder for the results")
    parser.add_argument("--tflops", type=positive, default=51.0, help="TFLOP/s of products (default: %(default)s)")
    parser.add_argument("--gpu", type=positive, default=94.0, help="GB of GPU memory (default: %(default)s)")
    args = parser.parse_args()
    hardware = replace(
        HardwareProfile.from_json(ROOT / "configs/machines/h100.json"),
        gpu_flops=args.tflops * 1e12,
        gpu_bytes=int(args.gpu * 1e9),
    )
    sys.argv = sys.argv[:1]  # LightningCLI warns about the arguments of this command
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "lifetimes.json"
    rows: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    for name in args.shapes:
        lifetimes = trace(name, hardware)
        figure = Figure(figsize=(12, 9))
        active, inactive, traffic = figure.subplots(3, 1)
        draw_active(active, lifetimes, hardware)
        draw_inactive(inactive, lifetimes, hardware)
        rows[name] = {"gpu_flops": hardware.gpu_flops, "gpu_bytes": hardware.gpu_bytes}
        rows[name] |= measure(lifetimes, hardware, traffic)
        figure.tight_layout()
        figure.savefig(args.out / f"lifetimes_{name.lower()}.png", dpi=80, format="png")
        path.write_text(json.dumps(rows, indent=1) + "\n")
        (args.out / "lifetimes.md").write_text(table(rows))
        draw_roofline(rows, args.out / "lifetimes_roofline.png")
        print(name, json.dumps(rows[name]), flush=True)


def positive(text: str) -> float:
    """Returns a number of the command line, which must be finite and greater than 0."""
    number = float(text)
    if not 0 < number < inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number greater than 0")
    return number


def draw_roofline(rows: dict[str, Any], path: Path) -> None:
    """Draws throughput by bandwidth of all models."""
    figure = Figure(figsize=(7, 4))
    plot = figure.subplots()
    for name, row in rows.items():
        bandwidths, throughputs = zip(*row["roofline"], strict=True)
        plot.plot([one / 1e9 for one in bandwidths], throughputs, "o-", label=name)
    plot.set(xlabel="bandwidth of migration, GB/s each way", ylabel="throughput / that without waiting")
    plot.set_xscale("log", base=2)
    plot.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100, format="png")


def draw_bandwidth(axes: Any, found: MigrationPrediction, title: str) -> None:
    """Draws bandwidth over the step: from the GPU above the axis, to the GPU below it."""
    width = found.step_seconds / BINS
    starts = [width * one for one in range(BINS)]
    for direction, nbytes in found.carried.items():
        sign = 1 if direction in ("copy out", "SSD write") else -1
        shown = sign * np.array(nbytes).reshape(BINS, -1).sum(axis=1) / width / 1e9
        if direction.startswith("copy"):
            axes.bar(starts, shown, width, align="edge", color=COLORS[direction], label=direction, linewidth=0)
        else:
            axes.step(starts, shown, where="post", color=COLORS[direction], label=direction, linewidth=1)
    axes.set_xlim(0, found.step_seconds)
    means = ", ".join(f"{name} {sum(row) / found.step_seconds / 1e9:.2f}" for name, row in found.carried.items())
    axes.set_title(f"{title}; mean GB/s: {means}", fontsize=9)
    axes.set_xlabel("seconds")
    axes.set_ylabel("GB/s: from the GPU, to it below 0")
    axes.legend(fontsize=7, loc="upper right")


def trace(name: str, hardware: HardwareProfile) -> LifetimeProfile:
    """Returns the lifetimes of a shape's step."""
    recipe, model, options, batch = SHAPES[name]
    files = ["-c", str(ROOT / f"configs/models/{model}.yaml")]
    config = read_recipe(str(ROOT / f"recipes/{recipe}.yaml"), [*files, *options], run=False)
    return replace(profile_lifetimes(config, hardware, batch), name=name)


def measure(lifetimes: LifetimeProfile, hardware: HardwareProfile, axes: Any) -> dict[str, Any]:
    """Returns the quantities of the paper's statements, and draws the bandwidth over a step with four drives."""
    mean, most = active_share(lifetimes, hardware.gpu_bytes)
    drive = MigrationMachine(hardware.gpu_bytes, 0, 64e9, 64e9, PAPER_DRIVE)
    read, write = PAPER_DRIVE
    drives = replace(drive, host_bytes=HOSTS[-1], ssd=(4 * read, 4 * write))
    begin = time.process_time()
    plan = plan_teraio(lifetimes, drives)
    planning = time.process_time() - begin
    found = simulate_migrations(lifetimes, drives, plan)
    title = f"{lifetimes.name}: migrations of a step, 4 drives and 128 GB of host memory"
    draw_bandwidth(axes, found, title)
    large = [period for period in lifetimes.periods if lifetimes.tensors[period.tensor].nbytes >= 10**7]
    row: dict[str, Any] = {
        "step_seconds": lifetimes.step_seconds,
        "operators": len(lifetimes.operators),
        "tensors": len(lifetimes.tensors),
        "peak_bytes": max(lifetimes.total),
        "active_mean": mean,
        "active_most": most,
        "migratable": migratable_share(lifetimes),
        "median_inactive": median_period(lifetimes),
        "large_periods": len(large),
        "plan_seconds": planning,
        "roofline": roofline(lifetimes, drive),
    }
    if lifetimes.name == "Llama3-8B":
        row["by_hardware"] = by_hardware(lifetimes, drive, HOSTS, DRIVES)
    return row


def _statements(rows: dict[str, Any]) -> list[str]:
    """Returns the paper's statements beside the results."""
    means = [row["active_mean"] for row in rows.values()]
    lines = [
        "Teraio's paper: 1.7 % and under 14 % active, more than 40 % of the periods longer, and periods of BERT-Large "
        "two orders of magnitude shorter.",
        f"Means of active bytes are {min(means):.2%} to {max(means):.2%} here, lower than the paper's.",
    ]
    if "BERT-Large" in rows and len(rows) > 1:
        shortest = rows["BERT-Large"]["median_inactive"]
        times = [row["median_inactive"] / shortest for name, row in rows.items() if name != "BERT-Large"]
        found = f"{min(times):.0f} to {max(times):.0f}"
        lines.append(f"Median periods of the larger models are {found} times BERT-Large's.")
    return lines


def table(rows: dict[str, Any]) -> str:
    """Returns the results as Markdown."""
    one = next(iter(rows.values()))
    lines = [
        "# Lifetimes of tensors, and throughput by bandwidth of migration",
        "",
        f"`python -m benchmarks.lifetimes`: one GPU of {one['gpu_flops'] / 1e12:g} TFLOP/s and "
        f"{one['gpu_bytes'] / 1e9:g} GB, 32-true, AdamW, one micro-batch, times calculated from FLOPs and bytes.",
        "",
        "| model | step | peak | active, mean | active, most | 10 MB to 1 GB: periods longer than a migration at "
        "6.5 GB/s | median inactive period, 10 MB or more | tensors | planning |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row['step_seconds']:.2f} s | {row['peak_bytes'] / 1e9:.0f} GB | {row['active_mean']:.2%} | "
            f"{row['active_most']:.1%} | {row['migratable']:.0%} | {1e3 * row['median_inactive']:.1f} ms | "
            f"{row['tensors']} | {row['plan_seconds']:.1f} s |"
        )
    lines += ["", *_statements(rows), ""]
    lines += [
        "Planning is CPU time. Throughput of Teraio's plans by bandwidth, without host memory, as a share of that of "
        "the step without waiting:",
        "",
    ]
    lines += ["| throughput at | " + " | ".join(f"{bandwidth / 1e9:g} GB/s" for bandwidth in BANDWIDTHS) + " |"]
    lines += ["|---" * (len(BANDWIDTHS) + 1) + "|"]
    for name, row in rows.items():
        lines.append(f"| {name} | " + " | ".join(f"{throughput:.2f}" for _, throughput in row["roofline"]) + " |")
    for name, row in rows.items():
        if "by_hardware" in row:
            lines += ["", f"{name} by host memory and number of drives of 6.5 GB/s:", ""]
            lines += ["| | " + " | ".join(f"{one} drives" for one in DRIVES) + " |", "|---" * (len(DRIVES) + 1) + "|"]
            for host, found in zip(HOSTS, row["by_hardware"], strict=True):
                lines.append(f"| {host / 1e9:g} GB | " + " | ".join(f"{one:.2f}" for one in found) + " |")
    pictures = ("roofline", *(name.lower() for name in rows))
    return "\n".join([*lines, "", *(f"![{name}](lifetimes_{name}.png)" for name in pictures), ""])


if __name__ == "__main__":
    main()
