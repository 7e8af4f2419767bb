"""The blob store, in which the other folders store bytes on SSDs.

`BlobStore` is the folder's only entry for transfers. Slots, striping, I/O threads and checksums are in files of their
own.
"""

from __future__ import annotations

import atexit
import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from lightning_ssd.futures import Future
from lightning_ssd.sizes import format_bytes_exactly
from lightning_ssd.storage.backend import Backend
from lightning_ssd.storage.blob import Blob, FileRange, Piece
from lightning_ssd.storage.checksums import Checksums, Hashes
from lightning_ssd.storage.choice import choose_backend
from lightning_ssd.storage.cleanup import clean_up
from lightning_ssd.storage.detached import DetachedBlobs
from lightning_ssd.storage.engine import Engine
from lightning_ssd.storage.errors import StorageError, StorageFullError
from lightning_ssd.storage.manifest import Manifest, read_manifest, write_manifest
from lightning_ssd.storage.private import PrivateDirectory
from lightning_ssd.storage.scratch import JoinedDirectory, ScratchDirectory
from lightning_ssd.storage.slots import PAGE, align_down, align_up
from lightning_ssd.storage.stripes import Stripes
from lightning_ssd.storage.timed_transfers import Calibration, calibrate
from lightning_ssd.storage.urgency import Urgency
from lightning_ssd.storage.volume import Volume
from lightning_ssd.types import BackendName


@dataclass(frozen=True, slots=True)
class IOStats:
    """Transfers and allocations of a store so far, without its calibration.

    Attributes:
        bytes_written: bytes of completed writes.
        bytes_read: bytes of completed reads.
        write_seconds: seconds during which at least one write was being served.
        read_seconds: seconds during which at least one read was being served.
        allocated_bytes: bytes of all blobs now, each piece rounded up to 4096.
    """

    bytes_written: int
    bytes_read: int
    write_seconds: float
    read_seconds: float
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class StoreManifest:
    """The state of a store, with which another one uses its files: after a kill, or in another process (`join`).

    Attributes:
        blobs: blobs in the files, which remain allocated.
        hashes: checksums of the blobs' pieces; empty if the store had none.
        calibration: measured bandwidths of the drives.
        run: name of the run in the manifest of every scratch directory.
        directories: paths of the scratch directories, for other processes.
    """

    blobs: Sequence[Blob]
    hashes: Hashes
    calibration: Calibration
    run: str
    directories: Sequence[str] = ()


