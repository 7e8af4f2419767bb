"""Parametrization over products of values, a part of which is in the default run."""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import combinations as subsets
from itertools import product
from typing import Any

import pytest

__all__ = ["combinations", "thorough"]


def combinations(
    names: str,
    *values: Iterable[Any],
    quick: Collection[tuple[Any, ...]],
    together: int | None = None,
    possible: Callable[..., bool] = lambda *combination: True,
) -> pytest.MarkDecorator:
    """Parametrizes a test over combinations of `values`; those that are not in `quick` are marked `thorough`.

    Args:
        names: names of the test's arguments.
        *values: values of each.
        quick: combinations of the default run.
        together: if given, not all combinations are tested, but enough that any values of so many arguments occur
            together in one.
        possible: whether a combination can be tested.
    """
    every = [combination for combination in product(*values) if possible(*combination)]
    assert all(combination in every for combination in quick)
    chosen = every if together is None else _cover(every, together, [c for c in every if c in quick])
    marked = [combination if combination in quick else thorough(*combination) for combination in chosen]
    return pytest.mark.parametrize(names, marked)


def _cover(
    every: Sequence[tuple[Any, ...]], together: int, chosen: Sequence[tuple[Any, ...]]
) -> Sequence[tuple[Any, ...]]:
    """Adds to `chosen` the combination with the most new sets of `together` values, until there are no new ones."""
    positions = list(subsets(range(len(every[0])), together))

    def parts(combination: tuple[Any, ...]) -> set[tuple[tuple[int, ...], str]]:
        return {(at, repr([combination[index] for index in at])) for at in positions}

    parts_of = [(combination, parts(combination)) for combination in every]
    left = set().union(*(found for _, found in parts_of)).difference(*map(parts, chosen))
    cover = list(chosen)
    while left:
        best, found = max(parts_of, key=lambda item: len(item[1] & left))
        cover.append(best)
        left -= found
    return cover


def thorough(*values: Any, **how: Any) -> Any:
    """Returns the parameters of a test, marked `thorough`."""
    return pytest.param(*values, marks=pytest.mark.thorough, **how)
