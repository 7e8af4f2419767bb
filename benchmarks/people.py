"""What people train: the default beside the settings that a person would write, in memory caps of one GPU.

    python -m benchmarks.people --out people.json --shapes qwen2.5-1.5b vit-l --caps 24 16
    python -m benchmarks.people --shapes qwen2.5-0.5b --ragged --caps 27      # a new length in each batch
    python -m benchmarks.people --shapes llama-1536 --compiled --caps 22      # every layer compiled
    python -m benchmarks.people --report people.json [--draw people.png]      # of earlier results

A row is a training in a process of its own, with random weights and samples, in the shapes of published models. Modes:
  plain              Lightning's own strategy, without a cap
  plain+checkpoint   Lightning's own strategy, and transformers' `gradient_checkpointing_enable()`
  plain=0.3          the same without it, layers compiled with that `activation_memory_budget`
  default            `strategy="ssd_offload"`
  checkpoint         the same with `gradient_checkpointing_enable()`
  ssdtrain           `SSDOffloadStrategy(offload="ssdtrain")`
  default+8bit       `SSDOffloadStrategy(state_format="8bit")`, or another format; also checkpoint+8bit
  deepspeed+checkpoint   `strategy="deepspeed_stage_3_offload"`, and `gradient_checkpointing_enable()`; the optimizer is
                         `DeepSpeedCPUAdam`, as DeepSpeed refuses others with offloaded states
  deepspeed2+checkpoint  `DeepSpeedStrategy(stage=2, offload_optimizer=True)`, whose weights stay on the GPU; the same
  fsdp+checkpoint        `FSDPStrategy(cpu_offload=True)`, without clipping, which Lightning refuses with it
  fsdp-fused+checkpoint  the same with `AdamW(parameters, fused=True)`, which is its fastest on a CPU

`AdamW(parameters)` with default arguments, clipping at 1.0, bf16-mixed, the models' own losses, a DataLoader with two
workers. A row has: the median step after `--warm-up` steps and after the plan is final; the longest step after that;
the GPU's peak in these steps; RAM at its most, and at the end (the proportional set size of the process); the first
step, and the steps and seconds until the plan is final; the seconds of the first `--warm-up` steps; and the loss of a
fixed step, which is the same in all modes as far as matrix products are. If `--limit` ends a training, its row has
the measurements up to then.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers.modeling_layers import GradientCheckpointingLayer

from benchmarks.activation_offload import quiet_trainer
from benchmarks.default import find_planners, in_force
from benchmarks.processes import cap_gpu_memory, run_alone
from lightning_ssd import SSDOffloadStrategy
from lightning_ssd._lightning import pl
from lightning_ssd.device import make_clock, process_ram

MODES = ("plain", "plain+checkpoint", "default", "checkpoint", "ssdtrain")

LOSS_STEP = 10
"""Step whose loss is compared."""

TOLD_EVERY = 5.0
"""Least seconds between two prints of the results so far, of which the last one counts if the training is ended."""

DISTINCT = 32
"""Samples that are made, and repeated."""


@dataclass(frozen=True)
class Shape:
    """A model of transformers with the sizes of a published one.

    Attributes:
        model: name of the model's class in transformers.
        config: name of its configuration's class.
        sizes: arguments of the configuration.
        batch: samples of a micro-batch.
        tokens: tokens of a sample, of a text model.
        inputs: "text", "text pairs", "masked text", "images" or "audio".
    """

    model: str
    config: str
    sizes: Mapping[str, Any]
    batch: int
    tokens: int = 2048
    inputs: str = "text"

    def build(self) -> Any:
        """Returns the model, with random weights."""
        config = getattr(transformers, self.config)(**self.sizes)
        config.use_cache = False
        return getattr(transformers, self.model)(config)


def _decoder(hidden: int, layers: int, heads: int, kv: int, ffn: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        **more,
    }


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

SHAPES = {
    "qwen2.5-0.5b": Shape(
        "Qwen2ForCausalLM", "Qwen2Config", _decoder(896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True), 4
    ),
    "qwen2.5-1.5b": Shape(
        "Qwen2ForCausalLM", "Qwen2Config", _decoder(1536, 28, 12, 2, 8960, 151936, tie_word_embeddings=True), 4
    ),
    "qwen3-4b": Shape(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        _decoder(2560, 36, 32, 8, 9728, 151936, head_dim=128, tie_word_embeddings=True),
        2,
    ),
    "llama-3.2-1b": Shape(
        "LlamaForCausalLM", "LlamaConfig", _decoder(2048, 16, 32, 8, 8192, 128256, tie_word_embeddings=True), 4
    ),
    "llama-1536": Shape("LlamaForCausalLM", "LlamaConfig", _decoder(1536, 20, 12, 4, 4096, 50304), 8),
    "gemma-2b": Shape(
        "GemmaForCausalLM", "GemmaConfig", _decoder(2048, 18, 8, 1, 16384, 256000, head_dim=256), 2, tokens=1024
    ),
    "gpt2-xl": Shape(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 1600, "n_layer": 48, "n_head": 25, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        4,
        tokens=1024,
    ),
    "t5-3b": Shape(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": 1024,
            "d_kv": 128,
            "d_ff": 16384,
            "num_layers": 24,
            "num_heads": 32,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
        8,
        tokens=512,
        inputs="text pairs",
    ),
    "bert-large": Shape(
        "BertForMaskedLM",
        "BertConfig",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            **_NO_DROPOUT,
        },
        64,
        tokens=512,
        inputs="masked text",
    ),
    "vit-l": Shape(
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "num_labels": 1000,
        },
        128,
        inputs="images",
    ),
    "whisper-medium": Shape(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "d_model": 1024,
            "encoder_layers": 24,
            "decoder_layers": 24,
            "encoder_attention_heads": 16,
            "decoder_attention_heads": 16,
            "encoder_ffn_dim": 4096,
            "decoder_ffn_dim": 4096,
            "decoder_start_token_id": 1,
        },
        16,
        tokens=256,
        inputs="audio",
    ),
}


class Samples(Dataset[dict[str, Tensor]]):
    """Random samples of a shape, always the same ones.

    Args:
        shape: the shape.
        vocabulary: number of token ids.
        count: number of samples.
        ragged: whether texts have 128 to `shape.tokens` tokens, and not all of them `shape.tokens`.
    """

    def __init__(self, shape: Shape, vocabulary: int, count: int, *, ragged: bool) -> None:
        self._shape = shape
        self._vocabulary = vocabulary
        self._count = count
        self._ragged = ragged

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index if self._ragged else index % DISTINCT)
        tokens = self._shape.tokens
        if self._ragged:
            tokens = int(torch.randint(128, tokens + 1, (), generator=generator))

        def ids(below: int, *size: int) -> Tensor:
            return torch.randint(2, below, size, generator=generator)

        if self._shape.inputs == "images":
            return {"pixel_values": torch.randn(3, 224, 224, generator=generator), "labels": ids(1000)}
        if self._shape.inputs == "audio":
            features = torch.randn(80, 3000, generator=generator)
            return {"input_features": features, "labels": ids(self._vocabulary, tokens)}
        text = ids(self._vocabulary, tokens)
        if self._shape.inputs == "text pairs":
            return {"input_ids": text, "labels": ids(self._vocabulary, tokens // 4)}
        if self._shape.inputs == "masked text":
            return {"input_ids": text, "labels": text.where(torch.rand(tokens, generator=generator) < 0.15, -100)}
        return {"input_ids": text, "labels": text}


def pad(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns a batch of texts, padded to the longest."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def padded(name: str, value: int) -> Tensor:
        rows = [torch.nn.functional.pad(one[name], (0, longest - len(one[name])), value=value) for one in samples]
        return torch.stack(rows)

    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    mask = (torch.arange(longest) < lengths[:, None]).long()
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": mask}


class Module(pl.LightningModule):
    """A model that is trained by its own loss.

    Args:
        model: the model.
        mode: see above.
    """

    def __init__(self, model: torch.nn.Module, mode: str) -> None:
        super().__init__()
        self.model = model
        self._mode = mode

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self._mode.startswith("deepspeed"):
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(list(self.parameters()), adamw_mode=True)
            return optimizer
        return torch.optim.AdamW(self.parameters(), fused=True if "fused" in self._mode else None)


class RamWatch:
    """Records the most RAM of this process, by a thread that reads it every second."""

    def __init__(self) -> None:
        self.most = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while True:
            self.most = max(self.most, process_ram())
            if self._ended.wait(1.0):
                return

    def end(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self._thread.join()


class Probe(pl.Callback):
    """Times all steps, measures memory once the plan is final, and prints results now and then.

    Args:
        warm_up: steps before the measured ones, at least.
        watch: the RAM of the process.
    """

    def __init__(self, warm_up: int, watch: RamWatch) -> None:
        self._warm_up = warm_up
        self._watch = watch
        self._told = self._began = time.monotonic()
        self._outcome = "none"
        self._marks: list[Any] = []
        self._loss: Tensor | None = None
        self.final: int | None = None
        self.seconds = 0.0
        self.ram_at_end = 0

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.ram_at_end = process_ram()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._clock = make_clock(pl_module.device)
        self._began = time.monotonic()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        self._marks.append(self._clock.now())
        if self.final is None and batch_idx > 1 and in_force(trainer, batch_idx):
            self.final, self.seconds = batch_idx, time.monotonic() - self._began
        if self.final is not None and batch_idx == max(self.final, self._warm_up) and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        auto, planner = find_planners(trainer)
        self._outcome = "plan" if planner is not None else "none" if auto is None else auto.outcome
        if time.monotonic() >= self._told + TOLD_EVERY:
            self._told = time.monotonic()
            print(json.dumps(self.result() | {"partial": True}), flush=True)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: object, batch_idx: int
    ) -> None:
        if batch_idx == LOSS_STEP:
            self._loss = outputs["loss"].detach().clone()

    def result(self) -> dict[str, Any]:
        """Returns the measurements of the steps that the device has ended."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        ended = [self._clock.elapsed(begin, end) for begin, end in pairs]
        steps = [seconds for seconds in ended if seconds is not None]
        final = len(steps) if self.final is None else self.final
        measured = steps[max(final, self._warm_up) :]
        if not measured:
            return {"error": f"no final plan, or no step after the first ones, in {len(steps)} steps", "steps": steps}
        return {
            "step": statistics.median(measured),
            "mean": statistics.fmean(measured),
            "longest": max(measured),
            "peak": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
            "first": steps[0],
            "final": final,
            "seconds": self.seconds,
            "beginning": sum(steps[: self._warm_up]),
            "steps": steps,
            "outcome": self._outcome,
            "loss": None if self._loss is None else self._loss.item(),
            "process_ram": self._watch.most,
            "process_ram_at_end": self.ram_at_end or process_ram(),
        }


