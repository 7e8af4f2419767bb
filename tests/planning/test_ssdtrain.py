"""SSDTrain's rule for the amount to offload."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ssd.planning import TierSpeed, offload_amounts

BANDWIDTH = st.floats(1.0, 1e11)
SECONDS = st.floats(-0.1, 100.0)  # stalls are subtracted from measured times: rounding may make the difference negative
BYTES = st.integers(0, 2**40)
SPEED = st.builds(TierSpeed, BANDWIDTH, BANDWIDTH, st.one_of(st.just(float("inf")), st.floats(0, 2**40)))
SPEEDS = st.dictionaries(st.sampled_from(["host", "ssd", "third"]), SPEED, min_size=1)
ROUNDING = 1 + 1e-9


@given(BYTES, SECONDS, SECONDS, SPEEDS)
def test_no_more_than_there_is_and_than_can_be_carried(
    saved: int, forward: float, backward: float, speeds: dict[str, TierSpeed]
) -> None:
    """No tier gets more bytes than were saved, than fit, than it writes in forward or reads in backward."""
    amounts = offload_amounts(saved, forward, backward, speeds)
    assert list(amounts) == list(speeds)
    assert sum(amounts.values()) <= saved
    for tier, amount in amounts.items():
        speed = speeds[tier]
        assert isinstance(amount, int)
        assert 0 <= amount <= max(0.0, ROUNDING * min(speed.write * forward, speed.read * backward))
        assert amount <= speed.capacity


@given(BYTES, SECONDS, SECONDS, SPEEDS)
def test_tiers_share_the_link(saved: int, forward: float, backward: float, speeds: dict[str, TierSpeed]) -> None:
    """All tiers together get no more bytes than the fastest alone could, because they share a link."""
    total = sum(offload_amounts(saved, forward, backward, speeds).values())
    out = max(0.0, forward) * max(speed.write for speed in speeds.values())
    back = max(0.0, backward) * max(speed.read for speed in speeds.values())
    assert total <= ROUNDING * min(out, back)


@given(BYTES, SECONDS, SECONDS, SPEEDS, st.floats(1.0, 10.0), st.sampled_from(["write", "read", "capacity"]), st.data())
def test_a_faster_or_larger_tier_offloads_no_less(
    saved: int,
    forward: float,
    backward: float,
    speeds: dict[str, TierSpeed],
    factor: float,
    field: str,
    data: Any,
) -> None:
    """A faster or larger tier never reduces the offloaded bytes, neither its own nor the sum."""
    tier = data.draw(st.sampled_from(sorted(speeds)))
    old = speeds[tier]
    fields = {"write": old.write, "read": old.read, "capacity": old.capacity}
    better = speeds | {tier: TierSpeed(**(fields | {field: factor * fields[field]}))}
    before = offload_amounts(saved, forward, backward, speeds)
    after = offload_amounts(saved, forward, backward, better)
    slack = len(speeds)  # each amount is rounded down to a byte
    assert after[tier] >= before[tier] - slack
    assert sum(after.values()) >= sum(before.values()) - slack


@given(BYTES, SECONDS, SECONDS, SPEEDS, st.floats(1.0, 10.0))
def test_longer_compute_hides_more(
    saved: int, forward: float, backward: float, speeds: dict[str, TierSpeed], factor: float
) -> None:
    """Twice the compute hides no less."""
    short = offload_amounts(saved, abs(forward), abs(backward), speeds)
    long = offload_amounts(saved, factor * abs(forward), factor * abs(backward), speeds)
    assert sum(long.values()) >= sum(short.values()) - len(speeds)


@pytest.mark.parametrize(
    ("saved", "forward", "backward", "speeds", "amounts"),
    [
        (1000, 1.0, 2.0, {"ssd": TierSpeed(100, 100)}, {"ssd": 100}),  # the write bounds
        (1000, 1.0, 2.0, {"ssd": TierSpeed(400, 100)}, {"ssd": 200}),  # the read bounds
        (1000, 1.0, 2.0, {"ssd": TierSpeed(9999, 9999, 300)}, {"ssd": 300}),  # the capacity bounds
        (1000, 1.0, 2.0, {"ssd": TierSpeed(9999, 9999)}, {"ssd": 1000}),  # all saved bytes
        (0, 1.0, 2.0, {"ssd": TierSpeed(100, 100)}, {"ssd": 0}),
        (1000, 0.0, 2.0, {"ssd": TierSpeed(100, 100)}, {"ssd": 0}),
        # The link transfers 600; host memory holds 500 of them, and the SSD gets the rest.
        (9999, 1.0, 1.0, {"host": TierSpeed(600, 600, 500), "ssd": TierSpeed(200, 200)}, {"host": 500, "ssd": 100}),
        (9999, 1.0, 1.0, {"ssd": TierSpeed(200, 200), "host": TierSpeed(600, 600)}, {"ssd": 200, "host": 400}),
    ],
)
def test_examples_of_each_bound(
    saved: int, forward: float, backward: float, speeds: dict[str, TierSpeed], amounts: dict[str, int]
) -> None:
    """Worked examples, one for each bound."""
    assert offload_amounts(saved, forward, backward, speeds) == amounts
