"""Other users can write to a scratch directory's parent: their files are not used, and outside files not changed."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lightning_ssd.storage import (
    BackendFile,
    BlobStore,
    NotPrivateError,
    PosixBackend,
    PrivateDirectory,
    ScratchDirectory,
    StorageError,
)
from lightning_ssd.storage.scratch import kept_directory
from tests.support.storage import CPU, KIB, noise, open_files, open_store, write

NOBODY = 65534
KILLED = f"lightning_ssd-{'0' * 16}-rank0"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")

Snapshot = dict[str, tuple[Any, ...]]


def snapshot(root: Path) -> Snapshot:
    """Mode, owner and content of everything below `root`, links not followed."""
    found: Snapshot = {}
    for path in sorted(root.rglob("*")):
        entry = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(entry.st_mode) else None
        found[str(path.relative_to(root))] = (entry.st_mode, entry.st_uid, entry.st_nlink, content)
    return found


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A private directory of this user that looks like the scratch directory of a killed run."""
    victim = tmp_path / "home" / "precious"
    victim.mkdir(parents=True, mode=0o700)
    for name in ("lock", "scratch.bin", "run", "journal", f"{KILLED}", f"lock.{victim.name}", "thesis.tex"):
        (victim / name).write_text(name)
        (victim / name).chmod(0o600)
    return victim


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory that everybody can write to."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    return shared


def make_directory(path: Path, mode: int = 0o700, uid: int | None = None) -> None:
    path.mkdir()
    for name in (f"lock.{path.name}", "scratch.bin", "run", "journal"):
        (path / name).write_text(name)
        (path / name).chmod(0o600)
        if uid is not None:
            os.chown(path / name, uid, uid)
    path.chmod(mode)
    if uid is not None:
        os.chown(path, uid, uid)


def make_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def link_of_nobody(path: Path, target: Path) -> None:
    path.symlink_to(target)
    os.lchown(path, NOBODY, NOBODY)


Make = Callable[[Path, Path], object]
DIRECTORIES: dict[str, tuple[Make, str]] = {
    "link to a directory": (lambda path, victim: path.symlink_to(victim), "is a symbolic link of user"),
    "link to a file": (lambda path, victim: path.symlink_to(victim / "thesis.tex"), "is a symbolic link of user"),
    "link to nothing": (lambda path, victim: path.symlink_to(victim / "absent"), "is a symbolic link of user"),
    "file": (lambda path, victim: path.write_text("x"), "is not a directory"),
    "fifo": (lambda path, victim: os.mkfifo(path), "is not a directory"),
    "socket": (lambda path, victim: make_socket(path), "is not a directory"),
    "writable by the group": (lambda path, victim: make_directory(path, 0o720), r"gives others rights \(mode 0720\)"),
    "readable by all": (lambda path, victim: make_directory(path, 0o704), r"gives others rights \(mode 0704\)"),
    "another private directory": (lambda path, victim: victim.rename(path), "is no scratch directory"),
}
FOREIGN: dict[str, tuple[Make, str]] = {
    "link of another user": (lambda path, victim: link_of_nobody(path, victim), rf"symbolic link .*uid {NOBODY}"),
    "directory of another user": (
        lambda path, victim: make_directory(path, 0o700, NOBODY),
        rf"belongs to .*uid {NOBODY}.*Remove it if it is yours, or give",
    ),
}
ROWS = [pytest.param(*row, id=name) for name, row in DIRECTORIES.items()] + [
    pytest.param(*row, id=name, marks=needs_root) for name, row in FOREIGN.items()
]


@pytest.mark.parametrize(("make", "message"), ROWS)
def test_a_kept_directory_that_another_user_may_have_made_is_refused(
    tmp_path: Path, shared: Path, victim: Path, make: Make, message: str
) -> None:
    """The refusal names path, owner and remedy; nothing of it is read, written or removed."""
    path = kept_directory(shared)
    make(path, victim)
    before = snapshot(tmp_path)
    read: list[object] = []
    with pytest.raises(NotPrivateError, match=rf"{path} .*{message}"):
        BlobStore([shared], device=CPU, keep=True, find_manifest=lambda directory: read.append(directory))
    assert not read
    assert snapshot(tmp_path) == before
    assert not open_files(tmp_path)


