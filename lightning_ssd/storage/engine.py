"""The engine: I/O threads that serve the requests of every volume, urgent ones first."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch

from lightning_ssd.futures import Future
from lightning_ssd.spans import SSD_READ, SSD_WRITE, span
from lightning_ssd.storage.backend import BackendFile
from lightning_ssd.storage.blob import Piece
from lightning_ssd.storage.checksums import Checksums
from lightning_ssd.storage.errors import StorageError, from_os_error
from lightning_ssd.storage.priority_queue import PriorityQueue
from lightning_ssd.storage.slots import align_up
from lightning_ssd.storage.urgency import Urgency
from lightning_ssd.waits import watch


class Meter:
    """Bytes transferred in one direction, and the seconds during which at least one transfer ran. Thread-safe.

    Attributes:
        running: number of transfers that run now.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.running = 0
        self._since = 0.0
        self._seconds = 0.0
        self._nbytes = 0

    def start(self) -> None:
        """Records the begin of a transfer."""
        with self._lock:
            if self.running == 0:
                self._since = perf_counter()
            self.running += 1

    def stop(self, nbytes: int) -> None:
        """Records the end of a transfer of `nbytes` bytes, 0 if it failed."""
        with self._lock:
            self._nbytes += nbytes
            self.running -= 1
            if self.running == 0:
                self._seconds += perf_counter() - self._since

    def read(self) -> tuple[int, float]:
        """Returns (bytes transferred, seconds with a running transfer) so far."""
        with self._lock:
            running = perf_counter() - self._since if self.running else 0.0
            return self._nbytes, self._seconds + running


