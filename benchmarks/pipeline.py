"""Activation memory of each stage of a two-stage pipeline (1F1B), and step time, with and without offloading.

    python -m benchmarks.pipeline --path /nvme0 [/nvme1] --out pipeline.json [--cases none 0.5 1.0 1.0,whole]
    python -m benchmarks.pipeline --report pipeline.json       # of earlier results; measures nothing

A case is `none` (Lightning without `ActivationOffload`) or a share of the saved tensors to offload, with options after
commas: `whole` (all micro-batches of the schedule are offloaded as one, without `follow_stages`), `host` (to host
memory instead of SSDs).

GPT blocks in bf16 (`bf16-true`), AdamW, one GPU a stage. Memory: the most that a step allocates beyond weights,
gradients and optimizer states. Step: the median time from one step's begin to the next on the last stage. With two
paths, each stage has one of its own, as in Teraio.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.processes import run_alone
from benchmarks.step_times import StepTimes

CASES = ["none", "0.5", "1.0", "1.0,whole"]
VOCABULARY = 50304


def train(case: str, sizes: Mapping[str, int], paths: list[str]) -> None:
    """Trains a case in this process, and in the one that the Trainer launches; rank 0 prints the result."""
    import torch
    from torch import Tensor, nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn import functional as F
    from torch.utils.data import DataLoader

    from lightning_ssd import ActivationOffload, follow_stages
    from lightning_ssd._lightning import pl

    offload, *options = case.split(",")
    if unknown := set(options) - {"whole", "host"}:
        raise ValueError(f"{case!r} has the unknown option {unknown.pop()!r}")
    hidden = sizes["hidden"]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
            self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
            self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

        def forward(self, x: Tensor) -> Tensor:
            heads = self.qkv(self.norms[0](x)).unflatten(2, (3, -1, min(128, hidden))).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).flatten(2))
            return x + self.mlp(self.norms[1](x))

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    class Pipeline(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.peaks: list[int] = []

        def configure_model(self) -> None:
            device, rank = self.trainer.strategy.root_device, self.global_rank
            with device:
                blocks = [Block() for _ in range(sizes["layers"] // 2)]
                first = [nn.Embedding(VOCABULARY, hidden), *blocks]
                last = [*blocks, nn.LayerNorm(hidden), nn.Linear(hidden, VOCABULARY, bias=False)]
            self.part = nn.Sequential(*(last if rank else first)).to(torch.bfloat16)
            self.stage = PipelineStage(self.part, rank, 2, device)
            self.schedule = Schedule1F1B(self.stage, sizes["chunks"], loss_fn=loss_of)

        def training_step(self, ids: Tensor, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            with follow_stages(self.trainer, *[] if "whole" in options else [self.stage]):
                if self.stage.is_first:
                    self.schedule.step(ids)
                else:
                    self.schedule.step(target=ids.roll(-1, 1))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)  # gradients are no part of the memory that is measured

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-4, fused=True)

    class Memory(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
                self.before = torch.cuda.memory_allocated()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            peak = torch.cuda.max_memory_allocated() - self.before if torch.cuda.is_available() else 0
            pl_module.peaks.append(peak)

    times = StepTimes(losses=False)
    callbacks: list[pl.Callback] = [times, Memory()]
    if offload != "none":
        path = paths[int(os.environ.get("LOCAL_RANK", 0)) % len(paths)]
        tiers: Any = {"tier": "host"} if "host" in options else {"host_memory": 0}
        callbacks.append(ActivationOffload(path, offload=float(offload), **tiers))
    trainer = pl.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=2,
        strategy=pl.strategies.ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2),
        precision="bf16-true",
        max_epochs=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=paths[0],
    )
    generator = torch.Generator().manual_seed(0)
    batch = sizes["chunks"] * sizes["batch"]
    rows = (sizes["warm_up"] + sizes["steps"]) * batch
    ids = torch.randint(VOCABULARY, (rows, sizes["tokens"]), generator=generator)
    module = Pipeline()
    trainer.fit(module, DataLoader(ids, batch_size=batch))  # type: ignore[arg-type]
    steps = times.seconds(sizes["warm_up"])
    mine = {"peak": max(module.peaks[sizes["warm_up"] :]), "steps": steps}
    stages: list[Any] = [None, None]
    torch.distributed.all_gather_object(stages, mine)
    if trainer.global_rank > 0:
        return
    result = {
        "sizes": dict(sizes),
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "peaks": [stage["peak"] for stage in stages],
        "step": statistics.median(stages[-1]["steps"]),
        "steps": stages[-1]["steps"],
        "machine": f"{torch.cuda.device_count()} GPUs, {os.cpu_count()} cores, torch {torch.__version__}",
    }
    print(json.dumps(result), flush=True)


def report(results: dict[str, dict[str, Any]]) -> str:
    """Returns the table of results."""
    lines = ["| offloaded | step | memory of the first stage | of the last stage |", "|---|---|---|---|"]
    for case, run in results.items():
        if "error" in run:
            lines.append(f"| {case} | {run['error']} | | |")
            continue
        step = f"{run['step']:.3f} s ({min(run['steps']):.3f} to {max(run['steps']):.3f})"
        lines.append(" | ".join([f"| {case}", step, *(f"{peak / 2**30:.2f} GiB" for peak in run["peaks"])]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--cases", nargs="+", default=CASES, help="none or SHARE[,OPTION...]")
    parser.add_argument("--path", nargs="+", default=["."], help="directory for scratch files, or one of each stage")
    parser.add_argument("--limit", type=float, help="seconds after which a training is ended")
    parser.add_argument("--report", type=Path, help="file of earlier results; measures nothing")
    sizes = {"hidden": 12288, "layers": 4, "chunks": 8, "batch": 4, "tokens": 1024, "warm-up": 4, "steps": 8}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        train(arguments.one, {name: getattr(arguments, name) for name in map(_field, sizes)}, arguments.path)
        return
    results: dict[str, dict[str, Any]] = {}
    if arguments.report:
        results = json.loads(arguments.report.read_text())
    else:
        for case in arguments.cases:
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.pipeline", "--one", case]
            command += [text for name in sizes for text in (f"--{name}", str(getattr(arguments, _field(name))))]
            results[case] = run_alone([*command, "--path", *arguments.path], arguments.limit)
            if arguments.out:
                arguments.out.write_text(json.dumps(results, indent=1))
    print(report(results))


def _field(name: str) -> str:
    return name.replace("-", "_")


if __name__ == "__main__":
    main()
