"""The SSD tier: saved tensors in scratch files, transferred through pinned staging buffers.

A storage is offloaded in pieces (the blob's stripes). The training thread allocates a staging buffer for each piece and
issues the d2h copy. When the copy is done, the piece is written, and then the buffer is released. For a load, a reader
thread allocates a buffer and reads the piece into it, the h2d copy is issued, and then the buffer is released.

Ownership of a staging buffer:
  offload: the d2h copy owns it until its mark is reached, then the write request until its future is done.
  load: the staged read owns it until its future is done, then the h2d copy until its mark is reached; see
    `device/staging.py`.
  forwarding: a load of a piece that is not written yet adds a reference to its buffer, and copies from there.
No owner of a buffer waits for another buffer, and each ownership ends by the progress of the GPU or the SSD alone. So
waiting for staging memory can't deadlock, even with a pool of one piece.
"""

import contextlib
import threading
from concurrent.futures import CancelledError
from functools import partial

from torch import Tensor

from lightning_ssd.activations.ssd_base import SSDTierBase
from lightning_ssd.activations.tier import Load, StoredCopy
from lightning_ssd.device import CopyEngine, Mark, StagedReader, h2d_and_release
from lightning_ssd.futures import Future
from lightning_ssd.storage import Blob, BlobStore, Piece, PinnedBuffer, PinnedPool, StorageError, Urgency
from lightning_ssd.waits import wait_for


class SSDTier(SSDTierBase):
    """Scratch files as a tier.

    Args:
        store: scratch space; owned.
        staging: pinned staging memory, with a budget of at least `store.piece_bytes`; owned.
    """

    def __init__(self, store: BlobStore, staging: PinnedPool, copies: CopyEngine) -> None:
        super().__init__(store, copies)
        self.staging = staging
        self._error: BaseException | None = None
        self._reader = StagedReader(staging, "saved-reader")

    def store(self, data: Tensor, *, may_wait: bool) -> StoredCopy | None:
        if self._error is not None:
            raise self._error
        blob = self._allocate(data.numel(), may_wait=may_wait)
        if blob is None:
            return None
        buffers = [] if may_wait else self._try_acquire_all(blob)
        if buffers is None:
            self.blobs.free(blob)
            return None
        copy = _SSDCopy(self, blob)
        produced = self._copies.mark()
        for index, piece in enumerate(blob.pieces):
            buffer = buffers[index] if buffers else self.staging.acquire(piece.nbytes)
            source = data[piece.start : piece.start + piece.nbytes]
            copy.begin(piece, buffer, self._copies.d2h(source, buffer.tensor, after=produced, awaited=True))
        self.bytes_out += data.numel()
        return copy

    @property
    def host_bytes(self) -> int:
        return self.staging.slab_total

    @property
    def host_limit(self) -> int:
        return self.staging.budget

    def peak_pinned_bytes(self) -> int:
        return self.staging.peak_bytes

    def reset_peak(self) -> None:
        self.staging.reset_peak()

    def trim(self) -> None:
        self.staging.trim()

    def close(self) -> None:
        self._reader.close()
        with contextlib.ExitStack() as stack:  # closes from the last line up, each even if another one fails
            stack.callback(self.staging.close)
            stack.callback(self._copies.drain)  # finished reads have issued h2d copies
            stack.callback(self.blobs.close)
            stack.callback(self._copies.drain)  # callbacks of d2h copies submit writes to the store

    def _try_acquire_all(self, blob: Blob) -> list[PinnedBuffer] | None:
        """Allocates the staging buffers of all pieces without waiting, or none of them."""
        buffers: list[PinnedBuffer] = []
        for piece in blob.pieces:
            buffer = self.staging.try_acquire(piece.nbytes)
            if buffer is None:
                for buffer in buffers:
                    buffer.release()
                return None
            buffers.append(buffer)
        return buffers

    def read(self, piece: Piece, urgency: Urgency) -> "Future[PinnedBuffer]":
        """Reads a piece into staging memory. Urgent reads are served first, others in the order of the calls."""
        fill = partial(self.blobs.read, piece, urgency=urgency)
        return self._reader.read(piece.nbytes, fill, urgency=urgency)


class _SSDCopy(StoredCopy):
    """The pieces of one storage on the SSD, or being written."""

    def __init__(self, tier: SSDTier, blob: Blob) -> None:
        self.tier = tier
        self.blob = blob
        self.last_copied: Mark = None
        self.writes: list[_PieceWrite] = []
        # Guards `_unfinished` and `freed`: writes end on I/O threads, `free` is called on the training thread.
        self._lock = threading.Lock()
        self._unfinished = len(blob.pieces)
        self.freed = False
        self._space_freed: Future[None] = Future()
        """Done when the space of a copy that was freed during a write can be reused."""

    def begin(self, piece: Piece, buffer: PinnedBuffer, copied: Mark) -> None:
        write = _PieceWrite(self, piece, buffer)
        self.writes.append(write)
        self.last_copied = copied
        self.tier._copies.on_d2h(copied).add_done_callback(write.start)

    def wait_copied(self) -> Mark:
        self.tier._copies.wait(self.last_copied)
        return self.last_copied

    def load(self, *, urgent: bool) -> Load:
        self.tier.bytes_in += self.blob.nbytes
        return _SSDLoad(self, urgent)

    def free(self) -> None:
        with self._lock:
            self.freed = True
            finished = self._unfinished == 0
        if finished:
            self.tier.blobs.free(self.blob)
        else:
            being_freed = self.tier._being_freed
            while being_freed and being_freed[0].done():
                being_freed.popleft()
            being_freed.append(self._space_freed)
            for write in self.writes:
                write.cancel()

    def write_ended(self) -> None:
        with self._lock:
            self._unfinished -= 1
            finished = self.freed and self._unfinished == 0
        if finished:
            self.tier.blobs.free(self.blob)
            self._space_freed.set_result(None)


