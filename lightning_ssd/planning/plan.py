"""The plan: a tier for the weights and states of each unit and its parts, and a choice for each saved tensor."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from lightning_ssd.planning.model import ModelProfile, UnitProfile
from lightning_ssd.planning.validation import as_mapping, read_text, write_text
from lightning_ssd.sizes import check_choice, format_bytes, parse_bytes, show_value
from lightning_ssd.types import CHOICES, CLIP_MODES, INPUT_CHOICES, TIERS, Choice, ClipMode, InputChoice, Tier


@dataclass(frozen=True)
class PartPlan:
    """The placement of weights and states: those of a unit, or of a part of one.

    Attributes:
        weights: tier of the compute weights between uses; "gpu" if and only if `states` is.
        states: tier of master weights and optimizer states.
    """

    weights: Tier
    states: Tier

    @property
    def offloaded(self) -> bool:
        """Whether weights and states are not on the GPU, so that the CPU makes the optimizer step."""
        return self.states != "gpu"

    @property
    def in_host(self) -> bool:
        """Whether weights and states are in host memory."""
        return self.weights == self.states == "host"


@dataclass(frozen=True)
class UnitPlan:
    """The plan of one unit.

    Attributes:
        weights: tier of the compute weights of the parts that `parts` does not name; see `PartPlan`.
        states: tier of their master weights and optimizer states.
        input: choice for the saved input, the inter-block activation: kept on the GPU, or swapped to host memory or
            SSDs.
        operators: choice for each operator's saved tensors, by its name: kept, swapped or recomputed.
        parts: placement of the other parts of the unit, by name.
        checkpoint: whether all saved tensors of the unit's forward but its input are dropped, and the forward is run
            again in backward (activation checkpointing). `operators` says "keep" then.
    """

    weights: Tier
    states: Tier
    input: InputChoice
    operators: Mapping[str, Choice]
    parts: Mapping[str, PartPlan] = field(default_factory=dict)
    checkpoint: bool = False

    @cached_property
    def keeps_all(self) -> bool:
        """Whether all saved tensors of the unit are kept on the GPU."""
        return not self.checkpoint and {self.input, *self.operators.values()} == {"keep"}

    @cached_property
    def placement(self) -> PartPlan:
        """The placement of the parts that `parts` does not name."""
        return PartPlan(self.weights, self.states)

    def of(self, part: str) -> PartPlan:
        """Returns the placement of a part."""
        return self.parts.get(part, self.placement)

    def placed(self, names: Sequence[str], parts: Sequence[PartPlan]) -> "UnitPlan":
        """Returns this plan with another placement of its parts."""
        ((of_most, _),) = Counter(parts).most_common(1)
        others = {name: part for name, part in zip(names, parts, strict=True) if part != of_most}
        return replace(self, weights=of_most.weights, states=of_most.states, parts=others)


@dataclass(frozen=True)
class Plan:
    """The plan of a model.

    Attributes:
        units: plans of the units by name, in the order of the forward.
        window_bytes: GPU bytes for prefetched tensors, and as many for tensors that are being offloaded.
        staging_bytes: host bytes for tensors read ahead from SSDs, and as many for tensors that are being written.
        clip: when optimizer steps run if gradients are clipped by norm, or scaled. "off": gradients are neither;
            "deferred": steps run during the next forward, when the norm is known; "speculative": steps run during
            backward, and write a second version of the states.
    """

    units: Mapping[str, UnitPlan]
    window_bytes: int
    staging_bytes: int
    clip: ClipMode = "off"

    @property
    def keeps_all(self) -> bool:
        """True if all saved tensors are kept on the GPU, so that the forward needs no dispatch mode."""
        return not self.num_freeing

    @property
    def num_freeing(self) -> int:
        """Number of units whose saved tensors are not all kept on the GPU."""
        return sum(not unit.keeps_all for unit in self.units.values())

    @property
    def offloads_states(self) -> bool:
        """Whether weights and states of any unit, or of a part of one, are not on the GPU."""
        return any(part.offloaded for part in self.placements)

    @property
    def intercepted(self) -> list[bool]:
        """Whether the operations of each unit's forward are intercepted, in the order of the units.

        A unit runs as in plain training if it and the next one, which saves its output, keep all saved tensors (see
        `activations/plan_mode.py`). A checkpointed unit is not intercepted, either.
        """
        units = list(self.units.values())
        outputs: list[InputChoice] = [*(unit.input for unit in units[1:]), "keep"]
        return [
            not unit.checkpoint and not (unit.keeps_all and output == "keep")
            for unit, output in zip(units, outputs, strict=True)
        ]

    @property
    def placements(self) -> Iterator[PartPlan]:
        """The placements of units, and of those parts that have one of their own."""
        for unit in self.units.values():
            yield unit.placement
            yield from unit.parts.values()

    def parts(self, model: ModelProfile) -> list[PartPlan]:
        """Returns the placement of each part in `model.parts`."""
        placed = ((self.units[unit.name], unit.own_parts) for unit in model.units)
        return [unit.parts.get(part.name, unit.placement) for unit, parts in placed for part in parts]

    def clipped(self, clip: ClipMode | None) -> "Plan":
        """Returns the plan with the clip mode of a training in place of its own; None: the plan as it is."""
        return self if clip is None or self.clip == "off" else replace(self, clip=clip)

    def placed(self, model: ModelProfile, parts: Sequence[PartPlan]) -> "Plan":
        """Returns the plan with another placement of each part in `model.parts`."""
        remaining = iter(parts)
        units = {
            unit.name: self.units[unit.name].placed(
                [part.name for part in unit.own_parts], [next(remaining) for _ in unit.own_parts]
            )
            for unit in model.units
        }
        return replace(self, units=units)

    def check(self, model: ModelProfile) -> None:
        """Raises ValueError unless the plan is one for `model`; the message names the entry."""
        for name in ("window_bytes", "staging_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}={getattr(self, name)}` must not be below 0.")
        check_choice("clip", self.clip, CLIP_MODES)
        if model.clip_norm and self.clip == "off":
            raise ValueError("`clip='off'`, but the model's gradients are clipped. Use 'deferred' or 'speculative'.")
        _check_names("units", list(self.units), [unit.name for unit in model.units])
        for profile in model.units:
            unit, where = self.units[profile.name], f"units.{profile.name}"
            check_choice(f"{where}.input", unit.input, INPUT_CHOICES)
            known = {part.name for part in profile.parts}
            for name in unit.parts:
                if name not in known:
                    raise ValueError(
                        f"`{where}.parts.{name}` is not in the model. Remove it, or plan again for this model: parts "
                        "of large units are placed in trainings with `states='auto'`."
                    )
            _check_placement(where, unit.placement)
            for name, part in unit.parts.items():
                _check_placement(f"{where}.parts.{name}", part)
            _check_names(f"{where}.operators", list(unit.operators), [item.name for item in profile.operators])
            for operator in profile.operators:
                choice = unit.operators[operator.name]
                if choice not in CHOICES or (choice == "recompute" and operator.recompute_seconds is None):
                    entry = f"{where}.operators.{operator.name}"
                    check_choice(entry, choice, CHOICES)
                    raise ValueError(f"`{entry}` can't be recomputed. Choose `keep`, `host` or `ssd`.")
            _check_checkpoint(where, unit, profile)

    def to_yaml(self) -> str:
        """Returns the plan as YAML, which a user may edit."""
        content = {
            "window_bytes": self.window_bytes,
            "staging_bytes": self.staging_bytes,
            "clip": self.clip,
            "units": {
                name: asdict(unit.placement)
                | ({"checkpoint": True} if unit.checkpoint else {})
                | {"input": unit.input, "operators": dict(unit.operators)}
                | ({"parts": {part: asdict(one) for part, one in unit.parts.items()}} if unit.parts else {})
                for name, unit in self.units.items()
            },
        }
        text: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        return text

    @classmethod
    def from_yaml(cls, text: str) -> "Plan":
        """Parses a plan from YAML. Byte counts may be written like `512MiB`.

        Raises:
            ValueError: `text` is not a plan; the message names the entry.
        """
        try:
            content = yaml.load(text, _StrictLoader)
        except RecursionError:
            raise ValueError("The plan is nested too deeply. Correct it, or plan again.") from None
        except Exception as error:  # PyYAML raises errors of many classes for values that do not match their tag
            raise ValueError(f"The plan is not YAML: {error}. Correct it, or plan again.") from error
        fields = _exact_fields(content, "the plan", ("window_bytes", "staging_bytes", "clip", "units"))
        units = {}
        for name, unit in as_mapping(fields["units"], "`units`").items():
            where = f"units.{name}"
            given = {"parts": {}, "checkpoint": False, **as_mapping(unit, f"`{where}`")}
            names = ("weights", "states", "input", "operators", "parts", "checkpoint")
            entry = _exact_fields(given, f"`{where}`", names)
            if not isinstance(entry["checkpoint"], bool):
                raise ValueError(f"`{where}.checkpoint={show_value(entry['checkpoint'])}` must be true or false.")
            operators = as_mapping(entry["operators"], f"`{where}.operators`")
            check_choice(f"{where}.input", entry["input"], INPUT_CHOICES)
            for operator, choice in operators.items():
                check_choice(f"{where}.operators.{operator}", choice, CHOICES)
            parts = {}
            for part, content in as_mapping(entry["parts"], f"`{where}.parts`").items():
                of_part = _exact_fields(content, f"`{where}.parts.{part}`", ("weights", "states"))
                parts[part] = _checked_placement(of_part, f"{where}.parts.{part}")
            whole = _checked_placement(entry, where)
            units[name] = UnitPlan(
                whole.weights, whole.states, entry["input"], dict(operators), parts, entry["checkpoint"]
            )
        check_choice("clip", fields["clip"], CLIP_MODES)
        try:
            window, staging = (parse_bytes(fields[name], name) for name in ("window_bytes", "staging_bytes"))
        except TypeError as error:
            raise ValueError(str(error)) from error
        return cls(units, window, staging, fields["clip"])

    def save(self, path: str | Path) -> None:
        """Writes the plan to the file `path`, as YAML."""
        write_text(self.to_yaml(), path)

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Loads a plan from the YAML file `path`.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is not a plan; the message names the file and the entry.
        """
        text = read_text(path, f"the plan {path}")
        try:
            return cls.from_yaml(text)
        except ValueError as error:
            raise ValueError(f"the plan {path}: {error}") from error

    def describe(self) -> str:
        """Returns the plan as a table, with one line for neighbouring units of equal plans."""
        lines = [
            f"window {format_bytes(self.window_bytes)}, staging {format_bytes(self.staging_bytes)}, clip {self.clip}",
            f"{'unit':<24} {'weights':<8} {'states':<8} {'input':<6} operators",
        ]
        runs: list[tuple[str, str, UnitPlan]] = []
        for name, unit in self.units.items():
            if runs and runs[-1][2] == unit:
                runs[-1] = (runs[-1][0], name, unit)
            else:
                runs.append((name, name, unit))
        for first, last, unit in runs:
            name = first if first == last else f"{first} .. {last}"
            counts = Counter(unit.operators.values())
            detail = "; ".join(
                f"{choice}: {', '.join(key for key, value in unit.operators.items() if value == choice)}"
                for choice in CHOICES
                if counts[choice]
            )
            detail = "checkpointed: its forward is run again in backward" if unit.checkpoint else detail
            for part, one in unit.parts.items():
                detail += f"; {part}: weights {one.weights}, states {one.states}"
            lines.append(f"{name:<24} {unit.weights:<8} {unit.states:<8} {unit.input:<6} {detail}")
        return "\n".join(lines)


