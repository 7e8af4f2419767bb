"""Teraio's experiment on one GPU (figure 7 of its paper): how near to unlimited GPU memory plans that migrate are.

    python -m benchmarks.teraio --out benchmarks/results/teraio.json [--models 1.2b 3b] [--precisions 32 bf16]
                                [--cases ideal teraio ...] [--leave 0.4] [--limit 120] [--path DIR]

A Llama with random weights is trained by AdamW without gradient checkpointing, on a GPU capped so that `--leave` of the
bytes that the ideal training allocates must leave it (the planner reserves 8 % more). Each case has a process of its
own with `--limit` seconds; one that is ended by it has the measurements that it has printed before.

Cases:
  ideal           plain Lightning on the whole GPU; the cap and the shares of the others follow from it
  teraio          `SwapPlanner(planner="teraio")` with host memory and the drive of `--path`
  teraio-host     the same with host memory alone
  teraio-16gbs    the same with host memory and a drive of 16 GB/s, which is modelled in memory
  holistic        `SwapPlanner()`, our own plan, with host memory and the drive of `--path`
  zero-offload    DeepSpeed's ZeRO-3 with parameters and optimizer in RAM
  zero-infinity   the same on NVMe
Precisions: 32 (fp32 without TF32, as in the paper) and bf16 (`bf16-mixed`; DeepSpeed's own bf16).

Steps are timed on the GPU's clock, from the begin of one to the begin of the next: the median of 8 steps; DeepSpeed's
on the host's. The prediction is the one that was made before the measured steps. Of several comparisons of a case, the
table has the last one, and the JSON file all. Results are added to those in `--out`, so cases may be run one by one.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.activation_offload import quiet_trainer
from benchmarks.finetuned_models import make_model, random_batch
from benchmarks.processes import cap_gpu_memory, run_alone
from benchmarks.throttled_backend import MemoryBackend, ThrottledBackend
from lightning_ssd import SSDOffloadStrategy, SwapPlanner
from lightning_ssd._lightning import pl
from lightning_ssd.autoplan import COMPARED_STEPS, Comparison, PlanRunner
from lightning_ssd.device import allocator_memory, make_clock
from lightning_ssd.planning import Plan
from lightning_ssd.sizes import format_bytes

CASES = ("ideal", "teraio", "teraio-host", "teraio-16gbs", "holistic", "zero-offload", "zero-infinity")
PRECISIONS = {"32": "32-true", "bf16": "bf16-mixed"}

WARM_UP = 3
"""Steps of the ideal case that are not measured."""

COMPARISONS = 2
"""Comparisons of the plan in force with measured steps, after which a case ends: steps may become slower without a
change of the plan."""

MODELLED_DRIVE = 16e9
"""Bytes/s of the modelled drive, reads and writes together."""


@dataclass(frozen=True)
class Shape:
    """A Llama and its batch.

    Attributes:
        hidden: width.
        layers: number of blocks.
        batch: samples of a micro-batch in full precision.
        tokens: tokens of a sample.
        vocabulary: token ids.
    """

    hidden: int
    layers: int
    batch: int
    tokens: int = 1024
    vocabulary: int = 32000


SHAPES = {"1.2b": Shape(2048, 24, 3), "3b": Shape(3072, 28, 3), "tiny": Shape(128, 3, 2, 32, 512)}

BF16_BATCH = {"1.2b": 6, "3b": 5, "tiny": 4}
"""Samples of a micro-batch in bf16: twice as many as in full precision, or as many as fit in 80 GB without a cap."""


class Llama(pl.LightningModule):
    """The model of a shape."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            late = isinstance(self.trainer.strategy, SSDOffloadStrategy)
            with torch.device("meta" if late else torch.get_default_device()):
                self.model = make_model("llama", self.shape.hidden, self.shape.layers, self.shape.vocabulary)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class SameTokens(Dataset[Tensor]):
    """One batch again and again, without end."""

    def __init__(self, shape: Shape) -> None:
        self._ids = random_batch("llama", shape.batch)["input_ids"][:, : shape.tokens] % shape.vocabulary

    def __len__(self) -> int:
        return 10**6 * len(self._ids)

    def __getitem__(self, index: int) -> Tensor:
        return self._ids[index % len(self._ids)]


