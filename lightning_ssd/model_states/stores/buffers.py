"""Buffers that store a flat parameter's bytes: host memory, or blobs on SSDs that are read to staging memory."""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_ssd import torch_internals as internals
from lightning_ssd.device import StagedReader
from lightning_ssd.futures import Future, all_of, failed, finished
from lightning_ssd.storage import (
    PAGE,
    Blob,
    BlobStore,
    DetachedBlobs,
    FileRange,
    Piece,
    PinnedPool,
    Slab,
    Urgency,
    align_up,
    commit,
)
from lightning_ssd.types import OffloadTierName


class StateBuffer(ABC):
    """Stores `nbytes` bytes, zero at first, in one version or in two, one of which is committed.

    Threads: as the `StateStore` that it belongs to. Ownership: staged bytes belong to the caller until `write`, and to
    the buffer until the write is done.

    Attributes:
        nbytes: bytes of one version.
        versions: 1 or 2.
        staging_bytes: bytes of staging memory that `stage` needs.
        version: number of the committed version.
    """

    tier: OffloadTierName
    nbytes: int
    versions: int
    staging_bytes: int
    version = 0

    @property
    @abstractmethod
    def has_second(self) -> bool:
        """Whether the second version is allocated, so that a step does not overwrite the committed one."""

    def adopt(self, version: int) -> None:
        """Makes the stored bytes of a version, by its number, the committed ones."""
        self.version = version

    def flip(self) -> None:
        """Commits the other version, if it is allocated."""
        if self.has_second:
            self.version = (self.version + 1) % self.versions

    @abstractmethod
    def stage(
        self, memory: Tensor | None, *, read: bool, urgency: Urgency | None = None
    ) -> "tuple[Tensor, Future[None]]":
        """Stages the committed bytes on the host.

        Args:
            memory: `staging_bytes` bytes, which belong to the reads until the future is done.
            read: whether the bytes are needed; else their values are undefined, to be overwritten.
            urgency: whether a thread or stream waits for the bytes.

        Returns:
            The bytes, and a future that is done when they have their values.
        """

    @abstractmethod
    def uncommitted(self, staged: Tensor) -> Tensor:
        """Returns the destination of the uncommitted version: a second host slab, or in place when staged from SSD.

        Without a second version it is the committed one.
        """

    @abstractmethod
    def write(self, staged: Tensor, *, uncommitted: bool) -> "Future[None]":
        """Stores staged bytes, which belong to the buffer until the future is done.

        `uncommitted`: they are the uncommitted version.
        """

    @abstractmethod
    def write_done(self, *, uncommitted: bool = False, urgency: Urgency | None = None) -> "Future[None]":
        """Returns the future of the last write of the committed version, or of the uncommitted one.

        Args:
            uncommitted: whether that of the uncommitted version is returned.
            urgency: whether a thread or stream waits for the write: from then on, it is served before normal requests.
        """

    def file_ranges(self, start: int, nbytes: int) -> tuple[FileRange, ...]:
        """Returns the ranges of files that have `nbytes` committed bytes from offset `start`; none in host memory."""
        return ()

    @abstractmethod
    def free(self) -> None:
        """Frees the bytes."""


