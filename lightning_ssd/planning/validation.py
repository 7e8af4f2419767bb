"""Validation of profiles and plans: of the fields of their dataclasses, and of the files that have them."""

import json
import stat
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from lightning_ssd.sizes import show_value

RecordT = TypeVar("RecordT")

LARGEST = 1e30
"""Largest number of a record: sums and products of several such numbers are finite, and no machine has more."""

MOST_BYTES = 2**26
"""Bytes of the largest file that is read as a plan or profile: those of models with 10,000 operators are smaller."""


def check_positive(what: str, value: float) -> None:
    """Raises ValueError unless `value` is a number above 0, and at most `LARGEST`; `what` names it in the message."""
    if not 0 < value <= LARGEST:
        raise ValueError(
            f"`{what}={show_value(value)}` must be a finite number above 0. Measure it, or take it from a data "
            f"sheet: it is at most {LARGEST:g}."
        )


def check_not_negative(what: str, value: float) -> None:
    """Raises ValueError unless `value` is a number from 0 to `LARGEST`; `what` names it in the message."""
    if not 0 <= value <= LARGEST:
        raise ValueError(
            f"`{what}={show_value(value)}` must be a finite number, and not below 0, nor above {LARGEST:g}."
        )


def as_mapping(value: Any, where: str) -> Mapping[Any, Any]:
    """Returns `value` if it is a mapping, and raises ValueError otherwise; `where` names it in the message."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a mapping, not {type(value).__name__}.")
    return value


def as_list(value: Any, where: str) -> Sequence[Any]:
    """Returns `value` if it is a list or tuple, and raises ValueError otherwise; `where` names it in the message."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where} must be a list, not {type(value).__name__}.")
    return value


def as_whole_numbers(value: Any, where: str) -> tuple[int, ...]:
    """Returns a list of whole numbers as a tuple, and raises ValueError otherwise; `where` names it in the message."""
    found = as_list(value, where)
    if any(isinstance(one, bool) or not isinstance(one, int) for one in found):
        raise ValueError(f"{where} must be whole numbers.")
    return tuple(found)


def from_mapping(record: type[RecordT], values: Any, where: str) -> RecordT:
    """Returns a `record` with the fields that `values` holds.

    Args:
        record: a dataclass.
        values: content of the file.
        where: name of the file and the entry, for the message.

    Raises:
        ValueError: `values` is not a mapping, has a field that `record` lacks or lacks one, or a value is wrong.
    """
    as_mapping(values, where)
    known = {field.name: field for field in fields(record)}  # type: ignore[arg-type]  # a dataclass
    for name in values:
        if name not in known:
            raise ValueError(
                f"{where} has an unknown field `{name:.80}`. Remove it, or write the file again if an earlier version "
                f"wrote it; valid fields are: {', '.join(known)}."
            )
    for name, field in known.items():
        if name not in values and field.default is MISSING:
            raise ValueError(f"{where} lacks the field `{name}`. Add it.")
    types = get_type_hints(record)
    checked = {name: _checked(name, value, types[name], where) for name, value in values.items()}
    try:
        return record(**checked)
    except ValueError as error:  # raised by the record's own check
        raise ValueError(f"{where}: {error}") from error


def _checked(name: str, value: Any, kind: Any, where: str) -> Any:
    """Returns the value of a field of type `kind`: a whole float is an integer, too."""
    kinds = [*get_args(kind), kind] if NoneType in get_args(kind) else [kind]
    if value is None and NoneType in kinds:
        return value
    if int in kinds or float in kinds:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"`{name}={show_value(value)}` of {where} must be a number.")
        if not -LARGEST <= value <= LARGEST:
            raise ValueError(f"`{name}={show_value(value)}` of {where} must be finite, and at most {LARGEST:g}.")
        if float in kinds:
            return value
        if value != int(value):
            raise ValueError(f"`{name}={show_value(value)}` of {where} must be a whole number.")
        return int(value)
    for plain, word in ((str, "a string"), (bool, "`true` or `false`")):
        if plain in kinds and not isinstance(value, plain):
            raise ValueError(f"`{name}={show_value(value)}` of {where} must be {word}.")
    return value


def save_json(record: Any, path: str | Path) -> None:
    """Writes a record to the file `path`."""
    write_text(json.dumps(asdict(record), indent=2) + "\n", path)


def write_text(text: str, path: str | Path) -> None:
    """Writes a file, and makes its folder: a training that has measured for minutes should not end for want of it."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def load_json(path: str | Path, where: str) -> Any:
    """Returns the content of the JSON file `path`; `where` names it in messages.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file can't be read, is not JSON, or a mapping in it has a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in found if names.count(name) > 1)
            raise ValueError(f"the key {show_value(twice)} occurs twice")
        return found

    try:
        return json.loads(read_text(path, where), object_pairs_hook=unique)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply. Correct it, or measure again.") from None
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}. Correct it, or measure again.") from error


def read_text(path: str | Path, where: str) -> str:
    """Returns the text of a file that a person may have edited; `where` names it in messages.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no regular file, has more than `MOST_BYTES`, can't be read, or is not UTF-8.
    """
    try:
        found = Path(path).stat()
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{where} is not a file.")
        if found.st_size > MOST_BYTES:
            raise ValueError(f"{where} has {found.st_size} bytes, and at most {MOST_BYTES} are read.")
        return Path(path).read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{where} does not exist. Give the file that was saved.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8: {error}. Give the file that was saved.") from error
    except OSError as error:
        raise ValueError(f"{where} can't be read: {error.strerror}.") from error
