"""Classes of objects that `StepState` records, and those of which it records nothing."""

import argparse
import functools
import io
import random
import sys
import weakref
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Iterator
from types import BuiltinFunctionType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_ssd._lightning import pl

_ATOMS: tuple[Any, ...] = (
    str, bytes, int, float, complex, bool, type(None), type, ModuleType, BuiltinFunctionType,
    torch.dtype, torch.device, pl.Trainer, pl.LightningDataModule, torch.utils.data.DataLoader,
    torch.utils.data.Dataset, torch.optim.Optimizer, random.SystemRandom, *weakref.ProxyTypes,
)  # fmt: skip
"""Types of objects that have no state, or whose state no `training_step` changes."""

_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)

_SPECIAL: tuple[Any, ...] = (Tensor, np.ndarray, bytearray, array, *_GENERATORS, Iterator, io.IOBase)
"""Types of objects that have a state besides their elements and attributes."""

_HOLDERS = (SimpleNamespace, argparse.Namespace, UserDict, UserList, ChainMap)
"""Python's own classes whose attributes are a user's values."""

SEQUENCES: tuple[Any, ...] = (list, deque)
"""Python's classes of sequences that change."""

CONSTANT: tuple[Any, ...] = (tuple, frozenset)
"""Python's classes of containers that do not change, while their elements may."""

HOOKS = frozenset(name for name in vars(nn.Module()) if "_hooks" in name)
"""Attributes of a module that contain its hooks, or options of them, by their numbers."""

EMPTY: dict[Any, Any] = {}
"""Copy of each empty dictionary of hooks: a module has a dozen."""

_LIBRARIES = {"torch", "numpy", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_ssd"}
"""Packages whose functions and classes have no state that a `training_step` changes."""


# These functions are cached by class: models have thousands of objects of a few classes.


@functools.lru_cache(maxsize=1024)
def is_atom(kind: type) -> bool:
    """Returns whether objects of a class are not recorded."""
    return issubclass(kind, _ATOMS)


@functools.lru_cache(maxsize=1024)
def is_special(kind: type) -> bool:
    """Returns whether objects of a class are of a type in `_SPECIAL`."""
    return issubclass(kind, _SPECIAL)


@functools.lru_cache(maxsize=1024)
def is_recorded(kind: type) -> bool:
    """Returns whether attributes of objects of a class are recorded.

    Those of Python's own classes, such as threads and locks, are not, nor are those of this package and of torch's
    internals.
    """
    package = _package(kind.__module__)
    if package == "lightning_ssd" or str(kind.__module__).startswith("torch._"):
        return issubclass(kind, nn.Module)
    return package not in sys.stdlib_module_names or kind in _HOLDERS


def _package(module: object) -> str:
    return str(module).partition(".")[0]  # user code may have assigned another object than a string


def is_library(module: object) -> bool:
    """Returns whether functions and classes of a module have no state that a `training_step` changes."""
    package = _package(module or "builtins")
    return package in _LIBRARIES or package in sys.stdlib_module_names


@functools.lru_cache(maxsize=1024)
def stateful_classes(kind: type) -> tuple[type, ...]:
    """Returns the classes of an object whose attributes are recorded."""
    return tuple(owner for owner in kind.__mro__ if not is_library(owner.__module__)) if is_recorded(kind) else ()


def attributes_of(value: object) -> dict[str, Any] | None:
    """Returns the attributes of an object that are recorded; `None`: none are."""
    kind: Any = type(value)
    if not is_recorded(kind):
        return None
    try:
        attributes = object.__getattribute__(value, "__dict__")  # calls no `__getattr__`
    except AttributeError:
        return None
    return attributes if isinstance(attributes, dict) else None


@functools.lru_cache(maxsize=1024)
def slots_of(kind: type) -> tuple[MemberDescriptorType, ...]:
    """Returns the `__slots__` of a class that are recorded."""
    if not is_recorded(kind):
        return ()
    owners = [vars(owner) for owner in kind.__mro__ if "__slots__" in vars(owner)]
    return tuple(each for owner in owners for each in owner.values() if isinstance(each, MemberDescriptorType))
