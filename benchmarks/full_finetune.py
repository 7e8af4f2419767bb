"""Full fine-tuning of GPT, T5 or Llama on a GPU capped at 24 GiB: ours, and DeepSpeed's ZeRO-3 beside it, in one run.

    python -m benchmarks.full_finetune --out results.json [--cases host:2048x24 deepspeed-cpu:2048x24 ...]

    python -m benchmarks.full_finetune --model t5 --out results.json     # T5 3B, clipped to norm 1
    python -m benchmarks.full_finetune --model llama --out results.json  # a Llama of 3.0B, clipped to norm 1

    python -m benchmarks.full_finetune --clipping 2560x24 --out results.json   # cost of clipping, of 1.9B

A case is MODE:HIDDENxLAYERS, with options after commas: `host:3072x34,clip,rounds=2`. Each has a process of its own.

Modes:
  host, ssd, auto                 `states=` of the strategy
  deepspeed-cpu, deepspeed-nvme   ZeRO-3 with parameters and optimizer in RAM, or on NVMe
Options:
  clip             gradients are clipped to norm 1, or `limit=N` (one that is never reached shows the cost alone)
  deferred, speculative   `clip=` of the strategy
  naive, none      `overlap=`
  split            `state_format="split"`
  recover          `recover=True`: a killed run would go on
  plain-kernel     AdamW by torch's kernels instead of our own
  mixed            `precision="bf16-mixed"` instead of `bf16-true`
  batch=N, warm-up=N, steps=N, rounds=N, gpu=GIB, host=GIB
  resident=GIB     `gpu_memory=` of the strategy: whole units stay on the GPU (with mode auto)

Batches of 16 x 1024 tokens (and 229 of a T5's decoder), gradient checkpointing, bf16 weights with fp32 master weights
and states (`bf16-true`; with `mixed`, `bf16-mixed`), AdamW. Step: median of the time from one step's begin to the next,
after the warm-up; `drain` is the rest of the last step on the CPU. RAM: the largest decrease of the free memory since
the process began. Random tokens, the same in every step, so that the loss falls. `--timeline NAME` writes a
Chrome trace and a picture.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.processes import cap_gpu_memory, run_alone

CLIPPING = (
    "host:{}",
    "host:{},deferred",
    "auto:{},deferred,resident=14",
    "host:{},speculative,limit=1000000",
)
"""Cases that show the cost of clipping: none; every step clipped, with all units in RAM, and with units that stay on
the GPU; and speculated steps of which none is clipped."""

SHAPES = {"gpt": ("2048x24", "2560x32", "3072x34"), "t5": ("1024x24,clip",), "llama": ("3072x28,clip",)}
"""Cases of each model, unless others are given."""

WARM_UP = 2


def train(case: dict[str, Any], path: str, timeline: str | None) -> None:
    """Trains by our strategy and prints the result as one line of JSON."""
    import torch
    from torch import Tensor
    from torch.utils.data import DataLoader, Dataset

    from benchmarks.finetuned_models import make_model, random_batch
    from benchmarks.step_times import StepTimes
    from lightning_ssd import SSDOffloadStrategy, TimelineRecorder
    from lightning_ssd._lightning import pl
    from lightning_ssd.model_states.optimizers import adam
    from lightning_ssd.recipes.models.gpt import GPT

    cap_gpu_memory(case["gpu"])
    if case["plain_kernel"]:
        adam.adam_library = lambda: None

    class FineTunedGPT(GPT):
        def configure_model(self) -> None:
            if self.model is None:
                with torch.device("meta"):
                    super().configure_model()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=case["lr"], fused=True)

    class FineTuned(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: Any = None

        def configure_model(self) -> None:
            if self.model is None:
                with torch.device("meta"):
                    self.model = make_model(case["model"], case["hidden"], case["layers"])
                self.model.gradient_checkpointing_enable({"use_reentrant": False})

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=case["lr"], fused=True)

    class SameTokens(Dataset[dict[str, Tensor]]):
        batch = random_batch(case["model"], case["batch"])

        def __len__(self) -> int:
            return case["batch"] * (case["warm-up"] + case["steps"])

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {name: values[index % case["batch"]] for name, values in self.batch.items()}

    class Probe(StepTimes):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.begun.append(time.perf_counter())  # without a wait for the GPU, which `drained` includes
            trainer.strategy.model_states.drain()
            self.drained = time.perf_counter() - self.begun[-1]

    strategy = SSDOffloadStrategy(
        path,
        offload="none",
        states=case["mode"],
        overlap=case["overlap"],
        clip=case["how"],
        state_format="split" if case["split"] else "fp32",
        recover=case["recover"],
        gpu_memory=f"{case['resident']}GiB" if case["resident"] else "4GiB",
        host_memory=f"{case['host']}GiB" if case["host"] else "auto",
    )
    probe = Probe()
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed" if case["mixed"] else "bf16-true",
        strategy=strategy,
        max_epochs=1,
        callbacks=[probe, *([TimelineRecorder(case["warm-up"] + 1, timeline, steps=2)] if timeline else [])],
        gradient_clip_val=float(case["limit"]) if case["clip"] else None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=path,
    )
    hidden = case["hidden"]
    model: pl.LightningModule = FineTuned()
    if case["model"] == "gpt":
        model = FineTunedGPT(50304, 1024, hidden, case["layers"], hidden // 128, gradient_checkpointing=True)
    started = time.perf_counter()
    trainer.fit(model, DataLoader(SameTokens(), batch_size=case["batch"]))
    steps = probe.seconds(case["warm-up"])
    result = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "step": statistics.median(steps),
        "steps": steps,
        "drain": probe.drained,
        "setup": probe.begun[0] - started,
        "gpu_peak": torch.cuda.max_memory_allocated(),
        "losses": probe.losses,
        "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {torch.get_num_threads()} CPU threads",
    }
    print(json.dumps(result), flush=True)
    import os

    os._exit(0)  # the rest would only make the model whole again


def parse(text: str, model: str) -> dict[str, Any]:
    """Returns the settings of a case of `model`."""
    mode, _, rest = text.partition(":")
    shape, *options = rest.split(",")
    hidden, layers = map(int, shape.split("x"))
    case: dict[str, Any] = {"model": model, "mode": mode, "hidden": hidden, "layers": layers, "batch": 16, "steps": 4}
    case |= {"rounds": 1, "gpu": 24, "host": 0, "resident": 0, "lr": 1e-4, "overlap": "optimized"}
    case["warm-up"] = WARM_UP
    case |= {
        "limit": 1,
        "how": "auto",
        "clip": False,
        "split": False,
        "plain_kernel": False,
        "recover": False,
        "mixed": False,
    }
    for option in options:
        name, _, value = option.partition("=")
        if name in ("naive", "none"):
            case["overlap"] = name
        elif name in ("deferred", "speculative"):
            case |= {"clip": True, "how": name}
        elif value:
            case[name] = float(value) if name == "lr" else int(value)
        else:
            case[name.replace("-", "_")] = True
    return case


def run(case: dict[str, Any], path: str, timeline: str | None) -> dict[str, Any]:
    """Runs a case in a process of its own, and returns its printed result, with the RAM that it used."""
    if case["mode"].startswith("deepspeed"):
        arguments = {name: case[name] for name in ("model", "hidden", "layers", "batch", "steps")}
        arguments |= {
            "mode": case["mode"].removeprefix("deepspeed-"),
            "warm-up": case["warm-up"],
            "gpu-gib": case["gpu"],
            "clip": case["limit"] if case["clip"] else 0.0,
            "path": f"{path}/deepspeed",
        }
        command = [f"--{name}={value}" for name, value in arguments.items()]
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.deepspeed_peer", *command]
    else:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.full_finetune", "--path", path]
        command += ["--one", json.dumps(case)] + ([f"--timeline={timeline}"] if timeline else [])
    return run_alone(command)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("--path", default=".", help="directory on the SSD")
    parser.add_argument("--model", choices=list(SHAPES), default="gpt", help="family of the model")
    parser.add_argument("--cases", nargs="+", help="MODE:HIDDENxLAYERS[,OPTION...] (default: see SHAPES)")
    parser.add_argument("--clipping", metavar="HIDDENxLAYERS", help="the cases without clipping, and with it, instead")
    parser.add_argument("--timeline", help="files to write, without ending, of the last of our cases")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        train(json.loads(arguments.one), arguments.path, arguments.timeline)
        return
    results: dict[str, Any] = {}
    default = [f"{mode}:{shape}" for shape in SHAPES[arguments.model] for mode in ("deepspeed-cpu", "host")]
    if arguments.clipping:
        default = [case.format(arguments.clipping) for case in CLIPPING]
    for text in arguments.cases or default:
        case = parse(text, arguments.model)
        if arguments.model != "gpt":
            text = f"{arguments.model} {text}"
        for _ in range(case["rounds"]):
            result = run(case, arguments.path, arguments.timeline)
            results.setdefault(text, []).append(result)
            if "error" in result:
                print(f"{text:36} failed: {result['error']}", flush=True)
            else:
                memory = f"GPU {result['gpu_peak'] / 2**30:.1f} GiB  RAM {result['ram'] / 2**30:.1f} GiB"
                loss = result["losses"]
                print(f"{text:36} {result['step']:.2f} s  {memory}  loss {loss[0]:.3f} to {loss[-1]:.3f}", flush=True)
            if arguments.out:
                Path(arguments.out).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
