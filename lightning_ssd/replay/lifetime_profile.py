"""Lifetimes of all tensors of a training step: when each is allocated, used by operators, and freed (Teraio, 3.1)."""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np

from lightning_ssd.planning import (
    MigrationPeriod,
    ModelProfile,
    StepMemory,
    as_list,
    as_mapping,
    as_whole_numbers,
    check_not_negative,
    check_positive,
    from_mapping,
    inactive_periods,
    load_json,
    write_text,
)
from lightning_ssd.sizes import check_choice, format_bytes, format_seconds, show_value

VERSION = 2
"""Version of the JSON format."""

TensorClass = Literal["weight", "gradient", "optimizer state", "saved tensor", "transient", "communication buffer"]
"""Class of a tensor. A saved tensor is allocated before backward begins and read in backward. A transient is in none of
the other classes."""

Phase = Literal["forward", "backward", "optimizer"]
"""Part of a training step."""

PADDING = 0.01
"""Largest share of trained parameters that are padding: storages of weights may be longer than the weights."""

CLASSES, PHASES = get_args(TensorClass), get_args(Phase)


@dataclass(frozen=True)
class OperatorSpan:
    """An executed operator. Seconds count from the begin of the step, without idle time of the device."""

    name: str
    phase: str
    start: float
    end: float

    def __post_init__(self) -> None:
        check_choice("phase", self.phase, PHASES)
        check_not_negative("start", self.start)
        if not self.end >= self.start:
            raise ValueError(f"`end={self.end}` is before `start={self.start}`.")


@dataclass(frozen=True)
class TensorLifetime:
    """A tensor (a storage: views share it) of a training step. Operators are named by their index in the step.

    Attributes:
        id: number, unique in the profile.
        name: qualified name of its parameter, followed by `.grad` or the name of an optimizer state; or name of the
            operator that allocates it.
        uses: operators that read or write it, in order.
        allocated: operator that allocates it; None: it exists when the step begins.
        freed: operator after which it is freed; None: it exists when the step ends, and in the next step.
        unit: name of the unit of a weight, gradient or optimizer state; "" for others.
        itemsize: bytes of an element of a weight.
    """

    id: int
    name: str
    kind: str
    nbytes: int
    uses: tuple[int, ...]
    allocated: int | None = None
    freed: int | None = None
    unit: str = ""
    itemsize: int = 4

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, CLASSES)
        check_not_negative("nbytes", self.nbytes)
        check_positive("itemsize", self.itemsize)
        bounds = (0 if self.allocated is None else self.allocated, *self.uses)
        bounds = bounds if self.freed is None else (*bounds, self.freed)
        if min(bounds) < 0 or any(one > other for one, other in pairwise(bounds)):
            raise ValueError(
                f"`allocated={self.allocated}`, `uses` and `freed={self.freed}` of the tensor {self.id} must be "
                "indices of operators in rising order."
            )

    @property
    def is_global(self) -> bool:
        """Whether the tensor exists in every step from begin to end, as weights and optimizer states do."""
        return self.allocated is None and self.freed is None


class InactivePeriod(NamedTuple):
    """A time in which a tensor is allocated and no operator uses it.

    Attributes:
        tensor: index of the tensor in the profile.
        after: last operator that uses it before.
        before: first operator that uses it after, counted from the begin of the step of `after`.
        seconds: time from the end of `after` to the begin of `before`.
    """

    tensor: int
    after: int
    before: int
    seconds: float


