"""Documents: the texts of a file, of a folder, of a `.jsonl` file, or of Python's standard library."""

import json
import random
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_PIECE_BYTES = 1 << 18  # bounds the memory of a tokenizer's call, which is a hundred times its text
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Document(NamedTuple):
    """One text.

    Attributes:
        source: File, or file and line, of the text, for messages.
        pieces: Bytes of the text, in pieces of about 256 KiB that end at line ends.
    """

    source: str
    pieces: Iterable[bytes]


def documents(path: Path | None, pattern: str, field: str) -> Iterator[Document]:
    """Yields the documents of `path` in an order that is always the same.

    Args:
        path: A text file, a `.jsonl` file (a document a line), a folder of either, or None for the sources of
            this Python's standard library.
        pattern: Glob of the files of a folder.
        field: Field of a `.jsonl` line that has the text.

    Raises:
        FileNotFoundError: If there is no such file, or no file in the folder matches.
        ValueError: If a line of a `.jsonl` file is not JSON or has no text under `field`.
    """
    for file in _files(path, pattern):
        if file.suffix == ".jsonl":
            yield from _json_documents(file, field)
        else:
            yield Document(str(file), _pieces(file))


def _files(path: Path | None, pattern: str) -> list[Path]:
    if path is None:
        library = Path(sysconfig.get_paths()["stdlib"])
        files = list(_sources(library))
        missing = f"Python's standard library has no sources in {library}: set data.path to a text file or folder"
    elif path.is_dir():
        files = [f for f in path.glob(pattern) if f.is_file()]
        missing = f"No file in data.path={path} matches data.pattern={pattern!r}: set data.pattern to a glob"
    else:
        files = [path] if path.is_file() else []
        missing = (
            f"data.path={path} does not exist: set it to a text file, a .jsonl file or a folder,"
            f" or leave it out to train on the sources of Python's standard library"
        )
    if not files:
        raise FileNotFoundError(missing)
    # The first files of a sorted folder are alike. In a random order, the files before a cap and the held-out ones are
    # fair samples of all. The seed is fixed: held-out files must not depend on a run's own seed.
    files.sort()
    random.Random(0).shuffle(files)
    return files


def _sources(folder: Path) -> Iterator[Path]:
    # Not a glob, which would walk through every installed package in site-packages.
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name not in _NOT_LIBRARY:
            yield from _sources(entry)
        elif entry.suffix == ".py" and entry.is_file():
            yield entry


def _pieces(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while lines := stream.readlines(_PIECE_BYTES):
            yield b"".join(lines)


def json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    """Yields file and number of each line of JSON, for messages, and its content. Empty lines are skipped.

    Raises:
        ValueError: A line is not JSON.
    """
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            source = f"{file}:{number}"
            try:
                yield source, json.loads(line)
            except ValueError as error:  # JSON and UTF-8 errors both are
                raise ValueError(f"{source} is not a line of JSON ({error}): correct or remove it") from error


def _json_documents(file: Path, field: str) -> Iterator[Document]:
    for source, record in json_lines(file):
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            found = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
            if isinstance(record, dict) and field in record:
                found = f"a value of type {type(text).__name__} there"
            raise ValueError(f"{source} has no text under {field!r} (it has {found}): set data.field")
        yield Document(source, [text.encode()])