class _PieceWrite:
    """The write of one piece from its staging buffer to the SSD. Owns a reference to the buffer until it has ended."""

    def __init__(self, copy: _SSDCopy, piece: Piece, buffer: PinnedBuffer) -> None:
        self._copy = copy
        self.piece = piece
        self.buffer = buffer
        self.done: Future[None] = Future()
        """Done when the piece is on the SSD, failed, or cancelled."""
        self._request: Future[None] | None = None

    def start(self, copied: Future[None]) -> None:
        """Called when the d2h copy is done. The staging buffer has the bytes then, unless the copy failed."""
        if self._copy.freed:
            self.done.cancel()
            self._end()
            return
        try:
            copied.result()
            self._request = self._copy.tier.blobs.write(self.piece, self.buffer.tensor)
        except Exception as error:
            self._fail(error)
            self._end()
        else:
            self._request.add_done_callback(self._written)

    def cancel(self) -> None:
        """Cancels a queued write. A running one continues."""
        if self._request is not None:
            self._request.cancel()

    def _written(self, request: Future[None]) -> None:
        if request.cancelled():
            self.done.cancel()
        elif (error := request.exception()) is not None:
            self._fail(error)
        else:
            self.done.set_result(None)
        self._end()

    def _fail(self, error: BaseException) -> None:
        """Makes the next store of the tier, and loads of this piece, raise an error."""
        self._copy.tier._error = self._copy.tier._error or error
        self.done.set_exception(error)

    def _end(self) -> None:
        self.buffer.release()
        self._copy.write_ended()


class _SSDLoad(Load):
    def __init__(self, copy: _SSDCopy, urgent: bool) -> None:
        self._urgency = Urgency(urgent=urgent)
        self._copies = copy.tier._copies
        self._tier = copy.tier
        self.data = self._copies.empty(copy.blob.nbytes)
        # The compute stream may still use the memory for its last owner: h2d copies wait for this mark.
        self._allocated = self._copies.mark()
        self._arrived: Mark = None
        self._issued: Future[None] = Future()
        """Done when the h2d copies of all pieces are issued, or one piece failed and all others have ended."""
        # Guards `_missing`, `_error` and the order of `_arrived`: pieces end on I/O threads.
        self._lock = threading.Lock()
        self._missing = len(copy.writes)
        self._error: BaseException | None = None
        for write in copy.writes:
            self._begin(write)

    @property
    def issued(self) -> bool:
        return self._issued.done()

    def wait(self) -> Mark:
        try:
            if not self._issued.done():
                self._urgency.begin_wait()
            wait_for(self._issued, "saved tensors")
        finally:  # also after an error, copies of other pieces may still write to `data`
            self._copies.wait(self._arrived)
        return self._arrived

    def _begin(self, write: _PieceWrite) -> None:
        if not write.done.done() and write.buffer.try_retain():
            # Not written yet: forward it from the staging buffer. The compute stream was ordered after the d2h copy
            # when the source was dropped, and `_allocated` was recorded after that: the buffer has the bytes by then.
            self._h2d(write.piece, write.buffer)
        elif write.done.done():
            self._read(write)
        else:
            write.done.add_done_callback(lambda _: self._read(write))

    def _read(self, write: _PieceWrite) -> None:
        if write.done.cancelled():
            self._fail(StorageError("a saved tensor was read after its store was cancelled"))
        elif (error := write.done.exception()) is not None:
            self._fail(error)
        else:
            read = self._tier.read(write.piece, self._urgency)
            read.add_done_callback(partial(self._piece_read, write.piece))

    def _piece_read(self, piece: Piece, read: "Future[PinnedBuffer]") -> None:
        try:
            buffer = read.result()
        except CancelledError:
            self._fail(StorageError("a saved tensor was still being read from the SSD when training ended"))
        except Exception as error:
            self._fail(error)
        else:
            self._h2d(piece, buffer)

    def _h2d(self, piece: Piece, buffer: PinnedBuffer) -> None:
        """Issues the h2d copy of a piece, which owns `buffer` from then on."""
        target = self.data[piece.start : piece.start + piece.nbytes]
        try:
            with self._lock:
                # Issued and recorded under one lock, so that `_arrived` is the last of these copies on the h2d stream.
                self._arrived = h2d_and_release(self._copies, buffer, target, self._allocated)
        except Exception as error:  # a lost device: the error is raised on the thread that waits for the load
            self._fail(error)
        else:
            self._piece_ended()

    def _fail(self, error: BaseException) -> None:
        """Records the error of one piece."""
        with self._lock:
            self._error = self._error or error
        self._piece_ended()

    def _piece_ended(self) -> None:
        with self._lock:
            self._missing -= 1
            last = self._missing == 0
        if last and self._error is not None:
            self._issued.set_exception(self._error)
        elif last:
            self._issued.set_result(None)
