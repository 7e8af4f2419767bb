"""`check_output`: whether a file that a callback writes can be written, which is asked before the training begins."""

import tempfile
from pathlib import Path


def check_output(argument: str, file: Path) -> None:
    """Makes the directory of a file that is written later, and checks that the file can be written.

    Args:
        argument: the argument that names the file, for the message, such as "`save` of SwapPlanner".

    Raises:
        ValueError: it can't be written; the message names the argument.
    """
    if file.is_dir():
        raise ValueError(f"{argument} can't be {str(file)!r}, which is a directory. Name a file.")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise ValueError(
            f"{argument} can't be {str(file)!r}, because {str(file.parent)!r} can't be written: {error.strerror}. "
            "Name a file in a directory that can be written."
        ) from error
