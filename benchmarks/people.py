"""What people train: the default beside the settings that a person would write, in memory caps of one GPU.

    python -m benchmarks.people --out people.json --shapes qwen2.5-1.5b vit-l --caps 24 16
    python -m benchmarks.people --shapes qwen2.5-0.5b --ragged --caps 27      # a new length in each batch
    python -m benchmarks.people --shapes llama-1536 --compiled --caps 22      # every layer compiled
    python -m benchmarks.people --rows vit-l:default:16 gpt2-xl:checkpoint:24 # these rows: shape, mode and cap of each
    python -m benchmarks.people --gpus 4 --budget 1200                        # four rows at once, none after 20 minutes
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

`AdamW(parameters)` with default arguments, clipping at 1.0 (`--clip`), bf16-mixed, the models' own losses, a
DataLoader with two workers. A row has: the median step after `--warm-up` steps and after the plan is in force; the
longest step after that; the GPU's peak in these steps, and how often torch freed its cache of GPU memory for an
allocation; RAM at its most, and at the end (the proportional set size of the process); the first step, and the steps
and seconds until the plan is in force; the seconds of the first `--warm-up` steps; and the loss of a fixed step, which
is the same in all modes as far as matrix products are. If `--limit` ends a training, its row has the measurements up
to then. The limit is that of one training, and counts from the start of its process. `--out` is written every few
seconds; SIGTERM ends all, and prints the table.

The processes are forked from one that has imported torch, Lightning and the models' classes, which takes up to a
minute. Each row counts a part of the memory that they share with it as its RAM: some hundred MiB less than a program
that imports for itself. DeepSpeed is imported by its own rows. With `--gpus`, each row has a GPU alone, and an equal
share of the processor's cores. Rows that are trained at once share the machine's RAM and drives, and their bandwidths;
`ram`, the decrease of available memory, is that of all of them.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.processes import exit_on_sigterm, run_all, run_alone, save

MODES = ("plain", "plain+checkpoint", "default", "checkpoint", "ssdtrain")


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
        import transformers

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


def table(runs: Mapping[str, dict[str, Any]]) -> str:
    """Returns the results as a Markdown table."""
    lines = [
        "| training | step | longest | GPU (retries) | RAM, at end | first step | plan in force | first steps | loss "
        "| outcome |",
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
        retries = f" ({run['retries']})" if "retries" in run else ""
        loss = "" if run["loss"] is None else f"{run['loss']:.4f}"
        lines.append(
            f"| {name} | {run['step']:.3f} s (mean {run['mean']:.3f}) | {run['longest']:.2f} s | "
            f"{run['peak'] / 2**30:.1f} GiB{retries} | {ram and f'{ram} GiB'} | {run['first']:.1f} s | "
            f"{run['final']} steps, {run['seconds']:.0f} s | {run['beginning']:.1f} s | {loss} | {run['outcome']} |"
        )
    return "\n".join(lines)


def label(run: Mapping[str, Any]) -> str:
    """Returns the text beside the bar of a row."""
    ram = max(run["process_ram"], run.get("ram", 0))  # that of the process lacks memory that CUDA has allocated
    return f"{run['step']:.2f} s; GPU {run['peak'] / 2**30:.0f}, RAM {ram / 2**30:.0f} GiB"


SETTINGS = {
    "default": 'strategy="ssd_offload"',
    "checkpoint": "the same, all blocks checkpointed",
    "checkpoint+8bit": 'the same, state_format="8bit", checkpointed',
    "fsdp-fused+checkpoint": "FSDPStrategy(cpu_offload=True), fused AdamW,\nall blocks checkpointed, not clipped",
    "deepspeed+checkpoint": 'strategy="deepspeed_stage_3_offload",\nall blocks checkpointed',
}
"""A user's code for a mode, in figures of one shape and cap."""


