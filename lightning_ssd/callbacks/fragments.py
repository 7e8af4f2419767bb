"""`FragmentCheck`: finds steps in which the allocator frees its cached memory, since fragments of it are too small.

Each of these retried allocations waits for the device and maps memory anew, for 12 ms in a Llama of 1.21B in 24 GiB
(benchmarks/results/bounds.md). A few of them after another rule is in force may leave the memory less fragmented.
"""

from lightning_ssd.activations import AllocatorMeter
from lightning_ssd.callbacks.plan_runner import WARMUP_AFTER_CHANGE

__all__ = ["FRAGMENT_RESERVE_STEP", "MAX_FRAGMENT_RESERVE", "RETRY_SECONDS", "FragmentCheck", "is_fragmented"]

MAX_RETRY_RATE = 0.1
"""Retried allocations per step (fragments were too small) above which plans reserve more memory for fragments."""

RETRY_SECONDS = 0.012
"""Duration of a retried allocation."""

FRAGMENT_RESERVE_STEP = 0.04
"""Share of the GPU limit by which the reserve for fragments grows each time."""

MAX_FRAGMENT_RESERVE = 0.2
"""Largest reserve for fragments / GPU limit."""

CHECKED_STEPS = 20
"""Steps in which retried allocations are counted."""


def is_fragmented(retries: int, num_steps: int) -> bool:
    """Returns whether so many allocations were retried in `num_steps` steps that plans should leave more memory."""
    return retries > MAX_RETRY_RATE * max(num_steps, CHECKED_STEPS)


class FragmentCheck:
    """Counts the allocations of steps under one rule for which the allocator had to free its cached memory.

    Args:
        meter: the device's allocator.
    """

    def __init__(self, meter: AllocatorMeter) -> None:
        self._meter = meter
        self.restart()

    def restart(self) -> None:
        """Another rule is in force: the allocator moves memory in the next steps, which are not counted."""
        self._num_steps = -WARMUP_AFTER_CHANGE
        self._retries = 0

    def end_step(self) -> bool:
        """Called when a step has ended; returns whether many of the last steps have retried allocations."""
        self._num_steps += 1
        if self._num_steps == 0:
            self._retries = self._meter.retries()
        if self._num_steps < CHECKED_STEPS:
            return False
        retries = self._meter.retries() - self._retries
        self._num_steps, self._retries = 0, self._retries + retries
        return is_fragmented(retries, CHECKED_STEPS)
