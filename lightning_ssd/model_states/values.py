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
        root: the outermost value.
        replacement: gets the path of a value, such as "optimizer_states/0/state", and the value. Returns the value
            itself if it is not replaced; it is then searched if it is a container.
    """
    done: dict[int, tuple[Any, Any]] = {}
    """By the id of a container, the container, so that the id remains its own, and its result."""

    def replace(path: str, value: Any) -> Any:
        replaced = replacement(path, value)
        if replaced is not value or not isinstance(value, dict | list | tuple):
            return replaced
        if id(value) not in done:
            done[id(value)] = value, value  # while its items are replaced: it may contain itself
            done[id(value)] = value, copied(path, value)
        return done[id(value)][1]

    def copied(path: str, value: Any) -> Any:
        prefix = f"{path}/" if path else ""
        items = list(value.items() if isinstance(value, dict) else enumerate(value))
        replaced = {key: replace(f"{prefix}{key}", item) for key, item in items}
        changed = {key: replaced[key] for key, item in items if replaced[key] is not item}
        if not changed:
            return value
        if isinstance(value, tuple):
            return _tuple_like(value, list(replaced.values()))
        result = copy.copy(value)
        for key, item in changed.items():
            result[key] = item
        return result

    return replace("", root)


def _tuple_like(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    if hasattr(value, "_make"):
        return cast(tuple[Any, ...], value._make(items))
    return type(value)(items)
