"""Records as JSON: dataclasses of numbers, names and further records."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

Record = TypeVar("Record")


def check_positive(what: str, value: float) -> None:
    """Raises ValueError unless `value` is a finite number above 0; `what` names it in the message."""
    if not (isfinite(value) and value > 0):
        raise ValueError(
            f"`{what}={value!r}` must be a finite number above 0. Measure it, or take it from a data sheet."
        )


def check_not_negative(what: str, value: float) -> None:
    """Raises ValueError unless `value` is a finite number of at least 0; `what` names it in the message."""
    if not (isfinite(value) and value >= 0):
        raise ValueError(f"`{what}={value!r}` must be a finite number, and not below 0.")


def as_mapping(value: Any, where: str) -> Mapping[Any, Any]:
    """Returns `value` if it is a mapping, and raises ValueError otherwise; `where` names it in the message."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a mapping, not {type(value).__name__}.")
    return value


def from_mapping(record: type[Record], values: Any, where: str) -> Record:
    """Returns a `record` with the fields that `values` holds.

    Args:
        record: a dataclass.
        values: what was read.
        where: what is read, for the message.

    Raises:
        ValueError: `values` is not a mapping, has a field that `record` lacks or lacks one, or a value is wrong.
    """
    as_mapping(values, where)
    known = {field.name: field for field in fields(record)}  # type: ignore[arg-type]  # a dataclass
    for name in values:
        if name not in known:
            raise ValueError(f"{where} has no field `{name}`. Remove it; there are: {', '.join(known)}.")
    for name, field in known.items():
        if name not in values and field.default is MISSING:
            raise ValueError(f"{where} lacks the field `{name}`. Add it.")
    for name, value in values.items():
        number = known[name].type in (int, float, "int", "float")
        if number and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"`{name}={value!r}` of {where} must be a number.")
    return record(**values)


def save_json(record: Any, path: str | Path) -> None:
    """Writes a record to the file `path`."""
    Path(path).write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")


def load_json(path: str | Path) -> Any:
    """Returns what the JSON file `path` holds.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}. Correct it, or measure again.") from error
