"""The profile of a model's training step: times, FLOPs and bytes of its units and their operators."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from lightning_ssd.planning.validation import (
    as_list,
    as_mapping,
    check_not_negative,
    check_positive,
    from_mapping,
    load_json,
    save_json,
)
from lightning_ssd.sizes import format_bytes
from lightning_ssd.types import Tier


@dataclass(frozen=True)
class OperatorProfile:
    """One operator of a unit, for one micro-batch.

    Attributes:
        name: name, unique in its unit.
        forward_seconds: GPU seconds of the forward.
        backward_seconds: GPU seconds of the backward, without recomputation.
        flops: FLOP of the forward.
        saved_bytes: bytes of the outputs that are saved for backward.
        tensors: names of the saved tensors.
        recompute_seconds: GPU seconds to recompute the saved tensors in backward; None if they can't be recomputed.
        recompute_bytes: workspace bytes on the GPU during recomputation, without the recomputed tensors.
        forward_bytes: peak transient bytes on the GPU until the next operator saves, without weights and saved tensors.
        first_use_bytes: transient bytes on the GPU when backward first reads the saved tensors, without weights, weight
            gradients and saved tensors.
        backward_bytes: peak of these transient bytes until backward reads the saved tensors of another operator.
        operations: operations that the forward launches.
        recompute_operations: operations re-executed in backward to rematerialize, also those of earlier operators.
        launch_seconds: seconds in which the host launches the forward.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    flops: float
    saved_bytes: int
    tensors: tuple[str, ...] = ()
    recompute_seconds: float | None = None
    recompute_bytes: int = 0
    forward_bytes: int = 0
    first_use_bytes: int = 0
    backward_bytes: int = 0
    operations: int = 0
    recompute_operations: int = 0
    launch_seconds: float = 0.0

    def __post_init__(self) -> None:
        for field in ("forward_seconds", "backward_seconds", "flops", "saved_bytes", "recompute_bytes", "forward_bytes",
                      "first_use_bytes", "backward_bytes", "operations", "recompute_operations",
                      "launch_seconds"):  # fmt: skip
            check_not_negative(f"{self.name}.{field}", getattr(self, field))
        if self.recompute_seconds is not None:
            check_not_negative(f"{self.name}.recompute_seconds", self.recompute_seconds)


@dataclass(frozen=True)
class PartProfile:
    """Weights, gradients and optimizer states that are placed and stepped together: a part of a unit, or all of it.

    Attributes:
        name: name, unique in the unit.
        parameters: number of trained parameters.
        weight_bytes: bytes of the compute weights.
        gradient_bytes: bytes of gradients that are offloaded in each micro-batch.
        state_bytes_read: bytes of master weights and optimizer states, all of which a step reads.
        state_bytes_written: bytes of master weights and optimizer states that a step writes.
        resident_extra_bytes: bytes that master weights and optimizer states take more if they are on the GPU, where
            they are in fp32 whatever `state_format` is.
        casts: whether the parameters are the master weights if the part is on the GPU, so that autocast makes compute
            weights from them in each forward (mixed precision).
    """

    name: str
    parameters: int
    weight_bytes: int
    gradient_bytes: int
    state_bytes_read: int
    state_bytes_written: int
    resident_extra_bytes: int = 0
    casts: bool = False

    def __post_init__(self) -> None:
        for field in _OF_PARTS:
            check_not_negative(f"{self.name}.{field}", getattr(self, field))

    @property
    def resident_gradient_bytes(self) -> int:
        """GPU bytes of gradients if the part is on the GPU: fp32 there, also where they are offloaded as bf16."""
        return max(self.gradient_bytes, FP32_BYTES * self.parameters)

    @property
    def resident_bytes(self) -> int:
        """GPU bytes of the part if it is on the GPU."""
        weights = 0 if self.casts else self.weight_bytes
        return weights + self.state_bytes_on("gpu") + self.resident_gradient_bytes

    def state_bytes_on(self, tier: Tier) -> int:
        """Bytes of master weights and optimizer states on a tier."""
        return self.state_bytes_read + (self.resident_extra_bytes if tier == "gpu" else 0)


