"""Shapes of batches: one is covered by another that is no smaller anywhere, and bounds the bytes that it saves."""

from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_ssd.autoplan.batches import ROWS, BatchShape, BatchSizes, SeenBatches, row_of, size_of_row

SHAPES = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3)


NESTED = [torch.strided, torch.jagged]
"""Layouts of nested tensors: those of the former have no `shape`."""


def shape(*sizes: tuple[int, ...]) -> BatchShape:
    found = BatchShape.of([torch.empty(size) for size in sizes])
    assert found is not None
    return found


@pytest.mark.parametrize(
    "batch",
    [
        [torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64)],
        {"a": torch.zeros(2, 3), "b": [torch.zeros(4, dtype=torch.int64), "text", 3]},
        UserDict(a=torch.zeros(2, 3), b={"c": torch.zeros(4, dtype=torch.int64)}),
        SimpleNamespace(a=torch.zeros(2, 3), b=SimpleNamespace(c=torch.zeros(4, dtype=torch.int64))),
    ],
)
def test_tensors_of_any_container_count(batch: Any) -> None:
    assert BatchShape.of(batch) == (((2, 3), (4,)), 2 * 3 * 4 + 4 * 8, (24, 32))


@pytest.mark.parametrize(
    "batch",
    [None, 3, ["text"], torch.zeros(2, 2).to_sparse(), {"a": object()}]
    + [torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout) for layout in NESTED],
)
def test_the_shape_of_other_batches_is_unknown(batch: Any) -> None:
    assert BatchShape.of(batch) is None
    assert not SeenBatches().covers(None)


@given(st.lists(SHAPES, min_size=1, max_size=5), SHAPES)
def test_a_batch_is_covered_by_one_that_is_no_smaller_anywhere(earlier: list[Any], later: Any) -> None:
    seen = SeenBatches()
    for sizes in earlier:
        seen.add(shape(*sizes))
    expected = any(
        len(sizes) == len(later)
        and all(len(a) == len(b) for a, b in zip(sizes, later, strict=True))
        and all(x >= y for a, b in zip(sizes, later, strict=True) for x, y in zip(a, b, strict=True))
        for sizes in earlier
    )
    assert seen.covers(shape(*later)) == expected
    assert all(seen.covers(shape(*sizes)) for sizes in earlier)


def test_the_newest_shapes_are_remembered() -> None:
    seen = SeenBatches()
    for rows in range(1, 41):
        seen.add(shape((rows, 41 - rows)))
    assert seen.covers(shape((40, 1))) and not seen.covers(shape((1, 40)))
    assert seen.nbytes == 20 * 21 * 4
    assert seen.is_large(shape((20, 21))) and not seen.is_large(shape((10, 10))) and seen.is_large(None)


Terms = list[tuple[int, int, int]]
"""Saved bytes as a sum: of each term its factor, and its exponents of the rows and the length."""

TERMS = st.lists(st.tuples(st.integers(1, 9), *[st.integers(1, 2)] * 2), min_size=1, max_size=4)
BATCHES = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=30)


def saved_by(terms: Terms, rows: int, length: int) -> int:
    return sum(factor * rows**a * length**b for factor, a, b in terms)


@given(TERMS, BATCHES, st.integers(0, 1000))
def test_batches_save_no_more_than_their_bound(terms: Terms, batches: list[tuple[int, int]], fixed: int) -> None:
    """Each term grows with rows and length, as activations and attention do. A part may not depend on the batch: once a
    second size was seen, bounds allow for it."""
    sizes, seen = BatchSizes(), 0
    for rows, length in batches:
        one, saved = shape((rows, length)), saved_by(terms, rows, length) + fixed
        bound = sizes.bound(one)
        assert bound is None or bound >= saved * (1 - 1e-9) or fixed
        assert bound is not None or seen == 0 or not any(rows <= a and length <= b for a, b in batches[:seen])
        sizes.add(one, saved)
        seen += 1
    assert len(sizes._known) <= BatchSizes.COUNT


def test_a_share_that_does_not_depend_on_the_batch_is_fitted() -> None:
    sizes = BatchSizes()
    sizes.add(shape((8, 8)), 1000)
    assert sizes.bound(shape((4, 8))) == 500
    sizes.add(shape((4, 8)), 750)
    assert sizes.bound(shape((2, 8))) == pytest.approx(625)  # half of the bytes are fixed
    assert sizes.bound(shape((8, 9))) is None


def test_the_tensor_that_has_shrunk_least_bounds_the_saved_bytes() -> None:
    """A decoder may save more than an encoder, but labels of a few bytes save nothing."""
    sizes = BatchSizes()
    sizes.add(shape((8, 8), (8, 8), (1,)), 1000)
    assert sizes.bound(shape((8, 2), (8, 6), (1,))) == 750


@given(st.floats(0.01, 20.0))
def test_a_row_is_for_micro_batches_of_up_to_its_size(size: float) -> None:
    number = row_of(size)
    assert number >= 1 and size <= size_of_row(number) * 1.021
    assert number == 1 or size > size_of_row(number - 1)
    assert row_of(1.0) == ROWS and size_of_row(ROWS) == 1
