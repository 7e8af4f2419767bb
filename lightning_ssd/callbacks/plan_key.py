"""The key under which a plan is stored: a hash of everything that its measurements depend on."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

import lightning_ssd
from lightning_ssd._lightning import pl
from lightning_ssd.callbacks.offloader import offload_config
from lightning_ssd.callbacks.seen_batches import BatchShape
from lightning_ssd.planning import HardwareProfile, ModelProfile

__all__ = ["has_more_memory", "is_like", "plan_key", "recorded_forward"]

_MEASURED = (
    "samples", "tokens", "forward_seconds", "backward_seconds", "between_seconds", "between_offloaded",
    "recompute_seconds", "launch_seconds", "synchronizes", "other_gpu_bytes", "between_gpu_bytes", "param_budget_bytes",
)  # fmt: skip
"""Fields of profiles that equal forwards need not have in common."""

_RATES = ("gpu_flops", "copy_out", "copy_in", "ssd_read", "ssd_write", "cpu_step_rate")


MEMORY_TOLERANCE = 1.05
"""Bytes of memory / bytes when a plan was made, up to which the plan is still a good one."""


def plan_key(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    device: torch.device,
    shape: BatchShape | None,
    recorded: tuple[object, ...],
) -> str:
    """Returns the key of a training's plan.

    The bytes of memory that this training may use are not in the key: they differ a little from run to run,
    measurements do not depend on them, and another plan is made if they have changed.

    Args:
        trainer: the Trainer.
        module: the module.
        device: the training device.
        shape: shape of the recorded batch.
        recorded: those properties of the recorded micro-batch that later ones repeat, and the planner's arguments.
    """
    states = getattr(trainer.strategy, "states_config", None)
    parts = [
        (lightning_ssd.__version__, torch.__version__, torch.version.cuda),
        _machine(device),
        (torch.are_deterministic_algorithms_enabled(), _fp32_products(), torch.get_num_threads()),
        [(name, f"{type(part).__module__}.{type(part).__qualname__}") for name, part in module.named_modules()],
        [
            (name, tuple(one.shape), str(one.dtype), one.requires_grad)
            for name, one in (*module.named_parameters(remove_duplicate=False), *module.named_buffers())
        ],
        (trainer.precision, trainer.accumulate_grad_batches, module.automatic_optimization),
        (bool(trainer.gradient_clip_val), trainer.gradient_clip_algorithm),
        [_optimizer(optimizer) for optimizer in trainer.optimizers],
        (type(trainer.strategy).__name__, _arguments(offload_config(trainer)), _arguments(states)),
        None if shape is None else shape.shapes,
        recorded,
    ]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def _fp32_products() -> str:
    """Returns the precision of fp32 products on the device.

    Since torch 2.9 there are newer settings, after whose use the older function raises an error.
    """
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return str(torch.get_float32_matmul_precision() if newer is None else newer)


def recorded_forward(profile: ModelProfile) -> object:
    """Returns all of a profile that equal forwards and backwards have in common: operators, bytes, FLOPs."""
    return _without_measured(asdict(profile))


def is_like(one: HardwareProfile, other: HardwareProfile) -> bool:
    """Returns whether two measurements may be of one machine: no rate differs by more than a factor of two."""
    pairs = [(getattr(one, name), getattr(other, name)) for name in _RATES]
    return all(max(pair) <= 2 * min(pair) for pair in pairs)


def has_more_memory(now: tuple[float, float], then: tuple[float, float]) -> bool:
    """Returns whether a training may use so much more memory than an earlier one that another plan may be faster.

    Args:
        now: bytes of the device and of host memory that the training may use.
        then: those that the earlier one might use.
    """
    return any(one > MEMORY_TOLERANCE * other for one, other in zip(now, then, strict=True))


def _without_measured(value: Any) -> Any:
    if isinstance(value, Mapping):
        found = {name: _without_measured(item) for name, item in value.items() if name not in _MEASURED}
        if "recompute_seconds" in value:
            found["recomputable"] = value["recompute_seconds"] is not None
        return found
    if isinstance(value, list | tuple):
        return [_without_measured(item) for item in value]
    return value


def _machine(device: torch.device) -> tuple[object, ...]:
    """Returns the names of the processor and of the GPU, and their sizes."""
    processor = {line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")}
    host = sorted(processor), len(os.sched_getaffinity(0))
    if device.type != "cuda":
        return host
    properties = torch.cuda.get_device_properties(device)
    return *host, properties.name, properties.total_memory


def _optimizer(optimizer: Optimizer) -> object:
    """Returns the class of an optimizer, and the settings of its groups that are no numbers, such as `foreach`."""
    groups = [
        (len(group["params"]), {k: v for k, v in group.items() if v is None or isinstance(v, bool | str)})
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}", groups


def _arguments(config: Any) -> object:
    """Returns the user's arguments. An object, such as an I/O backend of the user, is represented by its class."""
    if config is None:
        return None
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return {
        name: value if isinstance(value, str | int | float | None) else _plain(value) for name, value in values.items()
    }


def _plain(value: object) -> object:
    if isinstance(value, list | tuple):
        return [str(item) for item in value]
    return str(value) if isinstance(value, Path) else type(value).__qualname__
