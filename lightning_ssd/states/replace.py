"""Files that are replaced whole: whenever the process is killed, the old one or the new one is there."""

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path, part: Path) -> Iterator[io.BufferedWriter]:
    """Yields a file that takes the place of `path` at the end, when it is on the drive; none if something is raised.

    Args:
        path: what is replaced.
        part: its name until then, in the same directory.
    """
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
