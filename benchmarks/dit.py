"""Diffusion transformers at the sizes of LoHan's table VI, the GPU capped: LoHan's figure 12.

    python -m benchmarks.dit --out results.json [--sizes 0.67B 1.4B] [--modes keep recompute offload] [--path /nvme0]
    python -m benchmarks.dit --report results.json [--draw figure.png]
    python -m benchmarks.dit --out dry.json --dry-run     # tiny sizes on the CPU: shows that the commands run

Modes, each a `Trainer.fit` in a process of its own:
  keep       Lightning's own strategy, all tensors are on the GPU
  recompute  the same with gradient checkpointing of every block: how Fast-DiT, the paper's baseline, trains
  offload    `ssd_offload`, whose default plans saved tensors and states by the first steps
  both       the same with gradient checkpointing: the inputs of blocks are offloaded

Latents of 512x512 images (4 x 64 x 64, 1024 tokens), `bf16-mixed`, AdamW. For every size and mode, batches are doubled
until one fails; the throughput of a size is that of its best batch. A run that exceeds the GPU's memory is recorded as
its error, and no larger batch is tried; the exit status is 1 where a run failed for any other reason. Step: median of
the time from one step's begin to the next, after the warm-up.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

SIZES = {
    "0.67B": (28, 16, 1152),
    "0.90B": (30, 16, 1280),
    "1.4B": (32, 16, 1536),
    "10B": (28, 32, 4096),
    "20B": (40, 40, 5120),
    "40B": (48, 56, 7168),
}
"""Layers, heads and hidden size, by the paper's names."""
TINY = {"tiny": (2, 2, 32), "small": (3, 2, 64)}
MODES = ("keep", "recompute", "offload", "both")
WARM_UP = {"offload": 30, "both": 30}
"""Steps before the measured ones: `ssd_offload` profiles steps first."""


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Trains one case and returns its measurements."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    from benchmarks.processes import cap_gpu_memory
    from benchmarks.step_times import StepTimes
    from lightning_ssd import SSDOffloadStrategy
    from lightning_ssd._lightning import pl
    from lightning_ssd.recipes.models import DiT

    cuda = torch.cuda.is_available() and not case["dry_run"]
    if cuda:
        cap_gpu_memory(case["gpu"])
    plain = case["mode"] in ("keep", "recompute")
    warm_up = WARM_UP.get(case["mode"], 3)
    steps = warm_up + case["steps"]

    class BenchmarkDiT(DiT):
        def configure_model(self) -> None:
            # Offloaded units get their values one at a time: the largest models do not fit the RAM twice.
            with nullcontext() if plain else torch.device("meta"):
                super().configure_model()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.0, fused=cuda)

    class RandomLatents(Dataset[dict[str, torch.Tensor]]):
        latents = torch.randn(
            case["batch"], 4, case["image"], case["image"], generator=torch.Generator().manual_seed(0)
        )

        def __len__(self) -> int:
            return case["batch"] * steps

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"images": self.latents[index % case["batch"]], "labels": torch.tensor(index % 1000)}

    model = BenchmarkDiT(
        case["image"],
        hidden_size=case["hidden"],
        num_layers=case["layers"],
        num_heads=case["heads"],
        gradient_checkpointing=case["mode"] in ("recompute", "both"),
    )
    strategy = "auto" if plain else SSDOffloadStrategy(case["path"])
    probe = StepTimes()
    trainer = pl.Trainer(
        accelerator="gpu" if cuda else "cpu",
        devices=1,
        precision="bf16-mixed",
        strategy=strategy,
        max_steps=steps,
        callbacks=[probe],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=case["path"],
    )
    trainer.fit(model, DataLoader(RandomLatents(), batch_size=case["batch"]))
    times = probe.seconds(warm_up)
    batch = {"images": torch.empty(case["batch"], 4, 1, 1)}
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "step": statistics.median(times),
        "steps": times,
        "images_per_second": case["batch"] / statistics.median(times),
        "model_flops": 3 * model.forward_flops(batch),
        "gpu_peak": torch.cuda.max_memory_allocated() if cuda else 0,
        "losses": probe.losses,
        "machine": f"{torch.cuda.get_device_name() if cuda else 'CPU'}, torch {torch.__version__}",
    }


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Runs a case in a process of its own, and returns its result, or `error`: the last line that it wrote."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.dit", "--one", json.dumps(case)]
    process = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        return {"error": (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs every mode on every size, with growing batches."""
    sizes = TINY if arguments.dry_run else SIZES
    results: dict[str, Any] = {"gpu": arguments.gpu, "runs": {}}
    for size in arguments.sizes or sizes:
        layers, heads, hidden = sizes[size]
        for mode in arguments.modes:
            for batch in [2, 4] if arguments.dry_run else arguments.batches:
                with tempfile.TemporaryDirectory(dir=arguments.path) as path:
                    case = {"mode": mode, "layers": layers, "heads": heads, "hidden": hidden, "batch": batch}
                    case |= {"image": 16 if arguments.dry_run else 64, "steps": arguments.steps, "path": path}
                    case |= {"gpu": arguments.gpu, "dry_run": arguments.dry_run}
                    result = run(case)
                results["runs"].setdefault(size, {}).setdefault(mode, {})[str(batch)] = result
                Path(arguments.out).write_text(json.dumps(results, indent=1))
                shown = result.get("error") or f"{result['step']:.3f} s, {result['images_per_second']:.2f} images/s"
                print(f"{size} {mode} batch {batch}: {shown}", flush=True)
                if "error" in result:
                    break
    return results


def does_not_fit(error: str) -> bool:
    """Returns whether a run's error says that the GPU's memory was exceeded."""
    return "out of memory" in error.lower()


def best(runs: dict[str, dict[str, Any]]) -> tuple[int, dict[str, Any]] | None:
    """Returns the batch of the highest throughput, and its result; None where no batch ran."""
    ran = [(int(batch), result) for batch, result in runs.items() if "error" not in result]
    return max(ran, key=lambda entry: entry[1]["images_per_second"], default=None)


def report(results: dict[str, Any]) -> str:
    """Returns the best batch of each size and mode as a Markdown table."""
    lines = [
        f"GPU capped at {results['gpu']:g} GiB; the best batch of each",
        "",
        "| size | parameters | mode | batch | step, s | images/s | of recompute | model TFLOP/s | GPU peak, GiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for size, modes in results["runs"].items():
        base = best(modes.get("recompute", {}))
        for mode, runs in modes.items():
            found = best(runs)
            if found is None:
                error = next(iter(runs.values()))["error"]
                outcome = "does not fit" if does_not_fit(error) else f"failed: {error}".replace("|", "/")
                lines.append(f"| {size} | | {mode} | {outcome} | | | | | |")
                continue
            batch, run = found
            ratio = f"{run['images_per_second'] / base[1]['images_per_second']:.2f}x" if base else ""
            lines.append(
                f"| {size} | {run['parameters'] / 1e9:.2f}B | {mode} | {batch} | {run['step']:.3f} | "
                f"{run['images_per_second']:.2f} | {ratio} | {run['model_flops'] / run['step'] / 1e12:.1f} | "
                f"{run['gpu_peak'] / 2**30:.1f} |"
            )
    return "\n".join(lines)


def draw(results: dict[str, Any], picture: str) -> None:
    """Draws images a second of each size, a bar for each mode, as LoHan's figure 12."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes = results["runs"]
    modes = [mode for mode in MODES if any(mode in runs for runs in sizes.values())]
    figure, axes = plt.subplots(figsize=(8, 3.5))
    for index, mode in enumerate(modes):
        found = [best(runs.get(mode, {})) for runs in sizes.values()]
        at = [place + (index - (len(modes) - 1) / 2) * 0.8 / len(modes) for place in range(len(sizes))]
        heights = [entry[1]["images_per_second"] if entry else 0.0 for entry in found]
        bars = axes.bar(at, heights, 0.8 / len(modes), label=mode)
        axes.bar_label(bars, [f"b{entry[0]}" if entry else "-" for entry in found], fontsize=7)
    axes.set_xticks(range(len(sizes)), list(sizes))
    axes.set_yscale("log")
    axes.set_ylabel("images a second, best batch")
    axes.margins(y=0.1)
    axes.set_ylim(bottom=10 ** math.floor(math.log10(axes.get_ylim()[0])))  # bars begin at a power of ten
    axes.legend(ncols=len(modes), fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def main() -> None:
    """Measures, or reports earlier measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES, *TINY], help="default: all")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="see above")
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 16, 32, 64, 128], help="in growing order")
    parser.add_argument("--steps", type=int, default=4, help="measured steps")
    parser.add_argument("--gpu", type=float, default=24.0, help="GiB of the GPU that may be used")
    parser.add_argument("--path", help="directory on the SSD (default: the system's temporary directory)")
    parser.add_argument("--out", default="dit.json", help="JSON file for the results")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--report", help="print the table of earlier results instead of measuring")
    parser.add_argument("--draw", metavar="PNG", help="draw the figure, too")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(train(json.loads(arguments.one))), flush=True)
        return
    results = json.loads(Path(arguments.report).read_text()) if arguments.report else measure(arguments)
    print(report(results))
    if arguments.draw:
        draw(results, arguments.draw)
    runs = [run for modes in results["runs"].values() for batches in modes.values() for run in batches.values()]
    if any("error" in run and not does_not_fit(run["error"]) for run in runs):
        sys.exit(1)


if __name__ == "__main__":
    main()
