"""`StepState`: the state that a `training_step` may change, recorded before it, and restored before it is run again.

It consists of the states of random number generators, and of everything that is reachable from the module, the batch,
parameter groups of optimizers and learning rate schedulers: attributes, also those of the user's classes, buffers,
states of metrics, hooks, variables that functions share with the code around them, and the containers and objects that
these refer to. Lightning's logged values and the grad mode are recorded, too. Tensors are copied to the host. Large
tensors, the batch's and parameters are not copied: their version counters tell whether they were changed, and then the
state can't be restored. Large writable NumPy arrays have no counters, so that a state with one can't be restored
either, nor can one with an object whose class raises an error when the object is recorded. Global variables, files and
loggers are not recorded.
"""

import contextlib
import functools
import random
from array import array
from collections.abc import Callable, Iterable
from types import CellType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_ssd._lightning import fabric
from lightning_ssd.garbage import no_collections
from lightning_ssd.interrupts import uninterrupted
from lightning_ssd.module_records import ModuleRecords
from lightning_ssd.recorded_classes import (
    CONSTANT,
    EMPTY,
    HOOKS,
    SEQUENCES,
    attributes_of,
    is_atom,
    is_library,
    is_special,
    slots_of,
    stateful_classes,
)

COPIED = 2**24
"""Bytes of the largest tensor or array that is copied."""

COPIED_IN_ALL = 2**26
"""Most bytes of tensors and arrays that are copied."""

_LOGGED_BY = "training_step."
"""Prefix of the keys of values that a `training_step` has logged."""

FEW = 10_000
"""Most elements of a container whose elements are recorded, too."""


