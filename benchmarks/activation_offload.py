"""Activation offload on one GPU: step time and activation memory of GPT, BERT and T5, kept, recomputed, and offloaded.

    python -m benchmarks.activation_offload --out results.json [--shapes 8192x4] [--modes keep host] [--rounds 3]
    python -m benchmarks.activation_offload --models gpt bert t5 --out results.json --plot figure.png
    python -m benchmarks.activation_offload --report results.json [--plot figure.png]

Modes, each a `Trainer.fit` on the same weights, one after the other, `--rounds` times:
  keep       Lightning's own strategy, all activations are kept on the GPU
  recompute  the same with activation checkpointing of every block
  host       `cpu_offload` with `offload="ssdtrain"`: to pinned memory, as many bytes as the link transfers
  ssd        `ssd_offload` with no host tier, `offload="ssdtrain"`: to the SSD alone, as many bytes as it writes
  offload    `ssd_offload` with `offload="ssdtrain"`: host memory first, then SSD
  slow-ssd   `ssd` with the drive throttled to a tenth of its measured speed
  host=1.0, ssd=0.5, ...   a fixed share of the bytes: the time that saved memory costs if nothing adapts
  planned    `cpu_offload` with `SwapPlanner(gpu_memory="least")`; planned=30 is `gpu_memory="30GiB"`, planned=auto that

A shape is HIDDENxLAYERS, or HIDDENxLAYERSxBATCH: batch 16 by default. With `--models`, the shapes and modes are those
of SSDTrain's figure 6, unless others are given.

Weights, gradients and optimizer states stay on the GPU in all modes.

As in SSDTrain's figure 6: batch 16, 1024 tokens, 16-bit weights, SGD; half of a T5's layers are decoders, rounded down.
A T5 has 1024 tokens in its encoder and, as span corruption makes them, 229 in its decoder. Activation peak: the most
that was allocated in the measured steps, less weights and gradients. Step time: from one `on_train_batch_start` to the
next, on the GPU's clock; medians over steps, then over rounds; the spread is over rounds.

Steps before the measured ones, unless `--warm-up` sets them for all modes: 30 of `planned`, which is profiled first;
20 where the package adapts the offloaded share (`host`, `ssd`, `offload`, `slow-ssd`); 4 of the other modes,
which adapt nothing. A fit without offloading precedes the rounds of a shape: a GPU slows down as it gets warm.
"""

import argparse
import gc
import itertools
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.throttled_backend import ThrottledBackend
from lightning_ssd import SSDOffloadStrategy, SwapPlanner
from lightning_ssd._lightning import pl
from lightning_ssd.callbacks.find import find_offloader
from lightning_ssd.recipes.data.span_corruption import span_lengths
from lightning_ssd.recipes.models import BERT, GPT, T5, RecipeModule

BATCH, TOKENS, VOCABULARY = 16, 1024, 50304
SHAPES = ("4096x16", "8192x4", "12288x3", "16384x2")
MODES = ("keep", "recompute", "host", "ssd", "offload", "slow-ssd")
FIGURE_SHAPES = ("8192x4", "12288x3", "16384x2")
FIGURE_MODES = ("keep", "recompute", "offload", "planned")
WARM_UP = {"planned": 30, "host": 20, "ssd": 20, "offload": 20, "slow-ssd": 20}
"""Steps before the measured ones of modes that adapt to the machine."""
WARM_UP_FIXED = 4
"""Steps before the measured ones of the other modes."""


