"""Device memory of gradients whose copies to the host are in flight."""

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from lightning_ssd.device import CopyEngine, Mark


class CopiesInFlight:
    """Keeps device bytes alive until the compute stream is ordered after their copies. Copies end in order.

    Threads: the training thread, or autograd's while that waits.

    Attributes:
        group_bytes: bytes of gradients that are copied together.
    """

    MAX_BYTES = 256 * 2**20
    """Most bytes of gradients on the device, in flight or waiting to be copied together with others."""

    def __init__(self, copies: CopyEngine) -> None:
        self.group_bytes = self.MAX_BYTES // 4
        self._copies = copies
        self._in_flight: deque[tuple[Sequence[Tensor], Mark, int]] = deque()
        self._nbytes = 0

    def add(self, tensors: Sequence[Tensor], mark: Mark) -> None:
        """Owns tensors on the device until the compute stream waits for `mark`, the mark of their copies.

        The compute stream is ordered after the oldest copies, whose memory is freed, if others would have no room.
        """
        nbytes = sum([tensor.nbytes for tensor in tensors])
        self._in_flight.append((tensors, mark, nbytes))
        self._nbytes += nbytes
        while self._nbytes > self.MAX_BYTES - self.group_bytes and len(self._in_flight) > 1:
            tensors, mark, nbytes = self._in_flight.popleft()
            self._nbytes -= nbytes
            self._copies.wait(mark)

    def release(self) -> None:
        """Orders the compute stream after all copies, and frees their memory."""
        if self._in_flight:
            self._copies.wait(self._in_flight[-1][1])
            self._in_flight.clear()
            self._nbytes = 0
