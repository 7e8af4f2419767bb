"""What the tests of the storage room share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ssd.storage import Blob, BlobStore

CPU = torch.device("cpu")
KIB, MIB = 2**10, 2**20


@contextmanager
def open_store(paths: Path | Sequence[Path], **arguments: Any) -> Iterator[BlobStore]:
    """A store of small pieces, closed at the end."""
    store = BlobStore(
        [paths] if isinstance(paths, Path) else paths, device=CPU, **{"piece_bytes": 64 * KIB, **arguments}
    )
    try:
        yield store
    finally:
        store.close()


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)


def write(store: BlobStore, blob: Blob, data: torch.Tensor) -> None:
    for future in [store.write(piece, data[piece.start : piece.start + piece.nbytes]) for piece in blob.pieces]:
        future.result()


def read(store: BlobStore, blob: Blob) -> torch.Tensor:
    data = torch.zeros(blob.nbytes, dtype=torch.uint8)
    for future in [store.read(piece, data[piece.start : piece.start + piece.nbytes]) for piece in blob.pieces]:
        future.result()
    return data


def open_files(path: Path) -> list[str]:
    """Returns the files and directories at and below `path` that this process has open, removed ones included."""
    files = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            files.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [file for file in files if file == str(path) or file.startswith(f"{path}/")]


def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, code: int = 0) -> None:
    """Puts a `smartctl` on the path that says `said`."""
    command = tmp_path / "bin" / "smartctl"
    command.parent.mkdir(exist_ok=True)
    (tmp_path / "said").write_text(said)
    command.write_text(f'#!/bin/sh\n[ "$3" = /dev/nvme7n1 ] && cat {tmp_path / "said"}\nexit {code}\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=os.pathsep)