@pytest.mark.parametrize(("make", "message"), ROWS)
def test_directories_that_another_user_may_have_made_are_not_removed(
    tmp_path: Path, shared: Path, victim: Path, make: Make, message: str
) -> None:
    make(shared / KILLED, victim)
    before = snapshot(tmp_path)
    with open_store(shared, capacity=2**20) as store:
        blob = store.allocate(KIB)
        write(store, blob, noise(KIB))
    assert snapshot(tmp_path) == before
    assert not open_files(tmp_path)


FILES: dict[str, tuple[Make, str]] = {
    "link to a file": (lambda path, victim: path.symlink_to(victim / "thesis.tex"), "is a symbolic link of user"),
    "link to nothing": (lambda path, victim: path.symlink_to(victim / "absent"), "is a symbolic link of user"),
    "hard link": (lambda path, victim: path.hardlink_to(victim / "thesis.tex"), "has 2 hard links"),
    "directory": (lambda path, victim: path.mkdir(), "is not a regular file"),
    "fifo": (lambda path, victim: os.mkfifo(path, 0o600), "is not a regular file"),
    "socket": (lambda path, victim: make_socket(path), "is not a regular file"),
    "writable by all": (lambda path, victim: (path.write_text("x"), path.chmod(0o606)), r"\(mode 0606\)"),
}
FILE_ROWS = [pytest.param(*row, id=name) for name, row in FILES.items()] + [
    pytest.param(
        lambda path, victim: (path.write_text("x"), path.chmod(0o600), os.chown(path, NOBODY, NOBODY)),
        rf"belongs to .*uid {NOBODY}",
        id="file of another user",
        marks=needs_root,
    )
]


@pytest.mark.parametrize(("make", "message"), FILE_ROWS)
@pytest.mark.parametrize("name", ["lock", "scratch.bin", "run", "journal"])
def test_a_file_that_another_user_may_have_put_into_a_kept_directory_is_refused(
    tmp_path: Path, shared: Path, victim: Path, make: Make, message: str, name: str
) -> None:
    """The manifest, the scratch file, the lock, and the journal of the store's owner."""
    path = kept_directory(shared)
    name = f"lock.{path.name}" if name == "lock" else name
    first = BlobStore([shared], device=CPU, capacity=2**20, keep=True)
    blob = first.allocate(KIB)
    write(first, blob, noise(KIB))
    kept = first.manifest([blob])
    first.close(remove=False)
    (path / "journal").write_text("x")
    (path / "journal").chmod(0o600)
    (path / name).unlink()
    make(path / name, victim)
    before = snapshot(tmp_path)

    def read(directories: Sequence[PrivateDirectory]) -> object:
        directories[0].read_file("journal")
        return kept

    with pytest.raises(NotPrivateError, match=rf"{path}/{name} .*{message}"):
        BlobStore([shared], device=CPU, capacity=2**20, keep=True, find_manifest=read)  # type: ignore[arg-type]
    assert snapshot(tmp_path) == before
    assert not open_files(tmp_path)


@pytest.mark.parametrize(("make", "message"), FILE_ROWS)
def test_links_in_a_scratch_directory_are_removed_and_not_followed(
    shared: Path, victim: Path, make: Make, message: str
) -> None:
    before = {name: row for name, row in snapshot(victim).items()}
    directory = ScratchDirectory(shared)
    make(directory.path / "entry", victim)
    entry = (directory.path / "entry").lstat()
    directory.close()
    after = snapshot(victim)
    assert {name: row[3] for name, row in after.items()} == {name: row[3] for name, row in before.items()}
    assert bool(list(shared.iterdir())) == stat.S_ISDIR(
        entry.st_mode
    )  # the package makes no directories there: they are kept


