"""Owners: the rank that sums the gradient of a flat parameter and steps it."""

from collections.abc import Sequence


def choose_owners(numels: Sequence[int], size: int) -> list[int]:
    """Returns the owner of each flat parameter: the largest first, to the rank with the fewest elements so far.

    Args:
        numels: elements of each flat parameter.
        size: number of ranks.
    """
    owners, loads = [0] * len(numels), [0] * size
    for index in sorted(range(len(numels)), key=lambda index: -numels[index]):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += numels[index]
    return owners