class Probe(pl.Callback):
    """Measures a case, prints each new result as one line of JSON, and ends the training.

    Args:
        planner: an earlier callback of the Trainer; None: the training is the ideal one.
    """

    def __init__(self, planner: SwapPlanner | None) -> None:
        self._planner = planner
        self._marks: list[Any] = []
        self._compared: list[Comparison] = []
        self._of_plan = 0
        self._loss = float("nan")
        self.result: dict[str, Any] = {"comparisons": []}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._clock = make_clock(pl_module.device)
        self._memory = allocator_memory(pl_module.device)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._planner is not None:
            self._follow(trainer, self._planner)
        elif batch_idx >= WARM_UP:
            if not self._marks and self._memory is not None:
                self._memory.reset_peak()
            self._marks.append(self._clock.now())
            trainer.should_stop = len(self._marks) == COMPARED_STEPS + 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARM_UP:  # the same step in every case
            self._loss = outputs["loss"].item()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._planner is None:
            if pl_module.device.type == "cuda":
                torch.cuda.synchronize()
            pairs = zip(self._marks, self._marks[1:], strict=False)
            self.result["step"] = statistics.median(self._clock.elapsed(begin, end) or 0.0 for begin, end in pairs)
            self.result["gpu_peak"] = 0 if self._memory is None else self._memory.peak()
            self._print(pl_module)

    def _follow(self, trainer: Any, planner: SwapPlanner) -> None:
        assert planner.cycle is not None
        comparison, runner = planner.cycle.comparison, planner.cycle.runner
        if comparison is None or runner is None or (self._compared and comparison is self._compared[-1]):
            return
        same = bool(self._compared) and comparison.plan is self._compared[-1].plan
        self._of_plan = self._of_plan + 1 if same else 1
        self._compared.append(comparison)
        predicted = comparison.predicted
        self.result["comparisons"].append(
            {
                "plans": len({id(one.plan) for one in self._compared}),
                "step": comparison.step_seconds,
                "predicted_step": predicted.step_seconds,
                "gpu_peak": comparison.gpu_peak_bytes,
                "predicted_gpu_peak": predicted.gpu_peak_bytes,
                "host_peak": comparison.host_peak_bytes,
                "predicted_host_peak": predicted.host_peak_bytes,
                "bound": predicted.bound,
            }
        )
        self.result |= {name: self.result["comparisons"][-1][name] for name in ("step", "gpu_peak")}
        self.result["placement"] = placement(runner, comparison.plan)
        self._print(trainer.lightning_module)
        trainer.should_stop = self._of_plan >= COMPARISONS and runner.plan is comparison.plan

    def _print(self, module: pl.LightningModule) -> None:
        self.result["loss"] = self._loss
        self.result["parameters"] = sum(parameter.numel() for parameter in module.parameters())
        self.result["device"] = torch.cuda.get_device_name() if module.device.type == "cuda" else "CPU"
        print(json.dumps(self.result), flush=True)


