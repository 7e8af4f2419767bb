"""Settings of model states for a whole training: the user's arguments, and settings of the Trainer."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ssd.activations import OffloadConfig
from lightning_ssd.device import available_memory, process_gpu_memory, usable_gpu_memory, usable_memory
from lightning_ssd.model_states.journal import RunFingerprint
from lightning_ssd.model_states.placement.budget import MemoryPlan
from lightning_ssd.model_states.placement.residency import bytes_on_device
from lightning_ssd.model_states.stores import MomentFormat, SpareMemory
from lightning_ssd.model_states.units import Unit, UnitPart
from lightning_ssd.sizes import (
    LEAST_BUDGET,
    SizeArgument,
    check_choice,
    check_flag,
    format_bytes,
    parse_bytes,
    show_argument,
)
from lightning_ssd.types import Clip, Overlap, StateFormat

log = logging.getLogger(__name__)

GPU_SHARE = 0.65
"""Largest share of the usable GPU memory for states that are not offloaded, with `states="auto"`: activations need
the rest."""

MOVABLE_GPU_SHARE = 0.8
"""Largest share of the usable GPU memory for states that can be offloaded later, if activations turn out to need the
room. Optimizers that step all parameters at once need a quarter of this share for temporary tensors."""

GPU_MEMORY = SizeArgument("gpu_memory", ("auto",), share_of="the GPU's memory", least=LEAST_BUDGET)


def moments_of(state_format: StateFormat) -> MomentFormat:
    """Returns the format of optimizer states of a `state_format`, which is that of master weights, too."""
    return "fp32" if state_format == "split" else state_format


@dataclass(frozen=True)
class StatesConfig:
    """The user's arguments for model states. `SSDOffloadStrategy` documents the fields.

    Raises:
        ValueError: a field is out of range; the message names it and its legal values.
    """

    states: Literal["auto", "gpu", "host", "ssd"]
    gpu_memory: int | str
    units: Sequence[str] | None
    overlap: Overlap
    state_format: StateFormat
    clip: Clip
    recover: bool

    def __post_init__(self) -> None:
        check_choice("states", self.states, ("auto", "gpu", "host", "ssd"))
        check_choice("overlap", self.overlap, ("optimized", "naive", "none"))
        check_choice("clip", self.clip, ("auto", "deferred", "speculative"))
        check_choice("state_format", self.state_format, get_args(StateFormat))
        check_flag("recover", self.recover)
        _check_units(self.units)
        GPU_MEMORY.parse(self.gpu_memory)
        if self.recover and self.states in ("gpu", "host"):
            raise ValueError(
                f"`recover=True` resumes from states on SSDs, and `states={self.states!r}` puts none "
                "there. Set `states='ssd'`, or `recover=False`."
            )

    @property
    def moments(self) -> MomentFormat:
        """Format of the optimizer states of offloaded parameters."""
        return moments_of(self.state_format)

    def offloads(self, module: nn.Module, device: torch.device, *, fitting: bool, movable: bool) -> bool:
        """Returns whether any state is offloaded: with `states="auto"`, if `device` has no room for all of them.

        Args:
            movable: whether states on the device can be offloaded later.
        """
        if self.states != "auto":
            return self.states != "gpu"
        if self.recover and fitting:
            return True
        budget = self.resident_budget(device, movable=movable)
        if budget is None:
            return False
        need = bytes_on_device(module, fitting=fitting)
        if need <= budget:
            return False
        log.info(
            "weights, gradients and optimizer states need %s, more than the device may use: they are offloaded",
            format_bytes(need),
        )
        return True

    def budget(self, device: torch.device) -> int:
        """Returns the budget of `device` for resident and prefetched states, once states are offloaded, in bytes."""
        if self.gpu_memory != "auto":
            return _gpu_bytes(self.gpu_memory, device)
        if device.type == "cuda":
            return usable_gpu_memory(device) // 10
        return 2**30

    def resident_budget(self, device: torch.device, *, movable: bool = False) -> float | None:
        """Returns the bytes of `device` up to which all states are kept there; None: the device is a CPU (no limit).

        Args:
            movable: whether states on the device can be offloaded later.
        """
        if self.gpu_memory != "auto":
            return _gpu_bytes(self.gpu_memory, device)
        share = MOVABLE_GPU_SHARE if movable else GPU_SHARE
        return share * usable_gpu_memory(device) if device.type == "cuda" else None


@dataclass(frozen=True)
class Setup:
    """Settings of model states that do not change during a training.

    Attributes:
        storage: budgets and paths.
        default_path: directory of scratch files if the user has named none.
        autocast: dtype of matrix products under autocast; None: without autocast.
        clip_norm: returns whether gradients are clipped by their norm in the step that begins.
        clip_value: returns the largest absolute value of gradients' elements in the step that begins; None: they are
            not clamped.
        defer_to_user_hooks: whether user code may read gradients or options between backward and `optimizer.step`, so
            that no step begins earlier.
        scales_exactly: whether losses are scaled by powers of two, or not scaled.
        settings: settings of the training, if it is recorded.
        start_over: whether training starts from a checkpoint although a killed run has left a record.
        whole: optimizers that are stepped whole (see `WholeStep`); `defer_to_user_hooks` is set if there are any.
        sums_gradients: whether gradients of several micro-batches are summed, which takes host memory.
        world_size: ranks that train the model together.
        num_nodes: hosts that they are on.
        trainer_arguments: arguments of the Trainer that ranks have to agree on.
        planned: whether the user's plan determines the tiers of states.
        last_micro_batch: returns whether the micro-batch whose backward ends is the last one before a step. Ranks
            reduce their gradients then.
    """

    config: StatesConfig
    storage: OffloadConfig
    default_path: str | Path
    autocast: torch.dtype | None
    clip_norm: Callable[[], bool]
    clip_value: Callable[[], float | None]
    defer_to_user_hooks: bool
    scales_exactly: bool = True
    settings: RunFingerprint = field(default_factory=RunFingerprint.none)
    start_over: bool = False
    whole: Sequence[Optimizer] = ()
    sums_gradients: bool = False
    world_size: int = 1
    num_nodes: int = 1
    trainer_arguments: Mapping[str, object] = field(default_factory=dict)
    planned: bool = False
    last_micro_batch: Callable[[], bool] = lambda: True

    def parts_of(self, unit: Unit) -> tuple[UnitPart, ...]:
        """Returns the parts of a unit that may be on tiers of their own.

        They are those of the unit where a plan, or `gpu_memory`, may place them, and one part elsewhere: plans that the
        training itself makes do not place states of several ranks.
        """
        by_plan = self.planned or self.world_size == 1
        placed = (
            self.config.states == "auto" and not self.config.recover and (by_plan or self.config.gpu_memory != "auto")
        )
        return unit.parts if placed else (UnitPart("", unit.parameters),)

    @property
    def loss_scaled(self) -> bool:
        """Whether losses are scaled, and a step is skipped if a gradient is not finite."""
        return self.autocast == torch.float16

    @property
    def needs_norm(self) -> bool:
        """Whether the next step needs all gradients, to clip them by their norm or to skip it if one is not finite.

        Callbacks may change that between two steps. Memory is planned for its value when the tiers are chosen.
        """
        return self.clip_norm() or self.loss_scaled

    @property
    def shares_gradients(self) -> bool:
        """Whether gradients may share host memory. If steps wait for all gradients, each needs memory of its own.

        Those of several ranks have memory of their own: each rank would wait for the memory that others' steps free.
        """
        alone = self.world_size == 1
        return alone and not self.needs_norm and not self.defer_to_user_hooks and self.config.overlap == "optimized"

    @property
    def sums_on_device(self) -> bool:
        """Whether steps of several ranks use gradients as backward has computed them, which their devices may sum."""
        return not self.sums_gradients and not self.defer_to_user_hooks and self.config.overlap == "optimized"

    @property
    def kind(self) -> Literal["host", "ssd", "auto"]:
        """The tiers that offloaded states may be in; "auto": both. Files of several ranks are those of one host."""
        if self.config.states == "auto" and (self.storage.tier == "host" or self.num_nodes > 1):
            return "host"
        assert self.config.states != "gpu"
        return self.config.states

    @property
    def later_versions(self) -> bool:
        """As in `plan_memory`: with "auto", steps that are not speculated need no second version."""
        return self.config.clip == "auto"

    def spare_memory(self, memory_plan: MemoryPlan, budget: int | None) -> SpareMemory:
        """Returns the budget of second versions: host memory that a memory plan does not use.

        Args:
            budget: result of `host_budget` before the plan's memory was allocated.
        """
        return SpareMemory(
            max(0, min(memory_plan.later, (usable_memory() if budget is None else budget) - memory_plan.host))
        )

    def host_budget(self) -> int | None:
        """Returns the bytes of host memory for model states, which all ranks share; None: unlimited."""
        if self.storage.host_memory != "auto":
            of_rank = parse_bytes(self.storage.host_memory, "host_memory") - self.storage.staging_bytes()
            return max(0, of_rank) * self.world_size // self.num_nodes
        # Weights of several ranks are in host memory where there is room, with `states="ssd"`, too.
        bounded = self.config.states == "auto" or (self.config.states == "ssd" and self.world_size > 1)
        return usable_memory() if bounded else None


def _gpu_bytes(gpu_memory: int | str, device: torch.device) -> int:
    """Returns the bytes of a `gpu_memory` other than "auto". On a CPU, percentages are of the free memory."""
    size = GPU_MEMORY.parse(gpu_memory)
    assert not isinstance(size, str)
    if isinstance(size, int):
        return size
    return int(size * (process_gpu_memory(device) if device.type == "cuda" else available_memory()))


def _check_units(units: object) -> None:
    """Raises an error that names `units`, unless it is None or a list of class names."""
    legal = "Give class names of modules, such as ['GPT2Block'], or None."
    if units is None:
        return
    if isinstance(units, str | bytes) or not isinstance(units, Sequence):
        raise TypeError(f"{show_argument('units', units)} is no list of class names. {legal}")
    if not units or not all(isinstance(name, str) and name for name in units):
        raise ValueError(f"{show_argument('units', units)} names no classes. {legal}")