class Engine:
    """Transfers pieces between buffers and files on threads of its own.

    Each volume has its own queue and threads, so a slow volume does not delay the others. A thread serves one piece
    at a time: at most `threads` pieces of a volume are in flight. Within a volume urgent requests are served before
    normal ones, and a queued request may become urgent; requests of equal priority are served in the order of their
    submission.

    The engine owns the buffer of a request from submission until the request's future is done or cancelled. Done
    callbacks run on the I/O thread, or, for a cancelled request, on the thread that cancels. No lock is held then.

    Threads are daemons: Python joins other threads before it runs exit handlers, so a store that was never closed
    would hang the interpreter's exit. The store closes the engine in an exit handler instead.

    Args:
        files: path and open file of every volume, in the order of `Piece.volume`. The caller closes them after
            `close`.
        threads: I/O threads per volume.
        checksums: hashes to record at writes and to verify at reads; None: transfers are not hashed.

    Attributes:
        written: meter of all writes so far.
        read: meter of all reads so far.
    """

    def __init__(
        self, files: Sequence[tuple[Path, BackendFile]], *, threads: int, checksums: Checksums | None = None
    ) -> None:
        self.written = Meter()
        self.read = Meter()
        self._checksums = checksums
        self._queues = [_IOQueue(path, file) for path, file in files]
        self._threads = [
            threading.Thread(target=self._work, args=(target,), name=f"lightning_ssd-io-{index}.{number}", daemon=True)
            for index, target in enumerate(self._queues)
            for number in range(threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.close()
            raise
        watch(self)

    def submit(
        self, piece: Piece, buffer: torch.Tensor, *, write: bool, urgency: Urgency | None = None
    ) -> Future[None]:
        """Queues a transfer. Its future has the result None, or a StorageError that names file, offset and remedy.

        Args:
            piece: the piece to transfer.
            buffer: contiguous uint8, at least `piece.nbytes` long. If it extends to the next multiple of 4096, all
                these bytes are transferred, so that O_DIRECT can be used: a read overwrites the padding, too.
            write: True: from the buffer to the file; False: from the file to the buffer.
            urgency: tells when a thread or stream begins to wait for the transfer, which then precedes normal ones.

        Raises:
            StorageError: the engine is closed.
        """
        request = _Request(piece, buffer, write)
        target = self._queues[piece.volume]
        if not target.queue.put(request, 0 if urgency is not None and urgency.urgent else 1):
            raise StorageError(f"the store is closed: {target.path} takes no more transfers")
        if urgency is not None:
            urgency.on_wait(request, lambda queued: target.queue.promote(queued, 0))
        return request

    def close(self) -> None:
        """Cancels queued requests, waits for running ones, and ends the threads. Idempotent."""
        for target in self._queues:
            for request in target.queue.close():
                request.cancel()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():  # a callback may close the store
                thread.join()

    def progress(self) -> tuple[int, ...]:
        """Returns the bytes that were written and read (`waits.Watched`)."""
        return self.written.read()[0], self.read.read()[0]

    def pending(self) -> str:
        """Returns the directions in which transfers run (`waits.Watched`)."""
        running = [name for name, meter in (("writes", self.written), ("reads", self.read)) if meter.running]
        return f"{' and '.join(running)} of {', '.join(str(one.path) for one in self._queues)}" if running else ""

    def _work(self, target: _IOQueue) -> None:
        while (request := target.queue.get()) is not None:
            if request.begin():
                try:
                    self._serve(target, request)
                except Exception as error:  # a bug outside `_transfer`: a future that is never done would hang training
                    if not request.done():
                        request.set_exception(error)
            del request  # an idle thread must not keep the last request's buffer alive

    def _serve(self, target: _IOQueue, request: _Request) -> None:
        meter = self.written if request.write else self.read
        failure: StorageError | None = None
        meter.start()
        try:
            with span(SSD_WRITE if request.write else SSD_READ, request.piece.nbytes):
                self._transfer(target, request)
        except StorageError as error:
            failure = error
        except Exception as error:
            failure = _explain(error, target.path, request)
        meter.stop(0 if failure else request.piece.nbytes)
        request.buffer = None
        if failure is None:
            request.set_result(None)
        else:
            request.set_exception(failure)

    def _transfer(self, target: _IOQueue, request: _Request) -> None:
        piece, buffer = request.piece, request.buffer
        assert buffer is not None
        padded = align_up(piece.nbytes)
        size = padded if buffer.numel() >= padded else piece.nbytes
        part = buffer if buffer.numel() == size else buffer[:size]
        if request.write:
            if self._checksums is not None:
                self._checksums.record(piece, buffer)
            transferred = target.file.write(part, piece.offset)
        else:
            transferred = target.file.read(part, piece.offset)
        if transferred != size:
            raise StorageError(
                f"{request.verb} only {transferred} of {size} bytes at offset {piece.offset} of {target.path}. "
                "The scratch file was truncated, or the drive is failing: look at `dmesg`."
            )
        if not request.write and self._checksums is not None:
            self._checksums.verify(piece, buffer, target.path)


class _Request(Future[None]):
    """The future of a queued transfer. It owns the buffer from submission until it is done."""

    def __init__(self, piece: Piece, buffer: torch.Tensor, write: bool) -> None:
        super().__init__()
        self.piece = piece
        self.buffer: torch.Tensor | None = buffer
        self.write = write

    @property
    def verb(self) -> str:
        return "wrote" if self.write else "read"

    def cancel(self) -> bool:
        """Cancels a queued transfer and drops its buffer. Returns False if the transfer runs or is done."""
        if not super().cancel():
            return False
        self.buffer = None
        return True


@dataclass(frozen=True)
class _IOQueue:
    """One volume: its scratch file, and the requests that its threads serve."""

    path: Path
    file: BackendFile
    queue: PriorityQueue[_Request] = field(default_factory=PriorityQueue)


def _explain(error: Exception, path: Path, request: _Request) -> StorageError:
    piece = request.piece
    action = f"{'write' if request.write else 'read'} {piece.nbytes} bytes at offset {piece.offset}"
    if isinstance(error, OSError):
        explained = from_os_error(error, action, path)
    else:  # errors of a backend's library have classes of their own
        explained = StorageError(f"could not {action} in {path}: {error}. Check the drive, or use backend='posix'.")
    explained.__cause__ = error
    return explained
