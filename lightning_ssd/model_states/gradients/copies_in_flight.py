"""Device memory of gradients whose copies to the host are in flight."""

from collections import deque

from torch import Tensor

from lightning_ssd.device import CopyEngine, Mark


class CopiesInFlight:
    """Keeps device bytes alive until the compute stream is ordered after their copies. Copies end in order.

    Threads: the training thread, or autograd's while that waits.
    """

    MAX_BYTES = 256 * 2**20
    """Most bytes of gradients on the device whose copies are in flight."""

    def __init__(self, copies: CopyEngine) -> None:
        self._copies = copies
        self._in_flight: deque[tuple[Tensor, Mark]] = deque()
        self._nbytes = 0

    def add(self, data: Tensor, mark: Mark) -> None:
        """Owns device bytes until the compute stream waits for `mark`, the mark of their copy.

        The compute stream is ordered after the oldest copies above `MAX_BYTES`, whose memory is freed.
        """
        self._in_flight.append((data, mark))
        self._nbytes += data.numel()
        while self._nbytes > self.MAX_BYTES and len(self._in_flight) > 1:
            data, mark = self._in_flight.popleft()
            self._nbytes -= data.numel()
            self._copies.wait(mark)

    def release(self) -> None:
        """Orders the compute stream after all copies, and frees their memory."""
        if self._in_flight:
            self._copies.wait(self._in_flight[-1][1])
            self._in_flight.clear()
            self._nbytes = 0