@dataclass(frozen=True)
class LifetimeProfile:
    """All operators and tensors of a training step on one GPU.

    Attributes:
        operators: operators of forward, backward and optimizer step, in order.
        samples: samples in the micro-batch; 0: unknown.
        tokens: tokens in the micro-batch; 0: unknown.
    """

    name: str
    operators: tuple[OperatorSpan, ...]
    tensors: tuple[TensorLifetime, ...]
    samples: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        check_not_negative("samples", self.samples)
        check_not_negative("tokens", self.tokens)
        if not self.operators:
            raise ValueError("`operators` is empty. Profile a step with at least one.")
        if not self.step_seconds:
            raise ValueError("`end` of all operators is 0. Measure them again.")
        for one, other in pairwise(self.operators):
            if other.start < one.end:
                raise ValueError(f"`start` of the operator `{other.name}` is before the `end` of the one before it.")
        for tensor in self.tensors:
            last = max((*tensor.uses, tensor.allocated or 0, tensor.freed or 0))
            if last >= len(self.operators):
                raise ValueError(
                    f"`allocated`, `uses` or `freed` of the tensor {tensor.id} names the operator {last}, and there "
                    f"are {len(self.operators)}."
                )
        for number, count in Counter(tensor.id for tensor in self.tensors).items():
            if count > 1:
                raise ValueError(f"`id={number}` occurs twice among `tensors`.")

    @property
    def step_seconds(self) -> float:
        """Seconds of a step in which the GPU never waits."""
        return self.operators[-1].end

    @property
    def operator_seconds(self) -> list[float]:
        """Seconds of each operator."""
        return [one.end - one.start for one in self.operators]

    @property
    def parameters(self) -> int:
        """Number of trained parameters: elements of the weights that the optimizer uses."""
        return sum(
            tensor.nbytes // tensor.itemsize
            for tensor in self.tensors
            if tensor.kind == "weight" and any(self.operators[use].phase == "optimizer" for use in tensor.uses)
        )

    def check(self, model: ModelProfile) -> None:
        """Raises ValueError unless the lifetimes are those of a micro-batch of `model`."""
        ours, its = ((one.name, one.samples, one.tokens) for one in (self, model))
        same = ours[0] == its[0] and abs(self.parameters - model.parameters) <= PADDING * model.parameters
        if self.samples:
            same &= ours == its
        if not same:
            said = (
                f"{one.name} of {one.parameters} trained parameters"
                + (f", with {one.samples} samples and {one.tokens} tokens in a micro-batch" if one.samples else "")
                for one in (self, model)
            )
            raise ValueError(
                "The lifetimes are of {}; the plan is for {}. Measure both with the same recipe and options.".format(
                    *said
                )
            )

    @cached_property
    def memory(self) -> dict[str, list[int]]:
        """Bytes of each class that are allocated while each operator runs."""
        changes = {kind: [0] * (len(self.operators) + 1) for kind in CLASSES}
        for tensor in self.tensors:
            of_kind = changes[tensor.kind]
            of_kind[tensor.allocated or 0] += tensor.nbytes
            of_kind[len(self.operators) if tensor.freed is None else tensor.freed + 1] -= tensor.nbytes
        return {kind: list(accumulate(of_kind))[:-1] for kind, of_kind in changes.items()}

    @cached_property
    def total(self) -> list[int]:
        """Bytes of all tensors that are allocated while each operator runs."""
        return [sum(of_classes) for of_classes in zip(*self.memory.values(), strict=True)]

    @cached_property
    def active(self) -> list[int]:
        """Bytes of the tensors that each operator reads or writes."""
        nbytes = [0] * len(self.operators)
        for tensor in self.tensors:
            for use in tensor.uses:
                nbytes[use] += tensor.nbytes
        return nbytes

    @cached_property
    def periods(self) -> tuple[InactivePeriod, ...]:
        """All inactive periods; those of global tensors wrap round the step."""
        count, found = len(self.operators), []
        for index, tensor in enumerate(self.tensors):
            for after, before in inactive_periods(tensor.uses, count, is_global=tensor.is_global):
                seconds = self.operators[before % count].start - self.operators[after].end
                wraps = self.step_seconds if before >= count else 0.0
                found.append(InactivePeriod(index, after, before, wraps + seconds))
        return tuple(found)

    def step_memory(self, min_bytes: int) -> StepMemory:
        """Returns the step for Teraio's algorithm, in which tensors of `min_bytes` or more may migrate."""
        candidates = []
        for tensor, after, before, _ in self.periods:
            if (nbytes := self.tensors[tensor].nbytes) >= min_bytes:
                candidates.append(MigrationPeriod(tensor, nbytes, after, before))
        return StepMemory(self.operator_seconds, np.array(self.total, np.int64), candidates)

    def to_json(self, path: str | Path) -> None:
        """Saves the profile in the file `path`."""
        write_text(json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":")) + "\n", path)

    @classmethod
    def from_json(cls, path: str | Path) -> "LifetimeProfile":
        """Loads a profile from the JSON file `path`.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is invalid; the message names the file and the field.
        """
        where = f"the lifetime profile {path}"
        content = dict(as_mapping(load_json(path, where), where))
        version = content.pop("version", None)
        if version is None:
            raise ValueError(
                f"{where} has no `version`: it is no file that `lightning-ssd profile --out` or ModelProfiler's "
                "`lifetimes` has written. Give such a file."
            )
        if version != VERSION:
            raise ValueError(f"{where} has the version {show_value(version)}, and {VERSION} is read. Profile again.")
        operators = tuple(
            from_mapping(OperatorSpan, one, f"an entry of `operators` of {where}")
            for one in as_list(content.get("operators", ()), f"`operators` of {where}")
        )
        tensors = []
        for one in as_list(content.get("tensors", ()), f"`tensors` of {where}"):
            tensor = dict(as_mapping(one, f"an entry of `tensors` of {where}"))
            tensor["uses"] = as_whole_numbers(tensor.get("uses", ()), f"`uses` of an entry of `tensors` of {where}")
            tensors.append(from_mapping(TensorLifetime, tensor, f"an entry of `tensors` of {where}"))
        return from_mapping(cls, content | {"operators": operators, "tensors": tuple(tensors)}, where)

    def describe(self) -> str:
        """Returns a summary: seconds and operators of the phases, bytes and inactive periods of the classes."""
        lines = [f"{self.name}: a step of {format_seconds(self.step_seconds)}, {len(self.operators)} operators, "
                 f"{len(self.tensors)} tensors, {format_bytes(max(self.total))} at the peak"]  # fmt: skip
        for phase in PHASES:
            of_phase = [one for one in self.operators if one.phase == phase]
            seconds = sum(one.end - one.start for one in of_phase)
            lines.append(f"  {phase:<22} {format_seconds(seconds):>12} {len(of_phase):>8} operators")
        waits: dict[str, list[float]] = {kind: [] for kind in CLASSES}
        for period in self.periods:
            waits[self.tensors[period.tensor].kind].append(period.seconds)
        for kind in CLASSES:
            count = sum(tensor.kind == kind for tensor in self.tensors)
            if count:
                middle = sorted(waits[kind])[len(waits[kind]) // 2] if waits[kind] else 0.0
                lines.append(
                    f"  {kind:<22} {format_bytes(max(self.memory[kind])):>12} {count:>8} tensors, inactive for "
                    f"{format_seconds(middle)} (median)"
                )
        return "\n".join(lines)
