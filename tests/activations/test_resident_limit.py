"""With a simulated allocator, `offload="ssdtrain"` never exceeds the limit of the device's memory."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ssd.activations.placement import PlacementPolicy, SSDTrainAuto
from lightning_ssd.activations.resident_limit import ResidentLimit
from lightning_ssd.planning import TierSpeed
from lightning_ssd.types import OffloadTierName
from tests.support.allocator import TRAININGS, Allocator, Training
from tests.support.meter import Meter
from tests.support.offloader import change_policy, open_offloader


def limited(memory: Allocator) -> SSDTrainAuto:
    return SSDTrainAuto({"host": TierSpeed(50, 50)}, ResidentLimit(memory))


@settings(max_examples=150, deadline=None)
@given(
    TRAININGS,
    st.floats(1.0, 3.0),
    st.integers(0, 30),
    st.lists(st.sampled_from(["", "validation", "reset", "forward"]), max_size=12),
)
def test_never_exceeds_the_limit_if_offloading_everything_fits(
    training: Training, room: float, speed: int, events: list[str]
) -> None:
    """Holds from the second micro-batch on: the memory of backward is unknown in the first one."""
    least = max(training.run(None, Allocator(), 8))
    memory = Allocator()
    memory.most = least * room
    auto = SSDTrainAuto({"host": TierSpeed(speed, speed)}, ResidentLimit(memory))
    peaks = training.run(auto, memory, 12, events)
    assert max(peaks[1:]) <= memory.most


@given(TRAININGS)
def test_limits_nothing_where_everything_fits(training: Training) -> None:
    """The policy chooses as without a limit, and does not reset the user's peak of the allocator."""
    free, memory = Allocator(), Allocator()
    memory.most = 10.0 * (sum(training.sizes) + sum(training.transients) + 4 * sum(training.gradients) + 1000)
    plain = training.run(SSDTrainAuto({"host": TierSpeed(50, 50)}), free, 12)
    assert training.run(limited(memory), memory, 12) == plain
    assert not memory.resets


@pytest.mark.parametrize("event", ["", "validation", "reset", "forward"])
def test_keeps_as_much_as_there_is_room_for(event: str) -> None:
    """Ten storages of 100 bytes, and 1,000 bytes of everything else: 650 bytes of room keep six storages.

    Other peaks of memory do not change that.
    """
    training = Training(500, [100] * 10, [100] * 10, [0] * 10, 1, beyond=50)
    memory = Allocator()
    least = max(training.run(None, Allocator(), 8))
    memory.most = least + 650
    auto = SSDTrainAuto({"host": TierSpeed(0, 0)}, ResidentLimit(memory))
    peaks = training.run(auto, memory, 20, [event] * 15)
    assert peaks[-1] == least + 600
    assert memory.resets == 1 or event


def test_memory_is_withheld_after_a_failure_only_where_the_room_was_known() -> None:
    """A first micro-batch that runs out of memory shows no limit: the bytes of everything else are unknown."""
    training = Training(500, [100] * 10, [100] * 10, [0] * 10, 1)
    most = max(training.run(None, Allocator(), 8)) + 650
    rooms = []
    for fails_first, fails_last in [(False, False), (True, False), (False, True)]:
        memory = Allocator()
        memory.most = most
        limit = ResidentLimit(memory)
        if fails_first:
            limit.lower()
        training.run(SSDTrainAuto({"host": TierSpeed(0, 0)}, limit), memory, 12)
        if fails_last:
            limit.lower()
        limit.begin(1000)
        rooms.append(limit.room_bytes)
    assert rooms == [650.0, 650.0, pytest.approx(650 - ResidentLimit.WITHHELD * most)]


def known_limit(expected: int = 1000) -> ResidentLimit:
    """Returns the limit in a micro-batch after a measured one, which saves `expected` bytes and has room for 400."""
    limit = ResidentLimit(Meter(most=1000.0, highest=600))
    limit.begin(1000)
    limit.measure()
    assert limit.use_window(50, lambda window: 0) == 0  # a measured micro-batch needs the least memory
    limit.end()
    limit.begin(expected)
    assert limit.known and limit.room_bytes == 400
    return limit


