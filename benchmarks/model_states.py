"""Model states in host memory on one GPU: step time and peak memory of GPT with AdamW, beside plain Lightning.

    python -m benchmarks.model_states --out results.json [--shapes 2048x24] [--modes plain host] [--rounds 2]

Modes, each a `Trainer.fit` on a model of its own, one after the other, `--rounds` times:
  plain         Lightning's own strategy; fused AdamW on the GPU
  host          `states="host"`: each unit is stepped on the CPU as soon as its gradient is complete
  host-end      the same with `overlap="none"`: all are stepped when backward has ended

In bf16-mixed, 1024 tokens, without activation offload, so that the model states' part is seen alone. Peak: the most
that was allocated in the measured steps, of all memory. Step time: from one `on_train_batch_start` to the next, on the
GPU's clock; the median over steps.
"""

import argparse
import gc
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.activation_offload import TOKENS, VOCABULARY, RandomTokens, quiet_trainer
from lightning_ssd import SSDOffloadStrategy
from lightning_ssd._lightning import pl
from lightning_ssd.models.gpt import GPT

MODES = ("plain", "host", "host-end")
WARM_UP = 3


class BenchmarkGPT(GPT):
    """GPT with AdamW and a fixed learning rate."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class Probe(pl.Callback):
    """Measures the steps after the first few."""

    def __init__(self) -> None:
        self.events: list[torch.cuda.Event] = []
        self.result: dict[str, float] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        if batch_idx >= WARM_UP:
            self.events.append(torch.cuda.Event(enable_timing=True))
            self.events[-1].record()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        torch.cuda.synchronize()
        steps = [a.elapsed_time(b) / 1e3 for a, b in zip(self.events, self.events[1:], strict=False)]
        self.result = {
            "step": statistics.median(steps),
            "peak": torch.cuda.max_memory_allocated(),
            "loss": float(trainer.callback_metrics["train/loss"]),
        }


def fit(mode: str, hidden: int, layers: int, batch: int, steps: int, path: str) -> dict[str, float]:
    """Trains a model for `steps` steps more than the warm-up's and returns what was measured."""
    torch.manual_seed(0)
    strategy: Any = "auto"
    if mode != "plain":
        overlap: Any = "none" if mode == "host-end" else "optimized"
        strategy = SSDOffloadStrategy(states="host", offload="none", overlap=overlap)
    probe = Probe()
    trainer = quiet_trainer("bf16-mixed", strategy, WARM_UP + steps + 1, probe, path)
    model = BenchmarkGPT(VOCABULARY, TOKENS, hidden, layers, hidden // 128)
    trainer.fit(model, DataLoader(RandomTokens(batch * (WARM_UP + steps + 1)), batch_size=batch))
    del trainer, model
    gc.collect()
    torch.cuda.empty_cache()
    return probe.result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="JSON file for the results")
    parser.add_argument("--shapes", nargs="+", default=["2048x24"], help="hidden size x layers")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {torch.get_num_threads()} CPU threads",
        "batch": arguments.batch,
        "shapes": {},
    }
    with tempfile.TemporaryDirectory() as path:
        for shape in arguments.shapes:
            hidden, layers = map(int, shape.split("x"))
            runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in arguments.modes}
            results["shapes"][shape] = runs
            for _ in range(arguments.rounds):
                for mode in arguments.modes:
                    runs[mode].append(fit(mode, hidden, layers, arguments.batch, arguments.steps, path))
                    print(shape, mode, runs[mode][-1], flush=True)
                    Path(arguments.out).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
