"""The staged transfer: from SSDs to host memory, and on to the device.

Saved tensors and model states are read in the same steps: allocate staging memory on a thread that may wait for it,
read, copy to the device, release. Values that are needed on the host are used before the release, without a copy.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_ssd.device.copies import CopyEngine
from lightning_ssd.device.cuda_events import Mark
from lightning_ssd.device.worker import Worker
from lightning_ssd.futures import Future
from lightning_ssd.storage import PinnedBuffer, PinnedPool, Urgency


class StagedReader:
    """Reads into staging memory that it allocates on a thread of its own.

    Threads: `read` may be called on any thread. The reader thread alone waits for memory, so the callers, and the I/O
    threads on which reads end, never do. A returned future is completed on the thread that ends the read, or on the one
    that fails to begin it.

    Ownership: memory belongs to the read until the returned future is done, then to the future's one receiver, which
    releases it (`h2d_and_release` does). The memory of a failed read is released before its future is completed.

    Args:
        pool: staging memory; the caller closes it after `close`.
        name: name of the thread, after `lightning_ssd-`.
    """

    def __init__(self, pool: PinnedPool, name: str) -> None:
        self.pool = pool
        self._worker = Worker(name)

    def read(
        self,
        nbytes: int,
        fill: "Callable[[Tensor], Future[None]]",
        after: "Sequence[Future[Any]]" = (),
        *,
        priority: int = -1,
        urgency: Urgency | None = None,
    ) -> "Future[PinnedBuffer]":
        """Allocates `nbytes` bytes once all of `after` are done, and has `fill` read into them.

        Args:
            fill: called on the reader thread with the memory, `nbytes` rounded up to a page; returns a future that is
                done when no read uses the memory any more.
            after: futures that the read depends on. If one fails, nothing is read and the error is passed on.
            priority: as in `Worker.submit`, among reads that wait for memory.
            urgency: as in `Worker.submit`.
        """
        filled: Future[PinnedBuffer] = Future()

        def begin() -> None:  # on the reader thread
            buffer = self.pool.acquire(nbytes)
            try:
                reading = fill(buffer.tensor)
            except BaseException:
                buffer.release()
                raise
            reading.add_done_callback(lambda reading: end(reading, buffer))

        def end(reading: "Future[None]", buffer: PinnedBuffer) -> None:  # on an I/O thread
            if (error := reading.exception()) is not None:
                buffer.release()
                filled.set_exception(error)
            else:
                filled.set_result(buffer)

        def pass_error(begun: "Future[None]") -> None:
            if (error := begun.exception()) is not None:
                filled.set_exception(error)

        self._worker.submit(begin, after, priority=priority, urgency=urgency).add_done_callback(pass_error)
        return filled

    def close(self) -> None:
        """Ends the thread, and fails all reads that it has not begun; one that waits for memory fails, too."""
        self.pool.refuse()
        self._worker.close()


def h2d_and_release(copies: CopyEngine, buffer: PinnedBuffer, target: Tensor, after: Mark) -> Mark:
    """Copies staging memory to device bytes `target` once `after` is reached.

    The memory belongs to the copy until the returned mark is reached, and is released then; after an error, at once.
    """
    try:
        mark = copies.h2d(buffer.tensor, target, after, awaited=True)
    except BaseException:
        buffer.release()
        raise
    copies.on_h2d(mark).add_done_callback(lambda _: buffer.release())
    return mark