class HostBuffer(StateBuffer):
    """Host memory, which is staged in place. The second version has no memory until `add_second`, unless it is shared.

    Args:
        memory: memory of each version, which other ranks share; owned. None: new memory.

    Attributes:
        shared: whether other ranks share the memory.

    Raises:
        StorageError: the memory can't be allocated.
    """

    tier = "host"
    staging_bytes = 0

    def __init__(self, nbytes: int, *, versions: int, memory: Sequence[Slab] | None = None) -> None:
        self.nbytes = nbytes
        self.versions = versions
        self._pin = False
        self.shared = memory is not None
        self._slabs: dict[int, Slab] = dict(enumerate(memory or [Slab(nbytes, pin=False)]))
        """Memory of each version, by its number."""
        self._views: dict[int, dict[str, Tensor]] = {}
        """What `views` has returned for each version."""

    @property
    def has_second(self) -> bool:
        return len(self._slabs) == 2

    @staticmethod
    def commit(buffers: Iterable[StateBuffer | None], *, pin: bool) -> None:
        """Commits the pages of host buffers, which no thread uses meanwhile; their bytes do not change.

        Args:
            buffers: the buffers; others than those in host memory are left out.
            pin: page-lock the memory of all versions, also of those that are added later, for copies to the device.

        Raises:
            StorageError: they can't be page-locked.
        """
        in_host = [buffer for buffer in buffers if isinstance(buffer, HostBuffer)]
        commit([slab for buffer in in_host for slab in buffer._slabs.values()], pin=pin)
        for buffer in in_host:
            buffer._pin |= pin

    def add_second(self) -> None:
        """Allocates the second version, whose bytes are undefined, unless it is allocated.

        Raises:
            StorageError: the memory can't be allocated.
        """
        assert self.versions == 2
        if not self.has_second:
            self._slabs[1 - self.version] = Slab(self.nbytes, pin=self._pin)

    def drop_second(self) -> None:
        """Frees the uncommitted version, which no copy reads."""
        if self.has_second:
            self._views.pop(1 - self.version, None)
            self._slabs.pop(1 - self.version).close()

    def stage(
        self, memory: Tensor | None, *, read: bool, urgency: Urgency | None = None
    ) -> "tuple[Tensor, Future[None]]":
        return self._slabs[self.version].tensor, finished(None)

    def uncommitted(self, staged: Tensor) -> Tensor:
        return self._slabs[1 - self.version].tensor if self.has_second else staged

    def views(self, make: Callable[[Tensor], dict[str, Tensor]], *, uncommitted: bool) -> Mapping[str, Tensor]:
        """Returns views of the memory of a version, which are made once.

        Each operator that makes a view releases Python's lock, for which the thread of the optimizer and the training
        thread would then wait, in every step of every flat parameter.

        Args:
            make: makes the views of bytes, the same in all calls.
            uncommitted: as in `write`.
        """
        number = 1 - self.version if uncommitted and self.has_second else self.version
        views = self._views.get(number)
        if views is None:
            # User code may read values inside of modes of its own; a step uses the views later.
            with torch.inference_mode(False), internals.without_dispatch():
                views = self._views[number] = make(self._slabs[number].tensor)
        return views

    def write(self, staged: Tensor, *, uncommitted: bool) -> "Future[None]":
        return finished(None)

    def write_done(self, *, uncommitted: bool = False, urgency: Urgency | None = None) -> "Future[None]":
        return finished(None)

    def free(self) -> None:
        self._views.clear()
        for slab in self._slabs.values():
            slab.close()


class SSDBuffer(StateBuffer):
    """A blob on SSDs for each version.

    Args:
        staging: allocates and transfers the blobs. The bytes of adopted ones are valid after `adopt`.

    Raises:
        StorageFullError: there is no space.
    """

    tier = "ssd"

    def __init__(self, nbytes: int, staging: "StateStaging", *, versions: int) -> None:
        self.nbytes = nbytes
        self.versions = versions
        self.staging_bytes = align_up(nbytes)
        self._store = staging.store
        self.blobs: list[Blob] = []
        try:
            while len(self.blobs) < versions:
                self.blobs.append(staging.allocate(nbytes))
        except BaseException:
            self.free()
            raise
        self._written = False
        self._write_done: list[Future[None]] = [finished(None)] * versions
        self._write_urgency = [Urgency() for _ in range(versions)]

    @property
    def has_second(self) -> bool:
        return self.versions == 2

    def adopt(self, version: int) -> None:
        super().adopt(version)
        self._written = True

    def stage(
        self, memory: Tensor | None, *, read: bool, urgency: Urgency | None = None
    ) -> "tuple[Tensor, Future[None]]":
        assert memory is not None
        if not self._written:
            memory.zero_()
            return memory[: self.nbytes], finished(None)
        if not read:
            return memory[: self.nbytes], finished(None)
        done = _transfer(memory, self.blobs[self.version].pieces, partial(self._store.read, urgency=urgency))
        return memory[: self.nbytes], done

    def read_to_device(self, target: Tensor, urgency: Urgency | None) -> "Future[None]":
        """Reads the committed bytes, which were written before, without host memory.

        Args:
            target: `nbytes` bytes of the device that no stream uses; they belong to the reads until the future is done.
            urgency: as in `stage`.

        Returns:
            A future that is done when no read uses `target` any more.

        Raises:
            ValueError: the store takes host buffers only (`BlobStore.device_buffers`).
        """
        assert self._written
        # The slices are no operators of the model: dispatch modes that are active in a forward must not see them.
        with internals.without_dispatch():
            return _transfer(target, self.blobs[self.version].pieces, partial(self._store.read, urgency=urgency))

    def uncommitted(self, staged: Tensor) -> Tensor:
        return staged

    def write(self, staged: Tensor, *, uncommitted: bool) -> "Future[None]":
        self._written = True
        version = (self.version + uncommitted) % self.versions
        whole = staged.as_strided((self.staging_bytes,), (1,))  # with the rest of the last page, which is `memory`'s
        self._write_urgency[version] = urgency = Urgency()
        write = partial(self._store.write, urgency=urgency)
        self._write_done[version] = _transfer(whole, self.blobs[version].pieces, write)
        return self._write_done[version]

    def write_done(self, *, uncommitted: bool = False, urgency: Urgency | None = None) -> "Future[None]":
        version = (self.version + uncommitted) % self.versions
        if urgency is not None and not self._write_done[version].done():
            urgency.on_wait(self._write_urgency[version], Urgency.begin_wait)
        return self._write_done[version]

    def file_ranges(self, start: int, nbytes: int) -> tuple[FileRange, ...]:
        return self._store.file_ranges(self.blobs[self.version], start, nbytes)

    def free(self) -> None:
        for blob in self.blobs:
            self._store.free(blob)