def strategy_of(mode: str) -> Any:
    """Returns the strategy of a mode."""
    kind, _, state_format = mode.partition("+")
    if kind.startswith("plain"):
        return "auto"
    if kind == "deepspeed":
        return "deepspeed_stage_3_offload"
    if kind == "deepspeed2":
        return pl.strategies.DeepSpeedStrategy(stage=2, offload_optimizer=True)
    if kind.startswith("fsdp"):
        return pl.strategies.FSDPStrategy(cpu_offload=True)
    if state_format:
        return SSDOffloadStrategy(state_format=state_format)
    return SSDOffloadStrategy(offload="ssdtrain") if kind == "ssdtrain" else "ssd_offload"


def fit(arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains the first shape in the first mode and cap, and returns the measurements, or `error`."""
    torch.manual_seed(0)
    shape, mode = SHAPES[arguments.shapes[0]], arguments.modes[0]
    cuda = torch.cuda.is_available()
    with torch.device("cuda" if cuda else "cpu"):  # random weights are drawn faster there
        model = shape.build()
    model.cpu()
    if cuda:
        torch.cuda.empty_cache()
        if mode != "plain":
            cap_gpu_memory(arguments.caps[0])
    if "checkpoint" in mode:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if mode.startswith("plain="):
        torch._functorch.config.activation_memory_budget = float(mode.split("=")[1])
    for layer in model.modules():
        if arguments.compiled and isinstance(layer, GradientCheckpointingLayer):
            layer.compile()
    watch = RamWatch()
    probe = Probe(arguments.warm_up, watch)
    data = Samples(
        shape, getattr(model.config, "vocab_size", 0), shape.batch * arguments.steps, ragged=arguments.ragged
    )
    loader = DataLoader(data, shape.batch, num_workers=2, collate_fn=pad if arguments.ragged else None)
    with tempfile.TemporaryDirectory() as path:
        trainer = quiet_trainer("bf16-mixed", strategy_of(mode), arguments.steps, [probe], path)
        trainer.gradient_clip_val = None if mode.startswith("fsdp") else 1.0
        try:
            trainer.fit(Module(model.train(), mode), loader)
        except torch.OutOfMemoryError:
            return {"error": "out of memory"}
        finally:
            watch.end()
        if cuda:
            torch.cuda.synchronize()
        return probe.result()


def table(runs: Mapping[str, dict[str, Any]]) -> str:
    """Returns the results as a Markdown table."""
    lines = [
        "| training | step | longest | GPU | RAM, at end | first step | plan final | first steps | loss | outcome |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        if run.get("partial"):
            name += f" (ended after {len(run['steps'])} steps)"
        if "error" in run:
            lines.append(f"| {name} | {run['error']} | | | | | | | | |")
            continue
        # Earlier results have no RAM of the process.
        ram = ", ".join(f"{run[one] / 2**30:.1f}" for one in ("process_ram", "process_ram_at_end") if one in run)
        loss = "" if run["loss"] is None else f"{run['loss']:.4f}"
        lines.append(
            f"| {name} | {run['step']:.3f} s (mean {run['mean']:.3f}) | {run['longest']:.2f} s | "
            f"{run['peak'] / 2**30:.1f} GiB | {ram and f'{ram} GiB'} | {run['first']:.1f} s | "
            f"{run['final']} steps, {run['seconds']:.0f} s | {run['beginning']:.1f} s | {loss} | {run['outcome']} |"
        )
    return "\n".join(lines)


def label(run: Mapping[str, Any]) -> str:
    """Returns the text beside the bar of a row."""
    return f"{run['step']:.2f} s; GPU {run['peak'] / 2**30:.0f}, RAM {run['process_ram'] / 2**30:.0f} GiB"


def draw(runs: Mapping[str, dict[str, Any]], path: Path) -> None:
    """Draws the median steps of the rows that ran, with the GPU's peak and the RAM beside each bar."""
    from matplotlib.figure import Figure

    rows = [(name, run) for name, run in runs.items() if "error" not in run][::-1]
    figure = Figure(figsize=(9, 0.6 + 0.45 * len(rows)), layout="constrained")
    axes = figure.subplots()
    colors = ["tab:blue" if any(word in name for word in ("default", " checkpoint")) else "0.7" for name, _ in rows]
    bars = axes.barh([name for name, _ in rows], [run["step"] for _, run in rows], color=colors)
    labels = [label(run) for _, run in rows]
    axes.bar_label(bars, labels, padding=3)
    axes.set_xlabel("seconds a step")
    axes.set_xlim(0, 1.7 * max((run["step"] for _, run in rows), default=1.0))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def measure(arguments: argparse.Namespace, tell: Callable[[str], None] = print) -> dict[str, Any]:
    """Trains each shape in each mode and cap, in processes of their own, and returns all results by row."""
    runs: dict[str, Any] = {}
    for shape in arguments.shapes:
        for cap in arguments.caps:
            for mode in arguments.modes:
                kind = " ragged" * arguments.ragged + " compiled" * arguments.compiled
                name = f"{shape}{kind} {mode}" + (f" {cap:g} GiB" if mode != "plain" else "")
                if name in runs:
                    continue
                options = [f"--steps={arguments.steps}", f"--warm-up={arguments.warm_up}"]
                options += ["--ragged"] * arguments.ragged + ["--compiled"] * arguments.compiled
                command = [sys.executable, "-W", "ignore", "-m", "benchmarks.people", "--one"]
                case = ["--shapes", shape, "--modes", mode, "--caps", str(cap)]
                runs[name] = run_alone([*command, *case, *options], arguments.limit)
                tell(table({name: runs[name]}).splitlines()[-1])
                if arguments.out is not None:
                    arguments.out.write_text(json.dumps(runs))
    return runs


def main(given: Sequence[str] | None = None) -> None:
    """Parses the command line, measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="models")
    parser.add_argument("--modes", nargs="+", default=MODES, help="see above")
    parser.add_argument("--caps", nargs="+", type=float, default=[24.0], help="GiB of the GPU that may be used")
    parser.add_argument("--steps", type=int, default=80, help="steps of a training")
    parser.add_argument("--warm-up", type=int, default=30, help="least steps before the measured ones")
    parser.add_argument("--ragged", action="store_true", help="texts of 128 tokens to all, padded to the longest")
    parser.add_argument("--compiled", action="store_true", help="compile every layer")
    parser.add_argument("--limit", type=float, help="seconds after which a training is ended")
    parser.add_argument("--one", action="store_true", help="train the first row in this process, and print the result")
    parser.add_argument("--report", nargs="+", type=Path, help="files of earlier results; measures nothing")
    parser.add_argument("--draw", type=Path, help="file for a picture of the results")
    arguments = parser.parse_args(given)
    if arguments.one:
        print(json.dumps(fit(arguments)))
        return
    if arguments.report is not None:
        runs: dict[str, Any] = {}
        for file in arguments.report:
            runs |= json.loads(file.read_text())
    else:
        runs = measure(arguments)
    print(table(runs))
    if arguments.draw is not None:
        draw(runs, arguments.draw)


if __name__ == "__main__":
    main()
