"""The defaults on one GPU: step time and memory of a model by `ssd_offload`, plain Lightning, and recomputation.

    python -m benchmarks.default --out results.json [--model gpt] [--modes plain ours] [--profile trace.json.gz]
    python -m benchmarks.default --gpu 24 --modes plain-eager recompute-eager ours-eager    # a GPU of 24 GiB
    python -m benchmarks.default --batch 1 --tokens 32768 --modes recompute-eager ours-eager
    python -m benchmarks.default --report llama.json gpt.json ... --draw default.png    # of earlier results

Modes, each a training in a process of its own with the same weights and data, in turn, `--rounds` times:
  plain        Lightning's own strategy, every layer compiled
  plain=0.5    the same with that `activation_memory_budget` of torch's partitioner
  recompute    Lightning's own strategy with gradient checkpointing of every layer, each layer compiled
  ours         `ssd_offload` with its defaults, every layer compiled
  ours-ssdtrain    the same with `offload="ssdtrain"`
  ours-none    the same with `offload="none"`: the overhead of the strategy by itself
  ours=0.5     the same with a fixed share of the saved bytes offloaded
  planned      `ssd_offload` with `SwapPlanner()`, which refuses compiled layers: with `-eager` only
  plain-eager, ours-eager, ...   the same with nothing compiled

A Llama has hidden size 2048, 16 layers, grouped-query attention (0.85B parameters); batches of 8 x 1024 tokens; the
sizes of the other models are in `benchmarks/default_models.py`. AdamW, clipping at 1.0, bf16-mixed. Steps are measured
after `--warm-up` steps at least, once the decision of `offload="auto"` is in force, which is printed. Step time: from
one `on_train_batch_start` to the next on the GPU's clock; medians over steps, then over rounds, with the rounds' range.
Peak: the most that was allocated in the measured steps. Without a GPU, steps are timed, and nothing runs out of memory.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.activation_offload import quiet_trainer
from benchmarks.default_models import FAMILIES, Model, RandomSamples
from benchmarks.processes import cap_gpu_memory, run_alone
from lightning_ssd import SSDOffloadStrategy, SwapPlanner
from lightning_ssd._lightning import pl
from lightning_ssd.autoplan import PlanCycle
from lightning_ssd.callbacks import AutoPlanner
from lightning_ssd.callbacks.find import find_offloader
from lightning_ssd.device import allocator_memory, make_clock

MODES = ("plain-eager", "plain", "ours-eager", "ours")
SIZES = ("hidden", "layers", "batch", "tokens")
"""Options that a model has a default for."""

PROFILED = 3
"""Steps after the measured ones, which a trace has."""

MOST_WARM_UP = 200
"""Steps after which steps are measured even if no decision is in force."""


class Probe(pl.Callback):
    """Measures `steps` steps once the decision of `offload="auto"` is in force, and profiles the following ones.

    Args:
        warm_up: steps before the measured ones, at least.
        steps: measured steps.
        trace: file for the trace of the profiled steps.
    """

    def __init__(self, warm_up: int, steps: int, trace: Path | None) -> None:
        self._warm_up = warm_up
        self._steps = steps
        self._begin: int | None = None
        self._trace = trace
        self._marks: list[Any] = []
        self._before: dict[str, float] = {}
        self._profiler: Any = None
        self._loss = float("nan")
        self.result: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._clock = make_clock(pl_module.device)
        self._memory = allocator_memory(pl_module.device)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._begin is None and batch_idx >= self._warm_up and in_force(trainer, batch_idx):
            self._begin = batch_idx
            _synchronize()
            if self._memory is not None:
                self._memory.reset_peak()
            self._before = _totals(trainer)
        if self._begin is None:
            return
        if len(self._marks) <= self._steps:
            self._marks.append(self._clock.now())
        if batch_idx == self._begin + self._steps:
            _synchronize()
            pairs = zip(self._marks, self._marks[1:], strict=False)
            steps = [self._clock.elapsed(begin, end) or 0.0 for begin, end in pairs]
            self.result = {name: (total - self._before[name]) / len(steps) for name, total in _totals(trainer).items()}
            peak = 0 if self._memory is None else self._memory.peak()
            self.result |= {"step": statistics.median(steps), "peak": peak}
            self.result |= {"outcome": _outcome(trainer), "warm_up": self._begin, "loss": self._loss}
            if self._trace is not None:
                self._profiler = torch.profiler.profile()
                self._profiler.start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._warm_up - 1:  # the same batch in every mode
            self._loss = outputs["loss"].item()
        if self._begin is not None and batch_idx == self._begin + self._steps + PROFILED - 1:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        _synchronize()
        if self._profiler is not None:
            self._profiler.stop()
            assert self._trace is not None
            self._profiler.export_chrome_trace(str(self._trace))
            table = self._profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25)
            print(table, file=sys.stderr)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def find_planners(trainer: Any) -> tuple[AutoPlanner | None, PlanCycle | None]:
    """Returns the callback that decides by default, and the plan of operators, if there are any."""
    auto = next((one for one in trainer.callbacks if isinstance(one, AutoPlanner)), None)
    swaps = next((one for one in trainer.callbacks if isinstance(one, SwapPlanner)), None)
    if swaps is not None:
        return auto, swaps.cycle
    return auto, None if auto is None else auto.planner


def in_force(trainer: Any, batch_idx: int) -> bool:
    """Returns whether there is a decision, and a plan is in force if the decision is a plan."""
    auto, planner = find_planners(trainer)
    if batch_idx >= MOST_WARM_UP:
        return True
    if planner is not None:
        return not planner.measuring
    return auto is None or find_offloader(trainer) is None or not auto.decides or auto.outcome != "measuring"


def _outcome(trainer: Any) -> str:
    auto, planner = find_planners(trainer)
    if planner is not None:
        return "plan"
    return auto.outcome if auto is not None and auto.decides else "fixed"


def _totals(trainer: Any) -> dict[str, float]:
    """Returns totals since the start: offloaded bytes, stalls, frames of Dynamo, and allocations that freed the cache.

    An allocation that finds no segment frees all cached ones, which synchronizes the device, and tries again.
    """
    frames = torch._dynamo.utils.counters["frames"]
    totals = {"frames": frames["total"], "frames_ok": frames["ok"]}
    totals["alloc_retries"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    if (offloader := find_offloader(trainer)) is not None:
        stats = offloader.stats()
        for name in ("saved", "stored", "forwarded", "loaded", "store_stall", "load_stall"):
            totals[name] = getattr(stats, name)
        totals["sending_seconds"] = offloader.offload_seconds
    return totals


def strategy_for(mode: str) -> Any:
    """Returns the strategy of a mode."""
    name, _, share = mode.partition("=")
    if name.startswith(("plain", "recompute")):
        return "auto"
    if name.startswith(("ours-none", "ours-ssdtrain")):
        return SSDOffloadStrategy(offload=name.split("-")[1])
    return SSDOffloadStrategy(offload=float(share)) if share else "ssd_offload"


def fit(arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains the first mode, and returns the measurements, or `error` where the GPU's memory did not suffice."""
    torch.manual_seed(0)
    mode = arguments.modes[0]
    name, _, value = mode.partition("=")
    torch._functorch.config.activation_memory_budget = float(value) if value and name.startswith("plain") else 1.0
    probe = Probe(arguments.warm_up, arguments.steps, arguments.profile)
    total = max(arguments.warm_up, MOST_WARM_UP) + arguments.steps + PROFILED + 1
    callbacks = [probe, SwapPlanner()] if name.startswith("planned") else [probe]
    with tempfile.TemporaryDirectory() as path:
        trainer = quiet_trainer("bf16-mixed", strategy_for(mode), total, callbacks, path)
        trainer.gradient_clip_val = 1.0
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = Model(
                arguments.model,
                arguments.hidden,
                arguments.layers,
                arguments.tokens,
                compiled="eager" not in mode,
                recompute=name.startswith("recompute"),
            )
        data = RandomSamples(arguments.model, arguments.batch * total, arguments.tokens)
        try:
            trainer.fit(model, DataLoader(data, batch_size=arguments.batch))
        except torch.OutOfMemoryError:
            probe.result = {"error": "out of memory"}
    probe.result["memory_budget"] = torch._functorch.config.activation_memory_budget
    counters = torch._dynamo.utils.counters
    probe.result["graph_breaks"] = sum(counters["graph_break"].values())
    probe.result["graphs"] = counters["stats"]["unique_graphs"]
    return probe.result


