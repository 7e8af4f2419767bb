"""What a training step of a model does: times, FLOPs and bytes of its units and their operators."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from lightning_ssd.planning.record import (
    as_mapping,
    check_not_negative,
    check_positive,
    from_mapping,
    load_json,
    save_json,
)
from lightning_ssd.sizes import format_bytes


@dataclass(frozen=True)
class OperatorProfile:
    """One operator of a unit, for one micro-batch.

    Attributes:
        name: unique in its unit.
        forward_seconds: of GPU time.
        backward_seconds: of GPU time, without recomputation.
        flops: FLOP of the forward.
        saved_bytes: bytes that it leaves for backward: its outputs, where backward needs them.
        tensors: names of the saved tensors.
        recompute_seconds: to compute the saved tensors again in backward; None: they can't be.
        recompute_bytes: on the GPU while they are, beside what is made.
        forward_bytes: most bytes on the GPU, beside weights and what is saved, from when it has made what it saves
            until the next operator has.
        wanted_bytes: on the GPU, beside gradients of weights, too, when backward first wants what it saved.
        backward_bytes: most of them from then until backward wants what another one saved.
        operations: of the forward, as the GPU is given them.
        again_operations: of them and of earlier ones, that run again when the saved tensors are computed again.
        launch_seconds: of the host's thread that gives the GPU its work, for the forward.
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
    wanted_bytes: int = 0
    backward_bytes: int = 0
    operations: int = 0
    again_operations: int = 0
    launch_seconds: float = 0.0

    def __post_init__(self) -> None:
        for field in ("forward_seconds", "backward_seconds", "flops", "saved_bytes", "recompute_bytes", "forward_bytes",
                      "wanted_bytes", "backward_bytes", "operations", "again_operations",
                      "launch_seconds"):  # fmt: skip
            check_not_negative(f"{self.name}.{field}", getattr(self, field))
        if self.recompute_seconds is not None:
            check_not_negative(f"{self.name}.recompute_seconds", self.recompute_seconds)


