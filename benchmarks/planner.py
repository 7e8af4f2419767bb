"""SwapPlanner on one GPU: its predictions beside measurements, and its plan beside a sweep of swap coefficients.

    python -m benchmarks.planner --out planner.json [--settings host:4096x16,gpu=36 ssd:4096x8,disk=1.0 ...]
    python -m benchmarks.planner --out planner.json --report [--plot planner.png]

A setting is TIERS:HIDDENxLAYERS with options after commas. Each is one training of GPT (1024 tokens, bf16-true):
SwapPlanner measures it and plans. Its plan is timed, then, in the same training, plans that swap a share of the
intra-block activations (the swap coefficient; those that are most expensive to recompute first) and recompute the rest,
as in figure 9 of LoHan and of Fuyou, and then its plan once more. For every plan, the median step and the peak of
allocated memory are compared with the simulation.

Tiers:
  host, ssd, both   tiers of offloaded activations
Options:
  batch=N (16), gpu=GIB (budget of the device), host=GIB (of host memory), disk=GB/s (a drive of that speed)
  states=host       weights, gradients and AdamW's states in host memory; else on the GPU, with SGD
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.activation_offload import BenchmarkGPT, RandomTokens, quiet_trainer
from benchmarks.swap_coefficients import plan_with_coefficient
from benchmarks.throttled_backend import ThrottledBackend
from lightning_ssd import SSDOffloadStrategy, SwapPlanner
from lightning_ssd._lightning import pl
from lightning_ssd.autoplan import Comparison, PlanRunner
from lightning_ssd.callbacks.find import find_offloader
from lightning_ssd.planning import (
    FixedPlacement,
    HardwareProfile,
    ModelProfile,
    Plan,
    simulate,
    swap_coefficient,
)
from lightning_ssd.profiling import measure_machine

SETTINGS = [
    "host:8192x2,batch=8,gpu=13",
    "host:4096x8,batch=8,gpu=13",
    "host:2048x16,batch=8,gpu=9",
    "ssd:8192x2,batch=2,gpu=10,disk=1.0",
    "ssd:8192x2,batch=2,gpu=10,disk=0.5",
    "both:4096x8,batch=8,gpu=12,host=8,disk=1.0",
    "host:2048x12,batch=8,states=host,gpu=9",
]
COEFFICIENTS = (0.0, 0.25, 0.5, 0.75, 1.0)


class Sweep(pl.Callback):
    """Times SwapPlanner's plan, those of the coefficients, and SwapPlanner's plan again: a GPU changes its clock rate.

    Args:
        planner: an earlier callback of the Trainer.
        coefficients: swap coefficients of the plans.
        steps: steps under each plan whose median is reported.
    """

    def __init__(self, planner: SwapPlanner, coefficients: tuple[float, ...], steps: int) -> None:
        self._planner = planner
        self._steps = steps
        self._remaining = list(coefficients)
        self._name = "planned"
        self._planned: Plan | None = None
        self._totals: tuple[float, float, int] = (0.0, 0.0, 0)
        self.results: list[dict[str, Any]] = []

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        cycle = self._planner.cycle
        assert cycle is not None
        runner, comparison = cycle.runner, cycle.comparison
        if runner is None or comparison is None:
            return
        if not self.results and runner.plan is not comparison.plan:
            self._add("first plan", trainer, runner, comparison)
        measured = runner.measured(self._steps)
        if measured is None:
            return
        self._add(self._name, trainer, runner, measured)
        if self._planned is None:
            self._planned = measured.plan
        elif self._name == "planned":
            trainer.should_stop = True
            return
        self._name, plan = "planned", self._planned
        if self._remaining:
            coefficient = self._remaining.pop(0)
            self._name = f"{coefficient:g}"
            plan = plan_with_coefficient(runner.profile, runner.hardware, coefficient, runner.placement)
        runner.apply(plan)

    def _add(self, name: str, trainer: pl.Trainer, runner: PlanRunner, measured: Comparison) -> None:
        offloader = find_offloader(trainer)
        assert offloader is not None
        stats = offloader.stats()
        totals = stats.store_stall, stats.load_stall, stats.micro_batches
        store, load, count = (now - then for now, then in zip(totals, self._totals, strict=True))
        self._totals = totals
        predicted = measured.predicted
        self.results.append(
            {
                "plan": name,
                "predicted_step": predicted.step_seconds,
                "step": measured.step_seconds,
                "predicted_peak": predicted.gpu_peak_bytes,
                "peak": measured.gpu_peak_bytes,
                "bound": predicted.bound,
                "coefficient": swap_coefficient(runner.profile, measured.plan),
                "store_stall": store / max(1, count),
                "load_stall": load / max(1, count),
            }
        )
        print(f"    {time.time():.1f}", json.dumps(self.results[-1]), flush=True)


class AdamGPT(BenchmarkGPT):
    """The same with AdamW."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def parse(text: str) -> dict[str, Any]:
    """Returns the arguments that the text of a setting stands for."""
    tiers, _, rest = text.partition(":")
    shape, *options = rest.split(",")
    hidden, layers = map(int, shape.split("x"))
    setting: dict[str, Any] = {"tiers": tiers, "hidden": hidden, "layers": layers, "batch": 16, "tokens": 1024}
    setting |= {"gpu": "auto", "host": None, "disk": None, "states": "gpu"}
    for option in options:
        name, _, value = option.partition("=")
        setting[name] = value if name == "states" else float(value) if "." in value else int(value)
    return setting