class BlobStore:
    """Blobs on one or several SSDs, striped over them by their measured bandwidth.

    Thread-safe. Not to be called from a finaliser (``__del__``): finalisers run at any point of any thread, also
    where that thread holds the store's lock. The owner closes the store; a store that was never closed is closed
    when the interpreter exits.

    Args:
        paths: existing, writable directories, one per SSD.
        device: device of the data that will be offloaded.
        backend: ``"posix"``, ``"kvikio"``, ``"auto"`` (kvikio only where GPUDirect Storage is available), or a
            backend.
        capacity: most bytes of the scratch files on all SSDs together; None: all free space may be used.
        checksum: hash written pieces and compare the hashes at reads, on the I/O threads. Buffers must be in host
            memory then.
        piece_bytes: bytes of the largest piece, a multiple of 4096.
        threads: I/O threads per SSD, and so the largest number of its pieces in flight.
        rank: rank of this process in its run.
        keep: use kept directories, from whose files the next run resumes if this one is killed. One store at a time
            can use those of a path.
        find_manifest: with `keep`, called with the scratch directory on each path once all are locked. Returns the
            state of the killed run to resume from, or None to begin with new files.
        join: state of another process's store (`share`), which removes the files; None: the files are of this process.

    Attributes:
        piece_bytes: bytes of the largest piece.
        device_buffers: whether `write` and `read` accept CUDA buffers, besides host buffers.
        write_bandwidth: write bandwidth of all SSDs together, measured at start, bytes/s.
        read_bandwidth: read bandwidth of all SSDs together, measured at start, bytes/s.

    Raises:
        ValueError: an argument is out of its range.
        StorageFullError: there is no room for `capacity`.
        StorageError: a path cannot be used, or a drive failed. Files that were made are removed.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        device: torch.device,
        backend: BackendName | Backend = "auto",
        capacity: int | None = None,
        checksum: bool = True,
        piece_bytes: int = 16 * 2**20,
        threads: int = 4,
        rank: int = 0,
        keep: bool = False,
        find_manifest: Callable[[Sequence[PrivateDirectory]], StoreManifest | None] | None = None,
        join: StoreManifest | None = None,
    ) -> None:
        if isinstance(paths, (str, Path)) or not paths:
            raise ValueError("paths must be a sequence of at least one directory")
        if piece_bytes <= 0 or piece_bytes % PAGE:
            raise ValueError(f"piece_bytes must be a positive multiple of {PAGE}, not {piece_bytes}")
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        if capacity is not None and capacity < PAGE * len(paths):
            raise ValueError(
                f"capacity (argument `ssd_capacity`) must be at least {PAGE} bytes per path, not {capacity}"
            )
        chosen = choose_backend(backend, device, checksum=checksum)
        self.piece_bytes = piece_bytes
        self.device_buffers = chosen.device_buffers and not checksum
        self.backend_name = chosen.name
        self._capacity = capacity
        self._lock = threading.Lock()  # guards volumes' slots, stripes and counters
        self._owner = os.getpid()
        self._paths = [str(Path(path).absolute()) for path in paths]
        self._volumes: list[Volume] = []
        with ExitStack() as undo:
            directories: list[ScratchDirectory] = []
            resumed = join
            is_new = not keep
            undo.callback(lambda: self._close_opened(directories, remove=is_new))
            for path in paths if join is None else ():
                directories.append(ScratchDirectory(path, rank, keep=keep))
            for joined in () if join is None else join.directories:
                directories.append(JoinedDirectory(joined))
            if keep and find_manifest is not None:
                resumed = find_manifest([directory.files for directory in directories])
            is_new = resumed is None
            self._run = secrets.token_hex(8) if resumed is None else resumed.run
            self._checksums = Checksums({} if resumed is None else resumed.hashes) if checksum else None
            if resumed is not None and join is None:
                self._check_manifest(resumed, directories)
            elif keep:
                self._write_manifests(directories)
            pieces = [piece for blob in (resumed.blobs if resumed else ()) for piece in blob.pieces]
            for index, directory in enumerate(directories):
                slots = [(piece.offset, piece.nbytes) for piece in pieces if piece.volume == index]
                taken = None if resumed is None else slots
                self._volumes.append(Volume(directory, chosen, taken))
                self._volumes[-1].shared = join is not None
            self._allocated = sum(align_up(piece.nbytes) for piece in pieces)
            self._calibration = self._calibrate(threads) if resumed is None else resumed.calibration
            self.write_bandwidth = self._calibration.write_bandwidth
            self.read_bandwidth = self._calibration.read_bandwidth
            self._stripes = Stripes(self._calibration.weights)
            files = [(volume.path, volume.file) for volume in self._volumes]
            self._engine = Engine(files, threads=threads, checksums=self._checksums)
            undo.callback(self._engine.close)
            # An exit handler, and not a finaliser: closing joins threads and takes locks, which garbage
            # collection, on any thread at any moment, must not.
            self._at_exit = partial(self.close, remove=not keep)
            atexit.register(self._at_exit)
            undo.pop_all()

    @property
    def room(self) -> int:
        """Bytes that can be allocated: free bytes of the files, and bytes by which they can still grow."""
        with self._lock:
            return sum(volume.slots.capacity - volume.slots.used for volume in self._volumes) + self._growth()

    @property
    def size(self) -> int:
        """Bytes of all scratch files."""
        with self._lock:
            return sum(volume.slots.capacity for volume in self._volumes)

    def reserve(self, nbytes: int) -> None:
        """Preallocates, so that the scratch files have at least `nbytes` bytes together.

        Raises:
            StorageFullError: there is no room.
            StorageError: a filesystem failed.
        """
        with self._lock:
            left = align_up(nbytes) - sum(volume.slots.capacity for volume in self._volumes)
            if left > (available := self._growth()):
                raise self._full("reserve", left, available)
            shares = [
                align_up(int(left * weight / sum(self._calibration.weights))) for weight in self._calibration.weights
            ]
            # First each volume's share by its bandwidth, then the bytes for which some volumes had no room.
            for volume, share in zip(self._volumes * 2, shares + [left] * len(shares), strict=True):
                extent = min(share, left, align_down(volume.disk_free()))
                if extent > 0:
                    volume.extend(extent)
                    left -= extent
            if left > 0:  # another process used the space since the check
                raise self._full("reserve", left, self._growth())

    def allocate(self, nbytes: int, prefer: Collection[int] = ()) -> Blob:
        """Allocates a blob of `nbytes`. Its contents are undefined until written.

        Args:
            prefer: indices of the paths that it is striped over while they have room; empty: all paths.

        Raises:
            ValueError: `nbytes` is negative.
            StorageFullError: there is no room.
            StorageError: a filesystem failed.
        """
        if nbytes < 0:
            raise ValueError(f"a blob cannot have {nbytes} bytes")
        pieces: list[Piece] = []
        refusals: list[StorageFullError] = []
        start = 0
        with self._lock:
            available = sum(volume.slots.capacity - volume.slots.used for volume in self._volumes)
            if align_up(nbytes) > available:
                available += self._growth()
            if align_up(nbytes) > available:
                raise self._full("allocate", nbytes, available)
            try:
                while start < nbytes:
                    piece = self._allocate_piece(start, min(self.piece_bytes, nbytes - start), prefer, refusals)
                    if piece is None:  # another process used the space since the check, or a limit forbids more
                        raise self._full("allocate", nbytes, start) from (refusals[-1] if refusals else None)
                    pieces.append(piece)
                    start += piece.nbytes
            except BaseException:
                self._free(pieces)
                raise
        return Blob(nbytes, tuple(pieces))

    def free(self, blob: Blob) -> None:
        """Frees a blob, of which no transfer may be queued or running.

        Raises:
            ValueError: the blob was freed before.
        """
        with self._lock:
            self._free(blob.pieces)

    def write(self, piece: Piece, buffer: torch.Tensor, *, urgency: Urgency | None = None) -> Future[None]:
        """Queues a write of a piece from `buffer`.

        Args:
            piece: the piece, or part of one (`parts`), to write.
            buffer: contiguous one-dimensional uint8, at least `piece.nbytes` long. If it is page-aligned and extends
                to the next multiple of 4096, the write bypasses the page cache. The request keeps the buffer alive
                until the future is done; the caller does not change its bytes until then.
            urgency: tells when a thread or stream begins to wait for the write, which then precedes normal requests.

        Returns:
            A future whose result is None, or whose error is a StorageError that names file, offset and remedy.
            `cancel` drops a queued request. Callbacks run on the I/O thread.

        Raises:
            ValueError: the buffer does not fit.
            StorageError: the store is closed.
        """
        self._check(piece, buffer)
        return self._engine.submit(piece, buffer, write=True, urgency=urgency)

    def read(self, piece: Piece, buffer: torch.Tensor, *, urgency: Urgency | None = None) -> Future[None]:
        """Queues a read of a piece into `buffer`, as `write` does.

        Args:
            piece: a piece that was written, or a part of one.
            buffer: as for `write`. If the buffer extends beyond the piece, its bytes up to the next multiple of 4096
                may be overwritten, too. The caller does not use the buffer until the future is done.
            urgency: tells when a thread or stream begins to wait for the read, which then precedes normal requests.

        Returns:
            A future, as `write` does.

        Raises:
            ValueError: the buffer does not fit.
            StorageError: the store is closed.
        """
        self._check(piece, buffer)
        return self._engine.submit(piece, buffer, write=False, urgency=urgency)

    def stats(self) -> IOStats:
        """Returns transfers and allocations so far."""
        written, write_seconds = self._engine.written.read()
        read, read_seconds = self._engine.read.read()
        with self._lock:
            return IOStats(written, read, write_seconds, read_seconds, self._allocated)

    def file_ranges(self, blob: Blob, start: int, nbytes: int) -> tuple[FileRange, ...]:
        """Returns the ranges of the scratch files that have `nbytes` bytes of a blob from offset `start`, in order."""
        return tuple(
            FileRange(self._volumes[piece.volume].path, piece.offset + low - piece.start, high - low)
            for piece, low, high in blob.overlaps(start, nbytes)
        )

    @property
    def directory(self) -> PrivateDirectory:
        """The scratch directory on the first path, for small files with the lifetime of the blobs."""
        return self._volumes[0].directory

    def manifest(self, blobs: Sequence[Blob]) -> StoreManifest:
        """Returns the state with which another store can resume with `blobs`, as they are now."""
        hashes = {} if self._checksums is None else self._checksums.all()
        directories = [str(volume.directory.path) for volume in self._volumes]
        return StoreManifest(blobs, hashes, self._calibration, self._run, directories)

    def share(self, blobs: Sequence[Blob]) -> StoreManifest:
        """Returns the state with which stores of other processes use these files, and `blobs`, too (`join`).

        The files exist until the last process has closed them. The processes agree on who writes a blob when, and pass
        on the hashes (`hashes_of`).
        """
        for volume in self._volumes:
            volume.shared = True
        return self.manifest(blobs)

    def hashes_of(self, blobs: Iterable[Blob]) -> Hashes:
        """Returns the hashes of blobs that were written, for `adopt_hashes`."""
        return {} if self._checksums is None else self._checksums.of(piece for blob in blobs for piece in blob.pieces)

    def adopt_hashes(self, hashes: Hashes) -> None:
        """Adopts the hashes of blobs that another process has written, from `hashes_of` in it."""
        if self._checksums is not None:
            self._checksums.adopt(hashes)

    def sync(self) -> None:
        """Makes completed writes durable.

        Raises:
            StorageError: a filesystem failed.
        """
        for volume in self._volumes:
            volume.sync()

    def close(self, *, remove: bool = True) -> None:
        """Cancels queued requests, waits for running ones, ends the threads and closes the files.

        Idempotent, safe in an exception handler, and without effect in a forked child.
        """
        if os.getpid() != self._owner:
            return
        atexit.unregister(self._at_exit)
        try:
            self._engine.close()
            for volume in reversed(self._volumes):  # the first one's manifest is removed last
                volume.close(remove=remove)
        finally:
            # Also when Ctrl-C ends the wait: running transfers then complete on unlinked files.
            for volume in reversed(self._volumes) if remove else ():
                volume.remove()

    def detach(self) -> DetachedBlobs:
        """Closes the store like `close`, and returns its blobs, which can still be read from the returned object."""
        atexit.unregister(self._at_exit)
        self._engine.close()
        files = [(volume.path, volume.detach()) for volume in reversed(self._volumes)]  # as in `close`
        return DetachedBlobs(files[::-1], self._checksums, shared=self._volumes[0].shared)

    def _close_opened(self, directories: Sequence[ScratchDirectory], *, remove: bool) -> None:
        """Closes the volumes and directories of a store that could not be made, the last ones first.

        The first directories have volumes. Without `remove`, only directories that have no files are removed.
        """
        for index, directory in reversed(list(enumerate(directories))):
            if index < len(self._volumes):
                self._volumes[index].close(remove=remove)
                continue
            remove_directory = remove
            with clean_up("list the scratch directory", directory.path):
                remove_directory = remove or directory.empty
            directory.close(remove=remove_directory)

    def _write_manifests(self, directories: Sequence[ScratchDirectory]) -> None:
        """Clears kept directories, and writes the manifest of this run to each.

        The first directory's manifest is written first and removed last. Whenever this process is killed, it therefore
        equals the manifests of those other directories that have one, on which `find_manifest` relies.
        """
        for directory in reversed(directories):
            directory.clear()
        for directory in directories:
            write_manifest(directory.files, Manifest(self._run, self._paths))

    def _calibrate(self, threads: int) -> Calibration:
        """Measures the drives, if they have room for the capacity; arguments as of the store."""
        available = self._growth()
        if available < align_down(self._capacity or 0):
            raise self._full("set aside", self._capacity or 0, available)
        return calibrate(self._volumes, piece_bytes=self.piece_bytes, threads=threads, capacity=available)

    def _check_manifest(self, manifest: StoreManifest, directories: Sequence[ScratchDirectory]) -> None:
        if self._checksums is not None and not all(
            (piece.volume, piece.offset) in manifest.hashes for blob in manifest.blobs for piece in blob.pieces
        ):
            raise StorageError(
                f"the run that was killed had checksum=False, so {directories[0].path} can't be checked: set "
                f"checksum=False in this run, too, or remove {directories[0].path}"
            )
        for directory in directories:
            if read_manifest(directory.files) != Manifest(manifest.run, self._paths):
                raise StorageError(
                    f"{directory.path} has no files of the run whose journal is in {directories[0].path}, so this run "
                    "can't be resumed. Remove both directories, and start from a checkpoint."
                )

    def _check(self, piece: Piece, buffer: torch.Tensor) -> None:
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
            raise ValueError(f"a buffer is contiguous one-dimensional uint8, not {buffer.dtype} {tuple(buffer.shape)}")
        if buffer.numel() < piece.nbytes:
            raise ValueError(f"a buffer of {buffer.numel()} bytes is too short for a piece of {piece.nbytes}")
        if buffer.device.type != "cpu" and not self.device_buffers:
            raise ValueError(
                f"backend {self.backend_name!r} with checksum={self._checksums is not None} takes host buffers only, "
                f"not {buffer.device}"
            )

    def _allocate_piece(
        self, start: int, nbytes: int, prefer: Collection[int], refusals: list[StorageFullError]
    ) -> Piece | None:
        """Allocates a piece, or returns None if there is no room. Errors of files that can't grow are appended to
        `refusals`."""
        for index in sorted(self._stripes.order(nbytes), key=lambda index: index not in prefer):  # which is stable
            volume = self._volumes[index]
            offset = volume.slots.allocate(nbytes)
            try:
                if offset is None and volume.grow(nbytes, self._limit()):
                    offset = volume.slots.allocate(nbytes)
            except StorageFullError as error:  # another volume may have room
                refusals.append(error)
            if offset is not None:
                return self._record_piece(index, offset, start, nbytes)
        # No volume has so large a hole, and none can grow: a shorter piece fills the largest hole.
        index = max(range(len(self._volumes)), key=lambda index: self._volumes[index].slots.largest_free)
        shorter = self._volumes[index].slots.largest_free
        if shorter == 0:
            return None
        offset = self._volumes[index].slots.allocate(shorter)
        assert offset is not None
        return self._record_piece(index, offset, start, shorter)

    def _record_piece(self, index: int, offset: int, start: int, nbytes: int) -> Piece:
        self._stripes.record(index, nbytes)
        self._allocated += align_up(nbytes)
        return Piece(index, offset, start, nbytes)

    def _free(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._volumes[piece.volume].slots.free(piece.offset)
            self._allocated -= align_up(piece.nbytes)
            if self._checksums is not None:
                self._checksums.discard(piece)

    def _limit(self) -> int:
        """Returns the bytes by which the files may grow before they reach the capacity."""
        if self._capacity is None:
            return 2**63 - 1
        return align_down(self._capacity) - sum(volume.slots.capacity for volume in self._volumes)

    def _growth(self) -> int:
        """Returns the bytes by which the files can grow. Volumes on one filesystem share its free space."""
        free = {volume.device: align_down(volume.disk_free()) for volume in self._volumes}
        return min(sum(free.values()), self._limit())

    def _full(self, action: str, needed: int, available: int) -> StorageFullError:
        where = ", ".join(str(volume.path.parent.parent) for volume in self._volumes)
        limit = "" if self._capacity is None else f" (capacity {format_bytes_exactly(self._capacity)})"
        change = "raise" if action == "allocate" else "lower"
        return StorageFullError(
            f"could not {action} {format_bytes_exactly(needed)} on {where}{limit}: "
            f"{format_bytes_exactly(available)} available. Free space, {change} `ssd_capacity`, or add a `path`."
        )