class Benchmarked(RecipeModule):
    """A model with SGD, whose gradients are the only state."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def cpu(self) -> "Benchmarked":
        return self  # Lightning moves a trained module to the CPU; here the next fit goes on with it

    def recompute(self, on: bool) -> None:
        """Switches activation checkpointing of the blocks."""
        assert self.model is not None
        model: Any = self.model
        if on:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()


class BenchmarkGPT(Benchmarked, GPT):
    """GPT of `activation_offload`."""


class BenchmarkBERT(Benchmarked, BERT):
    """BERT of `activation_offload`."""


class BenchmarkT5(Benchmarked, T5):
    """T5 of `activation_offload`."""


def make_model(model: str, hidden: int, layers: int) -> Benchmarked:
    """Returns a model of `--models`, with heads of 128 as in SSDTrain."""
    heads = hidden // 128
    if model == "gpt":
        return BenchmarkGPT(VOCABULARY, TOKENS, hidden, layers, heads)
    if model == "bert":
        return BenchmarkBERT(VOCABULARY, TOKENS, hidden, layers, heads)
    return BenchmarkT5(VOCABULARY, hidden, 128, 4 * hidden, layers - layers // 2, layers // 2, heads)


def parse_shape(shape: str) -> tuple[int, int, int]:
    """Returns width, layers and samples of a batch of a shape, which may stand behind the name of a model."""
    hidden, layers, batch = [*map(int, shape.rpartition(" ")[2].split("x")), BATCH][:3]
    return hidden, layers, batch


class RandomTokens(Dataset[torch.Tensor]):
    """Blocks of random token ids."""

    def __init__(self, blocks: int, tokens: int = TOKENS, vocabulary: int = VOCABULARY) -> None:
        self.ids = torch.randint(0, vocabulary, (blocks, tokens), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.ids[index]


class RandomSamples(RandomTokens):
    """Random token ids with labels: of 15 % of the tokens for a BERT, of the decoder for a T5."""

    def __init__(self, blocks: int, model: str) -> None:
        super().__init__(blocks)
        generator = torch.Generator().manual_seed(1)
        labels = TOKENS if model == "bert" else span_lengths(TOKENS, 0.15, 3.0).targets
        self.labels = torch.randint(0, VOCABULARY, (blocks, labels), generator=generator)
        if model == "bert":
            self.labels[torch.rand(self.labels.shape, generator=generator) > 0.15] = -100

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class Probe(pl.Callback):
    """Measures the steps after the first `warm_up`."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.events: list[torch.cuda.Event] = []
        self.before: dict[str, float] = {}
        self.result: dict[str, float] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.warm_up:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = self._totals(trainer)
        if batch_idx >= self.warm_up:
            self.events.append(torch.cuda.Event(enable_timing=True))
            self.events[-1].record()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        torch.cuda.synchronize()
        steps = [a.elapsed_time(b) / 1e3 for a, b in zip(self.events, self.events[1:], strict=False)]
        count = len(self.events)
        states = 2 * sum(p.numel() * p.element_size() for p in pl_module.parameters())
        after = self._totals(trainer)
        self.result = {name: (after[name] - self.before[name]) / count for name in after}
        self.result["step"] = statistics.median(steps)
        self.result["peak"] = torch.cuda.max_memory_allocated() - states
        self.result["states"] = states
        self.result["loss"] = float(trainer.callback_metrics["train/loss"])
        if (offloader := find_offloader(trainer)) is not None:
            self.result["window"] = offloader.policy.window_bytes

    @staticmethod
    def _totals(trainer: Any) -> dict[str, float]:
        offloader = find_offloader(trainer)
        if offloader is None:
            return {}
        stats = offloader.stats()
        totals = {"saved": stats.saved, "stored": stats.stored, "store_stall": stats.store_stall}
        totals["load_stall"] = stats.load_stall
        totals |= {f"{name}_out": tier.bytes_out for name, tier in offloader.tiers.items()}
        return totals


def strategy_for(mode: str, path: Path, ssd_speed: float) -> Any:
    """Returns the strategy of a mode; `ssd_speed`: measured write bandwidth of the drive, bytes/s."""
    mode, _, share = mode.partition("=")
    offload: Any = float(share) if share and mode != "planned" else "ssdtrain"
    match mode:
        case "keep" | "recompute":
            return "auto"
        case "host":
            return SSDOffloadStrategy(tier="host", offload=offload, states="gpu")
        case "planned":
            return SSDOffloadStrategy(tier="host", states="gpu")
        case "ssd":
            return SSDOffloadStrategy(path, host_memory=0, offload=offload, states="gpu")
        case "offload":
            return SSDOffloadStrategy(path, offload=offload, states="gpu")
        case "slow-ssd":
            backend = ThrottledBackend(ssd_speed / 10)
            return SSDOffloadStrategy(path, host_memory=0, offload=offload, states="gpu", backend=backend)
    raise SystemExit(f"unknown mode {mode!r}; modes are {', '.join(MODES)}")


def warm_up_steps(mode: str) -> int:
    """Returns the steps of a mode before the measured ones: `host=0.5`, unlike `host`, adapts nothing."""
    name, _, share = mode.partition("=")
    return WARM_UP_FIXED if share and name != "planned" else WARM_UP.get(name, WARM_UP_FIXED)


def quiet_trainer(
    precision: Any, strategy: Any, max_steps: int, callbacks: Sequence[pl.Callback], path: str | Path
) -> pl.Trainer:
    """Returns a Trainer on one GPU, if there is one, that does nothing beside training and `callbacks`."""
    return pl.Trainer(
        accelerator="auto",
        devices=1,
        precision=precision,
        strategy=strategy,
        max_steps=max_steps,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=path,
    )