@given(st.integers(0, 2000), st.integers(0, 3))
def test_the_window_and_storages_kept_within_it_have_room_beside_kept_ones(window: int, share: int) -> None:
    limit = known_limit()
    found = limit.use_window(window, lambda window: share * window)
    early = share * found
    assert found <= window and found + early <= 400
    assert found == window or 2 * (1 + share) * (found + 1) > 400
    assert limit.placed_bytes == 1000 - early
    assert limit.keep(400 - found - early) and not limit.keep(1)


@given(st.integers(0, 2000))
def test_where_all_storages_have_room_a_window_needs_none(window: int) -> None:
    limit = known_limit(expected=300)
    assert limit.use_window(window, lambda window: window) == window
    assert limit.keep(400)


def test_a_larger_batch_keeps_no_more() -> None:
    """Storages beyond the expected ones are not kept, either."""
    training = Training(500, [100] * 10, [0] * 10, [0] * 10, 1)
    memory = Allocator()
    memory.most = max(training.run(None, Allocator(), 8)) + 500
    auto = SSDTrainAuto({"host": TierSpeed(0, 0)}, ResidentLimit(memory))
    training.run(auto, memory, 12)
    auto.begin(1000)
    assert sum(not auto.tiers_for(100) for _ in range(30)) == 5


def test_a_peak_beyond_the_limit_lowers_the_kept_bytes() -> None:
    """Transient tensors grow and exceed the limit; after two micro-batches fewer storages are kept."""
    training = Training(500, [100] * 10, [100] * 10, [0] * 10, 1)
    memory = Allocator()
    memory.most = max(training.run(None, Allocator(), 8)) + 500
    auto = SSDTrainAuto({"host": TierSpeed(0, 0)}, ResidentLimit(memory))
    training.run(auto, memory, 12)
    larger = Training(0, [100] * 10, [300] * 10, [0] * 10, 1)
    peaks = larger.run(auto, memory, 6)
    assert peaks[0] > memory.most
    assert max(peaks[2:]) <= memory.most


class _FirstOnly(PlacementPolicy):
    """The first storage of each micro-batch is offloaded."""

    def __init__(self, scarce: bool) -> None:
        self._scarce = scarce
        self._first = True
        self.ended = 0

    @property
    def memory_is_scarce(self) -> bool:
        return self._scarce

    def begin(self, expected_bytes: int) -> None:
        self._first = True

    def end(self) -> None:
        self.ended += 1

    def tiers_for(self, nbytes: int) -> Sequence[OffloadTierName]:
        first, self._first = self._first, False
        return ("ssd",) if first else ()


@pytest.mark.parametrize("scarce", [False, True])
def test_storages_are_evicted_at_once_if_memory_is_scarce(tmp_path: Path, scarce: bool) -> None:
    """The forward references its first storage while it is saved; the next save, or a later one, offloads it."""
    with open_offloader(tmp_path) as offloader:
        placement = _FirstOnly(scarce)
        change_policy(offloader, placement=placement)
        for _ in range(2):  # kept storages of the second micro-batch have no record
            offloader.begin_micro_batch()
            leaf = torch.randn(1000, requires_grad=True)
            with offloader.hooks():
                held = leaf.exp()
                x = held.sin()
                before = offloader.stats().stored
                del held
                x = x.sin()
                stored = offloader.stats().stored - before
                loss = x.sin().sin().sin().sum()
            loss.backward()
            offloader.end_backward()
        offloader.begin_micro_batch()
        assert placement.ended == 2
    assert stored == (4000 if scarce else 0)


def test_a_longer_batch_is_measured_again() -> None:
    """Only its transient tensors are larger."""
    memory = Allocator()
    short, long = (Training(0, [size] * 10, [3 * size] * 10, [0] * 10, 1) for size in (50, 100))
    memory.change(500)
    memory.most = 500 + 100 + 300 + 250
    auto = SSDTrainAuto({"host": TierSpeed(0, 0)}, ResidentLimit(memory))
    short.run(auto, memory, 12)
    before = memory.resets
    assert max(long.run(auto, memory, 6)[1:]) <= memory.most
    assert memory.resets > before


def test_the_measured_micro_batches_of_a_long_training_take_no_memory() -> None:
    memory = Allocator()
    memory.most = 10_000
    limit = ResidentLimit(memory)
    for level in range(100):
        memory.level = 50 * level
        limit.begin(100)
        limit.measure()
        limit.end()
    assert len(limit._levels) == ResidentLimit.MOST_LEVELS
