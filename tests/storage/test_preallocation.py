"""Files are preallocated by Linux's `fallocate`, and only made longer where a filesystem can't preallocate."""

from __future__ import annotations

import ctypes
import errno
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ssd.storage.preallocation import fallocate
from tests.support.storage import MIB, noise, open_store, read, write


class FailingLibrary:
    """The C library, with a `fallocate` that fails with each of `errors` in turn, and succeeds afterwards."""

    def __init__(self, errors: list[int]) -> None:
        self._errors = errors
        self._library = ctypes.CDLL(None, use_errno=True)

    def fallocate(self, *arguments: Any) -> int:
        if not self._errors:
            status: int = self._library.fallocate(*arguments)
            return status
        ctypes.set_errno(self._errors.pop(0))
        return -1


def fail(monkeypatch: pytest.MonkeyPatch, errors: list[int]) -> None:
    library = FailingLibrary(errors)
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: library)


def test_bytes_are_allocated(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        fallocate(file.fileno(), 0, MIB)
        fallocate(file.fileno(), 5 * 2**30, MIB)  # an offset of more than 32 bits
    status = (tmp_path / "file").stat()
    assert status.st_size == 5 * 2**30 + MIB
    assert 2 * MIB <= status.st_blocks * 512 < 4 * MIB


def test_an_interrupted_call_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, [errno.EINTR, errno.EINTR])
    with (tmp_path / "file").open("wb") as file:
        fallocate(file.fileno(), 0, MIB)
    assert (tmp_path / "file").stat().st_size == MIB


def test_the_error_has_the_number_of_the_system_call(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (tmp_path / "file").open("rb") as file, pytest.raises(OSError) as caught:
        fallocate(file.fileno(), 0, MIB)
    assert caught.value.errno == errno.EBADF and caught.value.strerror == "Bad file descriptor"


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS], ids=errno.errorcode.get)
def test_a_filesystem_that_cannot_preallocate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """The file is made longer without a write to its blocks, and one warning is logged."""
    fail(monkeypatch, 100 * [number])
    with caplog.at_level(logging.WARNING), open_store(tmp_path) as store:
        store.reserve(32 * MIB)
        store.reserve(128 * MIB)
        (file,) = tmp_path.glob("*/scratch.bin")
        assert file.stat().st_size >= 128 * MIB and file.stat().st_blocks * 512 < 32 * MIB
        data = noise(MIB)
        blob = store.allocate(data.numel())
        write(store, blob, data)
        assert torch.equal(read(store, blob), data)
    assert caplog.text.count(f"the filesystem of {file} cannot preallocate") == 1
