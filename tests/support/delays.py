"""Copies and transfers that are delayed at random. For GPU tests."""

import random
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ssd.device import CUDACopyEngine, Mark
from tests.support.faults import Move, Operation, WrappingBackend

DELAYS = random.Random()
"""Draws the delays. The default generator is the training's: a layer that has changed it can't be run again."""


class SlowCopies(CUDACopyEngine):
    """Delays every copy, and every wait of the compute stream, by a random time on the GPU."""

    def mark(self, *, awaited: bool = False) -> Mark:
        self._hold(torch.cuda.current_stream())
        return super().mark(awaited=awaited)

    def d2h(self, src: Tensor, dst: Tensor, after: Mark, *, awaited: bool = False) -> Mark:
        if after is None:
            self._hold(torch.cuda.current_stream())
        self._hold(self._out._stream)
        return super().d2h(src, dst, after, awaited=awaited)

    def d2h_each(self, sources: Sequence[Tensor], dst: Tensor, starts: Sequence[int], *, awaited: bool = False) -> Mark:
        self._hold(torch.cuda.current_stream())
        self._hold(self._out._stream)
        return super().d2h_each(sources, dst, starts, awaited=awaited)

    def h2d(self, src: Tensor, dst: Tensor, after: Mark, *, awaited: bool = False) -> Mark:
        if after is None:
            self._hold(torch.cuda.current_stream())
        self._hold(self._in._stream)
        return super().h2d(src, dst, after, awaited=awaited)

    def d2d(self, src: Tensor, dst: Tensor) -> None:
        self._hold(torch.cuda.current_stream())
        super().d2d(src, dst)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        self._hold(torch.cuda.current_stream())
        super().copy(to, source, nbytes)

    @staticmethod
    def _hold(stream: torch.cuda.Stream) -> None:
        if DELAYS.random() < 0.3:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(DELAYS.randrange(2_000_000))


class SlowBackend(WrappingBackend):
    """Delays every I/O by a random time, which simulates a slow drive; the test does not wait by it."""

    name = "slow"

    def transfer(self, operation: Operation, call: Move, buffer: Tensor, offset: int) -> int:
        time.sleep(DELAYS.random() * 2e-3)
        return call(buffer, offset)
