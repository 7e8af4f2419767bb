"""A drive that fails in any system call: a StorageError is raised, nothing masks it, and no descriptor leaks."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ssd.storage import (
    BlobStore,
    ChecksumError,
    StorageError,
    StorageFullError,
    preallocation,
    timed_transfers,
)
from tests.support.garbage import collect
from tests.support.storage import CPU, KIB, noise, open_files, read, write

PAGE = 4096
CALLS = {
    os: ("open", "close", "mkdir", "listdir", "stat", "fstat", "fstatvfs", "ftruncate", "pwritev", "preadv",
         "fdatasync", "fsync", "rename", "unlink", "rmdir"),
    fcntl: ("flock",),
    preallocation: ("fallocate",),
}  # fmt: skip
REMOVALS = {"ftruncate", "unlink", "rmdir", "listdir", "stat", "fstat", "close"}
ERRORS = [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.ENODEV]
ROOM = "lightning_ssd/storage/"


class Drive:
    """Counts the system calls of the storage room, and lets those fail that `fails` selects.

    Attributes:
        calls: names of all calls so far.
        failures: name and error of those that failed.
    """

    def __init__(self, fails: Callable[[int, str], int | None]) -> None:
        self._fails = fails
        self._lock = threading.Lock()
        self.calls: list[str] = []
        self.failures: list[tuple[str, OSError]] = []

    @property
    def failed(self) -> list[str]:
        """Names of those that failed."""
        return [name for name, _ in self.failures]

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*arguments: Any, **options: Any) -> Any:
            if ROOM not in sys._getframe(1).f_code.co_filename:
                return call(*arguments, **options)
            with self._lock:
                number = self._fails(len(self.calls), name)
                self.calls.append(name)
                if number is not None:
                    error = OSError(number, os.strerror(number))
                    self.failures.append((name, error))
            if number is None:
                return call(*arguments, **options)
            if name == "close":
                call(*arguments)  # Linux frees the descriptor, whatever it returns
            raise error

        return faulty


@pytest.fixture(autouse=True)
def short_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_transfers, "_MAX_BLOCKS", 2)


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """Finalizers of an earlier test's objects, which remove files, do not run among the counted calls."""
    collect()


@contextmanager
def failing(fails: Callable[[int, str], int | None]) -> Iterator[Drive]:
    drive = Drive(fails)
    with pytest.MonkeyPatch.context() as patch:
        for module, names in CALLS.items():
            for name in names:
                patch.setattr(module, name, drive.wrap(name, getattr(module, name)))
        yield drive


def use_a_store(path: Path, keep: bool) -> None:
    """Runs all operations of a store, and checks the read bytes."""
    store = BlobStore([path], device=CPU, capacity=128 * KIB, checksum=True, piece_bytes=PAGE, threads=1, keep=keep)
    try:
        store.reserve(3 * PAGE)
        data = noise(4 * PAGE + 100)
        blob = store.allocate(data.numel())
        write(store, blob, data)
        store.sync()
        assert torch.equal(read(store, blob), data)
        kept = store.manifest([blob]) if keep else None
        store.free(store.allocate(PAGE))
    except BaseException:
        store.close()
        raise
    store.close(remove=not keep)
    if kept is not None:
        store = BlobStore(
            [path],
            device=CPU,
            checksum=True,
            piece_bytes=PAGE,
            threads=1,
            keep=True,
            find_manifest=lambda directory: kept,
        )
        try:
            assert torch.equal(read(store, blob), data)
        finally:
            store.close()