def placement(runner: PlanRunner, plan: Plan) -> dict[str, dict[str, int]]:
    """Returns the bytes of optimizer states in each tier, and of saved tensors of each choice."""
    states, saved = Counter[str](), Counter[str]()
    for unit in runner.profile.units:
        of_unit = plan.units[unit.name]
        for part in unit.own_parts:
            states[of_unit.of(part.name).states] += part.state_bytes_read
        saved[of_unit.input] += unit.input_bytes
        for operator in unit.operators:
            saved[of_unit.operators[operator.name]] += operator.saved_bytes
    return {"states": dict(states), "saved": dict(saved)}


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Trains a case of ours, or the ideal one, prints its results, and returns the last."""
    shape = Shape(**case["shape"])
    mode, path = case["case"], case["path"]
    planner: SwapPlanner | None = None
    strategy: Any = "auto"
    if mode != "ideal":
        if torch.cuda.is_available():
            cap_gpu_memory(case["gpu"] / 2**30)
        how: dict[str, Any] = {"path": path, "tier": "host" if mode == "teraio-host" else "ssd"}
        if mode == "teraio-16gbs":
            how["backend"] = ThrottledBackend(MODELLED_DRIVE, MemoryBackend())
        strategy = SSDOffloadStrategy(**how)
        budget = "auto" if torch.cuda.is_available() else int(case["gpu"])
        kind: Any = "holistic" if mode == "holistic" else "teraio"
        planner = SwapPlanner(planner=kind, gpu_memory=budget)
    probe = Probe(planner)
    callbacks: list[pl.Callback] = [probe] if planner is None else [planner, probe]
    trainer = quiet_trainer(PRECISIONS[case["precision"]], strategy, -1, callbacks, path)
    trainer.fit(Llama(shape), DataLoader(SameTokens(shape), batch_size=shape.batch))
    return probe.result


def run(case: dict[str, Any], limit: float) -> dict[str, Any]:
    """Runs a case in a process of its own, and returns the last result that it printed, with the RAM that it took."""
    command = [sys.executable, "-W", "ignore", "-m"]
    if not case["case"].startswith("zero"):
        return run_alone([*command, "benchmarks.teraio", "--one", json.dumps(case)], limit)
    shape = case["shape"]
    arguments = {"model": "llama", "hidden": shape["hidden"], "layers": shape["layers"], "batch": shape["batch"]}
    arguments |= {"mode": "cpu" if case["case"] == "zero-offload" else "nvme", "precision": case["precision"]}
    arguments |= {"gpu-gib": case["gpu"] / 2**30, "path": f"{case['path']}/deepspeed", "warm-up": 1, "steps": 3}
    arguments |= {"buffers": 64}  # these Llamas need more than 16
    options = [f"--{name}={value}" for name, value in arguments.items()]
    return run_alone([*command, "benchmarks.deepspeed_peer", *options, "--no-checkpointing"], limit)


def table(results: dict[str, dict[str, Any]]) -> str:
    """Returns the results as a Markdown table."""
    lines = [
        "| model | case | step, s | share of the ideal | predicted | GPU peak | predicted | host peak | predicted "
        "| states on GPU / host / SSD, GB | saved tensors kept / host / SSD / recomputed, GB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        model, _, case = name.rpartition(" ")
        if "step" not in row:
            lines.append(f"| {model} | {case} | {row['error']} | | | | | | | | |")
            continue
        ideal = results.get(f"{model} ideal", {}).get("step")
        share = "" if ideal is None else f"{ideal / row['step']:.2f}"
        cells = [model, case, f"{row['step']:.3f}", share]
        peak = format_bytes(row["gpu_peak"])
        if row.get("comparisons"):
            last = row["comparisons"][-1]
            cells += [_predicted(last, "step", "{:.3f}"), peak, _predicted(last, "gpu_peak", "{}")]
            cells += [format_bytes(last["host_peak"]), _predicted(last, "host_peak", "{}")]
            for kind, choices in (("states", ("gpu", "host", "ssd")), ("saved", ("keep", "host", "ssd", "recompute"))):
                found = row["placement"][kind]
                cells.append(" / ".join(f"{found.get(choice, 0) / 1e9:.1f}" for choice in choices))
        else:
            cells += ["", peak, "", "", "", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _predicted(comparison: dict[str, Any], name: str, form: str) -> str:
    """Returns a predicted quantity with its error."""
    measured, predicted = comparison[name], comparison[f"predicted_{name}"]
    shown = form.format(predicted if name == "step" else format_bytes(predicted))
    return f"{shown} ({100 * (predicted / measured - 1):+.1f} %)" if measured else shown


def main() -> None:
    """Runs the cases, writes each result to `--out`, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["1.2b", "3b"], help="sizes of the Llama")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["32"], help="see above")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="see above")
    parser.add_argument("--leave", type=float, default=0.4, help="share of the bytes that must leave the GPU")
    parser.add_argument("--gpu", type=float, help="GiB of the capped GPU, instead of `--leave`")
    parser.add_argument("--limit", type=float, default=120, help="seconds of a case (default: %(default)s)")
    parser.add_argument("--path", default=".", help="directory on the SSD")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--table", action="store_true", help="print the table of `--out`, and run nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        train(json.loads(arguments.one))
        return
    out: Path | None = arguments.out
    results: dict[str, Any] = json.loads(out.read_text()) if out is not None and out.is_file() else {}
    for model in () if arguments.table else arguments.models:
        for precision in arguments.precisions:
            shape = asdict(SHAPES[model])
            if precision == "bf16":
                shape["batch"] = BF16_BATCH[model]
            for mode in arguments.cases:
                name = f"Llama {model} {precision} {mode}"
                gpu = arguments.gpu and arguments.gpu * 2**30
                if mode != "ideal" and not gpu:
                    peak = results.get(f"Llama {model} {precision} ideal", {}).get("gpu_peak")
                    if not peak:
                        raise SystemExit(f"{name}: run the case `ideal` first, or give the cap by `--gpu`.")
                    gpu = (1 - arguments.leave) * peak
                with tempfile.TemporaryDirectory(dir=arguments.path) as path:
                    case = {"case": mode, "precision": precision, "shape": shape, "gpu": gpu, "path": path}
                    results[name] = run(case, arguments.limit) | {"gpu": gpu}
                print(name, json.dumps(results[name]), flush=True)
                if out is not None:
                    out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