def draw(runs: Mapping[str, dict[str, Any]], path: Path) -> None:
    """Draws the median steps of the rows that ran, with the GPU's peak and the RAM beside each bar."""
    from matplotlib.figure import Figure

    rows = [(name, run) for name, run in runs.items() if "error" not in run][::-1]
    figure = Figure(figsize=(9, 0.6 + 0.45 * len(rows)), layout="constrained")
    axes = figure.subplots()
    colors = ["tab:blue" if any(word in name for word in ("default", " checkpoint")) else "0.7" for name, _ in rows]
    words = [name.split() for name, _ in rows]
    alike = len({(shape, *cap) for shape, _, *cap in words}) == 1
    # The text beside the figure of one shape in one cap has their names.
    names = [SETTINGS.get(mode, name) if alike else name for (name, _), (_, mode, *_) in zip(rows, words, strict=True)]
    bars = axes.barh(names, [run["step"] for _, run in rows], color=colors)
    labels = [label(run) for _, run in rows]
    axes.bar_label(bars, labels, padding=3)
    axes.set_xlabel("seconds a step")
    axes.set_xlim(0, 1.7 * max((run["step"] for _, run in rows), default=1.0))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def rows(arguments: argparse.Namespace) -> Iterator[tuple[str, Callable[[int], object]]]:
    """Yields the name of each row, and a function that trains it, until `--budget` has passed."""
    end = time.monotonic() + arguments.budget
    chosen = arguments.rows or list(itertools.product(arguments.shapes, arguments.caps, arguments.modes))
    if any(mode.startswith("deepspeed") for _, _, mode in chosen):
        # It compiles its optimizer at the first use, which takes a minute, neither timed nor limited here.
        build = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
        run_alone([sys.executable, "-c", build])
    # `torch.cuda.is_available()` in an import must not initialize CUDA here: forked processes could not use it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    from benchmarks.people_training import preload, train

    preload(sorted({shape for shape, _, _ in chosen}), compiled=arguments.compiled)
    named = {}
    for shape, cap, mode in chosen:
        kind = " ragged" * arguments.ragged + " compiled" * arguments.compiled
        # "plain" has no cap, and is one row.
        named[f"{shape}{kind} {mode}" + (f" {cap:g} GiB" if mode != "plain" else "")] = shape, mode, cap
    for name, row in named.items():
        if time.monotonic() >= end:
            return
        yield name, partial(train, arguments, *row)


def measure(arguments: argparse.Namespace, runs: dict[str, Any]) -> None:
    """Trains each shape in each mode and cap, in processes of their own, and adds all results to `runs`, by row."""
    with contextlib.closing(run_all(rows(arguments), arguments.gpus, arguments.limit)) as results:
        for name, run, ended in results:
            runs[name] = run
            save(runs, arguments.out)
            if ended:
                print(table({name: run}).splitlines()[-1], flush=True)


def _row(text: str) -> tuple[str, float, str]:
    shape, mode, cap = text.split(":")
    if shape not in SHAPES:
        raise argparse.ArgumentTypeError(f"there is no shape {shape!r}. Choose from {', '.join(SHAPES)}")
    return shape, float(cap), mode


def main(given: Sequence[str] | None = None) -> None:
    """Parses the command line, measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="models")
    parser.add_argument("--modes", nargs="+", default=MODES, help="see above")
    parser.add_argument("--caps", nargs="+", type=float, default=[24.0], help="GiB of the GPU that may be used")
    parser.add_argument("--rows", nargs="+", type=_row, metavar="SHAPE:MODE:CAP", help="rows in place of all products")
    parser.add_argument("--steps", type=int, default=80, help="steps of a training")
    parser.add_argument("--warm-up", type=int, default=30, help="least steps before the measured ones")
    parser.add_argument("--ragged", action="store_true", help="texts of 128 tokens to all, padded to the longest")
    parser.add_argument("--compiled", action="store_true", help="compile every layer")
    parser.add_argument("--clip", type=float, default=1.0, help="norm at which gradients are clipped")
    parser.add_argument("--limit", type=float, help="seconds after which a process of a training is ended")
    parser.add_argument("--gpus", type=int, default=1, help="rows that are trained at once, each on a GPU of its own")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no other row is begun")
    parser.add_argument("--report", nargs="+", type=Path, help="files of earlier results; measures nothing")
    parser.add_argument("--draw", type=Path, help="file for a picture of the results")
    arguments = parser.parse_args(given)
    exit_on_sigterm()
    runs: dict[str, Any] = {}
    try:
        if arguments.report is None:
            measure(arguments, runs)
        for file in arguments.report or ():
            runs |= json.loads(file.read_text())
    finally:
        print(table(runs))
    if arguments.draw is not None:
        draw(runs, arguments.draw)


if __name__ == "__main__":
    main()
