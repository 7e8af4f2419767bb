"""How near trainings are to their bound: the measured step, the simulated one, and what the GPU waits for.

    python -m benchmarks.bounds --out bounds.json [--cases llama:2048x24,mixed gpt:2560x24,batch=16 ...] [--limit 150]
    python -m benchmarks.bounds --out bounds.json --report       # the tables of earlier results

A case is FAMILY:HIDDENxLAYERS with options after commas, on a GPU capped at 24 GiB, by `Trainer(strategy=
"ssd_offload")` with its defaults. Each has a process of its own, which is ended after `--limit` seconds; one that is
ended by it has the measurements that it has printed before. Results are added to those in `--out`.

Options:
  batch=N, tokens=N   of a micro-batch (8 x 1024)
  gpu=GIB          cap of the GPU's memory (24); 0: none
  states=TIER      `states=` of the strategy (auto): `host` also where the GPU has room for them
  mixed            `precision="bf16-mixed"` instead of `bf16-true`
  compiled         every layer is compiled
  recompute        gradient checkpointing of every layer
  norm=N           gradients are clipped to that norm (1); 0: not clipped; 1000: clipped, though no step exceeds it
  clip=MODE        `clip=` of the strategy (auto)
  hooked           a hook of the user runs between backward and step
  plain            Lightning's own strategy, on the whole GPU

Step: median of `--steps` steps on the GPU's clock, from one begin to the next, under the last plan.

Bound: the step if every resource of the plan worked without waiting, which is the busy time of the busiest one:
computation (forward, backward, recomputation), copies in each direction, reads and writes of drives, the CPU optimizer,
and launches by the host (`Prediction.busy_seconds`, predicted before the measured steps). Steps that are clipped and
deferred can't all overlap backward, because the norm is known at its end. So the *ordered* bound is the step that is
simulated with copies and drives that take no time: computation and optimizer jobs wait for each other, and nothing
else. A training without a plan has no simulation: its bound is the busiest resource of the recorded steps, and its
ordered bound the computation of backward (with optimizer steps on the GPU) and those parts of the CPU optimizer's
time that the next forward waits for.

Then two steps are recorded by torch's profiler, which slows the host down. The second table has the share of them in
which each resource was busy, and the causes for which no kernel ran (see `TimelineRecorder`).
"""

import argparse
import gzip
import json
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.activation_offload import quiet_trainer
from benchmarks.default import find_planners, in_force
from benchmarks.default_models import Model, RandomSamples
from benchmarks.processes import cap_gpu_memory, run_alone
from benchmarks.teraio import placement
from lightning_ssd import SSDOffloadStrategy, SwapPlanner
from lightning_ssd._lightning import pl
from lightning_ssd.autoplan import WARMUP_AFTER_CHANGE, PlanRunner
from lightning_ssd.device import allocator_memory, make_clock
from lightning_ssd.planning import simulate
from lightning_ssd.timeline import BETWEEN, Timeline, TimelineProfile
from lightning_ssd.timeline.timeline import Span, clip, union

WEIGHTS_SHARE = 16 / 42
"""Bytes that the half of a step before the weights are written moves / bytes of both halves, with fp32 states."""

CASES = (
    "llama:2048x16,mixed,states=host",
    "llama:2048x16,mixed,states=host,norm=0",
    "llama:2048x24,mixed",
    "llama:2048x24,mixed,compiled",
    "gpt:2560x24,batch=16",
    "llama:2048x44,mixed,recompute",
    "gpt:3072x34,batch=16,recompute",
    "llama:3072x28,batch=16,compiled",
)
"""The models have 0.85B, 1.2B, 1.2B, 2.0B, 2.1B, 4.0B and 3.0B parameters. The host bounds the steps of the first."""

RECORDED = 2
"""Recorded steps."""

TRACE = "trace.json"
"""Name of the file of the recorded steps."""

FAST = 1e6
"""Factor of the bandwidths of copies and drives that take no time."""