def strategy_for(setting: dict[str, Any], path: Path) -> SSDOffloadStrategy:
    """Returns the strategy of a setting."""
    host: Any = "auto" if setting["host"] is None else f"{setting['host']}GiB"
    tiers, states = setting["tiers"], setting["states"]
    how: dict[str, Any] = {"states": states}
    if states == "host":
        how["gpu_memory"] = "4GiB"
    if tiers == "host":
        return SSDOffloadStrategy(path, tier="host", host_memory=host, **how)
    if setting["disk"] is not None:
        how["backend"] = ThrottledBackend(1e9 * setting["disk"])
    return SSDOffloadStrategy(path, host_memory=0 if tiers == "ssd" else host, **how)


def measure(text: str, path: Path, machine: HardwareProfile, steps: int) -> dict[str, Any]:
    """Runs one setting."""
    setting = parse(text)
    if setting["disk"] is not None:
        machine = replace(machine, **dict.fromkeys(("ssd_read", "ssd_write", "ssd_mixed"), 1e9 * setting["disk"]))
    machine.to_json(path / "machine.json")
    kind = BenchmarkGPT if setting["states"] == "gpu" else AdamGPT
    model = kind(50304, 1024, setting["hidden"], setting["layers"], max(1, setting["hidden"] // 128))
    budget = setting["gpu"] if setting["gpu"] == "auto" else f"{setting['gpu']}GiB"
    planner = SwapPlanner(gpu_memory=budget, machine=path / "machine.json")
    sweep = Sweep(planner, COEFFICIENTS, steps)
    count = 20 + (len(COEFFICIENTS) + 4) * (steps + 4)  # more than there is to measure, which ends the training
    trainer = quiet_trainer("bf16-true", strategy_for(setting, path), count, [planner, sweep], path)
    trainer.fit(model, DataLoader(RandomTokens(setting["batch"] * count), batch_size=setting["batch"]))
    assert planner.cycle is not None and planner.cycle.runner is not None
    runner = planner.cycle.runner
    runner.profile.to_json(path / "profile.json")
    runner.hardware.to_json(path / "machine.json")
    return {
        "plans": sweep.results,
        "placement": asdict(runner.placement),
        "profile": json.loads((path / "profile.json").read_text()),
        "machine": json.loads((path / "machine.json").read_text()),
    }


def report(results: dict[str, Any]) -> str:
    """Returns the results as a Markdown table."""
    lines = [
        "| setting | plan | step, s | predicted | error | peak, GiB | predicted | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        for row in result["plans"]:
            error = 100 * (row["predicted_step"] / row["step"] - 1)
            peak, predicted = row["peak"] / 2**30, row["predicted_peak"] / 2**30
            of_peak = f"{100 * (predicted / peak - 1):+.1f} %" if peak else ""
            lines.append(
                f"| {name} | {row['plan']} (swaps {row['coefficient']:.2f}) | {row['step']:.3f} | "
                f"{row['predicted_step']:.3f} | {error:+.1f} % | {peak:.1f} | {predicted:.1f} | {of_peak} |"
            )
    lines += ["", "| setting | planned, s | best of the sweep | planned / best |", "|---|---|---|---|"]
    for name, result in results.items():
        planned, swept = _split(result)
        if swept:
            best = min(swept, key=lambda row: row["step"])
            lines.append(
                f"| {name} | {planned['step']:.3f} | {best['step']:.3f} at {best['plan']} | "
                f"{planned['step'] / best['step']:.3f} |"
            )
    rows = [row for result in results.values() for row in result["plans"]]
    errors = [abs(row["predicted_step"] / row["step"] - 1) for row in rows]
    lines += ["", f"error of the step: median {100 * statistics.median(errors):.1f} %, most {100 * max(errors):.1f} %"]
    return "\n".join(lines)


def _split(result: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the planner's last plan, with the mean of its steps before and after, and those of the coefficients."""
    planned = [row for row in result["plans"] if row["plan"] == "planned"]
    swept = [row for row in result["plans"] if row["plan"] not in ("planned", "first plan")]
    return planned[0] | {"step": statistics.mean(row["step"] for row in planned)}, swept


def plot(results: dict[str, Any], picture: Path) -> None:
    """Draws, for each setting, the step over the swap coefficient: measured, simulated, and the planner's (a star)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = 4
    rows = -(-len(results) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(3.2 * columns, 2.6 * rows), squeeze=False)
    for axes in grid.flat[len(results) :]:
        axes.axis("off")
    for axes, (name, result) in zip(grid.flat, results.items(), strict=False):
        planned, swept = _split(result)
        swept.sort(key=lambda row: row["coefficient"])
        model, machine = _profiles(result)
        given = result["placement"]
        placement = FixedPlacement(
            tuple(given["weights"]), tuple(given["states"]), given["staging_bytes"], given["host_limit"]
        )
        fine = [step / 20 for step in range(21)]
        curve = [
            simulate(model, machine, plan_with_coefficient(model, machine, share, placement)).step_seconds
            for share in fine
        ]
        axes.plot(fine, curve, color="tab:gray", label="simulated")
        axes.plot([row["coefficient"] for row in swept], [row["step"] for row in swept], "o", label="measured")
        axes.plot(planned["coefficient"], planned["step"], "*", color="tab:red", markersize=13, label="planned")
        axes.set_title(name, fontsize=8)
        axes.set_ylim(bottom=0)
    grid[0][0].legend(fontsize=8)
    figure.supxlabel("swap coefficient", fontsize=9)
    figure.supylabel("step, s", fontsize=9)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def _profiles(result: dict[str, Any]) -> tuple[ModelProfile, HardwareProfile]:
    with tempfile.TemporaryDirectory() as folder:
        model, machine = Path(folder) / "model.json", Path(folder) / "machine.json"
        model.write_text(json.dumps(result["profile"]))
        machine.write_text(json.dumps(result["machine"]))
        return ModelProfile.from_json(model), HardwareProfile.from_json(machine)


def main() -> None:
    """Measures, or reports earlier measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=SETTINGS, help="see above")
    parser.add_argument("--steps", type=int, default=6, help="whose median counts")
    parser.add_argument("--path", help="where scratch files go (default: the system's temporary directory)")
    parser.add_argument("--out", default="planner.json", help="JSON file of the results")
    parser.add_argument("--report", action="store_true", help="print the tables of earlier results, and run nothing")
    parser.add_argument("--plot", metavar="PNG", type=Path, help="draw the results")
    arguments = parser.parse_args()
    out = Path(arguments.out)
    results: dict[str, Any] = json.loads(out.read_text()) if arguments.report else {}
    if not arguments.report:
        path = Path(tempfile.mkdtemp(dir=arguments.path))
        machine = measure_machine(path)
        print(machine.describe(), flush=True)
        for text in arguments.settings:
            print(text, flush=True)
            try:
                results[text] = measure(text, path, machine, arguments.steps)
            except (torch.cuda.OutOfMemoryError, ValueError) as error:
                print(f"    {error}".splitlines()[0], flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            out.write_text(json.dumps(results))
    print(report(results))
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
