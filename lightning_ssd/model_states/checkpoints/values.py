"""Replacement of values in nested containers, such as the tensors in a checkpoint."""

import copy
from collections.abc import Callable
from typing import Any, cast


def replace_values(root: Any, replacement: Callable[[str, Any], Any]) -> Any:
    """Returns `root` with some values replaced in its dicts, lists and tuples, including those of subclasses.

    A container in which nothing is replaced is the same object in the result. The others are copies that keep their
    type and attributes, such as the default factory of a `defaultdict`, or `_metadata` of a module's state dict.
    Values inside other objects, such as dataclasses, are not replaced. A container that occurs several times does so
    in the result.

    Args:
        replacement: gets the path of a value, such as "optimizer_states/0/state", and the value. Returns the value
            itself if it is not replaced; it is then searched if it is a container.
    """
    return _replace("", root, replacement, {})


def _replace(path: str, value: Any, replacement: Callable[[str, Any], Any], done: dict[int, tuple[Any, Any]]) -> Any:
    """Returns the replacement of one value; `done` has, by the id of each container, the container and its result."""
    # No functions that refer to each other: they would hold the values until a garbage collection.
    replaced = replacement(path, value)
    if replaced is not value or not isinstance(value, dict | list | tuple):
        return replaced
    if id(value) not in done:
        done[id(value)] = value, value  # while its items are replaced: it may contain itself
        done[id(value)] = value, _copied(path, value, replacement, done)
    return done[id(value)][1]


def _copied(
    path: str,
    value: dict[Any, Any] | list[Any] | tuple[Any, ...],
    replacement: Callable[[str, Any], Any],
    done: dict[int, tuple[Any, Any]],
) -> Any:
    """Returns a container, or a copy of it if an item is replaced."""
    prefix = f"{path}/" if path else ""
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    replaced = {key: _replace(f"{prefix}{key}", item, replacement, done) for key, item in items}
    changed = {key: replaced[key] for key, item in items if replaced[key] is not item}
    if not changed:
        return value
    if isinstance(value, tuple):
        return _tuple_like(value, list(replaced.values()))
    result = copy.copy(value)
    for key, item in changed.items():
        result[key] = item
    return result


def _tuple_like(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    if hasattr(value, "_make"):
        return cast(tuple[Any, ...], value._make(items))
    return type(value)(items)
