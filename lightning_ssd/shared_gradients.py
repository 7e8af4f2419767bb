"""Host memory that gradients share: the engine allocates it, and plans count it."""

from collections.abc import Iterable

AT_ONCE = 6
"""Gradients that shared memory holds at least: some arrive, some are stepped, some wait."""

SHARE = 16
"""Divisor of the bytes of all gradients: shared memory holds at least this part of them."""


def shared_gradient_bytes(sizes: Iterable[int]) -> int:
    """Returns the bytes of memory that gradients of `sizes` bytes share: that of all of them at most."""
    largest_first = sorted(sizes, reverse=True)
    total = sum(largest_first)
    return min(total, max(total // SHARE, sum(largest_first[:AT_ONCE])))
