"""Cost of measuring and planning: each of the first steps of `ssd_offload` beside those of plain Lightning.

    python -m benchmarks.planning_cost                                   # the default strategy, on a GPU or a CPU
    python -m benchmarks.planning_cost --gpu 24 --batch 16               # a GPU of 24 GiB, on which it plans
    python -m benchmarks.planning_cost --gpu-memory 200MB --layers 4 --hidden 256 --tokens 128   # plans on a CPU

One process trains a Llama by plain Lightning and by `ssd_offload`, in turn, `--rounds` times each, with the same
weights and data, no layer compiled, and no cached plan. A step begins when the device has finished the one before.
Each step's time is the median of the rounds. It is compared with the same step of plain Lightning where that is the
first one, which allocates memory, and with plain Lightning's median step otherwise.

A CPU has no limit of memory, and the default keeps all saved tensors there. `--gpu-memory` gives it a limit:
`SwapPlanner(gpu_memory=...)` measures and plans then, as it does by default on a GPU without room.

The last lines say in which step the decision was in force, the seconds that the steps before it took in all beyond
plain Lightning's, and the largest ratio of one of them. The targets are 5 s and 2.
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

from benchmarks.activation_offload import quiet_trainer
from benchmarks.default import in_force
from benchmarks.default_models import Model, RandomSamples
from benchmarks.processes import cap_gpu_memory
from benchmarks.step_times import StepTimes
from lightning_ssd import SwapPlanner
from lightning_ssd._lightning import pl


class Decision(pl.Callback):
    """Records the first step that begins under the decision of `offload="auto"`, or under a compared plan.

    Attributes:
        step: number of the step, from 0; None: there was none.
    """

    def __init__(self) -> None:
        self.step: int | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.step is None and in_force(trainer, batch_idx):
            self.step = batch_idx


def train(arguments: argparse.Namespace, *, ours: bool) -> tuple[list[float], int | None]:
    """Returns the seconds of each step, and the number of the first step under the decision."""
    torch.manual_seed(0)
    times, decision = StepTimes(losses=False), Decision()
    callbacks: list[pl.Callback] = [times, decision]
    if ours and arguments.gpu_memory:
        callbacks.append(SwapPlanner(gpu_memory=arguments.gpu_memory))
    model = Model("llama", arguments.hidden, arguments.layers, arguments.tokens)
    data = RandomSamples("llama", arguments.batch * arguments.steps, arguments.tokens)
    with tempfile.TemporaryDirectory() as path:
        trainer = quiet_trainer(
            arguments.precision, "ssd_offload" if ours else "auto", arguments.steps, callbacks, path
        )
        trainer.fit(model, DataLoader(data, batch_size=arguments.batch))
    del model, trainer, callbacks
    gc.collect()
    return times.seconds(0), decision.step


def compare(plain: list[list[float]], ours: list[list[float]], in_force_from: int) -> dict[str, Any]:
    """Returns the seconds of each step of both, and the cost of the steps before `in_force_from`."""
    plain_steps, our_steps = (
        [statistics.median(rounds) for rounds in zip(*runs, strict=True)] for runs in (plain, ours)
    )
    usual = statistics.median(plain_steps[1:])
    against = [plain_steps[0], *([usual] * (len(plain_steps) - 1))]
    before = list(zip(our_steps, against, strict=True))[:in_force_from]
    return {
        "plain": plain_steps,
        "ours": our_steps,
        "plain_step": usual,
        "in_force_from": in_force_from,
        "extra_seconds": sum(one - other for one, other in before),
        "worst_ratio": max((one / other for one, other in before), default=1.0),
        "later_ratio": statistics.median(our_steps[in_force_from:] or [usual]) / usual,
    }


def main() -> None:
    """Measures, prints every step and the cost, and writes all to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--rounds", type=int, default=3, help="trainings of each strategy")
    parser.add_argument("--steps", type=int, default=40, help="steps of a training")
    parser.add_argument("--hidden", type=int, default=2048, help="width of the model")
    parser.add_argument("--layers", type=int, default=16, help="blocks of the model")
    parser.add_argument("--batch", type=int, default=8, help="samples of a micro-batch")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a sample")
    parser.add_argument("--precision", default="bf16-mixed", help="precision of the Trainer")
    parser.add_argument("--gpu", type=float, help="GiB of the GPU that may be used")
    parser.add_argument("--gpu-memory", help="bytes that a SwapPlanner plans with, such as 200MB, for a CPU")
    arguments = parser.parse_args()
    if arguments.gpu:
        cap_gpu_memory(arguments.gpu)
    plain, ours, decided = [], [], []
    for _ in range(arguments.rounds):
        plain.append(train(arguments, ours=False)[0])
        seconds, step = train(arguments, ours=True)
        ours.append(seconds)
        decided.append(arguments.steps if step is None else step)
    found = compare(plain, ours, max(decided))
    print("| step | plain | ours | ratio |\n|---|---|---|---|")
    for number, (one, other) in enumerate(zip(found["plain"], found["ours"], strict=True)):
        print(f"| {number} | {one:.4f} s | {other:.4f} s | {other / one:.2f} |")
    print(f"in force from step {found['in_force_from']} on, at {found['later_ratio']:.3f} of plain Lightning's time")
    print(
        f"before: {found['extra_seconds']:.2f} s more than plain Lightning in all, one step at most "
        f"{found['worst_ratio']:.2f} times as long"
    )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
