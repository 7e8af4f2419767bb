"""`StepState`: the state that a `training_step` may change, recorded before it, and restored before it is run again.

| state | before a second attempt |
|---|---|
| random number generators, grad mode, `requires_grad`, logged values | restored |
| attributes of modules, and of the objects and containers that these refer to | restored |
| what their hooks refer to (callbacks, variables of functions: many hooks of user code are closures) | restored |
| parameters, the batch, tensors and arrays that are too large to copy | compared; a change is an obstacle |
| iterators, open files, large arrays | an obstacle, because their use can't be seen |
| global variables, attributes of classes, slots, loggers, files of others | not restored (`UNRECORDED`) |

Tensors are copied to the host. The references end with the micro-batch, so that replaced values are freed then.
"""

import argparse
import functools
import io
import random
import sys
import weakref
from array import array
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_ssd import torch_internals as internals
from lightning_ssd._lightning import fabric, pl
from lightning_ssd.interrupts import uninterrupted

UNRECORDED = "Effects of the first attempt on global variables, class attributes, slots, files and loggers remain."
"""Sentence of the log line about a micro-batch that is run again."""

COPIED = 2**24
"""Bytes of the largest tensor or array that is copied."""

COPIED_IN_ALL = 2**26
"""Most bytes of tensors and arrays that are copied."""

FEW = 10_000
"""Most elements of a container whose elements are recorded, too."""

_LOGGED_BY = "training_step."
"""Prefix of the keys of values that a `training_step` has logged."""

_ATOMS: tuple[Any, ...] = (
    str, bytes, int, float, complex, bool, type(None), type, ModuleType, BuiltinFunctionType,
    torch.dtype, torch.device, pl.Trainer, pl.LightningDataModule, torch.utils.data.DataLoader,
    torch.utils.data.Dataset, torch.optim.Optimizer, random.SystemRandom, *weakref.ProxyTypes,
)  # fmt: skip
"""Types of objects that have no state, or whose state no `training_step` changes."""

_OPAQUE: tuple[Any, ...] = (Iterator, io.IOBase, bytearray, array)
"""Types of objects whose state is not copied."""

_SPECIAL = (Tensor, np.ndarray, torch.Generator, random.Random, np.random.Generator, np.random.RandomState, *_OPAQUE)
"""Types of objects that have a state besides their elements and attributes."""

_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, deque, set)
"""Python's containers that change. Methods of these classes read and fill subclasses, whose own may do more."""

_CONSTANT: tuple[Any, ...] = (tuple, frozenset)
"""Python's containers that do not change, while their elements may."""

_FUNCTIONS = (FunctionType, MethodType, functools.partial)
"""Types of functions that may have variables of their own."""

_HOLDERS = (SimpleNamespace, argparse.Namespace, UserDict, UserList, ChainMap)
"""Python's own classes whose attributes are a user's values."""

_LIBRARIES = sys.stdlib_module_names | {
    "torch", "numpy", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_ssd",
}  # fmt: skip
"""Packages whose functions and classes have no state that a `training_step` changes."""

_LOGGERS = {"wandb", "tensorboard", "tensorboardX", "mlflow", "comet_ml", "neptune", "tqdm", "rich"}
"""Packages whose objects write on threads of their own, so that a state of theirs can't be put back."""

_BEFORE_BACKWARD = ("on_before_backward", "on_before_zero_grad")
"""Hooks of callbacks between forward and backward, which are not run again."""


