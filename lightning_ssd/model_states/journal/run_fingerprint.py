"""Settings of a training by name, as text, which are compared with those of a killed run before resuming from it.

They are read before the first step, so that a training does not change them. Code is not compared.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

_SHOWN = 6
"""Differences that a message names one by one."""


@dataclass(frozen=True)
class RunFingerprint:
    """Settings of one training.

    Attributes:
        fixed: settings that affect results; a run with other values is refused.
        noted: settings that may change; a run with other values resumes with a warning.
    """

    fixed: Mapping[str, str]
    noted: Mapping[str, str]

    @classmethod
    def none(cls) -> "RunFingerprint":
        """Returns empty settings, for evaluations."""
        return cls({}, {})


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns a phrase for each setting that differs, with both values."""
    found: list[str] = []
    for name in [*before, *(name for name in now if name not in before)]:
        if name not in now:
            found.append(f"{name} was {before[name]} and is missing now")
        elif name not in before:
            found.append(f"{name} is {now[name]} and was missing then")
        elif before[name] != now[name]:
            found.append(f"{name} was {before[name]} and is {now[name]} now")
    return found


def describe(phrases: Sequence[str]) -> str:
    """Returns up to `_SHOWN` phrases, and the number of the others."""
    others = f"; and {len(phrases) - _SHOWN} more" if len(phrases) > _SHOWN else ""
    return "; ".join(phrases[:_SHOWN]) + others


def show(value: Any) -> str:
    """Returns a value as text that is equal in all processes with an equal value."""
    if isinstance(value, Tensor):
        if value.is_meta:
            return _kind(value)
        if value.numel() == 1:
            return repr(value.item())
        copy = value.detach().to("cpu", copy=True)  # torch refuses to resize the memory of an array of NumPy
        content = copy.contiguous().reshape(-1).view(torch.uint8).numpy().data
        return f"{_kind(value)} with checksum {xxhash.xxh3_64_hexdigest(content)}"
    if isinstance(value, list | tuple):
        return ("({})" if isinstance(value, tuple) else "[{}]").format(", ".join(show(item) for item in value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{show(key)}: {show(item)}" for key, item in value.items()) + "}"
    if isinstance(value, type) or callable(value) and hasattr(value, "__qualname__"):
        return type_name(value)
    if isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device) or value is None:
        return repr(value)
    return type_name(type(value))


def type_name(kind: Any) -> str:
    """Returns the full name of a class or function."""
    return f"{kind.__module__}.{kind.__qualname__}"


def model_settings(module: nn.Module, optimizers: Sequence[Optimizer]) -> RunFingerprint:
    """Returns the settings of a model and its optimizers, none of which has stepped."""
    owners = {
        parameter: f"group {number} of optimizer {index}"
        for index, optimizer in enumerate(optimizers)
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    fixed: dict[str, str] = {}
    noted: dict[str, str] = {}
    for name, owner in module.named_modules():
        fixed[f"module `{name}`" if name else "the model"] = _describe_module(owner)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        trained = owners.get(parameter, "no optimizer") if parameter.requires_grad else "frozen"
        fixed[f"parameter `{name}`"] = f"{_kind(parameter)}, {trained}"
    for name, buffer, persistent in _buffers(module):
        if persistent:
            fixed[f"buffer `{name}`"] = _kind(buffer)
            noted[f"the first value of buffer `{name}`, which the record replaces,"] = show(buffer)
        else:  # no record has its values
            fixed[f"buffer `{name}`"] = f"not persistent, {show(buffer)}"
    for index, optimizer in enumerate(optimizers):
        fixed[f"optimizer {index}"] = type_name(type(optimizer))
        for number, group in enumerate(optimizer.param_groups):
            for option, value in group.items():
                if option != "params":
                    fixed[f"`{option}` of {type(optimizer).__name__}, group {number} of optimizer {index},"] = show(
                        value
                    )
    return RunFingerprint(fixed, noted)


def _describe_module(module: nn.Module) -> str:
    constants = {name: getattr(module, name, None) for name in getattr(module, "__constants__", ())}
    settings = [module.extra_repr(), *(f"{name}={show(value)}" for name, value in constants.items())]
    text = f"{type_name(type(module))}({', '.join(setting for setting in settings if setting)})"
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yields name, buffer, and whether state dicts have it."""
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                qualified = f"{prefix}.{name}" if prefix else name
                yield qualified, buffer, name not in owner._non_persistent_buffers_set


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
