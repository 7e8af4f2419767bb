"""Several GPUs of one host: step time, throughput and memory of GPT, beside one GPU, peers, and the machine's bound.

    python -m benchmarks.several_gpus --out several_gpus.json --devices 1 2 [--cases fits:1024x24 host:3072x34,clip]
    python -m benchmarks.several_gpus --report several_gpus.json       # of earlier results; measures nothing
    python -m benchmarks.several_gpus --report several_gpus.json --draw several_gpus.png

A case is MODE:HIDDENxLAYERS, with options after commas; each is trained with each number of `--devices`, and all again
in each of `--rounds`, so that a slow minute of the machine hits more than one case.

Modes:
  machine  rates of the machine, all processes at once, and the forward and backward of the model (`rank_peers`)
  ddp      Lightning's own `ddp`, everything on the GPUs
  fits     `ssd_offload` with `states="gpu"`: torch's DDP, the same activations
  host     `states="host"`: one copy of the states in host memory for all GPUs
  default  `ssd_offload` with default arguments: after 16 steps, states move to GPU memory that is left (`warm-up=40`)
  deepspeed, fsdp  the peers of `rank_peers`
Options:
  clip             gradients are clipped to norm 1
  batch=N          sequences a GPU in a micro-batch (default: 16)
  tokens=N         tokens of a sequence (default: 1024)
  gpu=GIB          memory of each GPU that may be used (default: 24 with `host`, `default` and peers, else all)
  resident=GIB     memory of each GPU for weights and states that stay there, of `host` (default: none stay)
  warm-up=N, steps=N

`--out` is written after each measured step; SIGTERM ends all, and prints the table.

Gradient checkpointing, AdamW. With `host` and `default`, weights are in bf16 with fp32 master weights (`bf16-true`);
else `bf16-mixed`. Step: the median time from one step's begin to the next on rank 0, after its GPU has ended the step
before. GPU: the most that rank 0 has allocated after the warm-up. RAM: the largest decrease of the host's free memory
since the processes began. Seconds of rank 0: `imports` from its start, `launch` until all processes are connected,
`states` until the first batch, `first` step, `end` of fit. Results are printed as they come, so that a training that a
limit ends has a row of the steps and seconds until then.

Bound of `host` and `default`, if all states are in host memory, with the `machine` of the same shape, batch and GPUs:
the largest of these seconds.

  compute   forward and backward
  DRAM      the least bytes a parameter that cross the host's memory, by the faster one of two rates, a copy's and the
            kernel's: 28 of the states, 4 of weights read in forward and backward, by all GPUs at once from the caches,
            and 8 of the gradients' mean, which one GPU writes and its step reads. Without access between GPUs
            (`NCCL_P2P_DISABLE=1`, and results before that access was used): for each GPU 2 of the gradient written and
            2 read; clipped: 2 more read
  CPU       parameters, by the rate of all ranks' kernels
  PCIe      4 bytes a parameter to each GPU
  order     clipped: backward, and then the longer one of the forward and the half of the CPU's steps that it waits for
"""

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.processes import cap_gpu_memory, end_with_parent, exit_on_sigterm, run_alone, save

CASES = ["ddp:1024x24", "fits:1024x24", "machine:3072x34", "host:3072x34", "host:3072x34,clip"]
PEERS = ("deepspeed", "fsdp", "machine")
OFFLOADED = ("host", "default")
"""Modes with model states in host memory, of a model in bf16."""

STEP_BYTES = 28
"""Bytes of memory traffic a parameter of a step of AdamW with fp32 master weights, on the CPU."""


def parse(text: str) -> dict[str, Any]:
    """Returns the settings of a case."""
    mode, _, rest = text.partition(":")
    shape, *options = rest.split(",")
    hidden, layers = map(int, shape.split("x"))
    case = {"mode": mode, "hidden": hidden, "layers": layers, "batch": 16, "tokens": 1024}
    case |= {
        "warm-up": 4,
        "steps": 8,
        "clip": 0,
        "resident": 0,
        "gpu": 24 if mode in (*OFFLOADED, "deepspeed", "fsdp") else 0,
    }
    for option in options:
        name, _, value = option.partition("=")
        if name not in case:
            raise ValueError(f"{text!r} has the unknown option {name!r}")
        case[name] = int(value or 1)
    return case


