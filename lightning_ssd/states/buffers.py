"""Where bytes of a flat lie between uses: in host memory, or in a blob on SSDs that is brought to staging memory."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from torch import Tensor

from lightning_ssd.device import Worker, all_of, finished
from lightning_ssd.storage import Blob, BlobStore, DetachedBlobs, PinnedPool
from lightning_ssd.storage.slab import Slab
from lightning_ssd.storage.slots import PAGE, align_up


class StateBuffer(ABC):
    """Keeps `nbytes` bytes, which are zero at first, in one slot or in two, of which one counts.

    Attributes:
        nbytes: bytes kept.
        slots: 1 or 2.
        staging_bytes: bytes of memory that `open` wants to be given.
    """

    nbytes: int
    slots: int
    staging_bytes: int
    slot = 0
    """The one that counts."""

    def turn(self) -> None:
        """The other slot, if there is one, is the one that counts."""
        self.slot = (self.slot + 1) % self.slots

    @abstractmethod
    def open(self, memory: Tensor | None, *, read: bool) -> "tuple[Tensor, Future[None]]":
        """Brings the bytes to the host.

        Args:
            memory: `staging_bytes` bytes; the reads' until the future is done.
            read: whether the bytes are wanted; else what is there is undefined, to be written over.

        Returns:
            The bytes, and a future that is done when they are there.
        """

    @abstractmethod
    def other(self, opened: Tensor) -> Tensor:
        """Returns where bytes for the other slot are made: apart from `opened`, or there."""

    @abstractmethod
    def write(self, opened: Tensor, *, other: bool) -> "Future[None]":
        """Takes over the bytes that `open` returned; they are the place's until the future is done.

        Args:
            opened: the bytes.
            other: whether they belong in the other slot.
        """

    @abstractmethod
    def settled(self, *, other: bool = False) -> "Future[None]":
        """Returns the future of the last `write` to the slot that counts, or to the other one."""

    @abstractmethod
    def free(self) -> None:
        """Gives the place back."""


class HostBuffer(StateBuffer):
    """Host memory.

    Args:
        nbytes: bytes to keep.
        slots: 1 or 2.
        pin: page-lock it, for copies to the device.
    """

    staging_bytes = 0

    def __init__(self, nbytes: int, *, slots: int, pin: bool) -> None:
        self.nbytes = nbytes
        self.slots = slots
        self._slabs = [Slab(nbytes, pin=pin) for _ in range(slots)]

    def open(self, memory: Tensor | None, *, read: bool) -> "tuple[Tensor, Future[None]]":
        return self._slabs[self.slot].tensor, finished(None)

    def other(self, opened: Tensor) -> Tensor:
        return self._slabs[(self.slot + 1) % self.slots].tensor

    def write(self, opened: Tensor, *, other: bool) -> "Future[None]":
        return finished(None)

    def settled(self, *, other: bool = False) -> "Future[None]":
        return finished(None)

    def free(self) -> None:
        for slab in self._slabs:
            slab.close()


class SSDBuffer(StateBuffer):
    """A blob for each slot.

    Args:
        nbytes: bytes to keep.
        slots: 1 or 2.
        store: where.
        blobs: of another run, to be taken over with what is in them; None: new ones.

    Attributes:
        blobs: one for each slot.

    Raises:
        StorageFullError: there is no room.
    """

    def __init__(self, nbytes: int, store: BlobStore, *, slots: int, blobs: Sequence[Blob] | None = None) -> None:
        self.nbytes = nbytes
        self.slots = slots
        self.staging_bytes = align_up(nbytes)
        self._store = store
        self.blobs = list(blobs or ())
        try:
            while len(self.blobs) < slots:
                self.blobs.append(store.allocate(nbytes))
        except BaseException:
            self.free()
            raise
        self._written = blobs is not None
        self._settled: list[Future[None]] = [finished(None)] * slots

    def open(self, memory: Tensor | None, *, read: bool) -> "tuple[Tensor, Future[None]]":
        assert memory is not None
        if not self._written:
            memory.zero_()
            return memory[: self.nbytes], finished(None)
        there = self._transfer(memory, self.blobs[self.slot], write=False) if read else finished(None)
        return memory[: self.nbytes], there

    def other(self, opened: Tensor) -> Tensor:
        return opened

    def write(self, opened: Tensor, *, other: bool) -> "Future[None]":
        self._written = True
        slot = (self.slot + other) % self.slots
        whole = opened.as_strided((self.staging_bytes,), (1,))  # with the rest of the last page, which is `memory`'s
        self._settled[slot] = self._transfer(whole, self.blobs[slot], write=True)
        return self._settled[slot]

    def settled(self, *, other: bool = False) -> "Future[None]":
        return self._settled[(self.slot + other) % self.slots]

    def free(self) -> None:
        for blob in self.blobs:
            self._store.free(blob)

    def _transfer(self, memory: Tensor, blob: Blob, *, write: bool) -> "Future[None]":
        move = self._store.write if write else self._store.read
        requests: list[Future[None]] = []
        try:
            for piece in blob.pieces:
                requests.append(move(piece, memory[piece.start : piece.start + align_up(piece.nbytes)]))
        except BaseException as error:  # what was asked for already still owns the memory: it is waited for
            failed: Future[None] = Future()
            failed.set_exception(error)
            requests.append(failed)
        return all_of(requests)


@dataclass(frozen=True)
class StateStaging:
    """What the flats on SSDs share.

    Two threads with memory of their own, so that neither waits for the other: weights on their way to the device are
    held by the device's progress alone, opened flats by that of backward, too.

    Attributes:
        store: scratch space.
        window: pinned memory that weights pass through on their way to the device.
        fetcher: takes memory of `window` and asks for reads.
        staging: memory that flats are opened in.
        opener: takes memory of `staging` and asks for reads.
    """

    store: BlobStore
    window: PinnedPool
    fetcher: Worker
    staging: PinnedPool
    opener: Worker

    @classmethod
    def make(cls, store: BlobStore, window: int, staging: int, *, pin: bool) -> "StateStaging":
        """Returns one with memory and threads; the caller closes the store if that fails.

        Args:
            store: owned from then on.
            window: bytes of that memory.
            staging: bytes of that memory.
            pin: page-lock the window.
        """
        with contextlib.ExitStack() as undo:
            pools = _make_pools(window, staging, pin=pin)
            for pool in pools:
                undo.callback(pool.close)
            scratch = cls(store, pools[0], Worker("fetcher"), pools[1], Worker("opener"))
            undo.pop_all()
        return scratch

    def with_memory(self, window: int, staging: int, *, pin: bool) -> "StateStaging":
        """Returns the same with memory of other sizes, as in `make`; what it had is in nobody's use, and given back."""
        pools = _make_pools(window, staging, pin=pin)  # first: else all is as it was
        self.window.close()
        self.staging.close()
        return replace(self, window=pools[0], staging=pools[1])

    def close(self, *, remove: bool = True) -> None:
        """Ends the threads and closes the files; no flat is open, and no copy under way.

        Args:
            remove: the files go away.
        """
        with contextlib.ExitStack() as stack:  # from the last line up, each whatever happens to the others
            stack.callback(self.staging.close)
            stack.callback(self.window.close)
            stack.callback(self.store.close, remove=remove)
            stack.callback(self.fetcher.close)
            self.opener.close()

    def detach(self) -> DetachedBlobs:
        """Closes it, and returns what its blobs can be read from."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)  # of all that is left then
            self.opener.close()
            self.fetcher.close()
            return self.store.detach()


def _make_pools(window: int, staging: int, *, pin: bool) -> tuple[PinnedPool, PinnedPool]:
    """Returns memory for weights on their way to the device, and for opened flats."""
    first = PinnedPool(max(window, PAGE), pin=pin, name="model states' window")
    try:
        return first, PinnedPool(max(staging, PAGE), pin=False, name="model states' staging")
    except BaseException:
        first.close()
        raise
