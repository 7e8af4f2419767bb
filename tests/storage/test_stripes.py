"""Each volume gets bytes in proportion to its speed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_ssd.storage.stripes import Stripes

WEIGHTS = st.lists(st.floats(0.5, 8.0), min_size=1, max_size=5)


@given(WEIGHTS, st.lists(st.integers(1, 64), min_size=1, max_size=200))
def test_shares_follow_the_weights(weights: list[float], sizes: list[int]) -> None:
    stripes = Stripes(weights)
    taken = [0] * len(weights)
    for size in sizes:
        first = stripes.order(size)[0]
        stripes.record(first, size)
        taken[first] += size
    seconds = [nbytes / weight for nbytes, weight in zip(taken, weights, strict=True)]
    # At any time, the volumes would finish their shares within the time of one piece of each other.
    assert max(seconds) - min(seconds) <= max(sizes) / min(weights) + 1e-6


@given(WEIGHTS)
def test_every_volume_is_offered(weights: list[float]) -> None:
    assert sorted(Stripes(weights).order(1)) == list(range(len(weights)))


def test_a_volume_that_was_full_catches_up_by_one_piece_only() -> None:
    stripes = Stripes([1.0, 1.0])
    for _ in range(1000):
        stripes.record(0, 10)  # volume 1 was full all the while
    firsts = []
    for _ in range(10):
        first = stripes.order(10)[0]
        stripes.record(first, 10)
        firsts.append(first)
    assert firsts.count(0) >= 4