class Probe(pl.Callback):
    """Measures steps under the plan in force, records the next ones, prints both, and ends the training.

    It has no hook between backward and step: with one, steps would wait for the end of backward.

    Args:
        steps: steps whose median counts.
        folder: directory for the trace.
    """

    def __init__(self, steps: int, folder: Path) -> None:
        self._steps = steps
        self._folder = folder
        self._rule: object = None
        """The plan in force; None: it is not decided."""
        self._marks: list[Any] = []
        """Begins of the steps under it, on the device's clock."""
        self._profile: TimelineProfile | None = None
        self._simulated: dict[str, Any] = {}
        self.result: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._clock = make_clock(pl_module.device)
        self._memory = allocator_memory(pl_module.device)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        rule = _rule(trainer, batch_idx)
        if rule is None or rule != self._rule:
            self._restart(rule, trainer)
        if rule is None:
            return
        self._marks.append(self._clock.now())
        warm = len(self._marks) - 1 - WARMUP_AFTER_CHANGE  # steps that have ended after the warm-up
        if warm == 0 and self._memory is not None:
            self._memory.reset_peak()
        elif warm == self._steps:
            self._measure(trainer, pl_module, batch_idx)
        elif warm == self._steps + 1:  # a comparison with the measured steps has not changed the plan
            self._profile = TimelineProfile(pl_module.device)
            self._profile.start()
        elif warm == self._steps + 1 + RECORDED:
            self._end(trainer)
            return
        if self._profile is not None:
            self._profile.mark(f"step {batch_idx}")
            self._profile.mark("forward")

    def on_before_backward(self, *_: Any) -> None:
        self._mark("backward")

    def on_train_batch_end(self, *_: Any) -> None:
        self._mark(BETWEEN)

    def on_exception(self, *_: Any) -> None:
        self._drop_profile()

    def _mark(self, phase: str) -> None:
        if self._profile is not None:
            self._profile.mark(phase)

    def _drop_profile(self) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()

    def _restart(self, rule: object, trainer: Any) -> None:
        self._drop_profile()
        self._rule = rule
        self._marks = []
        runner = _runner(trainer)
        self._simulated = {} if runner is None or rule is None else _simulated(runner)

    def _measure(self, trainer: Any, pl_module: Any, batch_idx: int) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
        marks = self._marks[WARMUP_AFTER_CHANGE:]
        steps = [self._clock.elapsed(begin, end) or 0.0 for begin, end in zip(marks, marks[1:], strict=False)]
        states = getattr(trainer.strategy, "model_states", None)
        self.result = self._simulated | {
            "step": statistics.median(steps),
            "steps": steps,
            "gpu_peak": 0 if self._memory is None else self._memory.peak(),
            "parameters": sum(parameter.numel() for parameter in pl_module.parameters()),
            "device": torch.cuda.get_device_name() if pl_module.device.type == "cuda" else "CPU",
            "torch": torch.__version__,
            "in_force_from": batch_idx - self._steps - WARMUP_AFTER_CHANGE,
            "deferred": states is not None and states.decision.needs_norm and states.decision.defers,
        }
        print(json.dumps(self.result), flush=True)

    def _end(self, trainer: Any) -> None:
        profile, self._profile = self._profile, None
        assert profile is not None
        profile.mark("end")
        profile.stop()
        timeline = profile.timeline(self._folder)
        timeline.save_trace(self._folder / TRACE)
        self.result |= recorded(timeline)
        print(json.dumps(self.result), flush=True)
        trainer.should_stop = True


def _rule(trainer: Any, batch_idx: int) -> object:
    """Returns a value that differs for each plan or other decision in force; None: the training is still measured."""
    _, planner = find_planners(trainer)
    if planner is None:
        return in_force(trainer, batch_idx) or None
    runner = planner.runner
    if runner is None or runner.plan is None or planner.measuring:
        return None
    return id(runner.plan)


def _runner(trainer: Any) -> PlanRunner | None:
    _, planner = find_planners(trainer)
    return None if planner is None else planner.runner


def _simulated(runner: PlanRunner) -> dict[str, Any]:
    """Returns the prediction for the plan in force, and its ordered bound."""
    assert runner.plan is not None and runner.prediction is not None
    busy = runner.prediction.busy_seconds
    fast = runner.hardware.with_link(FAST).with_ssds(FAST)
    ordered = simulate(runner.profile, fast, runner.plan).step_seconds
    return {
        "predicted": runner.prediction.step_seconds,
        "predicted_busy": busy,
        "ordered_bound": max(ordered, *busy.values()),
        "placement": placement(runner, runner.plan),
    }


