"""Fine-tuning with a capped GPU: the Llama shapes of configs/models, whole, by adapters, and on long sequences.

    python -m benchmarks.finetune --out results.json [--cases full:8b lora:8b long:1.2b long:8b]

Each command is one case:

    full:8b      the 8B shape trained whole, the GPU capped at 24 GiB: bf16 weights with fp32 masters, batch 8 x 1024,
                 clipping 1.0; states where there is room, `states="auto"`, in the format `--state-format`
    lora:8b      adapters of rank 16 over it, the GPU capped at 12 GiB: bf16-mixed over a bf16 base, batch 8 x 1024
    long:1.2b    the 1.2B shape trained whole, batch 1, the GPU capped at the 79 GiB of an H100 80GB: the step at 32,768
                 tokens, and the longest sequence that trains
    long:8b      the same by adapters over the 8B shape

`long` runs with and without this package: `plain` is Lightning's own strategy with gradient checkpointing and whole
logits, `ours` the defaults of `ssd_offload` and the loss in chunks. Sequences double from `--shortest` until one fails,
each in a process of its own. Step: median of the time from one step's begin to the next, after the warm-up. RAM: the
largest decrease of the free memory since the process began. Random tokens, the same in every step, so that the loss
falls. Plain bf16-true has no fp32 masters, so that its states take less than ours.
`--tiny` uses toy sizes on a CPU, to test the script itself.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.processes import cap_gpu_memory, run_alone

CASES = ["full:8b", "lora:8b", "long:1.2b", "long:8b"]
CONFIGS = Path(__file__).parents[1] / "configs" / "models"
WARM_UP = 2
FIRST_LENGTH = 32768
TINY: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                        "num_attention_heads": 8, "max_position_embeddings": 512}  # fmt: skip


def train(case: dict[str, Any], path: str) -> None:
    """Trains and prints the result as one line of JSON."""
    import torch
    import yaml
    from torch import Tensor
    from torch.utils.data import DataLoader, Dataset

    from benchmarks.step_times import StepTimes
    from lightning_ssd import SSDOffloadStrategy
    from lightning_ssd._lightning import pl
    from lightning_ssd.recipes.models import CausalLM, LoRACausalLM

    cuda = torch.cuda.is_available()
    if cuda and case["gpu"]:
        cap_gpu_memory(case["gpu"])
    sizes = yaml.safe_load((CONFIGS / f"llama-{case['shape']}.yaml").read_text())["model"]["init_args"]["config"]
    if case["tiny"]:
        sizes |= TINY
    sizes["max_position_embeddings"] = max(sizes["max_position_embeddings"], case["length"])

    class SameTokens(Dataset[Tensor]):
        ids = torch.randint(0, 256, (case["batch"], case["length"]), generator=torch.Generator().manual_seed(0))

        def __len__(self) -> int:
            return case["batch"] * (WARM_UP + case["steps"])

        def __getitem__(self, index: int) -> Tensor:
            return self.ids[index % case["batch"]]

    ours = case["mode"] == "ours"
    kind = LoRACausalLM if case["adapters"] else CausalLM
    module = kind(config=sizes, draw_late=ours, chunked_loss=ours, gradient_checkpointing=True, lr=1e-4, warmup_steps=1)
    probe = StepTimes()
    trainer = pl.Trainer(
        accelerator="gpu" if cuda else "cpu",
        devices=1,
        precision="bf16-mixed" if case["adapters"] else "bf16-true",
        strategy=SSDOffloadStrategy(path, **case["arguments"]) if ours else "auto",
        max_epochs=1,
        callbacks=[probe],
        gradient_clip_val=1.0,
        logger=False,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=path,
    )
    started = time.perf_counter()
    trainer.fit(module, DataLoader(SameTokens(), batch_size=case["batch"]))
    steps = probe.seconds(WARM_UP)
    step = statistics.median(steps)
    result = {
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "step": step,
        "steps": steps,
        "tokens_per_second": case["batch"] * case["length"] / step,
        "setup": probe.begun[0] - started,
        "gpu_peak": torch.cuda.max_memory_allocated() if cuda else 0,
        "losses": probe.losses,
        "machine": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
    }
    print(json.dumps(result), flush=True)
    os._exit(0)  # skips the release of memory, which takes long and serves nothing here


def run(case: dict[str, Any], path: str) -> dict[str, Any]:
    """Runs a case in a process of its own, and returns its printed result, with the RAM that it used."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.finetune", "--path", path, "--one", json.dumps(case)]
    return run_alone(command)


def runs_of(text: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Returns the runs of a case: those of `long` have the shortest length, which is doubled while they succeed."""
    kind, _, shape = text.partition(":")
    case = {"name": text, "shape": shape, "tiny": tiny, "adapters": kind == "lora", "mode": "ours", "batch": 8}
    case |= {"length": 64 if tiny else 1024, "gpu": 0}
    if kind == "full":
        return [case | {"gpu": 24}]
    if kind == "lora":
        return [case | {"gpu": 12}]
    if kind != "long":
        raise ValueError(f"{text!r} is no case: give one of {', '.join(CASES)}")
    case |= {"batch": 1, "length": 64 if tiny else FIRST_LENGTH, "adapters": shape == "8b", "gpu": 79}
    return [case | {"mode": mode} for mode in ("plain", "ours")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("--path", default=".", help="directory on the SSD")
    parser.add_argument("--cases", nargs="+", default=CASES, help="see above")
    parser.add_argument("--offload", default="auto", help="`offload=` of the strategy")
    parser.add_argument("--state-format", default="fp32", help="`state_format=` of the strategy")
    parser.add_argument("--host-memory", default="auto", help="`host_memory=` of the strategy")
    parser.add_argument("--modes", nargs="+", default=["plain", "ours"], choices=["plain", "ours"], help="of `long`")
    parser.add_argument("--shortest", type=int, default=FIRST_LENGTH, help="tokens of the first sequence of `long`")
    parser.add_argument("--longest", type=int, default=2**20, help="tokens of the longest sequence to try")
    parser.add_argument("--steps", type=int, default=4, help="measured steps")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        train(json.loads(arguments.one), arguments.path)
        return
    results: dict[str, Any] = {}
    for text in arguments.cases:
        for case in runs_of(text, tiny=arguments.tiny):
            if text.startswith("long") and case["mode"] not in arguments.modes:
                continue
            if text.startswith("long") and not arguments.tiny:
                case["length"] = arguments.shortest
            while case["length"] <= arguments.longest:
                given = {name: getattr(arguments, name) for name in ("offload", "state_format", "host_memory")}
                result = run(case | {"arguments": given, "steps": arguments.steps}, arguments.path)
                name = f"{text} {case['mode']} {case['batch']}x{case['length']}"
                results[name] = result
                if "error" in result:
                    print(f"{name:32} failed: {result['error']}", flush=True)
                else:
                    loss = result["losses"]
                    print(
                        f"{name:32} {result['step']:.2f} s  {result['tokens_per_second']:.0f} tokens/s  GPU"
                        f" {result['gpu_peak'] / 2**30:.1f} GiB  RAM {result['ram'] / 2**30:.1f} GiB  loss"
                        f" {loss[0]:.3f} to {loss[-1]:.3f}",
                        flush=True,
                    )
                if arguments.out:
                    Path(arguments.out).write_text(json.dumps(results, indent=1))
                if "error" in result or not text.startswith("long"):
                    break
                case["length"] *= 2


if __name__ == "__main__":
    main()