def _check_checkpoint(where: str, unit: UnitPlan, profile: UnitProfile) -> None:
    """Raises ValueError unless a unit may be checkpointed, or is not."""
    if not unit.checkpoint:
        return
    if profile.checkpoint_bytes is None:
        raise ValueError(
            f"`{where}` can't be checkpointed: its forward can't be run again in backward. Remove `checkpoint`."
        )
    if set(unit.operators.values()) - {"keep"}:
        raise ValueError(
            f"`{where}` is checkpointed, which frees all of its saved tensors but the input: set all `operators` to "
            "`keep`, or remove `checkpoint`."
        )


def _checked_placement(entry: Mapping[str, Any], where: str) -> PartPlan:
    for name in ("weights", "states"):
        check_choice(f"{where}.{name}", entry[name], TIERS)
    return PartPlan(entry["weights"], entry["states"])


class _StrictLoader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no annotations
    """PyYAML's safe loader, which also refuses repeated keys (PyYAML would drop one) and keys that are no strings."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:
        found: dict[str, Any] = super().construct_mapping(node, deep)
        for name in found:
            if not isinstance(name, str):
                raise ValueError(f"the key {show_value(name)} is no string: write it in quotes")
        keys = Counter(self.construct_object(key) for key, _ in node.value)
        for name, count in keys.items():
            if count > 1:
                raise ValueError(f"the key {show_value(name)} occurs twice")
        return found


def _check_placement(where: str, part: PartPlan) -> None:
    """Raises ValueError unless `part`, which the plan has at `where`, is a placement that can be had."""
    check_choice(f"{where}.weights", part.weights, TIERS)
    check_choice(f"{where}.states", part.states, TIERS)
    if (part.weights == "gpu") != (part.states == "gpu"):
        raise ValueError(
            f"`{where}` has weights on `{part.weights}` and states on `{part.states}`. A unit, or a part of one, is on "
            "the GPU with both of them, or with neither: change one of the two."
        )


def _check_names(where: str, given: list[str], expected: list[str]) -> None:
    if given == expected:
        return
    for name in given:
        if name not in expected:
            raise ValueError(
                f"`{where}.{name}` is not in the model. Remove it, or plan again for this model: the operators of a "
                "training are those of the profile that ModelProfiler measures (`lightning-ssd plan --profile FILE`)."
            )
    for name in expected:
        if name not in given:
            raise ValueError(f"`{where}.{name}` is missing. Add it, or plan again for this model.")
    raise ValueError(f"`{where}` must be in the order of the forward: {', '.join(expected)}.")


def _exact_fields(value: object, where: str, names: tuple[str, ...]) -> Mapping[str, Any]:
    """Returns the mapping `value` if it has exactly these names, and raises ValueError otherwise."""
    value = as_mapping(value, where)
    for name in value:
        if name not in names:
            raise ValueError(
                f"{where} has an unknown entry `{name:.80}`. Remove it; valid entries are: {', '.join(names)}."
            )
    for name in names:
        if name not in value:
            raise ValueError(f"{where} lacks the entry `{name}`. Add it.")
    return value
