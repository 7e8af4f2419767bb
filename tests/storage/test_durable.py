"""Bytes that survive a loss of power: the order of writing, flushing and renaming."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_ssd.model_states.journal.journal import remove_record
from lightning_ssd.storage import BlobStore, PosixBackend, ScratchDirectory, StorageError
from lightning_ssd.storage.scratch import JoinedDirectory, kept_directory
from tests.support.faults import GatedBackend
from tests.support.storage import CPU, KIB, noise, open_store, write


class Calls:
    """System calls on files, in order: (name, file name)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.seen: list[tuple[str, str]] = []
        for name in names:
            monkeypatch.setattr(os, name, self._noting(name, getattr(os, name)))

    def _noting(self, name: str, call: Any) -> Any:
        def noting(first: Any, *rest: Any, **options: Any) -> Any:
            file = Path(f"/proc/self/fd/{first}").resolve().name if isinstance(first, int) else str(first)
            result = call(first, *rest, **options)
            self.seen.append((name, file))
            return result

        return noting


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    directory = ScratchDirectory(tmp_path)
    files = directory.files
    with files.replacing_file("record") as file:
        file.write(b"first")
    with pytest.raises(ZeroDivisionError), files.replacing_file("record") as file:
        file.write(b"second")
        raise ZeroDivisionError
    assert files.read_file("record") == b"first"
    assert "record.part" not in files.names()
    (directory.path / "record.part").symlink_to(tmp_path / "elsewhere")  # of a killed run, or of another program
    with files.replacing_file("record") as file:
        file.write(b"third")
    assert files.read_file("record") == b"third"
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(FileNotFoundError):
        files.read_file("absent")
    directory.close()


def test_a_file_is_on_the_drive_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new content is flushed, then the file is renamed, then the directory is flushed."""
    directory = ScratchDirectory(tmp_path)
    calls = Calls(monkeypatch, "fsync", "rename")
    with directory.files.replacing_file("record") as file:
        file.write(b"content")
    assert calls.seen == [("fsync", "record.part"), ("rename", "record.part"), ("fsync", directory.path.name)]
    directory.close()


def test_a_record_is_removed_from_the_drive_before_its_values_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = ScratchDirectory(tmp_path)
    with directory.files.replacing_file("journal") as file:
        file.write(b"content")
    calls = Calls(monkeypatch, "fsync", "unlink")
    remove_record(directory.files)
    assert calls.seen == [("unlink", "journal"), ("fsync", directory.path.name)]
    directory.close()


def test_a_kept_directory_and_its_files_survive_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own name, the name of its lock, and the manifest, which once had 0 bytes after a loss of power."""
    calls = Calls(monkeypatch, "fsync", "rename")
    store = BlobStore([tmp_path], device=CPU, capacity=64 * KIB, keep=True)
    name = kept_directory(tmp_path).name
    assert calls.seen[:5] == [
        ("fsync", name),
        ("fsync", tmp_path.name),
        ("fsync", "run.part"),
        ("rename", "run.part"),
        ("fsync", name),
    ]
    assert ("fsync", name) in calls.seen[5:]  # the scratch file's name
    assert (kept_directory(tmp_path) / "run").read_text()
    store.close()


def test_sync_flushes_every_volume_and_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    with open_store(paths) as store:
        write(store, blob := store.allocate(200 * KIB), noise(blob.nbytes))
        flushed: list[Path] = []
        monkeypatch.setattr(os, "fdatasync", lambda fd: flushed.append(Path(f"/proc/self/fd/{fd}").resolve()))
        store.sync()
        assert sorted(file.parent.parent for file in flushed) == paths

        def fail(fd: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "fdatasync", fail)
        with pytest.raises(StorageError, match=r"could not flush to the drive in .*scratch\.bin.*EIO.*dmesg"):
            store.sync()


def test_a_write_is_done_when_the_drive_has_it_and_not_before(tmp_path: Path) -> None:
    gate = GatedBackend()
    with open_store(tmp_path, backend=gate) as store:
        (piece,) = store.allocate(KIB).pieces
        gate.hold()
        told: list[object] = []
        future = store.write(piece, noise(KIB))
        future.add_done_callback(told.append)
        gate.wait_for_arrival()
        assert not future.done() and not told
        assert store.stats().bytes_written == 0
        gate.release()
        future.result(timeout=60)
        assert store.stats().bytes_written == KIB


def test_bytes_in_the_page_cache_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page cache would hide a failed write: every descriptor flushes it or bypasses it."""
    flags: list[int] = []
    real = os.open

    def noting(path: Any, how: int, *rest: Any, **options: Any) -> int:
        flags.append(how)
        return real(path, how, *rest, **options)

    (tmp_path / "file").write_bytes(bytes(8 * KIB))
    monkeypatch.setattr(os, "open", noting)
    file = PosixBackend().open(tmp_path / "file")
    monkeypatch.undo()
    file.close()
    assert flags and all(how & (os.O_DSYNC | os.O_DIRECT) for how in flags)


def test_a_killed_runs_directory_is_not_used_while_a_process_that_has_joined_it_is_alive(tmp_path: Path) -> None:
    first = ScratchDirectory(tmp_path, keep=True)
    joined = JoinedDirectory(first.path)
    first.close(remove=False)  # as a kill does
    with pytest.raises(StorageError, match="other processes of the run that was killed.* are still alive"):
        ScratchDirectory(tmp_path, keep=True)
    joined.close()
    ScratchDirectory(tmp_path, keep=True).close()
    assert not list(tmp_path.iterdir())
