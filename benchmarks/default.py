"""The defaults on one GPU: step time and memory of a Llama by `ssd_offload`, plain Lightning, and recomputation.

    python -m benchmarks.default --out results.json [--modes plain ours] [--rounds 3] [--profile trace.json.gz]
    python -m benchmarks.default --gpu 24 --modes plain-eager recompute-eager ours-eager    # a GPU of 24 GiB
    python -m benchmarks.default --batch 1 --tokens 32768 --modes recompute-eager ours-eager

Modes, each a `Trainer.fit` of its own with the same weights and data, in turn, `--rounds` times:
  plain        Lightning's own strategy, every layer compiled
  plain=0.5    the same with that `activation_memory_budget` of torch's partitioner
  recompute    Lightning's own strategy with gradient checkpointing of every layer, each layer compiled
  ours         `ssd_offload` with its defaults, every layer compiled
  ours-ssdtrain    the same with `offload="ssdtrain"`
  ours-none    the same with `offload="none"`: the overhead of the strategy by itself
  ours=0.5     the same with a fixed share of the saved bytes offloaded
  planned      `ssd_offload` with `SwapPlanner()`, which refuses compiled layers: with `-eager` only
  plain-eager, ours-eager, ...   the same with nothing compiled

The model has hidden size 2048, 16 layers, grouped-query attention (0.85B parameters); batches of 8 x 1024 tokens,
AdamW, clipping at 1.0, bf16-mixed. Steps are measured after `--warm-up` steps at least, once the decision of
`offload="auto"` is in force, which is printed. Step time: from one `on_train_batch_start` to the next on the GPU's
clock; medians over steps, then over rounds, with the rounds' range. Peak: the most that was allocated in the measured
steps.
"""

import argparse
import gc
import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.activation_offload import RandomTokens, quiet_trainer
from benchmarks.processes import cap_gpu_memory
from lightning_ssd import SSDOffloadStrategy, SwapPlanner
from lightning_ssd._lightning import pl
from lightning_ssd.callbacks import AutoPlanner
from lightning_ssd.callbacks.offloader import find_offloader

MODES = ("plain-eager", "plain", "ours-eager", "ours")
VOCABULARY = 32000


class Llama(pl.LightningModule):
    """A Llama that is trained on random tokens.

    Args:
        compiled: compile every layer.
        recompute: checkpoint every layer.
        hidden: size of the hidden dimension.
        layers: count of decoder layers.
        tokens: of a sample.
    """

    def __init__(self, *, compiled: bool, recompute: bool, hidden: int, layers: int, tokens: int) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4 // 64 * 64,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=max(1, hidden // 256),
            max_position_embeddings=tokens,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)
        if recompute:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        if compiled:
            for layer in self.model.model.layers:
                layer.compile()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


PROFILED = 3
"""Steps after the measured ones, which a trace has."""

MOST_WARM_UP = 100
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
        self._events: list[torch.cuda.Event] = []
        self._before: dict[str, float] = {}
        self._profiler: Any = None
        self._loss = float("nan")
        self.result: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._begin is None and batch_idx >= self._warm_up and in_force(trainer, batch_idx):
            self._begin = batch_idx
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = _totals(trainer)
        if self._begin is None:
            return
        if len(self._events) <= self._steps:
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        if batch_idx == self._begin + self._steps:
            torch.cuda.synchronize()
            steps = [a.elapsed_time(b) / 1e3 for a, b in zip(self._events, self._events[1:], strict=False)]
            self.result = {name: (total - self._before[name]) / len(steps) for name, total in _totals(trainer).items()}
            self.result |= {"step": statistics.median(steps), "peak": torch.cuda.max_memory_allocated()}
            self.result |= {"outcome": _outcome(trainer), "warm_up": self._begin, "loss": self._loss}
            auto, _ = _planners(trainer)
            if auto is not None and auto.regions is not None:
                self.result["memory_budget"] = auto.regions.memory_budget
                self.result["trials"] = [
                    {
                        "memory_budget": trial.memory_budget,
                        "offloaded": None if trial.plan is None else trial.plan.offloaded_bytes,
                        "predicted_stall": None if trial.plan is None else trial.plan.stall_seconds,
                        "window": None if trial.plan is None else trial.plan.window_bytes,
                        "saved": trial.saved_bytes,
                        "step": trial.seconds,
                        "stalled": trial.stalled,
                    }
                    for trial in auto.regions.trials
                ]
            if self._trace is not None:
                self._profiler = torch.profiler.profile()
                self._profiler.start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._warm_up - 1:  # the same batch in every mode
            self._loss = outputs["loss"].item()
        if self._begin is not None and batch_idx == self._begin + self._steps + PROFILED - 1:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        torch.cuda.synchronize()
        if self._profiler is not None:
            self._profiler.stop()
            assert self._trace is not None
            self._profiler.export_chrome_trace(str(self._trace))
            print(self._profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))


def _planners(trainer: Any) -> tuple[AutoPlanner | None, SwapPlanner | None]:
    """Returns the callback that decides by default, and the planner, if there are any."""
    auto = next((one for one in trainer.callbacks if isinstance(one, AutoPlanner)), None)
    return auto, next((one for one in trainer.callbacks if isinstance(one, SwapPlanner)), None)


