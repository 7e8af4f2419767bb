"""Stripes: which volume takes the next piece, so that each gets bytes in proportion to its bandwidth."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Stripes"]


class Stripes:
    """Weighted round robin by bytes.

    Every volume has a clock that advances by bytes / weight with each piece it takes; the next piece goes
    where it would be finished first. Clocks run on from blob to blob, so blobs of one piece are spread as
    well.

    Args:
        weights: relative speed of each volume, positive.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = list(weights)
        self._clocks = [0.0] * len(self._weights)

    def order(self, nbytes: int) -> list[int]:
        """Returns all volumes, the one that should take a piece of `nbytes` first."""
        return sorted(range(len(self._weights)), key=lambda volume: self._finish(volume, nbytes))

    def take(self, volume: int, nbytes: int) -> None:
        """Notes that `volume` takes a piece of `nbytes`."""
        self._clocks[volume] = self._finish(volume, nbytes)
        # A volume that was full while others took its share must not get everything when it has room again.
        lag = nbytes / min(self._weights)
        oldest = self._clocks[volume] - lag
        self._clocks = [max(clock, oldest) for clock in self._clocks]

    def _finish(self, volume: int, nbytes: int) -> float:
        return self._clocks[volume] + nbytes / self._weights[volume]
