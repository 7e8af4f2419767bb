"""Plans of saved storages: kept storages fit, and stalls are those of a link that carries one copy at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ssd.planning import SavedTimeline, StoragePlan, TierSpeed, plan_storages, smaller_budget
from lightning_ssd.planning.saved_timeline import free_bytes, stall_seconds
from lightning_ssd.types import InputChoice


@st.composite
def timelines(draw: st.DrawFn) -> SavedTimeline:
    sizes = draw(st.lists(st.integers(1, 100), min_size=1, max_size=30))
    moments = st.floats(0, 10)
    count = len(sizes)
    return SavedTimeline(
        sizes=tuple(sizes),
        movable=frozenset(draw(st.sets(st.integers(0, count - 1)))),
        saved_at=tuple(sorted(draw(moments) for _ in sizes)),
        order=tuple(draw(st.permutations(range(count)))),
        used_at=tuple(sorted(draw(moments) for _ in sizes)),
        forward_seconds=10.0,
        backward_seconds=draw(st.floats(10, 20)),
    )


@given(timelines(), st.floats(0, 2000), st.floats(1, 1000), st.integers(0, 300), st.integers(0, 500), st.booleans())
def test_kept_storages_fit_and_offloaded_ones_can_be_offloaded(
    timeline: SavedTimeline, room: float, speed: float, window: int, capacity: int, fixed: bool
) -> None:
    tiers: dict[InputChoice, TierSpeed] = {
        "host": TierSpeed(speed, speed, capacity),
        "ssd": TierSpeed(speed / 4, speed / 4, 3000),
    }
    plan = plan_storages(timeline, room, tiers, window, fixed_window=fixed)
    offloaded = {index for index, choice in enumerate(plan.choices) if choice != "keep"}
    assert offloaded <= timeline.movable - plan.early
    assert plan.early == timeline.early(plan.window_bytes)
    kept = sum(timeline.sizes[index] for index in timeline.movable - plan.early - offloaded)
    left = room - plan.window_bytes - timeline.early_bytes(plan.window_bytes)
    assert kept <= max(0, left) + 1e-6 and not plan.excess_bytes
    assert left >= 0 or (not offloaded or plan.window_bytes <= window)
    assert sum(timeline.sizes[index] for index in offloaded if plan.choices[index] == "host") <= capacity
    assert plan.window_bytes == window or not fixed
    assert plan.window_bytes or not window or not offloaded
    assert plan.stall_seconds >= 0
    assert plan.stall_seconds == stall_seconds(timeline, plan.choices, plan.window_bytes, tiers)


@given(timelines(), st.integers(0, 300))
def test_nothing_is_offloaded_if_all_fits_and_nothing_stalls_if_links_are_fast(
    timeline: SavedTimeline, window: int
) -> None:
    fast: dict[InputChoice, TierSpeed] = {"host": TierSpeed(float("inf"), float("inf"))}
    plan = plan_storages(timeline, sum(timeline.sizes), fast, window)
    assert set(plan.choices) == {"keep"} and not plan.offloaded_bytes and not plan.stall_seconds
    assert not plan.window_bytes  # as no copies are in flight
    assert plan_storages(timeline, 0, fast, window, fixed_window=True).stall_seconds == 0


@given(timelines(), st.floats(0, 500))
def test_a_plan_states_the_excess_bytes_if_tiers_are_full(timeline: SavedTimeline, room: float) -> None:
    plan = plan_storages(timeline, room, {"host": TierSpeed(1, 1, 0)}, 0, fixed_window=True)
    free = sum(timeline.sizes[index] for index in timeline.movable - plan.early)
    assert set(plan.choices) == {"keep"} and plan.excess_bytes == max(0.0, free - room)


REGIONS = SavedTimeline(
    sizes=(10, 10, 10, 10),
    movable=frozenset(range(4)),
    saved_at=(1.0, 2.0, 3.0, 4.0),
    order=(3, 2, 1, 0),
    used_at=(0.0, 2.0, 4.0, 6.0),
    forward_seconds=4.0,
    backward_seconds=8.0,
)


@pytest.mark.parametrize(
    ("choices", "window", "stall"),
    [
        (("host", "keep", "keep", "keep"), 20, 0.0),  # copied until 2 s, loaded before 6 s
        (("host", "host", "keep", "keep"), 20, 0.0),  # the second one is copied from 2 s to 3 s
        (("keep", "keep", "host", "keep"), 0, 1.0),  # copied until 4 s, loaded on demand in a second
        (("host", "host", "host", "keep"), 0, 3.0),  # three loads on demand
    ],
)
def test_stalls_of_single_copies(choices: tuple[InputChoice, ...], window: int, stall: float) -> None:
    assert stall_seconds(REGIONS, choices, window, {"host": TierSpeed(10, 10)}) == pytest.approx(stall)


def test_over_a_slow_link_the_first_saved_storages_are_offloaded() -> None:
    """The copy of one of four storages takes three seconds: only that of the first one is hidden."""
    plan = plan_storages(REGIONS, 20, {"host": TierSpeed(10 / 3, 10)}, 0, fixed_window=True)
    assert plan == StoragePlan(
        sizes=REGIONS.sizes,
        movable=REGIONS.movable,
        choices=("host", "keep", "keep", "keep"),
        early=frozenset({3}),
        window_bytes=0,
        stall_seconds=pytest.approx(1.0),
        excess_bytes=0.0,
    )


def test_free_bytes_are_those_of_the_shorter_direction() -> None:
    assert free_bytes(REGIONS, {"host": TierSpeed(10, 2)}, 0.0) == 16
    assert free_bytes(REGIONS, {"host": TierSpeed(10, 20)}, 0.25) == 70


@pytest.mark.parametrize(
    ("speed", "room", "expected"),
    [
        (1000.0, 0.0, None),  # the link carries all storages while the device computes
        (2.0, 40.0, None),  # all storages have room
        (2.0, 0.0, 0.4),  # the link carries 8 of 30 bytes while the forward computes; 10 are needed first
        (0.1, 20.0, 0.7),
    ],
)
def test_code_saves_less_where_transfers_would_delay_it(speed: float, room: float, expected: float | None) -> None:
    tiers: dict[InputChoice, TierSpeed] = {"host": TierSpeed(speed, speed)}
    plan = plan_storages(REGIONS, room, tiers, 0, fixed_window=True)
    assert smaller_budget(REGIONS, plan, room, tiers) == expected


def test_code_saves_less_where_no_tier_has_room() -> None:
    tiers: dict[InputChoice, TierSpeed] = {"host": TierSpeed(1e9, 1e9, 0)}
    plan = plan_storages(REGIONS, 0, tiers, 0, fixed_window=True)
    assert plan.excess_bytes and smaller_budget(REGIONS, plan, 0, tiers) == 0.9


@given(timelines(), st.floats(0.1, 4.0))
def test_a_timeline_of_another_size_has_no_fewer_bytes_than_its_micro_batch(
    timeline: SavedTimeline, size: float
) -> None:
    scaled = timeline.with_size(size)
    assert all(mine >= size * one for mine, one in zip(scaled.sizes, timeline.sizes, strict=True))
    assert scaled.seconds == pytest.approx(size * timeline.seconds) and scaled.order == timeline.order
