"""The training of a row of `benchmarks.people`, in the process that it forks for it."""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers.modeling_layers import GradientCheckpointingLayer

from benchmarks.activation_offload import quiet_trainer
from benchmarks.default import find_planners, in_force
from benchmarks.people import SHAPES, Shape
from benchmarks.processes import cap_gpu_memory
from lightning_ssd import SSDOffloadStrategy
from lightning_ssd._lightning import pl
from lightning_ssd.device import CUDAMemory, allocator_memory, make_clock, process_ram

LOSS_STEP = 10
"""Step whose loss is compared."""

TOLD_EVERY = 5.0
"""Least seconds between two prints of the results so far, of which the last one counts if the training is ended."""

DISTINCT = 32
"""Samples that each worker makes once, and repeats: to make a batch of random images takes longer than a step."""


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
        self._made: dict[int, dict[str, Tensor]] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self._ragged:
            return self._make(index)
        seed = index % DISTINCT
        if seed not in self._made:
            self._made[seed] = self._make(seed)
        return self._made[seed]

    def _make(self, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
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
        mode: see `benchmarks.people`.
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


def count_retries() -> int:
    """Returns the allocations of GPU memory so far that found none before torch had freed its cache."""
    return int(torch.cuda.memory_stats()["num_alloc_retries"])


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
            if self._ended.wait(3.0):  # a look at a large process takes 50 ms
                return

    def end(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self._thread.join()


class Probe(pl.Callback):
    """Times all steps, measures memory once the plan is in force, and prints results now and then.

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
        self._memory: CUDAMemory | None = None
        self._retries_before = 0
        """Allocations before the measured steps that found no memory before torch had freed its cache."""
        self.final: int | None = None
        self.seconds = 0.0
        self.ram_at_end = 0

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.ram_at_end = process_ram()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._clock = make_clock(pl_module.device)
        self._memory = allocator_memory(pl_module.device)
        self._began = time.monotonic()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        self._marks.append(self._clock.now())
        if self.final is None and batch_idx > 1 and in_force(trainer, batch_idx):
            self.final, self.seconds = batch_idx, time.monotonic() - self._began
        if self.final is not None and batch_idx == max(self.final, self._warm_up) and self._memory is not None:
            self._memory.reset_peak()
            self._retries_before = count_retries()
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
            "peak": 0 if self._memory is None else self._memory.peak(),
            "retries": 0 if self._memory is None else count_retries() - self._retries_before,
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


def preload(shapes: Sequence[str], *, compiled: bool) -> None:
    """Imports modules that trainings of the shapes would import at first use. They start no threads, and no CUDA."""
    for shape in shapes:
        getattr(transformers, SHAPES[shape].model)
    if compiled:
        import_module("torch._inductor.compile_fx")


def train(arguments: argparse.Namespace, shape: str, mode: str, cap: float, place: int) -> None:
    """Trains a row in this process, and prints its measurements.

    Args:
        arguments: options of all rows.
        shape: name of a shape.
        mode: see `benchmarks.people`.
        cap: GiB of the GPU that may be used.
        place: number of the GPU.
    """
    warnings.simplefilter("ignore")
    if arguments.gpus > 1:
        take_share(place, arguments.gpus)
    print(json.dumps(fit(arguments, SHAPES[shape], mode, cap)))


def take_share(place: int, count: int) -> None:
    """Has this process use GPU number `place` of those that it may use, and one of `count` shares of its cores."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = str(place) if visible is None else visible.split(",")[place]
    cores = sorted(os.sched_getaffinity(0))
    width = max(1, len(cores) // count)
    begin = place * width % len(cores)
    os.sched_setaffinity(0, cores[begin : begin + width])  # before threads are started, which inherit it
    torch.set_num_threads(max(1, torch.get_num_threads() // count))


def fit(arguments: argparse.Namespace, shape: Shape, mode: str, cap: float) -> dict[str, Any]:
    """Trains a shape in a mode and cap, and returns the measurements, or `error`."""
    torch.manual_seed(0)
    cuda = torch.cuda.is_available()
    with torch.device("cuda" if cuda else "cpu"):  # random weights are drawn faster there
        model = shape.build()
    model.cpu()
    if cuda:
        torch.cuda.empty_cache()
        if mode != "plain":
            cap_gpu_memory(cap)
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
        trainer.gradient_clip_val = None if mode.startswith("fsdp") else arguments.clip
        try:
            trainer.fit(Module(model.train(), mode), loader)
        except torch.OutOfMemoryError:
            traceback.print_exc()  # with the notes that the strategy has added
            return {"error": "out of memory"}
        finally:
            watch.end()
        if cuda:
            torch.cuda.synchronize()
        return probe.result()
