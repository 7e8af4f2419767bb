"""Several GPUs of one host: step time, throughput and memory of GPT, one GPU and Lightning's DDP beside it.

    python -m benchmarks.several_gpus --out several_gpus.json --devices 1 2 [--cases fits:1024x24 host:3072x34,clip]
    python -m benchmarks.several_gpus --report several_gpus.json       # of earlier results; measures nothing

A case is MODE:HIDDENxLAYERS, with options after commas; each is trained with each number of `--devices`.

Modes:
  ddp      Lightning's own `ddp`, everything on the GPUs
  fits     `ssd_offload` with `states="gpu"`: torch's DDP, the same activations
  host     `states="host"`: one copy of the states in host memory for all GPUs
Options:
  clip             gradients are clipped to norm 1
  batch=N          sequences a GPU in a micro-batch (default: 16)
  gpu=GIB          memory of each GPU that may be used (default: 24 with `host`, else all)
  warm-up=N, steps=N

Sequences of 1024 tokens, gradient checkpointing, AdamW. With `host`, weights are in bf16 with fp32 master weights
(`bf16-true`); else `bf16-mixed`. Step: the median time from one step's begin to the next on rank 0, after its GPU has
ended the step before. RAM: the largest decrease of the host's free memory since the processes began.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.processes import cap_gpu_memory, run_alone
from benchmarks.step_times import StepTimes

TOKENS = 1024
CASES = ["ddp:1024x24", "fits:1024x24", "host:3072x34", "host:3072x34,clip"]


def parse(text: str) -> dict[str, Any]:
    """Returns the settings of a case."""
    mode, _, rest = text.partition(":")
    shape, *options = rest.split(",")
    hidden, layers = map(int, shape.split("x"))
    case = {"mode": mode, "hidden": hidden, "layers": layers, "batch": 16, "warm-up": 4, "steps": 8, "clip": 0}
    case["gpu"] = 24 if mode == "host" else 0
    for option in options:
        name, _, value = option.partition("=")
        if name not in case:
            raise ValueError(f"{text!r} has the unknown option {name!r}")
        case[name] = int(value or 1)
    return case


def train(case: dict[str, Any], devices: int, path: str) -> None:
    """Trains a case in this process, and in those that the Trainer launches; rank 0 prints the result."""
    import torch
    from torch import Tensor
    from torch.utils.data import DataLoader, Dataset

    from lightning_ssd import SSDOffloadStrategy
    from lightning_ssd._lightning import pl
    from lightning_ssd.recipes.models.gpt import GPT

    class TrainedGPT(GPT):
        def configure_model(self) -> None:
            # The model is made on the GPU where it fits there; states in host memory are initialized unit by unit.
            if self.model is None:
                with torch.device("meta" if case["mode"] == "host" else self.trainer.strategy.root_device):
                    super().configure_model()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

    class RandomTokens(Dataset[Tensor]):
        def __len__(self) -> int:
            return devices * case["batch"] * (case["warm-up"] + case["steps"])

        def __getitem__(self, index: int) -> Tensor:
            generator = torch.Generator().manual_seed(index % (devices * case["batch"]))
            return torch.randint(50304, (TOKENS,), generator=generator)

    if case["gpu"]:
        local = int(os.environ.get("LOCAL_RANK", 0))
        torch.cuda.set_device(local)
        cap_gpu_memory(case["gpu"], local)
    strategy: Any = "ddp" if devices > 1 else "auto"
    if case["mode"] != "ddp":
        states = "gpu" if case["mode"] == "fits" else "host"
        strategy = SSDOffloadStrategy(path, offload="none", states=states)
    times = StepTimes(losses=False)
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=devices,
        precision="bf16-true" if case["mode"] == "host" else "bf16-mixed",
        strategy=strategy,
        max_epochs=1,
        callbacks=[times],
        gradient_clip_val=1.0 if case["clip"] else None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=path,
    )
    hidden = case["hidden"]
    module = TrainedGPT(50304, TOKENS, hidden, case["layers"], hidden // 128, gradient_checkpointing=True)
    trainer.fit(module, DataLoader(RandomTokens(), batch_size=case["batch"]))
    if trainer.global_rank > 0:
        return
    steps = times.seconds(case["warm-up"])
    result = {
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "step": statistics.median(steps),
        "steps": steps,
        "tokens": devices * case["batch"] * TOKENS / statistics.median(steps),
        "gpu_peak": torch.cuda.max_memory_allocated(),
        "machine": f"{devices} of {torch.cuda.device_count()} {torch.cuda.get_device_name()}, {os.cpu_count()} cores, "
        f"torch {torch.__version__}",
    }
    print(json.dumps(result), flush=True)


def report(results: dict[str, dict[str, Any]]) -> str:
    """Returns the table of results, with throughput relative to one GPU."""
    lines = ["| training | GPUs | step | tokens/s | of one GPU | GPU | RAM |", "|---|---|---|---|---|---|---|"]
    for name, run in results.items():
        case, _, devices = name.rpartition(" x")
        if "error" in run:
            lines.append(f"| {case} | {devices} | {run['error']} | | | | |")
            continue
        spread = f"{run['step']:.3f} s ({min(run['steps']):.3f} to {max(run['steps']):.3f})"
        alone = results.get(f"{case} x1", {}).get("tokens")
        ratio = f"{run['tokens'] / alone:.2f}x" if alone else ""
        memory = f"{run['gpu_peak'] / 2**30:.1f} GiB | {run['ram'] / 2**30:.1f} GiB"
        lines.append(f"| {case} | {devices} | {spread} | {run['tokens']:.0f} | {ratio} | {memory} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--cases", nargs="+", default=CASES, help="MODE:HIDDENxLAYERS[,OPTION...]")
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 2], help="numbers of GPUs")
    parser.add_argument("--limit", type=float, help="seconds after which a training is ended")
    parser.add_argument("--path", default=".", help="directory for scratch files")
    parser.add_argument("--report", type=Path, help="file of earlier results; measures nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        train(json.loads(arguments.one), arguments.devices[0], arguments.path)
        return
    results: dict[str, dict[str, Any]] = {}
    if arguments.report:
        results = json.loads(arguments.report.read_text())
    else:
        for text in arguments.cases:
            for devices in arguments.devices:
                command = [sys.executable, "-W", "ignore", "-m", "benchmarks.several_gpus", "--path", arguments.path]
                command += ["--devices", str(devices), "--one", json.dumps(parse(text))]
                results[f"{text} x{devices}"] = run_alone(command, arguments.limit)
                if arguments.out:
                    arguments.out.write_text(json.dumps(results, indent=1))
                print(report(results).splitlines()[-1], flush=True)
    print(report(results))


if __name__ == "__main__":
    main()