def fit(
    model: Benchmarked, batch: int, mode: str, path: Path, ssd_speed: float, steps: int, warm_up: int
) -> dict[str, float]:
    """Trains `model` for `warm_up + steps` steps and returns the measurements."""
    if model.model is not None:
        model.recompute(mode == "recompute")
    probe = Probe(warm_up)
    callbacks: list[pl.Callback] = [probe]
    if mode.startswith("planned"):
        budget = mode.partition("=")[2] or "least"
        planner = SwapPlanner(gpu_memory=f"{budget}GiB" if budget.isdigit() else budget)
        callbacks.append(planner)
    trainer = quiet_trainer("bf16-true", strategy_for(mode, path, ssd_speed), warm_up + steps, callbacks, path)
    blocks = batch * (warm_up + steps)
    kind = "gpt" if isinstance(model, GPT) else "bert" if isinstance(model, BERT) else "t5"
    samples = RandomTokens(blocks) if kind == "gpt" else RandomSamples(blocks, kind)
    trainer.fit(model, DataLoader(samples, batch_size=batch))
    if mode.startswith("planned") and planner.cycle is not None and planner.cycle.prediction is not None:
        probe.result["predicted_step"] = planner.cycle.prediction.step_seconds
        probe.result["predicted_peak"] = planner.cycle.prediction.gpu_peak_bytes
    for parameter in model.parameters():
        parameter.grad = None
    gc.collect()
    torch.cuda.empty_cache()
    return probe.result


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs every mode on every shape."""
    from lightning_ssd.storage import BlobStore

    path = Path(tempfile.mkdtemp(dir=arguments.path))
    store = BlobStore([path], device=torch.device("cpu"))
    ssd_speed = store.write_bandwidth
    store.close()
    results: dict[str, Any] = {
        "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        "ssd_write": ssd_speed,
        "link_out": link_speed(),
        "shapes": {},
    }
    for kind, shape in itertools.product(arguments.models, arguments.shapes):
        hidden, layers, batch = parse_shape(shape)
        model = make_model(kind, hidden, layers)
        name = shape if kind == "gpt" else f"{kind} {shape}"
        fit(model, batch, "keep", path, ssd_speed, 2, 2)
        runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in arguments.modes}
        for _ in range(arguments.rounds):
            for mode in arguments.modes:
                warm_up = warm_up_steps(mode) if arguments.warm_up is None else arguments.warm_up
                runs[mode].append(fit(model, batch, mode, path, ssd_speed, arguments.steps, warm_up))
                print(name, mode, {k: float(f"{v:.5g}") for k, v in runs[mode][-1].items()}, flush=True)
        results["shapes"][name] = runs
        Path(arguments.out).write_text(json.dumps(results, indent=1))
        del model
        gc.collect()
        torch.cuda.empty_cache()
    path.rmdir()
    return results


def link_speed() -> float:
    """Returns bytes/s of a large copy from the GPU to pinned memory."""
    device = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    host.copy_(device, non_blocking=True)
    start.record()
    for _ in range(8):
        host.copy_(device, non_blocking=True)
    end.record()
    end.synchronize()
    return 8 * 2**28 / (start.elapsed_time(end) / 1e3)


def report(results: dict[str, Any]) -> str:
    """Returns the results as a Markdown table."""
    lines = [
        f"{results['machine']}; SSD writes {results['ssd_write'] / 1e9:.1f} GB/s, "
        f"copies out {results['link_out'] / 1e9:.1f} GB/s",
        "",
        "| shape | mode | step, s | of keep | activation peak, GiB | of keep | GB out a step | stall, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for shape, runs in results["shapes"].items():
        keep = runs.get("keep") or next(iter(runs.values()))
        for mode, rounds in runs.items():
            step = [run["step"] for run in rounds]
            ratio = [run["step"] / base["step"] for run, base in zip(rounds, keep, strict=True)]
            peak = statistics.median(run["peak"] for run in rounds)
            base_peak = statistics.median(run["peak"] for run in keep)
            out = statistics.median(run.get("stored", 0.0) for run in rounds) / 1e9
            stall = statistics.median(run.get("store_stall", 0) + run.get("load_stall", 0) for run in rounds)
            lines.append(
                f"| {shape} | {mode} | {statistics.median(step):.3f} | {100 * (statistics.median(ratio) - 1):+.1f} % "
                f"({100 * (min(ratio) - 1):+.1f} to {100 * (max(ratio) - 1):+.1f}) | {peak / 2**30:.1f} | "
                f"{100 * (peak / base_peak - 1):+.0f} % | {out:.1f} | {1e3 * stall:.1f} |"
            )
    return "\n".join(lines)


def plot(results: dict[str, Any], figure: str) -> None:
    """Draws step time and activation peak of every mode beside each other."""
    import matplotlib.pyplot as plt

    shapes = results["shapes"]
    modes = [mode for mode in dict.fromkeys((*MODES, *FIGURE_MODES)) if all(mode in runs for runs in shapes.values())]
    _, (above, below) = plt.subplots(2, 1, figsize=(9, 7), sharex=True)
    for index, mode in enumerate(modes):
        at = [position + (index - len(modes) / 2 + 0.5) * 0.8 / len(modes) for position in range(len(shapes))]
        for axes, key, unit in ((above, "step", 1.0), (below, "peak", 2.0**30)):
            heights = [statistics.median(run[key] for run in runs[mode]) / unit for runs in shapes.values()]
            axes.bar(at, heights, 0.8 / len(modes), label=mode)
    above.set_ylabel("step, s")
    below.set_ylabel("activation peak, GiB")
    below.set_xticks(range(len(shapes)), [_label(shape) for shape in shapes], fontsize=7)
    above.legend(ncols=len(modes), fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    below.set_title(f"batch {BATCH} x {TOKENS} tokens, {results['machine']}", fontsize=9)
    plt.tight_layout()
    plt.savefig(figure, dpi=120)


def _label(shape: str) -> str:
    model, _, sizes = shape.rpartition(" ")
    return f"{(model or 'gpt').upper()}\nh{sizes.replace('x', ' l')}"


def plot_curve(results: dict[str, Any], figure: str) -> None:
    """Draws throughput over activation peak, a line for each mode over its batch sizes, as SSDTrain's figure 7."""
    import matplotlib.pyplot as plt

    points: dict[str, list[tuple[float, float, int]]] = {}
    for shape, runs in results["shapes"].items():
        batch = parse_shape(shape)[2]
        for mode, rounds in runs.items():
            peak = statistics.median(run["peak"] for run in rounds) / 2**30
            step = statistics.median(run["step"] for run in rounds)
            points.setdefault(mode, []).append((peak, batch / step, batch))
    _, axes = plt.subplots(figsize=(7, 4.5))
    for mode, line in points.items():
        line.sort(key=lambda point: point[2])
        axes.plot([peak for peak, _, _ in line], [speed for _, speed, _ in line], "o-", label=mode)
        for peak, speed, batch in line:
            axes.annotate(f"b{batch}", (peak, speed), textcoords="offset points", xytext=(4, 4), fontsize=7)
    axes.set_xlabel("activation peak, GiB")
    axes.set_ylabel("samples a second")
    axes.legend()
    axes.set_title(f"GPT, {TOKENS} tokens a sample, {results['machine']}", fontsize=9)
    plt.tight_layout()
    plt.savefig(figure, dpi=120)


