"""Slots never overlap, and freed bytes can be allocated again."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ssd.storage import SlotAllocator

PAGE = 4096


@given(st.lists(st.tuples(st.sampled_from("aaafg"), st.integers(1, 9 * PAGE), st.integers(0, 1000)), max_size=80))
def test_slots_are_aligned_disjoint_and_reused(steps: list[tuple[str, int, int]]) -> None:
    slots = SlotAllocator(32 * PAGE)
    live: dict[int, int] = {}
    for action, nbytes, choice in steps:
        if action == "g":
            slots.grow((1 + choice % 4) * PAGE)
        elif action == "f" and live:
            freed = sorted(live)[choice % len(live)]
            slots.free(freed)
            del live[freed]
        elif action == "a":
            largest = slots.largest_free
            offset = slots.allocate(nbytes)
            assert (offset is None) == (largest < nbytes)
            if offset is not None:
                live[offset] = -(-nbytes // PAGE) * PAGE
        assert slots.used == sum(live.values())
        ends = 0
        for offset in sorted(live):
            assert offset % PAGE == 0
            assert offset >= ends
            ends = offset + live[offset]
        assert ends <= slots.capacity
    for offset in live:
        slots.free(offset)
    assert slots.largest_free == slots.tail_free == slots.capacity
    assert slots.allocate(slots.capacity) == 0


def test_the_smallest_sufficient_hole_is_used() -> None:
    slots = SlotAllocator(10 * PAGE)
    assert [slots.allocate(size * PAGE) for size in (4, 1, 2, 1)] == [0, 4 * PAGE, 5 * PAGE, 7 * PAGE]
    slots.free(0)
    slots.free(5 * PAGE)  # now a hole of 4 pages, one of 2, and 2 at the end
    assert slots.allocate(2 * PAGE) == 5 * PAGE
    assert slots.allocate(3 * PAGE) == 0


@given(st.lists(st.integers(1, 9 * PAGE), max_size=20), st.randoms())
def test_another_allocator_can_have_the_same_slots(sizes: list[int], random: Random) -> None:
    """Whatever was freed before, and in any order of allocation."""
    slots = SlotAllocator(200 * PAGE)
    live = {slots.allocate(size): size for size in sizes}
    for offset in random.sample(list(live), len(live) // 3):
        assert offset is not None
        slots.free(offset)
        del live[offset]
    other = SlotAllocator(200 * PAGE)
    for offset in random.sample(list(live), len(live)):
        assert offset is not None
        other.allocate_at(offset, live[offset])
    assert (other.used, other.largest_free, other.tail_free) == (slots.used, slots.largest_free, slots.tail_free)
    for offset in live:
        assert offset is not None
        with pytest.raises(ValueError, match="not free"):
            other.allocate_at(offset, 1)


def test_growing_enlarges_the_hole_at_the_end() -> None:
    slots = SlotAllocator()
    assert slots.allocate(1) is None
    slots.grow(PAGE)
    slots.grow(PAGE)
    assert slots.allocate(2 * PAGE) == 0


@pytest.mark.parametrize("misuse", [lambda s: s.free(0), lambda s: s.allocate(0), lambda s: s.grow(100)])
def test_misuse_is_refused(misuse: Callable[[SlotAllocator], object]) -> None:
    with pytest.raises(ValueError):
        misuse(SlotAllocator(PAGE))


def test_a_slot_is_freed_once() -> None:
    slots = SlotAllocator(PAGE)
    assert slots.allocate(1) == 0
    slots.free(0)
    with pytest.raises(ValueError, match="freed before"):
        slots.free(0)