class StepState:
    """The present state of a training.

    Args:
        records: records of the module and those that it contains, which this object updates.
        inputs: arguments of its `training_step`, and other objects that it may reach; their tensors are not copied.
        logged: values that were logged, by their key.
        offloaded: offloaded parameters, which are not recorded.

    Attributes:
        leaves: tensors whose gradients a backward may accumulate, without the offloaded ones. Gradients are not
            recorded here, as they are dropped between forward and backward.
    """

    def __init__(
        self, records: ModuleRecords, inputs: object, logged: dict[str, Any] | None, offloaded: set[nn.Parameter]
    ) -> None:
        with no_collections():
            records.update()
        self._random = random_states()
        self._grad_enabled = torch.is_grad_enabled()
        self._logged = logged
        self.leaves: list[Tensor] = []
        self._keys = {} if logged is None else {k: v for k, v in logged.items() if k.startswith(_LOGGED_BY)}
        self._restores: list[Callable[[], object]] = []
        """Functions that restore objects of other kinds than dictionaries."""
        self._dictionaries: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        """Dictionaries, also those of attributes, and copies of them."""
        self._compared: list[tuple[Tensor, int]] = []
        """Tensors that are not copied, and their versions."""
        self._opaque: type | None = None
        """Class of an iterator, file, large array or the like, which can't be restored; `None`: there is none."""
        self._code: list[object] = []
        """Functions and hooks, whose objects are recorded last."""
        self._is_code = False
        """Whether objects are recorded that are reached by code alone: files and iterators among them are no obstacle,
        as most code only has them to log to."""
        self._copied = 0
        """Bytes that were copied."""
        self._seen: dict[int, object] = dict(records.known)
        """Recorded objects by their identity; the values keep them alive."""
        self._modules = records.records
        """Copies of attributes that were not made for this micro-batch alone."""
        self._hooks = records.hooks
        self._hooked = {id(hooks): dict(hooks) for hooks in filter(None, records.hooks)}
        """Copies of dictionaries of hooks of these modules that have elements, by the identity of the dictionaries."""
        parameters = records.parameters
        self.leaves += parameters if not offloaded else [one for one in parameters if one not in offloaded]
        self._compared += [(parameter, parameter._version) for parameter in self.leaves]
        trained = [(parameter, parameter.requires_grad) for parameter in parameters]
        self._restores.append(lambda: _set_trained(trained))
        # Modes and subclasses of the user see no copies. So many new objects would cause garbage collections.
        with no_collections(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunctionSubclass():
            self._record([*records.others, *self._keys.values()], copy=True)
            self._record([inputs], copy=False)
            self._code += [hook for hooks in self._hooked.values() for hook in hooks.values()]
            self._record_classes(records.classes)
            self._is_code = True
            self._record(self._code, copy=True)

    def obstacle(self) -> str | None:
        """Returns why the state can't be restored; `None`: it can."""
        with torch._C.DisableTorchFunctionSubclass():
            changed = any(tensor._version != version for tensor, version in self._compared)
        if changed:
            return "`training_step` has changed a parameter, its batch, or a large tensor in place"
        return None if self._opaque is None else f"`training_step` may have read or written a {self._opaque.__name__}"

    @uninterrupted  # a module with a part of its attributes could not even be saved
    def restore(self) -> None:
        """Restores the state, if there is no obstacle."""
        if self._logged is not None:
            for key in [key for key in self._logged if key.startswith(_LOGGED_BY) and key not in self._keys]:
                del self._logged[key]
        with torch._C._DisableTorchDispatch():
            for record in self._modules:
                for dictionary, items in (*record.copies, *record.structure):
                    _refill(dictionary, items)
                for members in record.sets:
                    members.clear()
            for hooks in self._hooks:
                _refill(hooks, self._hooked.get(id(hooks), EMPTY))
            for dictionary, items in self._dictionaries:
                _refill(dictionary, items)
            for restore in self._restores:
                restore()
        set_random_states(self._random)
        torch.set_grad_enabled(self._grad_enabled)

    def _record(self, values: Iterable[object], *, copy: bool) -> None:
        """Records objects, and those that they refer to."""
        found = list(values)
        while found:
            value = found.pop()
            kind: Any = type(value)  # mypy takes classes for unhashable
            try:
                if is_atom(kind) or id(value) in self._seen:
                    continue
                self._seen[id(value)] = value
                found += self._record_one(value, copy=copy)
            except Exception:  # raised by code of the object's class, which plain training may never run
                self._opaque = kind

    def _record_one(self, value: Any, *, copy: bool) -> Iterable[object]:
        """Records one object, and returns the objects that it refers to."""
        kind: Any = type(value)
        if is_special(kind):
            self._record_special(value, copy=copy)
            return ()
        if issubclass(kind, FunctionType | MethodType | functools.partial):
            if self._is_code:
                return self._record_code(value)
            self._seen.pop(id(value))
            self._code.append(value)
            return ()
        referred: list[object] = []
        # Elements are read by methods of Python's classes: those of subclasses may do more, such as importing modules.
        if issubclass(kind, dict):
            items = dict(dict.items(value))
            self._dictionaries.append((value, items))
            referred += (*items.keys(), *items.values()) if len(items) <= FEW else ()
        elif issubclass(kind, SEQUENCES):
            base = next(base for base in SEQUENCES if issubclass(kind, base))
            elements = list(base.__iter__(value))
            self._restores.append(lambda: _replace(base, value, elements))
            referred += elements if len(elements) <= FEW else ()
        elif issubclass(kind, set):
            members = set(value)
            self._restores.append(lambda: _exchange(value, members))
            referred += members if len(members) <= FEW else ()
        elif issubclass(kind, CONSTANT):
            base = next(base for base in CONSTANT if issubclass(kind, base))
            referred += base.__iter__(value) if base.__len__(value) <= FEW else ()
        if (attributes := attributes_of(value)) is not None:
            before = dict(attributes)
            self._dictionaries.append((attributes, before))
            if isinstance(value, nn.Module):
                self._record_hooks([before[name] for name in HOOKS & before.keys()])
                referred += [each for name, each in before.items() if name not in HOOKS]
            else:
                referred += before.values()
        if slots := slots_of(kind):
            given = {slot: slot.__get__(value) for slot in slots if _is_set(slot, value)}
            self._restores.append(lambda: _refill_slots(value, slots, given))
            referred += given.values()
        self._record_classes(stateful_classes(kind))
        return referred

    def _record_hooks(self, hooks: list[dict[int, object]]) -> None:
        """Records the hooks of a module, such as those that a `training_step` registers and removes."""
        self._dictionaries += [(mapping, dict(mapping) if mapping else EMPTY) for mapping in hooks]
        self._code += [hook for mapping in hooks if mapping for hook in mapping.values()]

    def _record_code(self, function: Any) -> list[object]:
        """Records the variables that a user's function shares with the code around it, its attributes and defaults."""
        if isinstance(function, MethodType):
            return [function.__self__, function.__func__]
        if isinstance(function, functools.partial):
            return [function.func, function.args, function.keywords]
        if is_library(function.__module__):
            return []
        cells = _contents(function)
        attributes, before = vars(function), dict(vars(function))

        def restore() -> None:
            for cell, content in cells:
                cell.cell_contents = content
            _refill(attributes, before)

        if cells or before:
            self._restores.append(restore)
        defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
        return [*(content for _, content in cells), *before.values(), *defaults]

    def _record_classes(self, kinds: Iterable[type]) -> None:
        """Records the attributes of classes that are not recorded yet."""
        for kind in kinds:
            if id(kind) not in self._seen:
                self._seen[id(kind)] = kind
                try:
                    self._code += self._record_class(kind)
                except Exception:  # raised by code of the classes of its attributes
                    self._opaque = kind

    def _record_class(self, kind: type) -> list[object]:
        """Records the attributes of a user's class, without methods and other descriptors."""
        before = _class_attributes(kind)

        def restore() -> None:
            now = _class_attributes(kind)
            for name in now.keys() - before.keys():
                delattr(kind, name)
            for name, value in before.items():
                if name not in now or now[name] is not value:
                    setattr(kind, name, value)

        self._restores.append(restore)
        return list(before.values())

    def _record_special(self, value: Any, *, copy: bool) -> None:
        if isinstance(value, Tensor):
            self._record_tensor(value, copy=copy)
        elif isinstance(value, np.ndarray):
            if value.flags.writeable:  # others may be mapped files
                self._record_array(value)
        elif isinstance(value, bytearray | array):
            self._record_bytes(value)
        elif (restore := _restore_generator(value)) is not None:
            self._restores.append(restore)
        else:
            self._refuse(value)

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

    def _record_bytes(self, value: Any) -> None:
        if not self._may_copy(memoryview(value).nbytes):
            self._refuse(value)
            return
        before = value[:]

        def restore() -> None:
            value[:] = before

        self._restores.append(restore)

    def _record_tensor(self, tensor: Tensor, *, copy: bool) -> None:
        if tensor.is_inference():
            return
        if tensor.is_leaf:
            self.leaves.append(tensor)
        plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.grad_fn is None
        plain = plain and not (tensor.is_nested or tensor._is_zerotensor())
        # Expanded tensors can't be written, only the tensors that they are views of.
        if not (copy and plain and torch._debug_has_internal_overlap(tensor) != 1 and self._may_copy(tensor.nbytes)):
            self._compared.append((tensor, tensor._version))
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


def _class_attributes(kind: type) -> dict[str, Any]:
    """Returns the attributes of a class, without methods, nested classes and other descriptors."""
    return {
        name: value
        for name, value in vars(kind).copy().items()  # other threads may set attributes
        if not (name.startswith("__") or isinstance(value, type) or hasattr(type(value), "__get__"))
    }


def _contents(function: FunctionType) -> list[tuple[CellType, object]]:
    """Returns the variables that a function shares with the code around it, and their values, if they have any."""
    found: list[tuple[CellType, object]] = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # assigned later
            found.append((cell, cell.cell_contents))
    return found


def _is_set(slot: MemberDescriptorType, value: object) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


def _refill_slots(
    value: object, slots: tuple[MemberDescriptorType, ...], given: dict[MemberDescriptorType, Any]
) -> None:
    for slot in slots:
        if slot in given:
            slot.__set__(value, given[slot])
        elif _is_set(slot, value):
            slot.__delete__(value)


def _set_trained(parameters: list[tuple[nn.Parameter, bool]]) -> None:
    for parameter, trained in parameters:
        if parameter.requires_grad != trained:
            parameter.requires_grad_(trained)


def _restore_generator(value: Any) -> Callable[[], object] | None:
    """Returns a function that restores a generator of random numbers; `None`: `value` is no generator."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    return None


def _refill(mapping: dict[Any, Any], items: dict[Any, Any]) -> None:
    if not mapping and not items:
        return
    # A subclass may have a `__setitem__` of its own; an OrderedDict has an order of its own.
    if type(mapping) is dict:
        mapping.clear()
        mapping.update(items)
        return
    for key in [key for key in dict.keys(mapping) if key not in items]:
        del mapping[key]
    now = dict(dict.items(mapping))
    for key, value in items.items():
        if key not in now or now[key] is not value:
            mapping[key] = value


def _replace(base: Any, sequence: Any, elements: list[Any]) -> None:
    base.clear(sequence)
    base.extend(sequence, elements)


def _exchange(members: set[Any], before: set[Any]) -> None:
    members.clear()
    members.update(before)