FP32_BYTES = 4

_OF_PARTS = ("parameters", "weight_bytes", "gradient_bytes", "state_bytes_read", "state_bytes_written",
             "resident_extra_bytes")  # fmt: skip


@dataclass(frozen=True)
class UnitProfile:
    """One unit: modules whose parameters are prefetched, evicted and stepped together.

    Attributes:
        name: name, unique in the model.
        operators: operators in the order of the forward.
        input_bytes: bytes of the unit's saved input, the inter-block activation, from which operators are recomputed.
        parameters: number of trained parameters.
        weight_bytes: bytes of the compute weights.
        gradient_bytes: bytes of gradients that are offloaded in each micro-batch.
        state_bytes_read: bytes of master weights and optimizer states, all of which a step reads.
        state_bytes_written: bytes of master weights and optimizer states that a step writes.
        forward_bytes: peak transient bytes on the GPU, without weights, before the first operator saves.
        backward_bytes: peak transient bytes on the GPU, without weights and their gradients, before backward reads the
            first saved tensor of the unit and after the last.
        parts: parts of the unit that may be on tiers of their own, two or more, of which `parameters` and the bytes of
            weights, gradients and states are the sums; empty: the unit is placed as a whole.
        checkpoint_bytes: bytes that stay on the GPU from forward to backward, besides the saved input, if the unit is
            checkpointed; None: its forward can't be run again in backward.
        argument_bytes: those of them that leave it with the input, if that is offloaded: bytes of arguments that no
            operator saves.
        cast_bytes: bytes of autocast's casts of weights that are saved. They are no saved bytes of operators, but
            transient bytes from the unit's forward to its backward. If it is checkpointed, they are freed in between.
        resident_extra_bytes, casts: as in `PartProfile`.
        reruns: whether user code checkpoints the unit: its backward runs the forward again, in its own seconds.
    """

    name: str
    operators: tuple[OperatorProfile, ...]
    input_bytes: int
    parameters: int
    weight_bytes: int
    gradient_bytes: int
    state_bytes_read: int
    state_bytes_written: int
    forward_bytes: int = 0
    backward_bytes: int = 0
    parts: tuple[PartProfile, ...] = ()
    checkpoint_bytes: int | None = None
    argument_bytes: int = 0
    cast_bytes: int = 0
    resident_extra_bytes: int = 0
    casts: bool = False
    reruns: bool = False

    def __post_init__(self) -> None:
        check_not_negative(f"{self.name}.checkpoint_bytes", self.checkpoint_bytes or 0)
        for field in ("input_bytes", "parameters", "weight_bytes", "gradient_bytes", "state_bytes_read",
                      "state_bytes_written", "forward_bytes", "backward_bytes", "argument_bytes", "cast_bytes",
                      "resident_extra_bytes"):  # fmt: skip
            check_not_negative(f"{self.name}.{field}", getattr(self, field))
        if not self.operators:
            raise ValueError(f"The unit `{self.name}` has no operators. Give it at least one, with its times.")
        _check_unique(f"operators of the unit `{self.name}`", [operator.name for operator in self.operators])
        _check_unique(f"parts of the unit `{self.name}`", [part.name for part in self.parts])
        for field in _OF_PARTS if self.parts else ():
            total = sum(getattr(part, field) for part in self.parts)
            if total != getattr(self, field):
                raise ValueError(
                    f"`{self.name}.{field}={getattr(self, field)}` must be the sum over its parts, {total}. Correct "
                    "one of them."
                )

    @cached_property
    def own_parts(self) -> tuple[PartProfile, ...]:
        """The parts that are placed on their own: `parts`, or the unit as one part."""
        whole = {field: getattr(self, field) for field in (*_OF_PARTS, "casts")}
        return self.parts or (PartProfile(self.name, **whole),)

    @cached_property
    def forward_seconds(self) -> float:
        """GPU seconds of the forward of one micro-batch."""
        return sum(operator.forward_seconds for operator in self.operators)

    @cached_property
    def backward_seconds(self) -> float:
        """GPU seconds of the backward of one micro-batch, without recomputation."""
        return sum(operator.backward_seconds for operator in self.operators)

    @cached_property
    def launch_seconds(self) -> float:
        """Seconds in which the host launches the forward of one micro-batch."""
        return sum(operator.launch_seconds for operator in self.operators)

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes of the saved tensors of one micro-batch, without the saved input."""
        return sum(operator.saved_bytes for operator in self.operators)

    @cached_property
    def num_saved(self) -> int:
        """Number of operators with saved tensors."""
        return sum(operator.saved_bytes > 0 for operator in self.operators)


def unit_call_name(unit: str, call_index: int) -> str:
    """Returns the name of a unit's call in a forward. A unit that is called repeatedly has its weights in call 0."""
    return unit if call_index == 0 else f"{unit} ({call_index + 1})"


