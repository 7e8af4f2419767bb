"""Striping: the choice of a volume for each piece, so that volumes get bytes in proportion to their bandwidth."""

from __future__ import annotations

from collections.abc import Sequence


class Stripes:
    """Weighted round robin by bytes.

    Every volume has a clock that advances by bytes / weight with each piece on it. The next piece is assigned to the
    volume that would finish it first. Clocks continue from blob to blob, so blobs of one piece are striped as well.

    Args:
        weights: relative speed of each volume, positive.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = list(weights)
        self._clocks = [0.0] * len(self._weights)

    def order(self, nbytes: int) -> list[int]:
        """Returns the indices of all volumes, the best one for a piece of `nbytes` first."""
        return sorted(range(len(self._weights)), key=lambda volume: self._finish(volume, nbytes))

    def record(self, volume: int, nbytes: int) -> None:
        """Records a piece of `nbytes` on `volume`."""
        self._clocks[volume] = self._finish(volume, nbytes)
        # A volume that was full for a while must not get all pieces when it has room again.
        lag = nbytes / min(self._weights)
        oldest = self._clocks[volume] - lag
        self._clocks = [max(clock, oldest) for clock in self._clocks]

    def _finish(self, volume: int, nbytes: int) -> float:
        return self._clocks[volume] + nbytes / self._weights[volume]