def test_a_scratch_file_is_opened_by_descriptor_by_backends_too(shared: Path, victim: Path) -> None:
    """The directory is exchanged before the backend opens the file: bytes are written to the checked file."""

    class Exchanging(PosixBackend):
        def open(self, path: Path) -> BackendFile:
            (directory,) = shared.iterdir()
            directory.rename(shared / "stolen")
            directory.symlink_to(victim)
            return super().open(path)

    before = snapshot(victim)
    with open_store(shared, backend=Exchanging(), capacity=2**20) as store:
        (piece,) = store.allocate(KIB).pieces
        store.write(piece, noise(KIB)).result()
        content = (shared / "stolen" / "scratch.bin").read_bytes()
        assert content[piece.offset :][:KIB] == noise(KIB).numpy().tobytes()
    assert snapshot(victim) == before


# ---- entries that are exchanged between two system calls ----

_EVENTS = {"open", "os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.listdir", "os.scandir", "fcntl.flock"}
_on_event: Callable[[], None] | None = None


def _audit(event: str, arguments: object) -> None:
    if _on_event is not None and event in _EVENTS:
        _on_event()


class Attacker:
    """A context in which `attack` runs before the system call at `position`.

    Attributes:
        ran: whether the call at `position` was reached.
    """

    def __init__(self, position: int, attack: Callable[[], None]) -> None:
        self._left = position
        self._attack = attack
        self.ran = False

    def __enter__(self) -> None:
        global _on_event
        _install_hook()
        _on_event = self._count

    def __exit__(self, *_: object) -> None:
        global _on_event
        _on_event = None

    def _count(self) -> None:
        global _on_event
        if self._left == 0:
            _on_event = None  # its own calls are not counted
            self.ran = True
            self._attack()
        self._left -= 1


def _install_hook() -> None:
    if not getattr(_install_hook, "done", False):
        sys.addaudithook(_audit)  # for the life of the process: it can't be removed
        _install_hook.done = True  # type: ignore[attr-defined]


def create(shared: Path, attacker: Attacker) -> None:
    with attacker:
        ScratchDirectory(shared).close()


def resume(shared: Path, attacker: Attacker) -> None:
    first = ScratchDirectory(shared, keep=True)
    (first.path / "journal").write_text("x")
    first.close(remove=False)
    with attacker:
        second = ScratchDirectory(shared, keep=True)
        second.clear()
        second.close()


def sweep(shared: Path, attacker: Attacker) -> None:
    make_directory(shared / KILLED)
    with attacker:
        ScratchDirectory(shared).close()


def close(shared: Path, attacker: Attacker) -> None:
    directory = ScratchDirectory(shared)
    (directory.path / "scratch.bin").write_text("x")
    with attacker:
        directory.close()


def by_link(name: Path, victim: Path) -> None:
    name.symlink_to(victim)


def by_private_directory(name: Path, victim: Path) -> None:
    victim.rename(name)


def by_foreign_directory(name: Path, victim: Path) -> None:
    make_directory(name, 0o777, NOBODY)


@pytest.mark.parametrize("operation", [create, resume, sweep, close])
@pytest.mark.parametrize(
    "exchange", [by_link, by_private_directory, pytest.param(by_foreign_directory, marks=needs_root)]
)
def test_a_directory_that_is_exchanged_at_any_moment(
    tmp_path: Path,
    shared: Path,
    victim: Path,
    operation: Callable[[Path, Attacker], None],
    exchange: Callable[[Path, Path], None],
) -> None:
    """The attack runs before every system call of every operation: no outside file is read, written or removed."""
    inode, before, home = victim.stat().st_ino, snapshot(victim), victim.parent
    exchanged = 0
    for position in range(100):

        def attack() -> None:
            nonlocal exchanged
            for name in list(shared.iterdir()):
                if name.name.startswith("lightning_ssd-"):
                    name.rename(shared / f"stolen-{exchanged}")
                    exchange(name, victim)
                    exchanged += 1
                    return

        attacker = Attacker(position, attack)
        with suppress(StorageError):
            operation(shared, attacker)
        assert not open_files(tmp_path)
        (found,) = [path for path in [*home.iterdir(), *shared.iterdir()] if path.lstat().st_ino == inode]
        assert snapshot(found) == before, position
        if found != victim:
            found.rename(victim)
        for path in shared.iterdir():  # for the next position
            if path.is_symlink():
                path.unlink()
            else:
                path.rename(home / f"old-{position}-{path.name}")
        if not attacker.ran:
            break
    assert exchanged >= 3
    assert position < 99
