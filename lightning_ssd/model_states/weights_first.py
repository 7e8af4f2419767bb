"""Weights first: which units have their compute weights stepped before the rest of their values."""

from time import perf_counter


class WeightsFirst:
    """Chooses the share of units whose deferred steps are made in two parts.

    The next forward waits for the first parts only, so that the more units have two, the sooner it begins; but the
    second parts cost CPU time, and a backward waits for those that are not made when its gradients
    arrive. Other code waits for whole steps, too, such as a callback that reads the weights after every step. The share
    is therefore reduced when training waited, and raised when it did not. It never changes numbers.
    The first units of the forward have two parts before others do: the gradients of the last units arrive first.

    Threads: the training thread, or autograd's while that waits.

    Args:
        units: number of units.
    """

    WAITED = 0.02
    """Share of a step's time that training may wait."""
    DOWN, UP = 0.25, 0.05
    """Changes of the share of units after a step."""

    def __init__(self, units: int) -> None:
        self._units = units
        self._share = 1.0
        self._noted: float | None = None

    def covers(self, unit: int) -> bool:
        """Whether the steps of the unit with this index, in the order of the forward, are made in two parts."""
        return unit < self._share * self._units

    def note(self, waited: float) -> None:
        """Notes the end of a step.

        Args:
            waited: seconds that training has waited for whole steps since the last call.
        """
        now = perf_counter()
        if self._noted is not None:
            if waited > self.WAITED * (now - self._noted):
                self._share = max(0.0, self._share - self.DOWN)
            else:
                self._share = min(1.0, self._share + self.UP)
        self._noted = now
