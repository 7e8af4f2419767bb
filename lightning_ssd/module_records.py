"""`ModuleRecords`: copies of the attributes of modules, which are made once and compared before each micro-batch.

A model has hundreds of modules with a dozen dictionaries each, and a `training_step` changes few of them. To find the
changed ones is ten times as fast as to copy all and to examine each value.
"""

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import repeat
from operator import is_
from typing import Any

from torch import nn

from lightning_ssd.recorded_classes import (
    CONSTANT,
    HOOKS,
    SEQUENCES,
    attributes_of,
    is_atom,
    is_special,
    slots_of,
    stateful_classes,
)

__all__ = ["ModuleRecord", "ModuleRecords"]

MAX_CHANGES = 3
"""Changes of a model's modules or parameters, after which its modules are not recorded any more."""

_STRUCTURE = ("_modules", "_parameters")
"""Attributes of a module that are the tree of modules and parameters."""

_SEARCHES = ("modules", "named_modules", "parameters", "named_parameters", "_named_members")
"""Methods that search the tree."""

_Copy = tuple[dict[Any, Any], dict[Any, Any]]
"""A dictionary, and a copy of it."""


@dataclass(frozen=True, slots=True)
class ModuleRecord:
    """Copies of the attributes of one module.

    Attributes:
        module: the module.
        attributes: its attributes.
        kind: its class.
        structure: its dictionaries of modules and parameters, and copies of them.
        copies: its attributes and buffers, and copies of them.
        sets: sets that have no elements.
        hooks: its dictionaries of hooks, with or without elements.
        referred: objects that attributes refer to, and that may have a state of their own.
    """

    module: nn.Module
    attributes: dict[str, Any]
    kind: Any
    structure: tuple[_Copy, ...]
    copies: tuple[_Copy, ...] = ()
    sets: tuple[set[Any], ...] = ()
    hooks: tuple[dict[int, Any], ...] = ()
    referred: tuple[object, ...] = ()

    def has_structure(self) -> bool:
        """Returns whether the module has the copied modules and parameters, and no others."""
        same = type(self.module) is self.kind and attributes_of(self.module) is self.attributes
        for name, (mapping, before) in zip(_STRUCTURE, self.structure, strict=True):
            same = same and self.attributes.get(name) is mapping and _is_same(mapping, before)
        return same

    def is_unchanged(self) -> bool:
        """Returns whether the module has the copied attributes, modules and parameters, and no others."""
        return self.has_structure() and not any(self.sets) and all(_is_same(*copy) for copy in self.copies)


class ModuleRecords:
    """Records of the modules of a model, without those that change or have tensors besides parameters.

    Recorded values are referred to until the next `update`, longer than the micro-batch that may restore them.
    Therefore a module has no record if an attribute or buffer is a tensor, and none any more once an attribute has
    changed: `StepState` copies these modules anew for each micro-batch. It copies hooks anew, too. The modules of
    TorchScript and the like, whose tree is not in dictionaries, have no records either.

    All methods are called on the training thread.

    Args:
        module: the model.

    Attributes:
        parameters: the parameters of the model.
        records: records of unchanged modules.
        others: objects that these modules refer to, and the modules without a record.
        hooks: dictionaries of hooks of the recorded modules.
        classes: classes of the recorded modules that may have attributes with a state.
        known: the recorded modules and the parameters, by their identity.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changing: list[ModuleRecord] = []
        """The structure of modules without a record."""
        self._num_changes = 0
        self._begun = False
        self._set([], [], [])

    def update(self) -> None:
        """Finds the changed modules, so that the attributes describe the present model."""
        if self._begun and all(record.has_structure() for record in self._changing):
            if self._comparison.is_same() and not any(self._sets):
                return
            unchanged: list[ModuleRecord] = []
            changed: list[ModuleRecord] = []
            for record in self.records:
                (unchanged if record.is_unchanged() else changed).append(record)
            if all(record.has_structure() for record in changed):
                self._set(unchanged, [*self._changing, *map(_structure_of, changed)], self.parameters)
                return
        self._num_changes += self._begun
        self._begin()

    def _begin(self) -> None:
        """Records all modules for the first time, or after a change of the tree."""
        modules = None if self._num_changes > MAX_CHANGES else _tree(self._module)
        self._begun = modules is not None
        if modules is None:
            self._set([], [], list(self._module.parameters()))
            self.others += [self._module, *self._module.buffers()]  # TorchScript's are no attributes
            return
        recorded: list[ModuleRecord] = []
        changing: list[ModuleRecord] = []
        for structure in modules:
            record = _record(structure)
            (changing if record is None else recorded).append(record or structure)
        parameters = [one for each in modules for one in each.structure[1][1].values() if one is not None]
        self._set(recorded, changing, list({id(one): one for one in parameters}.values()))

    def _set(self, records: list[ModuleRecord], changing: list[ModuleRecord], parameters: list[nn.Parameter]) -> None:
        self.records = records
        self._sets = [each for record in records for each in record.sets]
        self._comparison = _Comparison(records)
        self._changing = changing
        self.parameters = parameters
        others = [each for record in records for each in record.referred]
        others += [record.module for record in changing]
        self.others: list[object] = list({id(each): each for each in others}.values())
        self.hooks: Sequence[dict[int, Any]] = [hooks for record in records for hooks in record.hooks]
        kinds: Any = {type(record.module) for record in records}
        self.classes: Sequence[type] = list({owner: None for kind in kinds for owner in stateful_classes(kind)})
        self.known: dict[int, object] = {id(each): each for each in parameters}
        self.known |= {id(record.module): record.module for record in records}


class _Comparison:
    """Compares many modules with their records at once."""

    def __init__(self, records: Sequence[ModuleRecord]) -> None:
        self._modules = [record.module for record in records]
        self._classes = [record.kind for record in records]
        self._attributes = [record.attributes for record in records]
        copies = [copy for record in records for copy in (*record.copies, *record.structure)]
        self._mappings = [mapping for mapping, _ in copies]
        self._lengths = [len(before) for _, before in copies]
        self._keys = [key for _, before in copies for key in before]
        self._values = [value for _, before in copies for value in before.values()]

    def is_same(self) -> bool:
        """Returns whether the modules have their classes, and the keys and values of all dictionaries."""
        attributes = map(object.__getattribute__, self._modules, repeat("__dict__"))
        if not (all(map(is_, map(type, self._modules), self._classes)) and all(map(is_, attributes, self._attributes))):
            return False
        if list(map(len, self._mappings)) != self._lengths:
            return False
        keys: list[object] = []
        values: list[object] = []
        for mapping in self._mappings:
            keys += mapping
            values += mapping.values()
        return all(map(is_, keys, self._keys)) and all(map(is_, values, self._values))


def _is_same(mapping: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Returns whether a dictionary has the keys and values of its copy, in the same order.

    They are compared by their identity, as their `__eq__` may be the user's.
    """
    same = len(mapping) == len(before) and all(map(is_, mapping, before))
    return same and all(map(is_, mapping.values(), before.values()))