def _transfer(
    memory: Tensor, pieces: Sequence[Piece], move: "Callable[[Piece, Tensor], Future[None]]"
) -> "Future[None]":
    """Transfers the pieces of a blob; `memory` has its bytes, up to whole pages."""
    requests: list[Future[None]] = []
    try:
        for piece in pieces:
            requests.append(move(piece, memory[piece.start : piece.start + align_up(piece.nbytes)]))
    except BaseException as error:  # earlier requests still own the memory: they are waited for
        requests.append(failed(error))
    return all_of(requests)


class SpareMemory:
    """Budget of host memory for second versions of flat parameters that are in host memory as a whole.

    Threads: any; the lock guards `reserved`.

    Attributes:
        reserved: bytes of the allocated second versions.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.reserved = 0
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> bool:
        """Reserves bytes and returns True, or returns False if fewer are left."""
        with self._lock:
            enough = self.reserved + nbytes <= self.nbytes
            self.reserved += nbytes * enough
            return enough

    def release(self, nbytes: int) -> None:
        """Releases reserved bytes."""
        with self._lock:
            self.reserved -= nbytes


@dataclass(frozen=True)
class StateStaging:
    """Scratch space, staging memory and reader threads that the flat parameters on SSDs share.

    Two readers have memory of their own, so that neither waits for the other. Prefetched weights hold their memory
    until the device has copied them; staged values until their step is made, which may wait for the end of backward.

    Attributes:
        params: reads prefetched weights to pinned memory, of which it has one page if `store` takes device buffers.
        states: reads all values; their memory is owned as `StateStore` says.
        adopted: allocated blobs, which `allocate` returns first: those of a killed run, or of all ranks.
    """

    store: BlobStore
    params: StagedReader
    states: StagedReader
    adopted: deque[Blob]

    @classmethod
    def make(
        cls, store: BlobStore, param_staging: int, staging: int, *, pin: bool, adopted: Iterable[Blob] = ()
    ) -> "StateStaging":
        """Returns scratch space with memory and threads. After an error, the caller closes `store`.

        Args:
            store: scratch space, which the result owns.
            param_staging: bytes of memory for prefetched weights.
            staging: bytes of memory for all values.
            pin: page-lock the memory of prefetched weights.
        """
        with contextlib.ExitStack() as undo:
            pools = _make_pools(store, param_staging, staging, pin=pin)
            for pool in pools:
                undo.callback(pool.close)
            readers = StagedReader(pools[0], "param-reader"), StagedReader(pools[1], "state-reader")
            undo.pop_all()
        return cls(store, *readers, deque(adopted))

    def allocate(self, nbytes: int) -> Blob:
        """Returns the next blob of `nbytes`.

        Raises:
            StorageFullError: there is no space.
        """
        return self.adopted.popleft() if self.adopted else self.store.allocate(nbytes)

    def resize(self, param_staging: int, staging: int, *, pin: bool) -> None:
        """Replaces the memory, which is not in use, by memory of other sizes. Arguments as in `make`."""
        pools = _make_pools(self.store, param_staging, staging, pin=pin)  # an error leaves the old ones in place
        for reader, pool in zip((self.params, self.states), pools, strict=True):
            old, reader.pool = reader.pool, pool
            old.close()

    def close(self, *, remove: bool = True) -> None:
        """Ends the threads and closes the files. Nothing is staged, and no copy runs."""
        with contextlib.ExitStack() as stack:  # closes from the last line up, each even if another one fails
            stack.callback(self.states.pool.close)
            stack.callback(self.params.pool.close)
            stack.callback(self.store.close, remove=remove)
            stack.callback(self.params.close)
            self.states.close()

    def detach(self) -> DetachedBlobs:
        """Closes the scratch space, and returns its blobs, which can still be read from files without a name."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)  # runs last, and closes all objects that are still open
            self.states.close()
            self.params.close()
            return self.store.detach()


def _make_pools(store: BlobStore, param_staging: int, staging: int, *, pin: bool) -> tuple[PinnedPool, PinnedPool]:
    first = PinnedPool(PAGE if store.device_buffers else max(param_staging, PAGE), pin=pin, name="model states' window")
    try:
        return first, PinnedPool(max(staging, PAGE), pin=False, name="model states' staging")
    except BaseException:
        first.close()
        raise
