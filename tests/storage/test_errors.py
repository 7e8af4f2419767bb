"""Every byte is checked: a failed transfer raises an error that names file, offset and remedy."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_ssd import ActivationOffload, SSDOffloadStrategy
from lightning_ssd.activations import OffloadConfig
from lightning_ssd.storage import (
    Backend,
    BackendFile,
    BlobStore,
    ChecksumError,
    StorageError,
    StorageFullError,
)
from tests.support.faults import DeviceBackend, FaultyBackend, Operation
from tests.support.storage import CPU, KIB, noise, open_store, write


@pytest.fixture
def backend() -> FaultyBackend:
    return FaultyBackend()


@pytest.fixture
def store(tmp_path: Path, backend: FaultyBackend) -> Iterator[BlobStore]:
    with open_store(tmp_path, backend=backend, checksum=True) as store:
        yield store


def place(offset: int) -> str:
    return rf"offset {offset}\b.*lightning_ssd-[0-9a-f]+-rank0/scratch\.bin"


@pytest.mark.parametrize("operation", ["write", "read"])
def test_a_failing_drive(store: BlobStore, backend: FaultyBackend, operation: Operation) -> None:
    blob = store.allocate(100 * KIB)
    write(store, blob, noise(blob.nbytes))
    backend.error[operation] = OSError(errno.EIO, "Input/output error")
    piece = blob.pieces[1]
    move = store.write if operation == "write" else store.read
    with pytest.raises(StorageError, match=rf"{operation} .*{place(piece.offset)}.*EIO.*dmesg") as caught:
        move(piece, noise(piece.nbytes)).result()
    assert not isinstance(caught.value, StorageFullError)
    assert isinstance(caught.value.__cause__, OSError)
    # The threads continue, and failed bytes are not counted.
    backend.error.clear()
    move(piece, noise(piece.nbytes)).exception()
    assert store.stats().bytes_written <= 2 * blob.nbytes


def test_a_piece_that_was_never_written(store: BlobStore) -> None:
    blob = store.allocate(KIB)
    write(store, blob, noise(KIB))
    store.free(blob)
    (again,) = store.allocate(KIB).pieces
    with pytest.raises(ChecksumError, match="never written"):
        store.read(again, noise(KIB)).result()


def test_an_error_of_a_backends_own_kind(store: BlobStore, backend: FaultyBackend) -> None:
    (piece,) = store.allocate(KIB).pieces
    backend.error["write"] = RuntimeError("cuFile error 5030")
    with pytest.raises(StorageError, match=rf"{place(piece.offset)}.*cuFile error 5030"):
        store.write(piece, noise(KIB)).result()


@pytest.mark.parametrize("checksum", [True, False])
def test_with_checksums_a_store_accepts_host_buffers_only(tmp_path: Path, checksum: bool) -> None:
    """Bytes in device memory can't be hashed, so a backend that supports device buffers gets host memory."""
    with open_store(tmp_path, backend=DeviceBackend(), checksum=checksum) as store:
        assert store.device_buffers is not checksum
        (piece,) = store.allocate(KIB).pieces
        if checksum:
            with pytest.raises(ValueError, match="'device' with checksum=True takes host buffers only, not meta"):
                store.write(piece, torch.empty(KIB, dtype=torch.uint8, device="meta"))
        store.write(piece, noise(KIB)).result()


def test_checksums_are_on_unless_they_are_turned_off(tmp_path: Path) -> None:
    """They are on in the store, and so in every strategy and callback by default."""
    assert OffloadConfig().checksum
    assert SSDOffloadStrategy().config.checksum and ActivationOffload().config.checksum
    backend = FaultyBackend()
    with open_store(tmp_path, backend=backend) as store:
        backend.flip = True
        (piece,) = store.allocate(KIB).pieces
        store.write(piece, noise(KIB)).result()
        with pytest.raises(ChecksumError):
            store.read(piece, noise(KIB)).result()


def test_a_backend_that_cannot_open_leaves_no_files(tmp_path: Path) -> None:
    class Broken(Backend):
        name = "broken"
        device_buffers = False

        def open(self, path: Path) -> BackendFile:
            raise RuntimeError("driver not loaded")

    with pytest.raises(StorageError, match=r"'broken' could not open .*driver not loaded"):
        BlobStore([tmp_path], device=CPU, backend=Broken())
    assert list(tmp_path.iterdir()) == []