class StepState:
    """The present state of a training.

    Args:
        inputs: arguments of `training_step`, and other objects that it may reach; their tensors are not copied.
        logged: values that were logged, by their key.
        offloaded: offloaded parameters, which are not recorded.

    Attributes:
        leaves: tensors whose gradients a backward may accumulate, without the offloaded ones. Gradients are not
            recorded here, as they are dropped between forward and backward.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: object,
        logged: dict[str, Any] | None,
        offloaded: set[nn.Parameter],
    ) -> None:
        self._random = random_states()
        self._grad_enabled = torch.is_grad_enabled()
        self._logged = logged
        self._keys = {} if logged is None else {k: v for k, v in logged.items() if k.startswith(_LOGGED_BY)}
        self._containers: list[tuple[Any, Any, Any]] = []
        """The class of `_CONTAINERS`, a container, and a copy of it."""
        self._empty: list[Any] = []
        """Containers of Python's own classes that are empty."""
        self._variables: list[tuple[Callable[[], object], Callable[[object], object], object]] = []
        """Functions that read and write a variable, and its value."""
        self._restores: list[Callable[[], object]] = []
        """Functions that restore tensors, arrays and generators."""
        self._compared: list[tuple[Tensor, int]] = []
        """Tensors that are not copied, and their versions."""
        self._opaque: type | None = None
        """Class of an object that can't be restored; `None`: there is none."""
        self._code: list[object] = []
        """Functions, which are recorded last."""
        self._is_code = False
        """Whether objects are recorded that only code reaches: files and iterators among them are no obstacle, as most
        code only has them to log to."""
        self._copied = 0
        """Bytes that were copied."""
        # Modes and subclasses of the user see no copies.
        with internals.without_dispatch(), internals.without_torch_function():
            parameters = list(module.parameters())
            self._seen: dict[int, object] = {id(parameter): parameter for parameter in parameters}
            """Recorded objects by their identity; the values keep them alive."""
            self._trained = [(parameter, parameter.requires_grad) for parameter in parameters]
            self.leaves: list[Tensor] = [parameter for parameter in parameters if parameter not in offloaded]
            self._compared += [(parameter, internals.version_of(parameter)) for parameter in self.leaves]
            # Buffers of TorchScript's modules are no attributes.
            self._record([module, *module.buffers(), *self._keys.values()], copy=True)
            self._record([inputs], copy=False)
            self._is_code = True
            while self._code:
                code, self._code = self._code, []
                self._record(code, copy=True)

    def obstacle(self) -> str | None:
        """Returns why the state can't be restored; `None`: it can."""
        with internals.without_torch_function():
            changed = any([internals.version_of(tensor) != version for tensor, version in self._compared])
        if changed:
            return "`training_step` has changed a parameter, its batch, or a large tensor in place"
        return None if self._opaque is None else f"`training_step` may have read or written a {self._opaque.__name__}"

    @uninterrupted  # a module with a part of its attributes could not even be saved
    def restore(self) -> None:
        """Restores the state, if there is no obstacle."""
        if self._logged is not None:
            for key in [key for key in self._logged if key.startswith(_LOGGED_BY) and key not in self._keys]:
                del self._logged[key]
        for container in self._empty:
            container.clear()
        with internals.without_dispatch():
            for base, container, before in self._containers:
                if not _is_same(_copy(base, container), before):
                    base.clear(container)
                    (base.extend if hasattr(base, "extend") else base.update)(container, before)
            for read, write, value in self._variables:
                if read() is not value:
                    write(value)
            for restore in self._restores:
                restore()
            for parameter, trained in self._trained:
                if parameter.requires_grad != trained:
                    parameter.requires_grad_(trained)
        set_random_states(self._random)
        torch.set_grad_enabled(self._grad_enabled)

    def _record(self, values: Iterable[object], *, copy: bool) -> None:
        """Records objects, and those that they refer to."""
        found = list(values)
        while found:
            value = found.pop()
            kind: Any = type(value)  # mypy takes classes for unhashable
            try:
                if kind in _CONTAINERS and not value:  # most objects: modules' dictionaries of hooks, for one
                    self._empty.append(value)
                    continue
                if _is_atom(kind) or id(value) in self._seen:
                    continue
                if not self._is_code and issubclass(kind, _FUNCTIONS):
                    self._code.append(value)
                    continue
                self._seen[id(value)] = value
                found += self._record_one(value, kind, copy=copy)
            except Exception:  # raised by code of the object's class, which plain training may never run
                self._opaque = kind

    def _record_one(self, value: Any, kind: Any, *, copy: bool) -> Iterable[object]:
        """Records one object, and returns the objects that it refers to."""
        if _is_special(kind):
            self._record_special(value, kind, copy=copy)
            return ()
        if issubclass(kind, _FUNCTIONS):
            return self._record_code(value)
        referred: list[object] = []
        if (base := _base_of(kind, _CONTAINERS)) is not None:
            before = _copy(base, value)
            self._containers.append((base, value, before))
            if len(before) <= FEW:
                referred += [*before, *before.values()] if isinstance(before, dict) else before
        elif (base := _base_of(kind, _CONSTANT)) is not None:
            referred += base.__iter__(value) if base.__len__(value) <= FEW else ()
        if not _has_attributes(kind):
            return referred
        if issubclass(kind, pl.Callback) and _acts_before_backward(value):
            self._opaque = kind  # what its hooks have changed since the forward would be reset, too
            return ()
        with suppress(AttributeError):  # there are only slots
            attributes = object.__getattribute__(value, "__dict__")  # calls no `__getattr__`
            self._containers.append((dict, attributes, before := dict(attributes)))
            referred += before.values()
        return referred

    def _record_code(self, function: Any) -> list[object]:
        """Records the variables that a function shares with the code around it, and returns objects that it reaches."""
        if isinstance(function, MethodType):
            return [function.__self__, function.__func__]
        if isinstance(function, functools.partial):
            return [function.func, function.args, function.keywords]
        if _is_library(function.__module__):
            return []
        referred = [vars(function), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # not assigned yet
                referred.append(cell.cell_contents)
                read, write = (functools.partial(access, cell, "cell_contents") for access in (getattr, setattr))
                self._variables.append((read, write, referred[-1]))
        return referred

    def _record_special(self, value: Any, kind: Any, *, copy: bool) -> None:
        if issubclass(kind, Tensor):
            self._record_tensor(value, copy=copy)
        elif issubclass(kind, np.ndarray):
            if value.flags.writeable:  # others may be mapped files
                self._record_array(value)
        elif issubclass(kind, _OPAQUE):
            self._refuse(value)
        else:
            self._restores.append(_restore_generator(value))

    def _refuse(self, value: object) -> None:
        """Records that an object can't be restored."""
        if not self._is_code:
            self._opaque = type(value)

    def _may_copy(self, nbytes: int) -> bool:
        """Returns whether a tensor or array of `nbytes` may be copied, and if so, counts it."""
        if nbytes > COPIED or self._copied + nbytes > COPIED_IN_ALL:
            return False
        self._copied += nbytes
        return True

    def _record_array(self, array: Any) -> None:
        if not self._may_copy(array.nbytes):
            self._refuse(array)
            return
        if array.dtype.hasobject:
            self._record(array.ravel().tolist(), copy=True)
        before = array.copy()
        self._restores.append(lambda: np.copyto(array, before))

    def _record_tensor(self, tensor: Tensor, *, copy: bool) -> None:
        if tensor.is_inference():
            return
        if tensor.is_leaf:
            self.leaves.append(tensor)
        plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.grad_fn is None
        plain = plain and not (tensor.is_nested or internals.is_zero_tensor(tensor))
        # Expanded tensors can't be written, only the tensors that they are views of.
        if not (copy and plain and internals.may_overlap(tensor) != 1 and self._may_copy(tensor.nbytes)):
            self._compared.append((tensor, internals.version_of(tensor)))
            return
        data = tensor.data
        if data.device.type == "cuda":
            # Copied in the order of the stream, so that the host does not wait; torch's allocator of page-locked
            # memory reuses the bytes when the copies from and to them are done.
            before = torch.empty_like(data, device="cpu", pin_memory=True).copy_(data, non_blocking=True)
        else:
            before = data.clone()

        def restore() -> None:
            tensor.data = data  # keeps the version counter, because autograd may have saved the tensor
            data.copy_(before, non_blocking=True)

        self._restores.append(restore)


def random_states() -> dict[str, Any]:
    """Returns the states of the random number generators of torch, its devices, NumPy and Python."""
    states: dict[str, Any] = fabric.utilities.seed._collect_rng_states()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Restores the states that `random_states` has returned."""
    fabric.utilities.seed._set_rng_states(dict(states))


# These functions are cached by class: models have thousands of objects of a few classes.


@functools.lru_cache(maxsize=1024)
def _is_atom(kind: type) -> bool:
    """Returns whether objects of a class are not recorded."""
    return issubclass(kind, _ATOMS)


@functools.lru_cache(maxsize=1024)
def _is_special(kind: type) -> bool:
    """Returns whether objects of a class are of a type in `_SPECIAL`."""
    return issubclass(kind, _SPECIAL)


@functools.lru_cache(maxsize=1024)
def _base_of(kind: type, bases: tuple[Any, ...]) -> Any:
    """Returns the first of some classes that a class is, or is a subclass of; None: there is none."""
    found = [base for base in bases if issubclass(kind, base)]
    return found[0] if found else None


@functools.lru_cache(maxsize=1024)
def _has_attributes(kind: type) -> bool:
    """Returns whether attributes of objects of a class are recorded.

    Those of Python's own classes, such as threads and locks, are not, nor are those of this package and of torch's
    internals.
    """
    package = _package(kind.__module__)
    if package == "lightning_ssd" or str(kind.__module__).startswith("torch._"):
        return issubclass(kind, nn.Module)
    return not (package in sys.stdlib_module_names or package in _LOGGERS) or kind in _HOLDERS


def _is_library(module: object) -> bool:
    """Returns whether functions and classes of a module have no state that a `training_step` changes."""
    return _package(module or "builtins") in _LIBRARIES


def _package(module: object) -> str:
    return str(module).partition(".")[0]  # user code may have assigned another object than a string


def _acts_before_backward(callback: pl.Callback) -> bool:
    """Returns whether a callback has hooks that run between forward and backward."""
    own, kind = vars(callback), type(callback)
    return any([hook in own or getattr(kind, hook) is not getattr(pl.Callback, hook) for hook in _BEFORE_BACKWARD])


def _copy(base: Any, container: Any) -> Any:
    """Returns the items of a container of the class `base` as a dictionary or list."""
    return dict(base.items(container)) if issubclass(base, dict) else list(base.__iter__(container))


def _is_same(one: Any, other: Any) -> bool:
    """Returns whether two copies have the same objects. Their `__eq__` may be the user's, and is not called."""
    if isinstance(one, dict):
        return _is_same(list(one), list(other)) and _is_same(list(one.values()), list(other.values()))
    return len(one) == len(other) and all(map(is_, one, other))


def _restore_generator(value: Any) -> Callable[[], object]:
    """Returns a function that restores a generator of random numbers."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return functools.partial(value.set_state, value.get_state())