@dataclass(frozen=True)
class UnitProfile:
    """One unit: what is fetched, released and stepped together.

    Attributes:
        name: unique in the model.
        operators: in the order of the forward.
        input_bytes: bytes of its saved input, the inter-block activation. Recomputing operators starts from it.
        parameters: count of trained parameters.
        weight_bytes: bytes of the compute weights.
        gradient_bytes: bytes of its gradient that leave the GPU in each micro-batch.
        state_bytes_read: bytes of master weights and optimizer states; a step reads all of them.
        state_bytes_written: bytes of them that a step writes.
        forward_bytes: most bytes on the GPU, beside weights, before an operator of it has made what is saved.
        backward_bytes: the same of its backward, beside gradients of weights, too, before it wants anything of them,
            and after all of them.
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

    def __post_init__(self) -> None:
        for field in ("input_bytes", "parameters", "weight_bytes", "gradient_bytes", "state_bytes_read",
                      "state_bytes_written", "forward_bytes", "backward_bytes"):  # fmt: skip
            check_not_negative(f"{self.name}.{field}", getattr(self, field))
        if not self.operators:
            raise ValueError(f"The unit `{self.name}` has no operators. Give it at least one, with its times.")
        _check_unique(f"operators of the unit `{self.name}`", [operator.name for operator in self.operators])

    @cached_property
    def forward_seconds(self) -> float:
        """GPU time of its forward in one micro-batch."""
        return sum(operator.forward_seconds for operator in self.operators)

    @cached_property
    def backward_seconds(self) -> float:
        """GPU time of its backward in one micro-batch, without recomputation."""
        return sum(operator.backward_seconds for operator in self.operators)


def visit_name(unit: str, time: int) -> str:
    """Returns the name of a unit for the `time`-th time, from 0, that a forward runs it: weights may be tied.

    Its parameters and states belong to the first time.
    """
    return unit if time == 0 else f"{unit} ({time + 1})"


def is_later_visit(name: str) -> bool:
    """Whether `visit_name` returned `name` for another time than the first."""
    return _LATER.search(name) is not None


_LATER = re.compile(r" \(\d+\)$")


@dataclass(frozen=True)
class ModelProfile:
    """A model's training step.

    Attributes:
        name: of the model.
        units: in the order of the forward.
        micro_batches: in a step.
        samples: in a micro-batch.
        tokens: in a micro-batch.
        clip_norm: gradients are clipped by their global norm, or scaled: what a step does is known only after backward.
        between_seconds: of GPU time in a step that is neither forward nor backward, as measured: with what is stepped
            on the GPU, and the GPU's waiting for the next batch. None: calculated from the bytes that are stepped.
        other_gpu_bytes: on the GPU at the peak, as measured, beside what this profile accounts for.
        between_gpu_bytes: on the GPU between backward and forward only, as measured: what steps are made with.
        weight_room_bytes: of the GPU, that weights which come and go keep, used or not, as far as there are so many.
            None: they are there around their use.
        waits: the host's thread that gives the GPU its work waits for it in every step, as where a loss is shown; else
            it is ahead by as much as it can.
    """

    name: str
    units: tuple[UnitProfile, ...]
    micro_batches: int
    samples: int
    tokens: int
    clip_norm: bool = False
    between_seconds: float | None = None
    other_gpu_bytes: int = 0
    between_gpu_bytes: int = 0
    weight_room_bytes: int | None = None
    waits: bool = True

    def __post_init__(self) -> None:
        for field in ("micro_batches", "samples", "tokens"):
            check_positive(field, getattr(self, field))
        check_not_negative("between_seconds", self.between_seconds or 0.0)
        check_not_negative("weight_room_bytes", self.weight_room_bytes or 0)
        if not self.units:
            raise ValueError("`units` is empty. Give at least one unit.")
        _check_unique("`units`", [unit.name for unit in self.units])
        if self.forward_seconds <= 0:
            raise ValueError("`forward_seconds` of all operators is 0. Measure them again.")

    @cached_property
    def forward_seconds(self) -> float:
        """GPU time of a micro-batch's forward."""
        return sum(unit.forward_seconds for unit in self.units)

    @cached_property
    def backward_seconds(self) -> float:
        """GPU time of a micro-batch's backward, without recomputation."""
        return sum(unit.backward_seconds for unit in self.units)

    @property
    def parameters(self) -> int:
        """Count of trained parameters."""
        return sum(unit.parameters for unit in self.units)

    @property
    def input_bytes(self) -> int:
        """Bytes of inter-block activations in a micro-batch (LoHan's A_interBlock)."""
        return sum(unit.input_bytes for unit in self.units)

    @property
    def saved_bytes(self) -> int:
        """Bytes of all activations that a micro-batch saves (LoHan's A_all)."""
        return self.input_bytes + sum(operator.saved_bytes for unit in self.units for operator in unit.operators)

    def with_samples(self, samples: int) -> "ModelProfile":
        """Returns the profile with another micro-batch: times, FLOPs and activation bytes grow with the samples."""
        check_positive("samples", samples)
        factor = samples / self.samples
        return replace(self._scaled(time=factor, size=factor), samples=samples, tokens=round(factor * self.tokens))

    def with_time(self, factor: float) -> "ModelProfile":
        """Returns the profile with everything on the GPU taking `factor` times as long."""
        between = None if self.between_seconds is None else factor * self.between_seconds
        return replace(self._scaled(time=factor), between_seconds=between)

    def with_launches(self, factor: float) -> "ModelProfile":
        """Returns the profile with the host taking `factor` times as long to give the GPU its work."""
        return self._scaled(launch=factor)

    def _scaled(self, *, time: float = 1.0, size: float = 1.0, launch: float = 1.0) -> "ModelProfile":
        """Returns the profile with so many times the seconds on the GPU, the bytes, and the seconds of the host."""

        def scale_operator(operator: OperatorProfile) -> OperatorProfile:
            again = operator.recompute_seconds
            return replace(
                operator,
                forward_seconds=time * operator.forward_seconds,
                backward_seconds=time * operator.backward_seconds,
                flops=size * operator.flops,
                saved_bytes=round(size * operator.saved_bytes),
                recompute_seconds=None if again is None else time * again,
                recompute_bytes=round(size * operator.recompute_bytes),
                forward_bytes=round(size * operator.forward_bytes),
                wanted_bytes=round(size * operator.wanted_bytes),
                backward_bytes=round(size * operator.backward_bytes),
                launch_seconds=launch * operator.launch_seconds,
            )

        units = tuple(
            replace(
                unit,
                input_bytes=round(size * unit.input_bytes),
                forward_bytes=round(size * unit.forward_bytes),
                backward_bytes=round(size * unit.backward_bytes),
                operators=tuple(scale_operator(operator) for operator in unit.operators),
            )
            for unit in self.units
        )
        return replace(self, units=units)

    def to_json(self, path: str | Path) -> None:
        """Saves the profile in the file `path`."""
        save_json(self, path)

    @classmethod
    def from_json(cls, path: str | Path) -> "ModelProfile":
        """Returns the profile that the file `path` holds.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is wrong; the message names the file, the unit, the operator and the field.
        """
        where = f"the model profile {path}"
        model = dict(as_mapping(load_json(path, where), where))
        units = []
        for unit in _sequence(model.get("units", ()), f"`units` of {where}"):
            unit = dict(as_mapping(unit, f"a unit of {where}"))
            of = f"the unit `{unit.get('name')!s:.80}` of {where}"
            operators = []
            for operator in _sequence(unit.get("operators", ()), f"`operators` of {of}"):
                operator = dict(as_mapping(operator, f"an operator of {of}"))
                tensors = f"`tensors` of an operator of {of}"
                operator["tensors"] = tuple(_sequence(operator.get("tensors", ()), tensors))
                if not all(isinstance(name, str) for name in operator["tensors"]):
                    raise ValueError(f"{tensors} must be strings.")
                where_in = f"the operator `{operator.get('name')!s:.80}` of {of}"
                operators.append(from_mapping(OperatorProfile, operator, where_in))
            units.append(from_mapping(UnitProfile, unit | {"operators": tuple(operators)}, of))
        return from_mapping(cls, model | {"units": tuple(units)}, where)

    def describe(self) -> str:
        """Returns the profile for a person to read: one line for each unit."""
        lines = [
            f"{self.name}: {self.parameters / 1e9:.2f} G parameters, {self.micro_batches} micro-batches of "
            f"{self.samples} samples, {self.tokens} tokens each",
            f"{'unit':<20} {'forward':>10} {'backward':>10} {'input':>12} {'saved':>12} {'weights':>12} {'states':>12}",
        ]
        for unit in self.units:
            saved = sum(operator.saved_bytes for operator in unit.operators)
            lines.append(
                f"{unit.name:<20} {1e3 * unit.forward_seconds:>7.2f} ms {1e3 * unit.backward_seconds:>7.2f} ms "
                f"{format_bytes(unit.input_bytes):>12} {format_bytes(saved):>12} {format_bytes(unit.weight_bytes):>12} "
                f"{format_bytes(unit.state_bytes_read):>12}"
            )
        return "\n".join(lines)


def _check_unique(what: str, names: Sequence[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"The name `{name}` is there twice among {what}. Rename one of them.")


def _sequence(value: object, where: str) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where} must be a list, not {type(value).__name__}.")
    return value