def recorded(timeline: Timeline) -> dict[str, Any]:
    """Returns, of a recorded step: its seconds, those in which each resource was busy, and those of each wait."""
    count = len(timeline.steps)
    rows = [row for row in timeline.rows if row != "waiting"]
    return {
        "recorded_step": timeline.seconds / count,
        "busy": {row: timeline.busy_share(row) * timeline.seconds / count for row in rows},
        "backward": busy_seconds_in(timeline, "compute", "backward") / count,
        "waiting": {label: seconds / count for label, seconds in seconds_by_label(timeline, "waiting").items()},
    }


def busy_seconds_in(timeline: Timeline, row: str, phase: str) -> float:
    """Returns the seconds in which there was work in a row during a phase."""
    busy = [Span(*part, row) for part in union(timeline.rows[row])]
    during = [span for span in timeline.phases if span.label == phase]
    return sum(part.end - part.start for part in clip(busy, during, ()))


def seconds_by_label(timeline: Timeline, row: str) -> dict[str, float]:
    """Returns the seconds of the spans of each label in a row, the largest first."""
    seconds: dict[str, float] = {}
    for start, end, label, _ in timeline.rows[row]:
        seconds[label] = seconds.get(label, 0.0) + end - start
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def bounds(result: dict[str, Any]) -> tuple[str, float, float]:
    """Returns the busiest resource of a result, the bound that it is, and the ordered bound, in seconds."""
    busy = result.get("predicted_busy") or result.get("busy", {})
    if not busy:
        return "", 0.0, 0.0
    busiest = max(busy, key=lambda resource: busy[resource])
    bound = busy[busiest]
    if not result["deferred"]:
        return busiest, bound, bound
    if "ordered_bound" in result:
        return busiest, bound, result["ordered_bound"]
    return busiest, bound, max(bound, result["backward"] + WEIGHTS_SHARE * result["busy"]["CPU optimizer"])


def parse(text: str) -> dict[str, Any]:
    """Returns the settings of a case."""
    family, _, rest = text.partition(":")
    shape, *options = rest.split(",")
    hidden, layers = map(int, shape.split("x"))
    case: dict[str, Any] = {"family": family, "hidden": hidden, "layers": layers, "batch": 8, "tokens": 1024}
    case |= {"gpu": 24.0, "states": "auto", "norm": 1.0, "clip": "auto"}
    case |= dict.fromkeys(("mixed", "compiled", "recompute", "hooked", "plain"), False)
    for option in options:
        name, _, value = option.partition("=")
        if name not in case:
            raise ValueError(f"{text!r} has the unknown option {name!r}")
        case[name] = type(case[name])(value) if value else True
    return case


def train(case: dict[str, Any], path: Path, steps: int, gpu_memory: str | None = None) -> dict[str, Any]:
    """Trains a case, prints its results, and returns the last.

    Args:
        case: settings of the case.
        path: directory for scratch files and the trace.
        steps: steps whose median counts.
        gpu_memory: memory that a `SwapPlanner` plans with; None: plans are made if the GPU lacks room.
    """
    on_gpu = torch.cuda.is_available()
    if on_gpu and case["gpu"] and not case["plain"]:
        cap_gpu_memory(case["gpu"])
    probe = Probe(steps, path)
    callbacks: list[pl.Callback] = [probe]
    if case["hooked"]:
        callbacks.append(pl.callbacks.LambdaCallback(on_before_optimizer_step=lambda *_: None))
    if gpu_memory is not None:
        callbacks.append(SwapPlanner(gpu_memory=gpu_memory))
    strategy: Any = "auto" if case["plain"] else SSDOffloadStrategy(path, states=case["states"], clip=case["clip"])
    trainer = quiet_trainer("bf16-mixed" if case["mixed"] else "bf16-true", strategy, -1, callbacks, path)
    trainer.gradient_clip_val = case["norm"] or None
    with torch.device("meta" if not case["plain"] else "cuda" if on_gpu else "cpu"):
        model = Model(
            case["family"],
            case["hidden"],
            case["layers"],
            case["tokens"],
            compiled=case["compiled"],
            recompute=case["recompute"],
        )
    data = RandomSamples(case["family"], 10**6, case["tokens"])
    trainer.fit(model, DataLoader(data, batch_size=case["batch"]))
    return probe.result