def summarise(runs: list[Mapping[str, Any]], anchor: float | None) -> str:
    """Returns a row of the table."""
    for run in runs:
        if "error" in run:
            return f"{run['error']} | | | | | | | | "
    steps = [run["step"] for run in runs]
    step = statistics.median(steps)
    against = "" if anchor is None else f"{step / anchor:.3f}"
    return (
        f"{step:.4f} s ({min(steps):.4f} to {max(steps):.4f}) | {against} | "
        f"{statistics.median(run['peak'] for run in runs) / 2**30:.1f} GiB | "
        f"{runs[-1].get('stored', 0) / 2**30:.2f} of {runs[-1].get('saved', 0) / 2**30:.2f} GiB | "
        f"{1e3 * runs[-1].get('store_stall', 0):.1f} + {1e3 * runs[-1].get('load_stall', 0):.1f} ms | "
        f"{1e3 * runs[-1].get('sending_seconds', 0):.1f} ms | {runs[-1]['graphs']} / {runs[-1]['graph_breaks']} | "
        f"{', '.join(sorted({run['outcome'] for run in runs}))} after {runs[-1]['warm_up']} steps | "
        f"{runs[-1]['alloc_retries']:.1f}"
    )


def table(runs: Mapping[str, list[dict[str, Any]]]) -> str:
    """Returns the results of a model as a Markdown table, each mode beside plain Lightning, compiled or eager as it."""
    anchors = {
        mode: statistics.median(run["step"] for run in of_mode)
        for mode, of_mode in runs.items()
        if not any("error" in run for run in of_mode)
    }
    lines = [
        "| mode | step (rounds) | of plain | peak | offloaded a step | stalls | host | graphs / breaks | decision "
        "| retries |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for mode, of_mode in runs.items():
        anchor = anchors.get("plain-eager" if "eager" in mode else "plain")
        lines.append(f"| {mode} | {summarise(of_mode, anchor)} |")
    return "\n".join(lines)


def draw(results: list[dict[str, Any]], figure: Path) -> None:
    """Draws the step over the peak of every mode, a panel for each model: ours filled, and the hull of all others."""
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(result["model"] for result in results))
    _, panels = plt.subplots(1, len(models), figsize=(1 + 4 * len(models), 4), squeeze=False)
    for model, axes in zip(models, panels[0], strict=True):
        others: dict[str, list[tuple[float, float]]] = {"C0": [], "C1": []}
        for result in [one for one in results if one["model"] == model]:
            cap = f", {result['gpu']:.0f} GiB" if result.get("gpu") else ""
            for mode, runs in result["runs"].items():
                if any("error" in run for run in runs):
                    continue
                peak, step = (statistics.median(run[name] for run in runs) for name in ("peak", "step"))
                ours, color = mode.startswith(("ours", "planned")), "C0" if "eager" in mode else "C1"
                if not ours:
                    others[color].append((peak / 2**30, step))
                axes.plot(peak / 2**30, step, "o" if ours else "s", color=color, fillstyle="full" if ours else "none")
                offset, side = ((-6, -9), "right") if ours else ((6, 4), "left")
                place = {"textcoords": "offset points", "xytext": offset, "ha": side, "fontsize": 7}
                axes.annotate(mode + cap, (peak / 2**30, step), **place)
        for color, points in others.items():
            if points:
                axes.plot(*zip(*lower_hull(points), strict=True), ":", color=color)
        axes.set_title(model, fontsize=9)
        axes.set_xlabel("GPU peak, GiB")
        axes.margins(0.25)
    panels[0][0].set_ylabel("step, s")
    plt.tight_layout()
    plt.savefig(figure, dpi=120)


