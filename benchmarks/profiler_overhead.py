"""Step time after `ModelProfiler` has profiled a training, beside that of a training without it.

    python -m benchmarks.profiler_overhead [--rounds 5] [--out FILE]

Each training has a process of its own, in turn with and without the profiler, which also records the lifetimes of all
tensors. A GPT in fp32, AdamW, batches of 2 x 128 tokens; everything stays on the device. Steps are timed once the
profiled ones have ended: the medians of `--steps` steps, and of the rounds, with their range.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from benchmarks.activation_offload import quiet_trainer
from benchmarks.default_models import Model, RandomSamples
from benchmarks.processes import run_alone
from benchmarks.step_times import StepTimes
from lightning_ssd import ModelProfiler, SSDOffloadStrategy

PROFILED = 1 + 1 + 3
"""Steps that the profiler measures: the recorded one, the checked one, and the timed ones."""

WARM_UP = 2
"""Steps before them."""

AFTER = 3
"""Steps after them that are not measured."""

BATCH, TOKENS = 2, 128


def train(case: str, hidden: int, layers: int, steps: int) -> dict[str, object]:
    """Trains with the profiler (`case` "profiled") or without it, and returns the median step time in seconds."""
    times = StepTimes(losses=False)
    skipped = WARM_UP + PROFILED + AFTER
    total = skipped + steps
    with tempfile.TemporaryDirectory() as path:
        files = [Path(path, name) for name in ("profile.json", "lifetimes.json")]
        profiler = ModelProfiler(files[0], warm_up=WARM_UP + 1, steps=3, lifetimes=files[1])
        callbacks = [times, profiler] if case == "profiled" else [times]
        strategy = SSDOffloadStrategy(states="gpu", offload="none", path=path)
        trainer = quiet_trainer("32-true", strategy, total, callbacks, path)
        torch.manual_seed(0)
        data = RandomSamples("gpt", BATCH * total, TOKENS)
        trainer.fit(Model("gpt", hidden, layers, TOKENS), DataLoader(data, batch_size=BATCH))
        assert all(file.is_file() for file in files) == (case == "profiled")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"step": statistics.median(times.seconds(skipped)), "device": device}


def main() -> None:
    """Prints a table, and writes the step time of each training to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="trainings of each case")
    parser.add_argument("--steps", type=int, default=40, help="measured steps of a training")
    parser.add_argument("--hidden", type=int, default=256, help="width of the GPT")
    parser.add_argument("--layers", type=int, default=4, help="layers of the GPT")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--one", choices=("plain", "profiled"), help="train this case here, and print its result")
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(train(arguments.one, arguments.hidden, arguments.layers, arguments.steps)))
        return
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("steps", "hidden", "layers")]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.profiler_overhead", *sizes]
    runs: dict[str, list[float]] = {"plain": [], "profiled": []}
    device = ""
    for _ in range(arguments.rounds):
        for case, seconds in runs.items():
            result = run_alone([*command, "--one", case])
            seconds.append(result["step"])
            device = result["device"]
    plain = statistics.median(runs["plain"])
    print(f"{device}, {arguments.rounds} rounds\n\n| training | step (rounds) | of plain |\n|---|---|---|")
    for case, seconds in runs.items():
        middle = statistics.median(seconds)
        print(f"| {case} | {middle:.4f} s ({min(seconds):.4f} to {max(seconds):.4f}) | {middle / plain:.3f} |")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"device": device, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