def start_ranks(devices: int) -> list[subprocess.Popen[bytes]]:
    """Starts the other ranks' processes, which end with this one.

    All import at once then: the Trainer would start them after this process's imports.
    """
    if devices == 1 or "LOCAL_RANK" in os.environ:
        return []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(devices), "NODE_RANK": "0"}
    started = [
        subprocess.Popen(sys.orig_argv, env=os.environ | {"LOCAL_RANK": str(rank)}, preexec_fn=end_with_parent)
        for rank in range(1, devices)
    ]
    os.environ["LOCAL_RANK"] = "0"
    return started


def train(case: dict[str, Any], devices: int, path: str) -> None:
    """Trains a case as this process's rank; rank 0 prints the result."""
    import torch
    from torch import Tensor
    from torch.utils.data import DataLoader, Dataset

    from benchmarks.step_times import StepTimes
    from lightning_ssd import SSDOffloadStrategy
    from lightning_ssd._lightning import pl
    from lightning_ssd.recipes.models.gpt import GPT

    class TrainedGPT(GPT):
        def configure_model(self) -> None:
            # The model is made on the GPU where it fits there; states in host memory are initialized unit by unit.
            if self.model is None:
                with torch.device("meta" if case["mode"] in OFFLOADED else self.trainer.strategy.root_device):
                    super().configure_model()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

    class RandomTokens(Dataset[Tensor]):
        def __len__(self) -> int:
            return devices * case["batch"] * (case["warm-up"] + case["steps"])

        def __getitem__(self, index: int) -> Tensor:
            generator = torch.Generator().manual_seed(index % (devices * case["batch"]))
            return torch.randint(50304, (case["tokens"],), generator=generator)

    class Printed(StepTimes):
        """Prints the result of the steps so far, after each one."""

        def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
            note("launch")
            if trainer.global_rank == 0:
                print(json.dumps(self.result(pl_module, partial=True)), flush=True)

        def on_train_batch_start(self, trainer: pl.Trainer, *rest: Any) -> None:
            super().on_train_batch_start(trainer, *rest)
            if len(self.begun) < 3:
                note("states" if len(self.begun) == 1 else "first")
            if cuda and len(self.begun) == case["warm-up"] + 1:
                torch.cuda.reset_peak_memory_stats()
            if trainer.global_rank == 0:
                print(json.dumps(self.result(trainer.lightning_module, partial=True)), flush=True)

        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            super().on_train_end(trainer, pl_module)
            ends.append(seconds_of_process())
            peaks.append(gpu_peak())  # which states that leave the GPU reset

        def result(self, module: pl.LightningModule, *, partial: bool) -> dict[str, Any]:
            steps = self.seconds(case["warm-up"])
            result = {
                "parameters": sum(parameter.numel() for parameter in module.parameters()),
                "gpu_peak": peaks[-1] if peaks else gpu_peak(),
                "seconds": seconds,
                "p2p": devices > 1 and os.environ.get("NCCL_P2P_DISABLE") != "1",
                "machine": f"{devices} of {torch.cuda.device_count()} "
                f"{torch.cuda.get_device_name() if cuda else 'CPU'}, {os.cpu_count()} cores, torch {torch.__version__}",
            }
            result |= {"step": statistics.median(steps), "steps": steps} if steps else {}
            return result | ({"partial": True} if partial else {})

    def gpu_peak() -> int:
        return torch.cuda.max_memory_allocated() if cuda else 0

    def note(phase: str) -> None:
        """Notes the seconds of a phase that ends now."""
        ends.append(seconds_of_process())
        seconds[phase] = ends[-1] - ends[-2]

    cuda = torch.cuda.is_available()  # else the benchmark is tried out
    seconds: dict[str, float] = {}
    peaks: list[int] = []
    ends = [0.0]
    note("imports")

    if case["gpu"] and cuda:
        local = int(os.environ.get("LOCAL_RANK", 0))
        torch.cuda.set_device(local)
        cap_gpu_memory(case["gpu"], local)
    strategy: Any = "ddp" if devices > 1 else "auto"
    if case["mode"] == "default":
        strategy = SSDOffloadStrategy(path)
    elif case["mode"] != "ddp":
        states: Any = "gpu" if case["mode"] == "fits" else "auto" if case["resident"] else "host"
        gpu_memory = f"{case['resident']}GiB" if case["resident"] else "auto"
        strategy = SSDOffloadStrategy(path, offload="none", states=states, gpu_memory=gpu_memory)
    times = Printed(losses=False)
    trainer = pl.Trainer(
        accelerator="gpu" if cuda else "cpu",
        devices=devices,
        precision="bf16-true" if case["mode"] in OFFLOADED else "bf16-mixed",
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
    module = TrainedGPT(50304, case["tokens"], hidden, case["layers"], hidden // 128, gradient_checkpointing=True)
    trainer.fit(module, DataLoader(RandomTokens(), batch_size=case["batch"]))
    if trainer.global_rank == 0:
        note("end")
        print(json.dumps(times.result(module, partial=False)), flush=True)


def seconds_of_process() -> float:
    """Returns the seconds since this process was started."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def command_of(text: str, devices: int, path: str) -> list[str]:
    """Returns the command of a case."""
    case = parse(text)
    python = [sys.executable, "-W", "ignore", "-m"]
    if case["mode"] not in PEERS:
        return [
            *python,
            "benchmarks.several_gpus",
            "--path",
            path,
            "--devices",
            str(devices),
            "--one",
            json.dumps(case),
        ]
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(devices), "-m", "benchmarks.rank_peers"]
    shape = f"{case['hidden']}x{case['layers']}"
    options = {"--mode": case["mode"], "--shape": shape, "--clip": case["clip"], "--gpu-gib": case["gpu"]}
    options |= {f"--{name}": case[name] for name in ("batch", "tokens", "steps", "warm-up")}
    if case["mode"] != "machine":
        from lightning_ssd.device import available_cores

        # torchrun's default is one thread, which our strategy replaces by its share
        python = ["env", f"OMP_NUM_THREADS={max(1, available_cores() // devices)}", *python]
    return [*python, *launch, *(str(item) for option in options.items() for item in option)]


def merge(earlier: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Returns the result of a case in two rounds, of which the first one's steps precede."""
    if "steps" not in run or "steps" not in earlier:
        return earlier if "steps" in earlier else run
    steps = earlier["steps"] + run["steps"]
    largest = {name: max(earlier[name], run[name]) for name in ("gpu_peak", "ram")}
    return run | largest | {"steps": steps, "step": statistics.median(steps)}


def bounds(case: dict[str, Any], rates: dict[str, float], devices: int, *, p2p: bool) -> dict[str, float]:
    """Returns the seconds that each part of the machine needs for a step of `host`; see the module's docstring.

    `p2p`: whether gradients are summed on the GPUs.
    """
    parameters, clipped = rates["parameters"], bool(case["clip"])
    stepping = parameters / (rates["adam"] * devices)
    dram = devices * max(rates["dram"], STEP_BYTES * rates["adam"])
    found = {
        "compute": rates["compute"],
        "DRAM": parameters * (STEP_BYTES + 4 + (8 if p2p else devices * (6 if clipped else 4))) / dram,
        "CPU": stepping,
    }
    if "h2d" in rates:
        found["PCIe"] = 4 * parameters / rates["h2d"]
    if clipped:
        found["order"] = rates["compute"] - rates["forward"] + max(rates["forward"], stepping / 2)
    return found


def bound_of(name: str, results: dict[str, dict[str, Any]]) -> tuple[str, float] | None:
    """Returns the part of the machine that bounds a result, and its seconds; None: it is not known."""
    text, _, devices = name.rpartition(" x")
    case = parse(text)
    same = ("hidden", "layers", "batch", "tokens")
    for other, rates in results.items():
        other_text, _, of_devices = other.rpartition(" x")
        measured = parse(other_text)
        alike = of_devices == devices and all(measured[key] == case[key] for key in same)
        if case["mode"] in OFFLOADED and measured["mode"] == "machine" and alike and "dram" in rates:
            found = bounds(case, rates, int(devices), p2p=results[name].get("p2p", False))
            return max(found.items(), key=lambda item: item[1])
    return None


def throughput(name: str, results: dict[str, dict[str, Any]]) -> float | None:
    """Returns the tokens a second of a result."""
    text, _, devices = name.rpartition(" x")
    case, step = parse(text), results.get(name, {}).get("step")
    return None if step is None else int(devices) * case["batch"] * case["tokens"] / step


def report(results: dict[str, dict[str, Any]]) -> str:
    """Returns the table of results, with throughput relative to one GPU, and the rates of the machine."""
    columns = ["training", "GPUs", "step", "bound", "bound / step", "tokens/s", "of one GPU", "GPU", "RAM", "seconds"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, run in results.items():
        case, _, devices = name.rpartition(" x")
        if "error" in run:
            lines.append(f"| {case} | {devices} | {run['error']} |" + " |" * 7)
            continue
        phases = ", ".join(f"{phase} {value:.1f}" for phase, value in run.get("seconds", {}).items())
        if "dram" in run:
            rates = ", ".join(
                f"{key} {value / 1e9:.1f} {unit}"
                for key, unit in (("dram", "GB/s"), ("adam", "1e9/s"), ("h2d", "GB/s"), ("d2h", "GB/s"))
                if (value := run.get(key)) is not None
            )
            times = f"forward {run['forward']:.3f} s, with backward {run['compute']:.3f} s"
            lines.append(f"| {case} | {devices} | of each process: {rates}; {times} |" + " |" * 7)
            continue
        if "step" not in run:
            lines.append(f"| {case} | {devices} | none until the limit |" + " |" * 6 + f" {phases} |")
            continue
        spread = f"{run['step']:.3f} s ({min(run['steps']):.3f} to {max(run['steps']):.3f})"
        if run.get("partial"):
            spread += f", {len(run['steps'])} steps until the limit"
        bound, ratio, of_one = "", "", ""
        if (found := bound_of(name, results)) is not None:
            bound, ratio = f"{found[1]:.3f} s ({found[0]})", f"{found[1] / run['step']:.2f}"
        tokens, alone = throughput(name, results), throughput(f"{case} x1", results)
        assert tokens is not None
        if alone is not None:
            of_one = f"{tokens / alone:.2f}x"
        memory = f"{run['gpu_peak'] / 2**30:.1f} GiB | {run['ram'] / 2**30:.1f} GiB"
        cells = [case, devices, spread, bound, ratio, f"{tokens:.0f}", of_one, memory, phases]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(results: dict[str, dict[str, Any]], picture: Path) -> None:
    """Draws the throughput of each case by the number of GPUs, and as crosses that of its bound."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.2))
    by_case: dict[str, list[int]] = {}
    for name, run in results.items():
        case, _, devices = name.rpartition(" x")
        if "step" in run:
            by_case.setdefault(case, []).append(int(devices))
    for case, numbers in by_case.items():
        numbers.sort()
        tokens = [throughput(f"{case} x{number}", results) for number in numbers]
        label = ",".join(part for part in case.split(",") if not part.startswith(("warm-up=", "steps=")))
        (line,) = axes.plot(numbers, tokens, "o-", label=label)
        found = [(number, bound) for number in numbers if (bound := bound_of(f"{case} x{number}", results))]
        settings = parse(case)
        limits = [number * settings["batch"] * settings["tokens"] / seconds for number, (_, seconds) in found]
        axes.plot([number for number, _ in found], limits, "x--", color=line.get_color())
    axes.set(xlabel="GPUs", ylabel="tokens/s (crosses: bound of the machine)", ylim=(0, None))
    axes.set_xticks(sorted({number for numbers in by_case.values() for number in numbers}))
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=150)


def measure(arguments: argparse.Namespace, results: dict[str, dict[str, Any]]) -> None:
    """Trains all cases in each round, and adds their results to `results`, those of unfinished trainings too."""
    for _ in range(arguments.rounds):
        for text, devices in itertools.product(arguments.cases, arguments.devices):
            name = f"{text} x{devices}"
            earlier = results.get(name, {})

            def keep(run: dict[str, Any], name: str = name, earlier: dict[str, Any] = earlier) -> None:
                results[name] = merge(earlier, run)
                save(results, arguments.out)

            keep(run_alone(command_of(text, devices, arguments.path), arguments.limit, keep))
            print(report({name: results[name]}).splitlines()[-1], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--cases", nargs="+", default=CASES, help="MODE:HIDDENxLAYERS[,OPTION...]")
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 2], help="numbers of GPUs")
    parser.add_argument("--limit", type=float, help="seconds after which a process of a training is ended")
    parser.add_argument("--path", default=".", help="directory for scratch files")
    parser.add_argument("--report", type=Path, help="file of earlier results; measures nothing")
    parser.add_argument("--draw", type=Path, help="picture of the results")
    parser.add_argument("--rounds", type=int, default=1, help="times that all cases are trained")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        started = start_ranks(arguments.devices[0])
        train(json.loads(arguments.one), arguments.devices[0], arguments.path)
        for process in started:
            process.wait()
        sys.stdout.flush()
        os._exit(0)  # torch takes up to 100 s to end four processes with NCCL, Lightning's own `ddp`, too
    results: dict[str, dict[str, Any]] = json.loads(arguments.report.read_text()) if arguments.report else {}
    exit_on_sigterm()
    try:
        if not arguments.report:
            measure(arguments, results)
    finally:
        print(report(results))
    if arguments.draw:
        draw(results, arguments.draw)


if __name__ == "__main__":
    main()
