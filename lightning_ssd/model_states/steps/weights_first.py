"""Weights first: which units have their compute weights stepped before the rest of their values."""

from time import perf_counter


class WeightsFirst:
    """Chooses the share of units whose deferred steps are made in two parts, which does not change numbers.

    The next forward waits for the first parts only: it begins sooner if more units have two parts. But the second parts
    cost CPU time, and training waits for those that are not made in time. Backward waits when it has a gradient whose
    host memory the last step still uses; this counts from when the device has run all kernels that were issued. Other
    code waits, too, such as a callback that reads the weights after every step. So the share is reduced after a step in
    which training waited, and raised after others. The first units of the forward are the first to have two parts,
    because the gradients of the last units arrive first.

    Steps of several ranks have one part: the host's memory, which they share, bounds them.

    Threads: the training thread, or autograd's while that waits.

    Args:
        units: number of units.
    """

    WAITED = 0.02
    """Share of a step's time that training may wait."""
    DOWN, UP = 0.1, 0.05
    """Changes of the share of units after a step."""

    def __init__(self, units: int) -> None:
        self._units = units
        self._share = 1.0
        self._noted: float | None = None

    def covers(self, unit: int) -> bool:
        """Returns whether the steps of a unit, by its index in the order of the forward, are made in two parts."""
        return unit < self._share * self._units

    def note(self, waited: float) -> None:
        """Adapts the share to a step that has ended.

        Args:
            waited: seconds since the last call that the device, in backward, or other code has waited for steps.
        """
        now = perf_counter()
        if self._noted is not None:
            if waited > self.WAITED * (now - self._noted):
                self._share = max(0.0, self._share - self.DOWN)
            else:
                self._share = min(1.0, self._share + self.UP)
        self._noted = now
