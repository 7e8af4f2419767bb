"""Parametrization over products of values, a part of which is in the default run."""

from collections.abc import Callable, Collection, Iterable
from itertools import product
from typing import Any

import pytest

__all__ = ["combinations", "thorough"]


def combinations(
    names: str,
    *values: Iterable[Any],
    quick: Collection[tuple[Any, ...]],
    possible: Callable[..., bool] = lambda *combination: True,
) -> pytest.MarkDecorator:
    """Parametrizes a test over combinations of `values`; those that are not in `quick` are marked `thorough`.

    Args:
        names: names of the test's arguments.
        *values: values of each.
        quick: combinations of the default run.
        possible: whether a combination can be tested.
    """
    every = [combination for combination in product(*values) if possible(*combination)]
    assert all(combination in every for combination in quick)
    marked = [combination if combination in quick else thorough(*combination) for combination in every]
    return pytest.mark.parametrize(names, marked)


def thorough(*values: Any, **how: Any) -> Any:
    """Returns the parameters of a test, marked `thorough`."""
    return pytest.param(*values, marks=pytest.mark.thorough, **how)
