"""Placement policies offload the right number of bytes, spread evenly over the forward."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ssd.activations.micro_batch import MicroBatchProfile
from lightning_ssd.activations.placement import FixedAmount, KeepAll, PlacementPolicy, SSDTrainAuto
from lightning_ssd.activations.resident_limit import ResidentLimit
from lightning_ssd.planning import TierSpeed
from lightning_ssd.types import OffloadTierName

SIZES = st.lists(st.integers(1, 10_000), min_size=1, max_size=60)


def place_all(
    placement: PlacementPolicy, sizes: list[int], *, expected: int | None = None
) -> list[tuple[OffloadTierName, ...]]:
    """One micro-batch."""
    placement.begin(sum(sizes) if expected is None else expected)
    return [tuple(placement.tiers_for(size)) for size in sizes]


def profile(
    revision: int,
    *,
    forward: float = 1.0 / SSDTrainAuto.MARGIN,
    backward: float = 2.0 / SSDTrainAuto.MARGIN,
    saved: int = 1000,
    **stalls: tuple[float, float],
) -> MicroBatchProfile:
    """By default one second of forward and two of backward."""
    none: dict[OffloadTierName, tuple[float, float]] = {"host": (0.0, 0.0), "ssd": (0.0, 0.0)}
    return MicroBatchProfile(forward, backward, none | stalls, saved, revision)  # type: ignore[operator]


def measured(speeds: dict[OffloadTierName, TierSpeed], saved: int = 1000) -> SSDTrainAuto:
    """`SSDTrainAuto` after the micro-batches that it measures."""
    auto = SSDTrainAuto(speeds)
    for _ in range(SSDTrainAuto.WARM_UP + 1):
        auto.observe(profile(auto.revision, saved=saved))
    return auto


@given(st.floats(0.0, 1.0), SIZES)
def test_share_is_met_at_every_moment(share: float, sizes: list[int]) -> None:
    """At any time of the forward, the share of offloaded bytes is exact up to half of the largest storage."""
    placement = FixedAmount(share, ("ssd",))
    for _ in range(2):
        seen = out = 0
        for size, tiers in zip(sizes, place_all(placement, sizes), strict=True):
            seen += size
            out += size if tiers else 0
            assert abs(out - share * seen) <= max(sizes) / 2 + 1e-6


@given(SIZES)
def test_all_and_nothing_are_exact(sizes: list[int]) -> None:
    """1.0 is everything, 0.0 and "none" are nothing."""
    assert all(place_all(FixedAmount(1.0, ("ssd", "host")), sizes))
    assert not any(place_all(FixedAmount(0.0, ("ssd",)), sizes))
    assert not any(place_all(KeepAll(), sizes))


@given(st.integers(0, 100_000), SIZES, st.booleans())
def test_bytes_are_never_exceeded(amount: int, sizes: list[int], known: bool) -> None:
    """A number of bytes limits every micro-batch, whether or not it saves as much as the last one."""
    placement = FixedAmount(amount, ("host", "ssd"))
    for _ in range(3):
        placed = place_all(placement, sizes, expected=None if known else 0)
        out = sum(size for size, tiers in zip(sizes, placed, strict=True) if tiers)
        assert out <= amount
        if known:  # and it is used, except less than a storage, or the rounding of a share
            assert out >= min(amount, sum(sizes)) - max(sizes)
        assert {tiers for tiers in placed if tiers} <= {("host", "ssd")}


def test_bytes_are_spread_over_the_forward() -> None:
    """Once the size of a micro-batch is known, the offloaded bytes are not all at its beginning."""
    placement = FixedAmount(300, ("ssd",))
    first = place_all(placement, [100] * 12, expected=0)
    later = place_all(placement, [100] * 12)
    assert [bool(tiers) for tiers in first] == [True] * 3 + [False] * 9
    chosen = [index for index, tiers in enumerate(later) if tiers]
    assert len(chosen) == 3
    assert [after - before for before, after in zip(chosen, chosen[1:], strict=False)] == [4, 4]


def test_auto_tries_everything_until_it_has_measured() -> None:
    """At first everything is offloaded that needs no wait; the first micro-batches are not measured."""
    auto = SSDTrainAuto({"host": TierSpeed(100, 100), "ssd": TierSpeed(10, 10)})
    for _ in range(SSDTrainAuto.WARM_UP):
        assert place_all(auto, [10, 20, 30]) == [("host", "ssd")] * 3
        assert not auto.may_wait
        auto.observe(profile(auto.revision))
        assert auto.revision == 0
    assert place_all(auto, [10, 20, 30]) == [("host", "ssd")] * 3
    auto.observe(profile(auto.revision))
    assert auto.revision == 1 and auto.may_wait


@given(st.floats(1.0, 2000.0), SIZES)
def test_auto_offloads_the_bytes_that_the_bandwidth_transfers(bandwidth: float, sizes: list[int]) -> None:
    """After the measurement, the tier gets as many bytes as it transfers during the forward, evenly spread."""
    saved = sum(sizes)
    auto = measured({"ssd": TierSpeed(bandwidth, bandwidth)}, saved)
    share = min(1.0, int(min(saved, bandwidth)) / saved)
    seen = out = 0
    for size, tiers in zip(sizes, place_all(auto, sizes), strict=True):
        assert tiers in ((), ("ssd",))
        seen += size
        out += size if tiers else 0
        assert abs(out - share * seen) <= max(sizes) / 2 + 1  # the amount is rounded to bytes


def test_auto_fills_tiers_by_their_shares() -> None:
    """Each of two tiers gets as many bytes as it can transfer, and each storage is in one tier."""
    auto = measured({"host": TierSpeed(600, 600, 500), "ssd": TierSpeed(200, 200)})
    for _ in range(2):
        placed = place_all(auto, [10] * 100)
        assert {tiers for tiers in placed} == {(), ("host",), ("ssd",)}
        assert abs(placed.count(("host",)) - 50) <= 1
        assert abs(placed.count(("ssd",)) - 10) <= 1


@pytest.mark.parametrize(
    "measured", [dict(forward=1.0, ssd=(0.4, 0.0)), dict(forward=9.0, backward=1.0, ssd=(0.0, 0.4))]
)
def test_auto_measures_without_stalls(measured: dict[str, Any]) -> None:
    """Stalls hide no transfers: a forward or a backward of 1 s with stalls of 0.4 s hides 0.6 s of transfers."""
    auto = SSDTrainAuto({"ssd": TierSpeed(500, 500)})
    for _ in range(SSDTrainAuto.WARM_UP + 1):
        auto.observe(profile(auto.revision, **measured))
    assert place_all(auto, [10] * 100).count(("ssd",)) == round(30 * SSDTrainAuto.MARGIN)


def test_auto_shrinks_the_tier_that_stalls() -> None:
    """The share of a tier that stalls the training shrinks repeatedly; the other tier keeps its share."""
    auto = measured({"host": TierSpeed(600, 600, 300), "ssd": TierSpeed(300, 300)})
    counts = []
    for _ in range(4):
        placed = place_all(auto, [10] * 100)
        assert abs(placed.count(("host",)) - 30) <= 1
        counts.append(placed.count(("ssd",)))
        for _ in range(2):  # the first of a revision does not count
            auto.observe(profile(auto.revision, forward=1.0, backward=2.0, ssd=(0.03, 0.03)))  # a fiftieth
    assert counts == sorted(counts, reverse=True)
    assert (
        abs(counts[0] - 30) <= 1 and abs(counts[1] - 30 * (1 - SSDTrainAuto.SHRINK / 50)) <= 1 and counts[3] < counts[1]
    )


def test_auto_grows_back() -> None:
    """A share that one stall has shrunk grows back to the measured share, and not above it."""
    auto = measured({"ssd": TierSpeed(300, 300)})
    before = place_all(auto, [10] * 100).count(("ssd",))
    for _ in range(2):
        auto.observe(profile(auto.revision, ssd=(0.1, 0.1)))
    shrunk = place_all(auto, [10] * 100).count(("ssd",))
    for _ in range(120):
        auto.observe(profile(auto.revision))
    assert shrunk < before
    assert place_all(auto, [10] * 100).count(("ssd",)) == before


@pytest.mark.parametrize(
    ("age", "stalls"), [(0, (0.0, 0.0)), (0, (0.005, 0.005)), (1, (1.0, 1.0))], ids=["none", "small", "older revision"]
)
def test_auto_tolerates_small_stalls_and_those_of_an_older_revision(age: int, stalls: tuple[float, float]) -> None:
    """Profiles are read later: stalls under an earlier revision do not count for the present one."""
    auto = measured({"ssd": TierSpeed(300, 300)})
    before = place_all(auto, [10] * 100)
    for _ in range(5):
        auto.observe(profile(auto.revision - age, ssd=stalls))
    assert auto.revision == 1
    assert place_all(auto, [10] * 100) == before


class Room(ResidentLimit):
    """A limit with room for half of all storages."""

    def __init__(self) -> None:
        self.measuring = False
        self.scarce = True

    def begin(self, expected_bytes: int) -> None:
        return None

    def end(self) -> None:
        return None

    def excess(self, nbytes: float) -> float:
        return 0.5

    def keep(self, nbytes: int) -> bool:
        return True


def slow(limit: ResidentLimit) -> SSDTrainAuto:
    """Returns `SSDTrainAuto` after its measurement, with a tier that transfers nothing during the forward."""
    auto = SSDTrainAuto({"ssd": TierSpeed(1, 1)}, limit)
    for _ in range(SSDTrainAuto.WARM_UP + 1):
        auto.observe(profile(auto.revision))
    return auto


def test_storages_without_room_are_spread_over_the_forward() -> None:
    """The first storages do not use up all the room, so that copies keep pace with the forward."""
    placed = place_all(slow(Room()), [100] * 20)
    assert [bool(tiers) for tiers in placed] == [True, False] * 10


def test_micro_batches_that_are_measured_have_a_revision_of_their_own() -> None:
    """All their storages are offloaded, so their stalls do not count for the shares."""
    limit = Room()
    auto = slow(limit)
    auto.begin(1000)
    shared = auto.revision

    def measure(expected_bytes: int) -> None:
        limit.measuring = expected_bytes > 1000

    limit.begin = measure  # type: ignore[method-assign]
    auto.begin(2000)
    measuring = auto.revision
    assert all(auto.tiers_for(10) for _ in range(10))
    auto.begin(1000)
    assert len({shared, measuring, auto.revision}) == 3
    before = place_all(auto, [100] * 20, expected=1000)
    for revision in (shared, measuring, measuring):
        auto.observe(profile(revision, ssd=(1.0, 1.0)))
    assert place_all(auto, [100] * 20, expected=1000) == before


def test_a_share_grows_once_in_so_many_quiet_micro_batches() -> None:
    """Shares that a tier can't sustain are tried more and more rarely, because each new revision costs host time."""
    auto = measured({"ssd": TierSpeed(300, 300)})
    for _ in range(3):
        for _ in range(2):
            auto.observe(profile(auto.revision, ssd=(0.1, 0.1)))
    revisions = []
    for _ in range(40):
        auto.observe(profile(auto.revision))
        revisions.append(auto.revision)
    changes = [number for number, (one, other) in enumerate(pairwise(revisions)) if one != other]
    assert len(changes) >= 3
    # 8 of them after three shrinkages, and one that is not counted, as the allocator moves memory after each change.
    assert {other - one for one, other in pairwise(changes)} == {9}
