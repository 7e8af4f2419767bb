"""`ModuleRecords`: copies of the attributes of modules, which are made once and compared before each micro-batch.

A model has hundreds of modules with a dozen dictionaries each, and a `training_step` changes few of them. To find the
changed ones is ten times as fast as to copy all and to examine each value.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from operator import is_
from typing import Any

from torch import nn

from lightning_ssd.recorded_classes import (
    CONSTANT,
    EMPTY,
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
    """Copies of the attributes and hooks of one module.

    Attributes:
        module: the module.
        attributes: its attributes.
        structure: its dictionaries of modules and parameters, and copies of them.
        copies: the attributes and other dictionaries with elements, and copies of them.
        empty: dictionaries of hooks, and sets, that have no elements.
        referred: objects that attributes refer to, and that may have a state of their own.
        hooks: its hooks.
    """

    module: nn.Module
    attributes: dict[str, Any]
    structure: tuple[_Copy, ...]
    copies: tuple[_Copy, ...] = ()
    empty: tuple[Any, ...] = ()
    referred: tuple[object, ...] = ()
    hooks: tuple[object, ...] = ()

    def has_structure(self) -> bool:
        """Returns whether the module has the copied modules and parameters, and no others."""
        present = [self.attributes.get(name) for name in _STRUCTURE]
        same = all(map(is_, present, (mapping for mapping, _ in self.structure)))
        return same and _Comparison([self], self.structure).is_same()

    def has_attributes(self) -> bool:
        """Returns whether the module has the copied attributes, and no others."""
        return _Comparison([self], self.copies[:1]).is_same()

    def is_unchanged(self) -> bool:
        """Returns whether the module has the copied attributes, modules, parameters and hooks, and no others."""
        return _Comparison([self], self.dictionaries()).is_same() and not any(self.empty)

    def dictionaries(self) -> Iterator[_Copy]:
        """Returns all dictionaries and their copies."""
        yield from self.copies
        yield from self.structure
        for container in self.empty:
            if not isinstance(container, set):
                yield container, EMPTY

    def clear_sets(self) -> None:
        """Removes the elements of sets that had none."""
        for container in self.empty:
            if isinstance(container, set):
                container.clear()


class ModuleRecords:
    """Records of the modules of a model, without those that change or have tensors besides parameters.

    Recorded values are referred to until the next `update`, longer than the micro-batch that may restore them.
    Therefore a module has no record if an attribute or buffer is a tensor, and none any more once another attribute
    than its hooks has changed: `StepState` copies these modules anew for each micro-batch. The modules of TorchScript
    and the like, whose tree is not in dictionaries, have no records either.

    All methods are called on the training thread.

    Args:
        module: the model.

    Attributes:
        parameters: the parameters of the model.
        records: records of unchanged modules.
        others: objects that these modules refer to, and the modules without a record.
        hooks: hooks of the recorded modules.
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
            if self._comparison.is_same() and not any(self._empty):
                return
            changed = [record for record in self.records if not record.is_unchanged()]
            if all(record.has_structure() for record in changed):
                self._replace(changed)
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

    def _replace(self, changed: Iterable[ModuleRecord]) -> None:
        """Records modules whose hooks have changed anew, and removes the records of others that have changed."""
        present = {id(record): record for record in self.records}
        changing = list(self._changing)
        for record in changed:
            structure = ModuleRecord(record.module, record.attributes, record.structure)
            replacement = _record(structure) if record.has_attributes() else None
            if replacement is None:
                del present[id(record)]
                changing.append(structure)
            else:
                present[id(record)] = replacement
        self._set(list(present.values()), changing, self.parameters)

    def _set(self, records: list[ModuleRecord], changing: list[ModuleRecord], parameters: list[nn.Parameter]) -> None:
        self.records = records
        self._empty = [container for record in records for container in record.empty]
        self._comparison = _Comparison(records, [pair for each in records for pair in (*each.copies, *each.structure)])
        self._changing = changing
        self.parameters = parameters
        others = [each for record in records for each in record.referred]
        others += [record.module for record in changing]
        self.others: list[object] = list({id(each): each for each in others}.values())
        self.hooks: Sequence[object] = [hook for record in records for hook in record.hooks]
        kinds: Any = {type(record.module) for record in records}
        self.classes: Sequence[type] = list({owner: None for kind in kinds for owner in stateful_classes(kind)})
        self.known: dict[int, object] = {id(each): each for each in parameters}
        self.known |= {id(record.module): record.module for record in records}


class _Comparison:
    """Compares many dictionaries with their copies at once.

    Keys and values are compared by their identity, as their `__eq__` may be the user's.

    Args:
        records: records of modules, which must still have their classes and dictionaries of attributes.
        copies: the dictionaries, and their copies.
    """

    def __init__(self, records: Sequence[ModuleRecord], copies: Iterable[_Copy]) -> None:
        self._modules = [record.module for record in records]
        self._classes: list[Any] = [type(module) for module in self._modules]
        self._attributes = [record.attributes for record in records]
        pairs = list(copies)
        self._mappings = [mapping for mapping, _ in pairs]
        self._lengths = [len(before) for _, before in pairs]
        self._keys = [key for _, before in pairs for key in before]
        self._values = [value for _, before in pairs for value in before.values()]

    def is_same(self) -> bool:
        """Returns whether all dictionaries have the keys and values of their copies, in the same order."""
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
        found[id(module)] = ModuleRecord(module, attributes, tuple((one, dict(one)) for one in dictionaries))
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
    kind: Any = type(structure.module)
    if slots_of(kind) or is_atom(kind) or is_special(kind) or issubclass(kind, (dict, set, *SEQUENCES, *CONSTANT)):
        return None
    attributes = structure.attributes
    copied = [attributes]
    empty: list[Any] = []
    referred: list[object] = []
    for name, value in attributes.items():
        own: Any = type(value)
        if name in _STRUCTURE or is_atom(own):
            continue
        if name in HOOKS or name == "_buffers":
            if own is not dict and own is not OrderedDict:
                return None
            (copied if value else empty).append(value)
        elif own is set and not value:
            empty.append(value)
        elif own is tuple and all(map(is_atom, map(type, value))):
            continue
        elif is_special(own):
            return None
        else:
            referred.append(value)
    buffers = attributes.get("_buffers")
    if buffers and any(value is not None for value in buffers.values()):
        return None
    hooks = tuple(hook for one in copied[1:] if one is not buffers for hook in one.values())
    copies = tuple((one, dict(one)) for one in copied)
    return ModuleRecord(structure.module, attributes, structure.structure, copies, tuple(empty), tuple(referred), hooks)