def _structure_of(record: ModuleRecord) -> ModuleRecord:
    """Returns a record of the modules and parameters of a module alone."""
    return ModuleRecord(record.module, record.attributes, record.kind, record.structure)


def _tree(root: nn.Module) -> list[ModuleRecord] | None:
    """Returns the structure of all modules in a tree; `None`: a module of it has another structure than torch's."""
    with suppress(Exception):  # raised by code of a module's class, which plain training may never run
        return _search(root)
    return None


def _search(root: nn.Module) -> list[ModuleRecord] | None:
    found: dict[int, ModuleRecord] = {}
    rest: list[Any] = [root]
    while rest:
        module = rest.pop()
        if module is None or id(module) in found:
            continue
        attributes = attributes_of(module) if isinstance(module, nn.Module) else None
        kind: Any = type(module)
        if attributes is None or not _is_searched_as_usual(kind):
            return None
        dictionaries: list[Any] = [attributes.get(name) for name in _STRUCTURE]
        if not all(type(one) is dict for one in dictionaries):
            return None
        found[id(module)] = ModuleRecord(module, attributes, kind, tuple((one, dict(one)) for one in dictionaries))
        rest += dictionaries[0].values()
    return list(found.values())


@lru_cache(maxsize=1024)
def _is_searched_as_usual(kind: Any) -> bool:
    """Returns whether the modules of a class are searched for modules and parameters by torch's methods."""
    return all(getattr(kind, name) is getattr(nn.Module, name) for name in _SEARCHES)


def _record(structure: ModuleRecord) -> ModuleRecord | None:
    """Returns the record of a module; `None`: it has tensors, or more state than that of its attributes."""
    with suppress(Exception):  # raised by code of the class of an attribute
        return _record_attributes(structure)
    return None


def _record_attributes(structure: ModuleRecord) -> ModuleRecord | None:
    kind, attributes = structure.kind, structure.attributes
    if slots_of(kind) or is_atom(kind) or is_special(kind) or issubclass(kind, (dict, set, *SEQUENCES, *CONSTANT)):
        return None
    copied = [attributes]
    sets: list[set[Any]] = []
    hooks: list[dict[int, Any]] = []
    referred: list[object] = []
    for name, value in attributes.items():
        own: Any = type(value)
        if name in _STRUCTURE or is_atom(own):
            continue
        if name in HOOKS or name == "_buffers":
            if own is not dict and own is not OrderedDict:
                return None
            (copied if name == "_buffers" else hooks).append(value)
        elif own is set and not value:
            sets.append(value)
        elif own is tuple and all(map(is_atom, map(type, value))):
            continue
        elif is_special(own):
            return None
        else:
            referred.append(value)
    if any(value is not None for buffers in copied[1:] for value in buffers.values()):
        return None
    return replace(
        structure,
        copies=tuple((one, dict(one)) for one in copied),
        sets=tuple(sets),
        hooks=tuple(hooks),
        referred=tuple(referred),
    )