def is_later_call(name: str) -> bool:
    """Returns True if `unit_call_name` returns `name` for a second or later call of a unit."""
    return _LATER.search(name) is not None


_LATER = re.compile(r" \(\d+\)$")


@dataclass(frozen=True)
class ModelProfile:
    """A model's training step.

    Attributes:
        name: name of the model.
        units: units in the order of the forward.
        micro_batches: micro-batches in a step.
        samples: samples in a micro-batch.
        tokens: tokens in a micro-batch.
        clip_norm: whether gradients are clipped by their global norm, or scaled by a loss scaler, so that the gradient
            scale of a step is known only after backward.
        between_seconds: measured GPU seconds of a step outside forward and backward: steps of resident parameters, and
            idle time until the next batch. None: calculated from the bytes of resident parameters.
        between_offloaded: offloaded parameters of the measured step, whose CPU steps cause the idle time: it is shorter
            for a plan that offloads fewer. 0: it is the same for all plans.
        other_gpu_bytes: GPU bytes at the peak, minus those that the other fields explain. Below 0 if gradients on the
            GPU have 16 bits, because the others count 32.
        between_gpu_bytes: measured GPU bytes that are allocated between backward and forward only, by optimizer steps.
        step_workspace: temporary GPU bytes per parameter of an optimizer step on the GPU. `between_gpu_bytes` has those
            of the parameters that were on the GPU in the measured steps.
        param_budget_bytes: GPU bytes reserved for streamed parameters, capped at their total. None: streamed parameters
            occupy GPU memory only around their use.
        synchronizes: whether the host synchronizes with the GPU in every step, as when a loss is shown. If not, it
            launches the GPU's work further ahead.
        shares_gradients: whether offloaded gradients share host memory as soon as any state is on SSDs. Each has memory
            of its own if steps wait for all of them.
        step_bytes: bytes of GPU memory that clipping and the optimizer's step read and write for each parameter on the
            GPU. None: weights, gradients and states are read once, and states written.
        placement_bytes: GPU bytes of all model states, by which `states="auto"` decides whether they are offloaded.
            None: weights, gradients and states as counted by the units.
        largest_tensor_bytes: bytes of the largest tensor that forward or backward allocates on the GPU. The allocator
            finds room for it only in one piece.
    """

    name: str
    units: tuple[UnitProfile, ...]
    micro_batches: int
    samples: int
    tokens: int
    clip_norm: bool = False
    between_seconds: float | None = None
    between_offloaded: int = 0
    other_gpu_bytes: int = 0
    between_gpu_bytes: int = 0
    param_budget_bytes: int | None = None
    synchronizes: bool = True
    shares_gradients: bool = False
    step_bytes: float | None = None
    placement_bytes: int | None = None
    largest_tensor_bytes: int = 0
    step_workspace: int = 0

    def __post_init__(self) -> None:
        for field in ("micro_batches", "samples", "tokens"):
            check_positive(field, getattr(self, field))
        check_not_negative("between_seconds", self.between_seconds or 0.0)
        check_not_negative("between_offloaded", self.between_offloaded)
        check_not_negative("param_budget_bytes", self.param_budget_bytes or 0)
        check_not_negative("step_bytes", self.step_bytes or 0.0)
        check_not_negative("placement_bytes", self.placement_bytes or 0)
        check_not_negative("largest_tensor_bytes", self.largest_tensor_bytes)
        check_not_negative("step_workspace", self.step_workspace)
        if not self.units:
            raise ValueError("`units` is empty. Give at least one unit.")
        _check_unique("`units`", [unit.name for unit in self.units])
        if self.forward_seconds <= 0:
            raise ValueError("`forward_seconds` of all operators is 0. Measure them again.")

    @cached_property
    def forward_seconds(self) -> float:
        """GPU seconds of a micro-batch's forward."""
        return sum(unit.forward_seconds for unit in self.units)

    @cached_property
    def backward_seconds(self) -> float:
        """GPU seconds of a micro-batch's backward, without recomputation."""
        return sum(unit.backward_seconds for unit in self.units)

    @cached_property
    def parts(self) -> tuple[tuple[int, PartProfile], ...]:
        """The parts of all units that are placed on their own, each with the index of its unit, in their order."""
        return tuple((index, part) for index, unit in enumerate(self.units) for part in unit.own_parts)

    @cached_property
    def undivided(self) -> "ModelProfile":
        """The profile with units that are placed as a whole; this one if no unit has parts."""
        if not any(unit.parts for unit in self.units):
            return self
        return replace(self, units=tuple(replace(unit, parts=()) for unit in self.units))

    @property
    def parameters(self) -> int:
        """Number of trained parameters."""
        return sum(unit.parameters for unit in self.units)

    @property
    def input_bytes(self) -> int:
        """Bytes of inter-block activations in a micro-batch (LoHan's A_interBlock)."""
        return sum(unit.input_bytes for unit in self.units)

    @property
    def saved_bytes(self) -> int:
        """Bytes of all activations that a micro-batch saves (LoHan's A_all)."""
        return self.input_bytes + sum(unit.saved_bytes for unit in self.units)

    def with_samples(self, samples: int) -> "ModelProfile":
        """Returns the profile of a micro-batch of `samples`: times, FLOPs and activation bytes scale with them."""
        check_positive("samples", samples)
        factor = samples / self.samples
        return replace(self._scaled(time=factor, size=factor), samples=samples, tokens=round(factor * self.tokens))

    def with_size(self, size: float) -> "ModelProfile":
        """Returns the profile of a micro-batch that saves `size` times as many bytes, whose GPU times scale with them.

        The host launches as many operations as before, and takes as long for it. Transient bytes of a smaller
        micro-batch are not reduced, because some of them, such as gradients of embeddings, do not depend on its size.
        """
        return self if size == 1 else self._scaled(time=size, size=size, transient=max(1.0, size))

    def with_time(self, factor: float) -> "ModelProfile":
        """Returns the profile with all GPU times multiplied by `factor`."""
        between = None if self.between_seconds is None else factor * self.between_seconds
        return replace(self._scaled(time=factor), between_seconds=between)

    def with_launches(self, factor: float) -> "ModelProfile":
        """Returns the profile with the host's launch times multiplied by `factor`."""
        return self._scaled(launch=factor)

    def _scaled(
        self, *, time: float = 1.0, size: float = 1.0, transient: float | None = None, launch: float = 1.0
    ) -> "ModelProfile":
        """Returns the profile with GPU seconds, bytes and launch seconds multiplied by these factors.

        Transient bytes have the factor of all others if `transient` is None.
        """
        workspace = size if transient is None else transient

        def scale_operator(operator: OperatorProfile) -> OperatorProfile:
            recompute_seconds = operator.recompute_seconds
            return replace(
                operator,
                forward_seconds=time * operator.forward_seconds,
                backward_seconds=time * operator.backward_seconds,
                flops=size * operator.flops,
                saved_bytes=round(size * operator.saved_bytes),
                recompute_seconds=None if recompute_seconds is None else time * recompute_seconds,
                recompute_bytes=round(workspace * operator.recompute_bytes),
                forward_bytes=round(workspace * operator.forward_bytes),
                first_use_bytes=round(workspace * operator.first_use_bytes),
                backward_bytes=round(workspace * operator.backward_bytes),
                launch_seconds=launch * operator.launch_seconds,
            )

        units = tuple(
            replace(
                unit,
                input_bytes=round(size * unit.input_bytes),
                forward_bytes=round(workspace * unit.forward_bytes),
                backward_bytes=round(workspace * unit.backward_bytes),
                checkpoint_bytes=None if unit.checkpoint_bytes is None else round(size * unit.checkpoint_bytes),
                argument_bytes=round(size * unit.argument_bytes),
                operators=tuple(scale_operator(operator) for operator in unit.operators),
            )
            for unit in self.units
        )
        return replace(self, units=units, largest_tensor_bytes=round(workspace * self.largest_tensor_bytes))

    def to_json(self, path: str | Path) -> None:
        """Saves the profile in the file `path`."""
        save_json(self, path)

    @classmethod
    def from_json(cls, path: str | Path) -> "ModelProfile":
        """Loads a profile from the JSON file `path`.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is invalid; the message names the file, the unit, the operator and the field.
        """
        where = f"the model profile {path}"
        model = dict(as_mapping(load_json(path, where), where))
        if "units" not in model:
            raise ValueError(f"{where} has no `units`: it is no file that ModelProfiler has written. Give such a file.")
        units = []
        for unit in as_list(model.get("units", ()), f"`units` of {where}"):
            unit = dict(as_mapping(unit, f"a unit of {where}"))
            of = f"the unit `{unit.get('name')!s:.80}` of {where}"
            operators = []
            for operator in as_list(unit.get("operators", ()), f"`operators` of {of}"):
                operator = dict(as_mapping(operator, f"an operator of {of}"))
                tensors = f"`tensors` of an operator of {of}"
                operator["tensors"] = tuple(as_list(operator.get("tensors", ()), tensors))
                if not all(isinstance(name, str) for name in operator["tensors"]):
                    raise ValueError(f"{tensors} must be strings.")
                where_in = f"the operator `{operator.get('name')!s:.80}` of {of}"
                operators.append(from_mapping(OperatorProfile, operator, where_in))
            parts = tuple(
                from_mapping(PartProfile, part, f"a part of {of}")
                for part in as_list(unit.get("parts", ()), f"`parts` of {of}")
            )
            units.append(from_mapping(UnitProfile, unit | {"operators": tuple(operators), "parts": parts}, of))
        return from_mapping(cls, model | {"units": tuple(units)}, where)

    def describe(self) -> str:
        """Returns a table of the profile with one line for each unit."""
        lines = [
            f"{self.name}: {self.parameters / 1e9:.2f} G parameters, {self.micro_batches} micro-batches of "
            f"{self.samples} samples, {self.tokens} tokens each",
            f"{'unit':<20} {'forward':>10} {'backward':>10} {'input':>12} {'saved':>12} {'weights':>12} {'states':>12}",
        ]
        for unit in self.units:
            lines.append(
                f"{unit.name:<20} {1e3 * unit.forward_seconds:>7.2f} ms {1e3 * unit.backward_seconds:>7.2f} ms "
                f"{format_bytes(unit.input_bytes):>12} {format_bytes(unit.saved_bytes):>12} "
                f"{format_bytes(unit.weight_bytes):>12} {format_bytes(unit.state_bytes_read):>12}"
            )
        return "\n".join(lines)


def _check_unique(what: str, names: Sequence[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"The name `{name}` occurs twice among {what}. Rename one of them.")