def main() -> None:
    """Measures, or reports earlier measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["gpt", "bert", "t5"], help="SSDTrain's figure 6 for these")
    parser.add_argument("--shapes", nargs="+", help="HIDDENxLAYERS[xBATCH]")
    parser.add_argument("--modes", nargs="+", help="see above")
    parser.add_argument("--rounds", type=int, default=2, help="fits of each mode")
    parser.add_argument("--steps", type=int, default=6, help="measured steps of a fit")
    parser.add_argument("--warm-up", type=int, help="steps before the measured ones, of every mode")
    parser.add_argument("--path", help="where scratch files go (default: the system's temporary directory)")
    parser.add_argument("--out", default="activation_offload.json", help="JSON file for the results")
    parser.add_argument("--report", help="print the table of earlier results instead of measuring")
    parser.add_argument("--plot", help="draw the figure")
    parser.add_argument("--curve", help="with --report: draw throughput over memory, of shapes that differ in batch")
    arguments = parser.parse_args()
    arguments.shapes = arguments.shapes or (FIGURE_SHAPES if arguments.models else SHAPES)
    arguments.modes = arguments.modes or (FIGURE_MODES if arguments.models else MODES)
    arguments.models = arguments.models or ["gpt"]
    results = json.loads(Path(arguments.report).read_text()) if arguments.report else measure(arguments)
    print(report(results))
    if arguments.plot:
        plot(results, arguments.plot)
    if arguments.curve:
        plot_curve(results, arguments.curve)


if __name__ == "__main__":
    main()
