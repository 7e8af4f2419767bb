"""Step times that `lightning-ssd plan` predicts for recipes, beside those of their trainings on the same machine.

    python -m benchmarks.dry_runs --out dry_runs.json [--cases gpt-1.3b gpt-2.7b,precision=bf16-mixed ...] [--gpu 24]

A case is a file in `configs/models`, with options after commas:
  recipe=NAME (gpt)         recipe of the model; `finetune` for the Llamas
  precision=P (bf16-true)   Lightning's precision
  clip=NORM (1.0)           largest norm of the gradient; 0: none

A process measures the machine, traces the recipe without training it, and predicts the step time with the strategy's
defaults, as `lightning-ssd plan RECIPE` prints it last. Another process then trains the recipe with gradient
checkpointing, in as much GPU memory as was planned with. The step time is the median of `--steps` steps after
`--warm-up` ones. The rate of the CPU optimizer is reported as the machine's profile has it, and as the training had it
while the optimizer was busy.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from benchmarks.processes import cap_gpu_memory, run_alone
from benchmarks.step_times import StepTimes
from lightning_ssd._lightning import pl
from lightning_ssd.device import WorkCounter

CASES = ("gpt-1.3b", "gpt-1.3b,clip=0", "gpt-2.7b", "gpt-1.3b,precision=bf16-mixed", "llama-1.2b,recipe=finetune")


class Probe(StepTimes):
    """Prints the times of the steps after `warm_up` ones, and the work of the CPU optimizer in them, as JSON."""

    def __init__(self, warm_up: int) -> None:
        super().__init__()
        self._warm_up = warm_up
        self._before = WorkCounter(0, 0.0)

    @override
    def on_train_batch_start(self, trainer: Any, *arguments: Any) -> None:
        super().on_train_batch_start(trainer, *arguments)
        if len(self.begun) == self._warm_up + 1:
            self._before = _stepped(trainer)

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        times, work = self.seconds(self._warm_up), _stepped(trainer).since(self._before)
        result = {
            "step": statistics.median(times),
            "steps": times,
            "stepped": work.amount / len(times),
            "training_step_rate": work.amount / work.seconds if work.seconds else None,
            "gpu_peak": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        }
        print(json.dumps(result))


def _stepped(trainer: pl.Trainer) -> WorkCounter:
    states = trainer.strategy.model_states  # type: ignore[attr-defined]
    return WorkCounter(0, 0.0) if states is None else states.steps.work()


def recipe_arguments(case: str, scratch: str) -> tuple[str, list[str]]:
    """Returns the recipe of a case, and its options; files are written to the folder `scratch`."""
    name, *options = case.split(",")
    settings = {"recipe": "gpt", "precision": "bf16-true", "clip": "1.0"} | dict(
        option.split("=", 1) for option in options
    )
    given = ["-c", f"configs/models/{name}.yaml", f"--trainer.precision={settings['precision']}"]
    given += [f"--trainer.gradient_clip_val={settings['clip']}"]
    given += ["--model.gradient_checkpointing=true", f"--trainer.default_root_dir={scratch}"]
    return f"recipes/{settings['recipe']}.yaml", given


def predict(recipe: str, given: list[str]) -> dict[str, Any]:
    """Returns the predicted step of a recipe by the strategy's defaults (seconds, bytes), and rates of this machine
    (parameters/s, bytes/s)."""
    from lightning_ssd.dry_run import plan_as_configured, profile_recipe
    from lightning_ssd.planning import simulate
    from lightning_ssd.profiling import measure_machine
    from lightning_ssd.recipes import read_recipe

    machine = measure_machine(None, attention=True)
    config = read_recipe(recipe, given, run=False)
    model = profile_recipe(config, machine)
    plan = plan_as_configured(config, model, machine)
    prediction = simulate(model, machine, plan)
    return {
        "machine": machine.name,
        "parameters": model.parameters,
        "predicted": prediction.step_seconds,
        "predicted_peak": prediction.gpu_peak_bytes,
        "bound": prediction.bound,
        "machine_step_rate": machine.cpu_step_rate,
        "host_memory_bandwidth": machine.host_memory_bandwidth,
    }


def train(recipe: str, given: list[str], warm_up: int, steps: int) -> None:
    """Trains a recipe, whose callback prints the result."""
    from lightning_ssd.recipes import read_recipe

    probe = json.dumps([{"class_path": "benchmarks.dry_runs.Probe", "init_args": {"warm_up": warm_up}}])
    given += [f"--trainer.max_steps={warm_up + steps}", f"--trainer.callbacks={probe}", "--trainer.logger=false"]
    given += ["--trainer.limit_val_batches=0", "--trainer.enable_checkpointing=false"]
    read_recipe(recipe, [*given, "--trainer.enable_progress_bar=false"], run=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--cases", nargs="+", default=CASES, help="see above")
    parser.add_argument("--gpu", type=float, default=24, help="GiB of the GPU that may be used")
    parser.add_argument("--steps", type=int, default=8, help="measured steps")
    parser.add_argument("--warm-up", type=int, default=12, help="steps before them")
    parser.add_argument("--one", choices=["predict", "train"], help="do this with the first case in this process")
    arguments = parser.parse_args()
    if arguments.one is not None:
        if torch.cuda.is_available():
            cap_gpu_memory(arguments.gpu)
        with tempfile.TemporaryDirectory() as scratch:
            recipe, given = recipe_arguments(arguments.cases[0], scratch)
            if arguments.one == "predict":
                print(json.dumps(predict(recipe, given)))
            else:
                train(recipe, given, arguments.warm_up, arguments.steps)
        return
    results = {}
    options = [f"--gpu={arguments.gpu}", f"--steps={arguments.steps}", f"--warm-up={arguments.warm_up}"]
    print("| case | predicted | measured | error | bound | CPU steps/s of the machine | in the training |")
    print("|---|---|---|---|---|---|---|")
    for case in arguments.cases:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.dry_runs", "--cases", case, *options, "--one"]
        result = results[case] = run_alone([*command, "predict"]) | run_alone([*command, "train"])
        if "error" in result:
            print(f"| {case} | {result} |", flush=True)
            continue
        in_training = result["training_step_rate"]
        print(
            f"| {case} | {result['predicted']:.3f} s | {result['step']:.3f} s | "
            f"{result['predicted'] / result['step'] - 1:+.1%} | {result['bound']} | "
            f"{result['machine_step_rate'] / 1e9:.2f}e9 | "
            f"{'' if in_training is None else f'{in_training / 1e9:.2f}e9'} |",
            flush=True,
        )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