def in_force(trainer: Any, batch_idx: int) -> bool:
    """Returns whether there is a decision, and a plan was compared with measured steps if the decision is a plan."""
    auto, planner = _planners(trainer)
    if batch_idx >= MOST_WARM_UP:
        return True
    if auto is not None and auto.regions is not None:
        return auto.regions.decided
    if planner is not None:
        return planner.comparison is not None and not planner.measuring and not planner.calibrating
    return auto is None or find_offloader(trainer) is None or not auto.decides or auto.outcome != "measuring"


def _outcome(trainer: Any) -> str:
    auto, planner = _planners(trainer)
    if planner is not None:
        return "plan"
    return auto.outcome if auto is not None and auto.decides else "fixed"


def _totals(trainer: Any) -> dict[str, float]:
    """Returns totals since the start: offloaded bytes, stalls, frames of Dynamo, and allocations that freed the cache.

    An allocation that finds no segment frees all cached ones, which synchronizes the device, and tries again.
    """
    frames = torch._dynamo.utils.counters["frames"]
    totals = {"frames": frames["total"], "frames_ok": frames["ok"]}
    totals["alloc_retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
    if (cache := find_offloader(trainer)) is not None:
        stats = cache.stats()
        for name in ("saved", "stored", "forwarded", "loaded", "store_stall", "load_stall"):
            totals[name] = getattr(stats, name)
        totals["sending_seconds"] = cache.offload_seconds
    return totals


def strategy_for(mode: str) -> Any:
    """Returns the strategy of a mode."""
    name, _, share = mode.partition("=")
    if name.startswith(("plain", "recompute")):
        return "auto"
    if name.startswith(("ours-none", "ours-ssdtrain")):
        return SSDOffloadStrategy(offload=name.split("-")[1])
    return SSDOffloadStrategy(offload=float(share)) if share else "ssd_offload"


def fit(mode: str, arguments: argparse.Namespace, trace: Path | None) -> dict[str, Any]:
    """Trains once and returns the measurements, or `error` where the GPU's memory did not suffice."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    name, _, value = mode.partition("=")
    torch._functorch.config.activation_memory_budget = float(value) if value and name.startswith("plain") else 1.0
    probe = Probe(arguments.warm_up, arguments.steps, trace)
    total = max(arguments.warm_up, MOST_WARM_UP) + arguments.steps + PROFILED + 1
    callbacks = [probe, SwapPlanner(cache=False)] if name.startswith("planned") else [probe]
    with tempfile.TemporaryDirectory() as path:
        trainer = quiet_trainer("bf16-mixed", strategy_for(mode), total, callbacks, path)
        trainer.gradient_clip_val = 1.0
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = Llama(
                compiled="eager" not in mode,
                recompute=name.startswith("recompute"),
                hidden=arguments.hidden,
                layers=arguments.layers,
                tokens=arguments.tokens,
            )
        data = RandomTokens(arguments.batch * total, arguments.tokens, VOCABULARY)
        try:
            trainer.fit(model, DataLoader(data, batch_size=arguments.batch))
        except torch.OutOfMemoryError:
            probe.result = {"error": "out of memory"}
    probe.result.setdefault("memory_budget", torch._functorch.config.activation_memory_budget)
    counters = torch._dynamo.utils.counters
    probe.result["graph_breaks"] = sum(counters["graph_break"].values())
    probe.result["graphs"] = counters["stats"]["unique_graphs"]
    del model, trainer, callbacks
    gc.collect()
    torch.cuda.empty_cache()
    return probe.result


def summarise(runs: list[Mapping[str, Any]], anchor: float | None) -> str:
    """Returns a row of the table."""
    if any("error" in run for run in runs):
        return "out of memory | | | | | | | | "
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


def main() -> None:
    """Measures, prints the table, and writes every run to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--modes", nargs="+", default=MODES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--gpu", type=float, help="GiB of the GPU that may be used")
    parser.add_argument("--profile", type=Path, help="write a trace of the last steps of mode `ours` there")
    arguments = parser.parse_args()
    if arguments.gpu:
        cap_gpu_memory(arguments.gpu)
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in arguments.modes}
    for number in range(arguments.rounds):
        for mode in arguments.modes:
            trace = arguments.profile if mode == "ours" and number == 0 else None
            runs[mode].append(fit(mode, arguments, trace))
            print(mode, json.dumps(runs[mode][-1]), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(
            json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "runs": runs}, indent=1)
        )
    anchors = {
        mode: statistics.median(run["step"] for run in of_mode)
        for mode, of_mode in runs.items()
        if not any("error" in run for run in of_mode)
    }
    print(
        "| mode | step (rounds) | of plain | peak | offloaded a step | stalls | host | graphs / breaks | decision "
        "| retries |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for mode, of_mode in runs.items():
        anchor = anchors.get("plain-eager" if "eager" in mode else "plain")
        print(f"| {mode} | {summarise(of_mode, anchor)} |")


if __name__ == "__main__":
    main()
