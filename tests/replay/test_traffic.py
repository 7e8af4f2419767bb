"""Bandwidth over time: no byte of a step's transfers is lost or counted twice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ssd.replay import DIRECTIONS, Traffic
from lightning_ssd.replay.traffic import Transfer


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9), st.integers(1, 10**9)), max_size=9),
    st.integers(1, 70),
)
def test_intervals_have_all_bytes(spans: list[tuple[float, float, int]], count: int) -> None:
    row = [Transfer(min(one, other), max(one, other), nbytes) for one, other, nbytes in spans]
    found = Traffic(9.0, dict.fromkeys(DIRECTIONS, row))
    total = sum(found.bandwidth("copy in", count)) * 9.0 / count
    assert total == pytest.approx(sum(nbytes for _, _, nbytes in spans))
    assert found.mean("copy in") == pytest.approx(total / 9.0)