def run(text: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs a case in a process of its own, and returns the last result that it printed, with the RAM that it took."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.bounds", "--one", text, f"--steps={arguments.steps}"]
    if arguments.gpu_memory is not None:
        command.append(f"--gpu-memory={arguments.gpu_memory}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=arguments.path) as path:
        result = run_alone([*command, f"--path={path}"], arguments.limit)
        trace = Path(path) / TRACE
        if arguments.traces is not None and trace.exists():
            arguments.traces.mkdir(parents=True, exist_ok=True)
            name = re.sub("[^0-9a-z]+", "-", text) + ".json.gz"
            (arguments.traces / name).write_bytes(gzip.compress(trace.read_bytes()))
    return result | {"wall": time.monotonic() - began}


def report(results: dict[str, dict[str, Any]]) -> str:
    """Returns the results as two Markdown tables."""
    lines = [
        "| case | parameters | step, s | predicted | bound | bound / step | deferred: ordered bound | of step "
        "| GPU peak, RAM |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        if "step" not in result:
            lines.append(f"| {name} | {result['error']} | | | | | | | |")
            continue
        step, (busiest, bound, ordered) = result["step"], bounds(result)
        predicted = result.get("predicted")
        error = "" if predicted is None else f"{predicted:.3f} ({100 * (predicted / step - 1):+.1f} %)"
        of_order = f"{ordered:.3f} | {ordered / step:.2f}" if result["deferred"] else " | "
        lines.append(
            f"| {name} | {result['parameters'] / 1e9:.2f}B | {step:.3f} | {error} | {bound:.3f} {busiest} | "
            f"{bound / step:.2f} | {of_order} | "
            f"{result['gpu_peak'] / 2**30:.1f}, {result.get('ram', 0) / 2**30:.0f} GiB |"
        )
    found = {name: result for name, result in results.items() if "recorded_step" in result}
    if not found:
        return "\n".join(lines)
    rows = list(next(iter(found.values()))["busy"])
    lines += ["", f"| case | recorded step, s | {' | '.join(rows)} | no work, and why |"]
    lines += ["|---|---|" + "---|" * len(rows) + "---|"]
    for name, result in found.items():
        step = result["recorded_step"]
        shares = [f"{result['busy'][row] / step:.0%}" if result["busy"][row] else "" for row in rows]
        waits = [f"{cause} {seconds / step:.1%}" for cause, seconds in result["waiting"].items()]
        total = sum(result["waiting"].values())
        lines.append(f"| {name} | {step:.3f} | {' | '.join(shares)} | {total / step:.0%}: {', '.join(waits[:6])} |")
    return "\n".join(lines)


def main() -> None:
    """Runs the cases, writes each result to `--out`, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, help="FAMILY:HIDDENxLAYERS[,OPTION...]")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--steps", type=int, default=8, help="steps whose median counts (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=150, help="seconds of a case (default: %(default)s)")
    parser.add_argument("--path", help="where scratch files go (default: the system's temporary directory)")
    parser.add_argument("--traces", type=Path, help="directory for the recorded steps, as Chrome traces")
    parser.add_argument("--gpu-memory", help="bytes that a SwapPlanner plans with, such as 200MB, for a CPU")
    parser.add_argument("--report", action="store_true", help="print the tables of `--out`, and run nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        train(parse(arguments.one), Path(arguments.path), arguments.steps, arguments.gpu_memory)
        sys.stdout.flush()
        os._exit(0)  # the rest would only make the model whole again
    out: Path | None = arguments.out
    results: dict[str, dict[str, Any]] = json.loads(out.read_text()) if out is not None and out.is_file() else {}
    for text in () if arguments.report else arguments.cases:
        parse(text)
        results[text] = run(text, arguments)
        print(text, json.dumps(results[text]), flush=True)
        if out is not None:
            out.write_text(json.dumps(results, indent=1) + "\n")
    print(report(results))


if __name__ == "__main__":
    main()
