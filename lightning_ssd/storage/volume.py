"""A volume: one directory on one SSD, with its preallocated scratch file and the slots in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from lightning_ssd.storage.backend import Backend, BackendFile
from lightning_ssd.storage.cleanup import clean_up, close_fd
from lightning_ssd.storage.errors import StorageError, from_os_error
from lightning_ssd.storage.preallocation import preallocate
from lightning_ssd.storage.private import PrivateDirectory
from lightning_ssd.storage.scratch import ScratchDirectory
from lightning_ssd.storage.slots import SlotAllocator, align_down, align_up

_FILE = "scratch.bin"
_SMALLEST_EXTENT = 64 * 2**20
_LARGEST_EXTENT = 2**30


class Volume:
    """One scratch file in its own scratch directory. The file grows and never shrinks.

    Not thread-safe, except for transfers through `file`: the store holds its lock around all other calls.

    Args:
        directory: a scratch directory on the SSD. The volume closes it, unless this constructor fails.
        taken: (offset, bytes) of each allocated slot of an existing file; None: the file is made.

    Attributes:
        file: the scratch file, open for transfers.
        slots: allocator of the file's bytes.
        device: number of the filesystem (`st_dev`), equal for volumes that share its free space.
        shared: whether other processes use the file, too: its bytes exist until the last of them closes it.

    Raises:
        StorageError: the file cannot be made, or the existing one does not contain the slots of `taken`.
    """

    def __init__(
        self, directory: ScratchDirectory, backend: Backend, taken: Sequence[tuple[int, int]] | None = None
    ) -> None:
        self._directory = directory
        self.shared = False
        with ExitStack() as undo:
            self.path = self._directory.path / _FILE
            try:
                self._fd = directory.files.open_file(
                    _FILE, os.O_RDWR | (os.O_CREAT | os.O_EXCL if taken is None else 0)
                )
                undo.callback(close_fd, self._fd, self.path)
                self.slots = SlotAllocator(align_down(os.fstat(self._fd).st_size))
                for offset, nbytes in taken or ():
                    self.slots.allocate_at(offset, nbytes)
                self.device = os.fstat(self._fd).st_dev
                directory.files.sync()  # the journal may refer to bytes of the file: its name must be durable before
                # By descriptor: another user may give the file's name, or its directory's, to another file.
                self.file: BackendFile = backend.open(Path(f"/proc/self/fd/{self._fd}"))
            except OSError as error:
                raise from_os_error(error, "open the scratch file", self.path) from error
            except ValueError as error:
                raise StorageError(
                    f"{self.path} is not the file of the run that was killed: remove {self._directory.path}, and start "
                    "from a checkpoint"
                ) from error
            except StorageError:
                raise
            except Exception as error:  # errors of a backend's library have classes of their own
                raise StorageError(f"backend {backend.name!r} could not open {self.path}: {error}") from error
            undo.pop_all()
        self._open = True

    def disk_free(self) -> int:
        """Returns the bytes that are free on this volume's filesystem.

        Raises:
            StorageError: the filesystem failed.
        """
        try:
            filesystem = os.fstatvfs(self._fd)
        except OSError as error:
            raise from_os_error(error, "ask for free space", self.path) from error
        return filesystem.f_bavail * filesystem.f_frsize

    def extend(self, nbytes: int) -> None:
        """Appends `nbytes` (a multiple of the page) of preallocated space.

        Raises:
            StorageFullError: the filesystem has no room, or a limit forbids so large a file.
            StorageError: the filesystem failed.
        """
        size = self.slots.capacity
        action = f"preallocate {nbytes} bytes at offset {size} ({self.disk_free()} bytes free)"
        try:
            preallocate(self._fd, size, nbytes, self.path)
        except OSError as error:
            with clean_up(f"free the bytes that were preallocated from offset {size}", self.path):
                os.ftruncate(self._fd, size)
            raise from_os_error(error, action, self.path) from error
        self.slots.grow(nbytes)

    def grow(self, nbytes: int, limit: int) -> bool:
        """Appends room for a slot of `nbytes`, and more, so that the file consists of a few large extents.

        Args:
            limit: most bytes by which the file may grow.

        Returns:
            Whether the file grew. It may have grown by less than `nbytes`, if `limit` or the disk has no more.

        Raises:
            StorageError: the filesystem failed for another reason than being full.
        """
        room = min(limit, align_down(self.disk_free()))
        need = align_up(nbytes) - self.slots.tail_free
        extent = min(max(self.slots.capacity, _SMALLEST_EXTENT), _LARGEST_EXTENT)
        if 2 * extent > self.disk_free():
            extent = need  # the disk is nearly full: its rest is not reserved ahead of need
        added = min(max(need, extent), room)
        if added <= 0:
            return False
        self.extend(added)
        return True

    @property
    def directory(self) -> PrivateDirectory:
        """The directory of the file."""
        return self._directory.files

    def sync(self) -> None:
        """Makes completed writes durable.

        Raises:
            StorageError: the filesystem failed.
        """
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise from_os_error(error, "flush to the drive", self.path) from error

    def close(self, *, remove: bool = True) -> None:
        """Closes the file and, with `remove`, removes it and its directory. No transfer may be running.

        Idempotent. Failures are logged and not raised (see `clean_up`).
        """
        if self._open:
            self._open = False
            if remove and not self.shared:
                # A forked DataLoader worker has the file open, too: its blocks are freed now, not when the worker ends.
                with clean_up("truncate", self.path):
                    os.ftruncate(self._fd, 0)
            close_fd(self._fd, self.path)
            with clean_up("close", self.path):
                self.file.close()
        self._directory.close(remove=remove)

    def detach(self) -> int:
        """Closes `file`, removes the file's name and its directory, and returns a descriptor of the file.

        The file's bytes exist until the caller closes the descriptor. No transfer may be running.
        """
        self._open = False
        with clean_up("close", self.path):
            self.file.close()
        self._directory.close()
        return self._fd

    def remove(self) -> None:
        """Removes the names of the file and its directory. Running transfers still succeed. Idempotent."""
        self._directory.close()
