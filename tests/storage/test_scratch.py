"""Scratch directories: private, alive while locked, swept when killed."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_ssd.storage import ScratchDirectory, StorageError

LIVE_STORE = """
import sys, torch
from lightning_ssd.storage import BlobStore
store = BlobStore([sys.argv[1]], device=torch.device("cpu"), capacity=2**20, rank=3)
store.allocate(100)
print("ready", flush=True)
sys.stdin.read()
"""


def start_store(path: Path, end: str = "") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", LIVE_STORE + end, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_directory_is_private_named_and_removed(tmp_path: Path) -> None:
    directory = ScratchDirectory(tmp_path, rank=2)
    assert re.fullmatch(r"lightning_ssd-[0-9a-f]+-rank2", directory.path.name)
    assert directory.path.parent == tmp_path
    assert directory.path.stat().st_mode & 0o777 == 0o700
    (directory.path / "data").write_bytes(b"x")
    directory.close()
    directory.close()
    assert list(tmp_path.iterdir()) == []


def test_a_live_runs_directory_is_kept_and_a_killed_ones_is_removed(tmp_path: Path) -> None:
    process = start_store(tmp_path)
    (theirs,) = tmp_path.iterdir()
    ScratchDirectory(tmp_path).close()
    assert (theirs / "scratch.bin").exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert theirs.exists()
    ours = ScratchDirectory(tmp_path)
    assert list(tmp_path.iterdir()) == [ours.path]
    ours.close()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("end", ["", "\nraise KeyboardInterrupt", "\nraise SystemExit(3)"])
def test_a_store_that_was_not_closed_is_removed_when_the_interpreter_exits(tmp_path: Path, end: str) -> None:
    process = start_store(tmp_path, end)
    assert list(tmp_path.iterdir())
    process.communicate(timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_its_lock_is_removed_and_other_files_are_kept(tmp_path: Path) -> None:
    half_made = tmp_path / f"lightning_ssd-{'0' * 16}-rank0"
    half_made.mkdir(mode=0o700)
    others = [
        tmp_path / "lightning_ssd-notes",
        tmp_path / "data",
        tmp_path / f"lightning_ssd-{'1' * 16}-rank1",
    ]
    others[0].mkdir()
    others[1].mkdir()
    others[2].symlink_to(others[1])
    ScratchDirectory(tmp_path).close()
    assert not half_made.exists()
    assert sorted(tmp_path.iterdir()) == sorted(others)


@pytest.mark.thorough
def test_processes_that_start_and_end_together(tmp_path: Path) -> None:
    """Each process sweeps while the others make and remove their directories, and none removes another's."""
    run = (
        "import sys; from lightning_ssd.storage import ScratchDirectory\n"
        "for rank in range(300):\n"
        "    directory = ScratchDirectory(sys.argv[1], rank)\n"
        "    (directory.path / 'data').write_bytes(b'x')\n"
        "    assert (directory.path / f'lock.{directory.path.name}').exists()\n"
        "    directory.close()\n"
        "    assert not directory.path.exists()\n"
    )
    command = [sys.executable, "-c", run, str(tmp_path)]
    processes = [subprocess.Popen(command, cwd=Path(__file__).parents[2]) for _ in range(4)]
    assert [process.wait(timeout=60) for process in processes] == [0] * 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["before the lock", "before the flock", "after it was opened and removed"])
def test_a_directory_that_is_swept_while_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A directory without a lock looks like a killed run's; if it is swept, its maker makes another."""
    swept: list[str] = []
    flock, open_file = fcntl.flock, os.open

    def interfering_open(path: Path, flags: int, *mode: int, **where: int) -> int:
        if moment == "before the lock" and flags & os.O_EXCL and not swept:
            (directory,) = tmp_path.iterdir()
            swept.append(directory.name)
            directory.rmdir()
        return open_file(path, flags, *mode, **where)

    def interfering_flock(fd: int, operation: int) -> None:
        if moment != "before the lock" and not swept:
            (directory,) = tmp_path.iterdir()
            swept.append(directory.name)
            if moment == "before the flock":
                raise BlockingIOError  # a sweeper holds it, and removes the directory later
            (directory / f"lock.{directory.name}").unlink()
            directory.rmdir()
        flock(fd, operation)

    monkeypatch.setattr(os, "open", interfering_open)
    monkeypatch.setattr(fcntl, "flock", interfering_flock)
    ours = ScratchDirectory(tmp_path)
    assert len(swept) == 1 and ours.path.name != swept[0]
    assert ours.path.is_dir()
    monkeypatch.undo()
    ScratchDirectory(tmp_path).close()  # sweeps the directory that the sweeper of the second case did not remove
    assert list(tmp_path.iterdir()) == [ours.path]
    ours.close()


def test_only_files_are_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS locks only files that are open for writing, so no directory can be locked there."""
    flock = fcntl.flock

    def nfs_flock(fd: int, operation: int) -> None:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
            raise OSError(errno.EBADF, "a lock needs write access")
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", nfs_flock)
    ScratchDirectory(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_a_filesystem_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(StorageError, match=f"`path`.*{tmp_path}.*No locks"):
        ScratchDirectory(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_another_rank_and_a_fork_remove_no_live_directory(tmp_path: Path) -> None:
    first = ScratchDirectory(tmp_path, rank=0)
    second = ScratchDirectory(tmp_path, rank=1)
    child = os.fork()
    if child == 0:
        failed = True
        try:
            first.close()  # a child's close must not remove its parent's directory
            ScratchDirectory(tmp_path, rank=0).close()
            failed = not (first.path.exists() and second.path.exists())
        finally:
            os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert first.path.exists()
    second.close()
    first.close()


def test_a_program_that_was_started_does_not_keep_the_directory_alive(tmp_path: Path) -> None:
    run = (
        "import subprocess, sys; from lightning_ssd.storage import ScratchDirectory; "
        "directory = ScratchDirectory(sys.argv[1]); "
        "child = subprocess.Popen(['cat'], stdin=sys.stdin, close_fds=False); print(child.pid, flush=True); "
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", run, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    assert int(process.stdout.readline()) > 0
    process.wait()
    assert len(list(tmp_path.iterdir())) == 1
    ScratchDirectory(tmp_path).close()
    assert list(tmp_path.iterdir()) == []
    assert process.stdin is not None
    process.stdin.close()  # ends the grandchild


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_does_not_hold_a_kept_directory(tmp_path: Path) -> None:
    """A DataLoader worker that outlives its parent does not keep the next run from using the directory."""
    first = ScratchDirectory(tmp_path, keep=True)
    until, end = os.pipe()
    began, begin = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.write(begin, b"x")
        os.read(until, 1)  # until the parent has closed its end
        os._exit(0)
    os.close(until)
    os.read(began, 1)
    first.close(remove=False)
    try:
        ScratchDirectory(tmp_path, keep=True).close()
    finally:
        for fd in (end, began, begin):
            os.close(fd)
        os.waitpid(child, 0)
    assert list(tmp_path.iterdir()) == []
