"""Errors that refuse a recipe's input, as one sentence for its author."""

import inspect
import re
import traceback
from collections.abc import Iterable, Sequence

from lightning_ssd.recipes.files import did_you_mean

_NOISE = re.compile(
    r"Does not validate against|Subtypes: |Errors:$|Given value type: |Expected a path but|Not a valid subclass of|"
    r"Subclass types expect|a class path \(str\)$|a dict with|Expected a <class 'NoneType'>"
)
"""Lines of jsonargparse's messages that name its types, and no cause."""

_TYPES = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a text"}


def refused_input(error: BaseException) -> str | None:
    """Returns the message of an error that refuses a recipe's input, or None for every other error.

    An error refuses input if no batch was trained yet, and the error was raised by this package or Lightning, or names
    a file or a missing package. Errors of other code, such as the user's modules, are shown with their traceback.
    """
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from lightning_ssd.storage import StorageError

    # jsonargparse wraps a constructor's error in errors about type hints. For a union it keeps the first type's error.
    cause: BaseException | None = error
    while cause is not None and _raised_by(cause).startswith("jsonargparse."):
        cause = cause.__cause__
    error = cause or error
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(frame.f_code is _TrainingEpochLoop.advance.__code__ for frame in frames):
        return None
    if isinstance(error, ImportError | MisconfigurationException | StorageError):
        return str(error)
    if isinstance(error, OSError):
        return describe_os_error(error)
    package = _raised_by(error).partition(".")[0]
    if isinstance(error, ValueError) and package == "jsonargparse":
        return describe_parser_error(str(error), ())
    refuses = isinstance(error, ValueError) and package in ("lightning_ssd", "lightning")
    refuses |= isinstance(error, TypeError) and package == "lightning_ssd"
    return str(error) if refuses else None


def describe_os_error(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)


def describe_parser_error(message: str, keys: Iterable[str]) -> str:
    """Returns a message of jsonargparse as one sentence: the key, its value and the cause, without types of Python.

    Args:
        message: the message, which may have an error for each type that a value may have.
        keys: all keys of a recipe, to name the nearest one to an unknown key.
    """
    unknown = re.search(r"unrecognized arguments: -*([^\s=]+)|does not accept option '(.+)'", message)
    if unknown is not None:
        key = unknown[1] or unknown[2]
        return f"a recipe has no key {key!r}.{did_you_mean(key, keys)} `RECIPE --help` lists all keys."
    path, class_path, value, errors = _parts(message)
    key = ".".join(path)
    causes = [error for error in errors if not error.startswith("Expected a ")]
    if not causes:
        return _describe_types(key, value, errors) or message
    sentences: list[str] = []
    for cause in dict.fromkeys(causes):
        option = re.search(r"Option '(.+)' is not accepted", cause)
        if option is None:
            sentences.append(cause if class_path is None else f"{class_path}: {cause}")
        else:
            near = did_you_mean(option[1], _arguments(class_path))
            sentences.append(f"{class_path or 'its class'} has no argument {option[1]!r}.{near}")
    return ": ".join(filter(None, (key, " ".join(sentences))))


def _parts(message: str) -> tuple[list[str], str | None, str, list[str]]:
    """Returns the nested keys that a message names, the class path, the refused value as text, and the errors."""
    path: list[str] = []
    class_path, value = None, ""
    errors: list[str] = []
    begins = True
    for line in message.splitlines():
        text = line.strip()
        begins |= text.startswith("- ")
        text = text.removeprefix("- ")
        if named := re.match(r'Parser key "(.+?)":\s*(.*)', text):
            path.append(named[1])
            errors.clear()  # the types of the value that has this key
            begins, text = True, named[2]
        if named := re.match(r"Problem with given class_path '(.+?)':\s*(.*)", text):
            class_path = named[1]
            begins, text = True, named[2]
        if named := re.match(r"Given value: (?:NestedArg\(.*val=)?(.*?)\)?$", text):
            value = value or named[1].strip("'")
            continue
        if not text or _NOISE.match(text):
            continue
        if named := re.match(r"(Expected .*)\. Got value: (.*)", text):
            text, value = named[1], named[2]
        if begins or not errors:
            errors.append(text)
        else:
            errors[-1] += f" {text}"
        begins = False
    return path, class_path, value, errors


def _describe_types(key: str, value: str, errors: Sequence[str]) -> str:
    """Returns the sentence for a value of none of the types that a key accepts."""
    if any("dot import path" in error for error in errors):
        return (
            f"{key}={value}: there is no class of that name. Give its import path, such as "
            "`lightning_ssd.recipes.models.GPT`."
        )
    expected: list[str] = []
    words: list[str] = []
    for error in errors:
        kind = error.removeprefix("Expected a ")
        if literal := re.match(r"typing\.Literal\[(.*)\]", kind):
            words += [word.strip("'\" ") for word in literal[1].split(",")]
            expected.append(literal[1])
        else:
            name = kind.removeprefix("<class '").removesuffix("'>")
            expected.append(_TYPES.get(name, name))
    return f"{key}={value} is not {' or '.join(dict.fromkeys(expected))}.{did_you_mean(value, words)}"


def _arguments(class_path: str | None) -> list[str]:
    """Returns the names of the arguments of a class."""
    from jsonargparse._util import import_object

    return [] if class_path is None else list(inspect.signature(import_object(class_path)).parameters)


def _raised_by(error: BaseException) -> str:
    """Returns the name of the module that raised `error`."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals["__name__"])
