"""The manifest of a kept directory: the name of its run, and all paths on which the run has files.

The journal of a run is in the kept directory of its first path only. A later run that has only other paths of the run
finds in their manifests that the journal exists.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import xxhash

from lightning_ssd.storage.errors import StorageError, from_os_error
from lightning_ssd.storage.private import PrivateDirectory

_FILE = "run"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The run that a kept directory belongs to.

    Attributes:
        run: random name of the run.
        paths: absolute paths of all the run's scratch paths, in their order.
    """

    run: str
    paths: Sequence[str]


def write_manifest(directory: PrivateDirectory, manifest: Manifest) -> None:
    """Writes the manifest of a kept directory durably.

    Raises:
        StorageError: the filesystem failed.
    """
    content = json.dumps(asdict(manifest)).encode()
    try:
        with directory.replacing_file(_FILE) as file:
            file.write(_checksum(content) + content)
    except OSError as error:
        raise from_os_error(error, f"write the file {_FILE!r}", directory.path) from error


def read_manifest(directory: PrivateDirectory) -> Manifest | None:
    """Returns the manifest of a kept directory, or None if it has none.

    Raises:
        StorageError: the filesystem failed, or the manifest is damaged.
    """
    try:
        content = directory.read_file(_FILE)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise from_os_error(error, f"read the file {_FILE!r}", directory.path) from error
    length = len(_checksum(b""))
    if content[:length] != _checksum(content[length:]):
        raise StorageError(
            f"{directory.path / _FILE}, which a run that was killed left, is damaged: its run is unknown. Remove "
            f"{directory.path} and what it holds, and start from a checkpoint or anew."
        )
    return Manifest(**json.loads(content[length:]))


def _checksum(content: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(content).encode()