def lower_hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the points on the lower convex hull, in the order of their first coordinate."""
    hull: list[tuple[float, float]] = []
    for x, y in sorted(points):
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return hull


def parse(given: Sequence[str]) -> argparse.Namespace:
    """Returns the arguments of a command line, with the sizes of the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--model", choices=FAMILIES, default="llama", help="family of the model")
    parser.add_argument("--modes", nargs="+", default=MODES, help="see above")
    parser.add_argument("--rounds", type=int, default=3, help="trainings of each mode")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of a training")
    parser.add_argument("--warm-up", type=int, default=20, help="least steps before the measured ones")
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, help="default: that of the model")
    parser.add_argument("--gpu", type=float, help="GiB of the GPU that may be used")
    parser.add_argument("--profile", type=Path, help="write a trace of the last steps of mode `ours` there")
    parser.add_argument("--one", action="store_true", help="train the first mode in this process, and print the result")
    parser.add_argument("--report", nargs="+", type=Path, help="files of earlier results; measures nothing")
    parser.add_argument("--draw", type=Path, metavar="PNG", help="draw the results")
    arguments = parser.parse_args(given)
    for name in SIZES:
        if getattr(arguments, name) is None:
            setattr(arguments, name, getattr(FAMILIES[arguments.model], name))
    return arguments


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains every mode in turn, each in a process of its own, and returns all runs."""
    shape = {name: getattr(arguments, name) for name in ("model", *SIZES, "gpu")}
    given = shape | {"steps": arguments.steps, "warm-up": arguments.warm_up}
    options = [f"--{name}={value}" for name, value in given.items() if value is not None]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.default", "--one", *options]
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in arguments.modes}
    for number in range(arguments.rounds):
        for mode in arguments.modes:
            traced = arguments.profile is not None and mode == "ours" and number == 0
            profile = [f"--profile={arguments.profile}"] if traced else []
            runs[mode].append(run_alone([*command, *profile, "--modes", mode]))
            print(mode, json.dumps(runs[mode][-1]), flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": device, "torch": torch.__version__, **shape, "runs": runs}


def main() -> None:
    """Measures a model, prints its table, and writes every run to `--out`; or reports earlier results."""
    arguments = parse(sys.argv[1:])
    if arguments.one:
        if arguments.gpu:
            cap_gpu_memory(arguments.gpu)
        print(json.dumps(fit(arguments)))
        return
    if arguments.report:
        results = [json.loads(path.read_text()) for path in arguments.report]
    else:
        results = [measure(arguments)]
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(results[0], indent=1))
    for result in results:
        print(f"\n{result['model']}, {result['device']}\n\n{table(result['runs'])}")
    if arguments.draw is not None:
        draw(results, arguments.draw)


if __name__ == "__main__":
    main()
