"""Files with given texts."""

from collections.abc import Mapping
from pathlib import Path


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Writes files, and the folders that they are in.

    Args:
        folder: folder that the names are relative to.
        files: text of each file by its name.
    """
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
