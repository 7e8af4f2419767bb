"""`PlannedExcess` follows its plan while storages are those of the plan, and keeps no more than has room."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from lightning_ssd.activations import PlannedExcess, ResidentLimit
from lightning_ssd.planning import StoragePlan
from lightning_ssd.types import InputChoice, OffloadTierName
from tests.support.meter import Meter

LIMIT, OTHERS = 1000, 600


def known_limit(meter: Meter) -> ResidentLimit:
    """Returns a limit that has measured a micro-batch, and has room for `LIMIT - OTHERS` bytes."""
    limit = ResidentLimit(meter)
    limit.begin(0)
    limit.measure()
    limit.end()
    return limit


def plan_of(
    sizes: Sequence[int], choices: Sequence[InputChoice], movable: frozenset[int], early: frozenset[int]
) -> StoragePlan:
    return StoragePlan(tuple(sizes), movable, tuple(choices), early, 0, 0.0, 0.0)


def follow(
    placement: PlannedExcess, plan: StoragePlan, sizes: Sequence[int], reserved: int = 0
) -> list[tuple[OffloadTierName, ...]]:
    placement.begin(sum(sizes))
    placement.use_window(reserved, lambda window: 0)
    placement.follow(plan)
    return [tuple(placement.tiers_for(size)) for size in sizes]


@given(
    st.lists(
        st.tuples(
            st.integers(1, 300),
            st.sampled_from(["keep", "host", "ssd"]),
            st.booleans(),
            st.booleans(),
            st.integers(0, 3),
        ),
        max_size=20,
    ),
    st.integers(0, 500),
)
def test_kept_storages_have_room_whatever_is_saved(
    storages: list[tuple[int, InputChoice, bool, bool, int]], reserved: int
) -> None:
    """A storage may differ from the plan's. Storages that the plan knows to be immovable are in the measured memory."""
    sizes = [size for size, *_ in storages]
    movable = frozenset(index for index, (_, _, one, _, _) in enumerate(storages) if one)
    early = frozenset(index for index, (_, _, _, one, _) in enumerate(storages) if one)
    plan = plan_of(sizes, [choice for _, choice, *_ in storages], movable, early)
    placement = PlannedExcess(("host", "ssd"), known_limit(Meter(LIMIT, OTHERS)))
    saved = [
        (size if other else size + 1, index)
        for index, (size, _, _, _, other) in enumerate(storages)
        if index not in early
    ]
    for _ in range(2):
        tiers = follow(placement, plan, [size for size, _ in saved], reserved)
        # Without a window if all storages have room, or with a smaller one if there is no room for it.
        room = LIMIT - OTHERS - (reserved if placement.limit.scarce and reserved <= LIMIT - OTHERS else 0)
        kept = follows = 0
        for (size, index), found in zip(saved, tiers, strict=True):
            follows = follows or int(size != sizes[index])  # 1: from here on the plan is not followed
            if not follows and storages[index][1] != "keep":
                assert found[0] == storages[index][1] and set(found) == {"host", "ssd"}
            if not found and (follows or index in movable):
                kept += size
        assert kept <= max(0, room)


def test_a_plan_is_followed_in_each_micro_batch_and_not_by_others() -> None:
    plan = plan_of([10, 20, 30, 40], ["keep", "ssd", "keep", "host"], frozenset(range(4)), frozenset({3}))
    placement = PlannedExcess(("host", "ssd"), known_limit(Meter(LIMIT, OTHERS)))
    planned = [(), ("ssd", "host"), ()]
    assert follow(placement, plan, [10, 20, 30]) == planned
    assert follow(placement, plan, [10, 21, 30]) == [(), (), ()]
    assert follow(placement, plan, [9, 19, 29]) == planned  # of a smaller batch
    assert follow(placement, plan, [10, 20, 30]) == planned


def test_all_is_offloaded_while_the_room_is_not_known() -> None:
    limit = known_limit(Meter(LIMIT, OTHERS))
    placement, plan = PlannedExcess(("host",), limit), plan_of([10], ["keep"], frozenset({0}), frozenset())
    assert follow(placement, plan, [10]) == [()]
    limit.restart()
    assert not limit.known
    assert follow(placement, plan, [10]) == [("host",)]
