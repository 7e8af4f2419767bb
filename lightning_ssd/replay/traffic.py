"""Bandwidth over time: the transfers of a simulated step (Teraio, figure 8)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

DIRECTIONS = ("copy out", "SSD write", "copy in", "SSD read")
"""Directions of transfers: the first two are from the GPU, the others to it. The names are those of a timeline."""


class Transfer(NamedTuple):
    """Bytes that are transferred from `start` to `end`, seconds from the begin."""

    start: float
    end: float
    nbytes: float


@dataclass(frozen=True)
class Traffic:
    """The transfers of a step.

    Attributes:
        seconds: duration of the step.
        transfers: transfers of each direction in `DIRECTIONS`.
    """

    seconds: float
    transfers: Mapping[str, Sequence[Transfer]]

    def mean(self, direction: str) -> float:
        """Returns the mean bytes/s of a direction."""
        return sum(one.nbytes for one in self.transfers[direction]) / self.seconds

    def bandwidth(self, direction: str, count: int) -> list[float]:
        """Returns the bytes/s of a direction in each of `count` equal intervals."""
        width = self.seconds / count
        nbytes = [0.0] * count
        for start, end, size in self.transfers[direction]:
            first, last = (min(count - 1, max(0, int(one / width))) for one in (start, end))
            for index in range(first, last + 1):
                inside = min(end, (index + 1) * width) - max(start, index * width)
                nbytes[index] += size * (inside / (end - start) if last > first else 1.0)
        return [max(0.0, one) / width for one in nbytes]
