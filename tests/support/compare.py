"""Comparison of trainings and of values, bit for bit."""

import dataclasses
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LOGS = ("losses", "seen")
"""Attributes of toy models that record a training."""


def assert_same(actual: Any, expected: Any) -> None:
    """Asserts that two trained modules have the same logs and state dicts, or that two values are the same.

    Raises:
        AssertionError: they are not, or neither module recorded anything; the message names the first difference.
    """
    found = difference(actual, expected)
    assert found is None, found
    logs = [getattr(actual, name) for name in LOGS if hasattr(actual, name)]
    assert not logs or any(logs), "the training recorded nothing"


def same(one: Any, other: Any) -> bool:
    """Returns whether two values have equal types and bits."""
    return difference(one, other) is None


def difference(one: Any, other: Any, path: str = "") -> str | None:
    """Returns a sentence on the first difference of two values in type or bits; None if there is none."""
    if type(one) is not type(other) and not isinstance(one, nn.Module):
        return f"{path or 'value'}: {type(one).__name__} and {type(other).__name__}"
    if isinstance(one, nn.Module):
        one, other = _recorded(one), _recorded(other)
    elif dataclasses.is_dataclass(one) and not isinstance(one, type):
        one, other = vars(one), vars(other)
    if isinstance(one, dict):
        if list(one) != list(other) or getattr(one, "default_factory", 0) is not getattr(other, "default_factory", 0):
            return f"keys of {path or 'value'}: {list(one)} and {list(other)}"
        items = [(str(key), value, other[key]) for key, value in one.items()]
    elif isinstance(one, list | tuple | deque):
        if len(one) != len(other) or getattr(one, "maxlen", None) != getattr(other, "maxlen", None):
            return f"length of {path or 'value'}: {len(one)} and {len(other)}"
        items = [(str(index), *pair) for index, pair in enumerate(zip(one, other, strict=True))]
    else:
        return None if _equal(one, other) else f"{path or 'value'}: {one} and {other}"
    return next((found for key, a, b in items if (found := difference(a, b, f"{path}.{key}".lstrip(".")))), None)


def _recorded(module: nn.Module) -> dict[str, Any]:
    return {name: getattr(module, name) for name in LOGS if hasattr(module, name)} | {"": dict(module.state_dict())}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape or one.device != other.device:
            return False
        return torch.equal(*(value.detach().reshape(-1).view(torch.uint8) for value in (one, other)))
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return np.float64(one).tobytes() == np.float64(other).tobytes()
    if isinstance(one, complex):
        return np.complex128(one).tobytes() == np.complex128(other).tobytes()
    return bool(one == other)
