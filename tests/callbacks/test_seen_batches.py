"""`SeenBatches`: a batch is covered if no dimension of its tensors is larger than that of an earlier batch."""

from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_ssd.callbacks.seen_batches import BatchShape, SeenBatches

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
    assert BatchShape.of(batch) == (((2, 3), (4,)), 2 * 3 * 4 + 4 * 8)


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