def check_position(
    path: Path, keep: bool, position: int, number: int, lasting: bool, log: pytest.LogCaptureFixture
) -> bool:
    """Returns whether there was a call at `position`."""
    path.mkdir()
    log.clear()
    threads = set(threading.enumerate())
    raised: BaseException | None = None
    with failing(lambda index, name: number if index == position or (lasting and index > position) else None) as drive:
        try:
            use_a_store(path, keep)
        except StorageError as error:
            raised = error
    where = f"{drive.failed[:1]} at {position}, {errno.errorcode[number]}, lasting={lasting}"
    if raised is None:
        # Only clean-up failed, or a call with a fallback, on which nothing depends.
        assert not drive.failed or drive.failed[0] in REMOVALS | {"fallocate", "open"}, where
    else:
        cause: BaseException | None = raised
        while isinstance(cause, StorageError):  # the first failure is the direct cause
            message, cause = str(cause), cause.__cause__
        first = next(error for name, error in drive.failures if name != "close" or error is cause)
        assert cause is first, where  # a failing `close` is logged
        assert raised.__context__ in (None, raised.__cause__), where
        assert errno.errorcode[number] in message and str(path) in message, where
        assert message.count(". ") >= 1, where  # the remedy
    told = raised is not None
    raised = cause = None
    assert not open_files(path), where
    assert set(threading.enumerate()) <= threads, where
    left = list(path.iterdir())
    if left and drive.failed and not keep:
        assert set(drive.failed) & REMOVALS, where
        assert told or str(path) in log.text, where
    return bool(drive.failed)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
def test_every_system_call(tmp_path: Path, caplog: pytest.LogCaptureFixture, keep: bool, lasting: bool) -> None:
    position = 0
    with caplog.at_level(logging.WARNING):
        while check_position(tmp_path / str(position), keep, position, ERRORS[position % len(ERRORS)], lasting, caplog):
            position += 1
    assert position > 60


@pytest.mark.thorough
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_every_system_call_with_every_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keep: bool, number: int
) -> None:
    for lasting in (False, True):
        position = 0
        while check_position(tmp_path / f"{lasting}{position}", keep, position, number, lasting, caplog):
            position += 1
        assert position > 60


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["pwritev", "preadv"])
@pytest.mark.parametrize("moved", [0, 1, 512, PAGE])
def test_short_transfers(tmp_path: Path, name: str, moved: int) -> None:
    """Each transfer of a store is short once: if the rest can be transferred it is, else an error is raised."""
    position = 0
    while True:
        seen = 0
        real = getattr(os, name)

        def short(fd: int, views: list[memoryview], offset: int, real: Any = real, position: int = position) -> Any:
            nonlocal seen
            seen += 1
            if seen == position + 1:
                return real(fd, [views[0][:moved]], offset) if moved else 0
            return real(fd, views, offset)

        path = tmp_path / str(position)
        path.mkdir()
        message = ""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, name, short)
            try:
                use_a_store(path, keep=False)
            except StorageError as error:
                message = str(error)
        assert not list(path.iterdir())
        if moved == 0 and seen > position:
            assert re.search(r"only 0 of \d+ bytes at offset \d+ of .*scratch\.bin\. .* look at `dmesg`", message)
        else:
            assert not message
        if seen <= position:
            break
        position += 1
    assert position >= 7


def test_the_reason_why_a_file_can_not_grow_is_named(tmp_path: Path) -> None:
    full = False
    with failing(lambda index, name: errno.EDQUOT if full and name == "fallocate" else None):
        store = BlobStore([tmp_path], device=CPU)
        full = True
        try:
            with pytest.raises(StorageFullError, match="could not allocate") as caught:
                store.allocate(100 * 2**20)
            assert "quota" in str(caught.value.__cause__)
        finally:
            store.close()


def test_a_checksum_error_is_not_hidden_by_clean_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The original error is raised unchanged, and each failure of clean-up is a warning that names its file."""
    with pytest.raises(ChecksumError), failing(lambda index, name: errno.EIO if dying else None):
        dying = False
        store = BlobStore([tmp_path], device=CPU, capacity=PAGE, checksum=True)
        try:
            (piece,) = store.allocate(PAGE).pieces
            store.read(piece, noise(PAGE)).result()
        finally:
            dying = True
            store.close()
    assert "could not truncate in" in caplog.text and "scratch.bin" in caplog.text
    assert "EIO" in caplog.text
