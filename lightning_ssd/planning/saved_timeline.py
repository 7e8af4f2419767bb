"""Plans saved storages by their times of saving and use, where operators are not visible, as in compiled code."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor

from lightning_ssd.planning.ssdtrain import TierSpeed
from lightning_ssd.types import InputChoice

DOUBLINGS = 3
"""Larger windows that are tried, each twice the one before."""

HALVINGS = 2
"""Smaller windows that are tried, each half of the one before."""

TOLERATED_STALL = 0.02
"""Share of a micro-batch for which it may wait for transfers before its code should save less."""

LEAST_BUDGET = 0.1
"""Smallest share of the saved bytes that compiled code is asked to save."""

RECOMPUTE_COST = 0.5
"""Share of the forward that code takes to recompute all that it could save. The cheapest values are recomputed first,
so that a share costs its square: a Llama of 0.85B took 4 % more time with a budget of 0.5, 7 % with 0.3 (H200)."""

STRETCHES = 8
"""Parts of the forward, from the shortest to all of it, over which offloaded storages are spread."""


@dataclass(frozen=True)
class SavedTimeline:
    """Saved storages of one micro-batch, in the order of saving, without the time of transfers.

    Attributes:
        sizes: bytes of each storage.
        movable: indices of the storages that can be offloaded. The others are referenced by user code, for example.
        saved_at: seconds of computation from the begin of the forward until each storage is saved, ascending.
        order: indices of the storages in the order in which backward uses them first.
        used_at: seconds of computation from the begin of backward until each use in `order`, ascending.
        forward_seconds: seconds of computation of the forward.
        backward_seconds: seconds of computation of the backward.
    """

    sizes: tuple[int, ...]
    movable: frozenset[int]
    saved_at: tuple[float, ...]
    order: tuple[int, ...]
    used_at: tuple[float, ...]
    forward_seconds: float
    backward_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds of computation of the micro-batch."""
        return self.forward_seconds + self.backward_seconds

    def with_size(self, size: float) -> "SavedTimeline":
        """Returns the timeline of a micro-batch that saves `size` times as many bytes, and takes as much longer."""
        return SavedTimeline(
            tuple(ceil(size * nbytes) for nbytes in self.sizes),
            self.movable,
            tuple(size * seconds for seconds in self.saved_at),
            self.order,
            tuple(size * seconds for seconds in self.used_at),
            size * self.forward_seconds,
            size * self.backward_seconds,
        )

    def early(self, window_bytes: int) -> frozenset[int]:
        """Returns the storages that are kept because backward needs them first: one, and the next `window_bytes`."""
        return needed_early(self.sizes, self.order, window_bytes)

    def early_bytes(self, window_bytes: int) -> int:
        """Returns the bytes of `early` storages that could be offloaded, besides the one that backward needs first."""
        return sum(self.sizes[index] for index in self.movable & (self.early(window_bytes) - self.early(0)))


@dataclass(frozen=True)
class StoragePlan:
    """Choices for the saved storages of one micro-batch.

    Attributes:
        sizes: bytes of each storage, in the order of saving.
        movable: indices of the storages that can be offloaded.
        choices: the choice for each storage.
        early: indices of the storages that are kept because backward needs them first.
        window_bytes: bytes in flight, prefetched ahead of use, and kept because backward needs them first.
        stall_seconds: predicted time that the compute stream waits for transfers.
        excess_bytes: bytes of storages for which neither the device nor a tier has room.
    """

    sizes: tuple[int, ...]
    movable: frozenset[int]
    choices: tuple[InputChoice, ...]
    early: frozenset[int]
    window_bytes: int
    stall_seconds: float
    excess_bytes: float

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the storages that are offloaded."""
        return sum(size for size, choice in zip(self.sizes, self.choices, strict=True) if choice != "keep")

    @property
    def kept_bytes(self) -> int:
        """Bytes of the storages that are kept although they could be offloaded, without those needed early."""
        return sum(self.sizes[index] for index in self.movable - self.early if self.choices[index] == "keep")


def needed_early(sizes: Sequence[int], order: Sequence[int], window_bytes: int) -> frozenset[int]:
    """Returns the indices of the storage that backward needs first, and of the next `window_bytes` bytes.

    Args:
        sizes: bytes of each storage.
        order: indices of the storages in the order in which backward uses them first.
        window_bytes: bytes that are prefetched ahead of use.
    """
    early, left = set(order[:1]), window_bytes
    for index in order[1:]:
        if left <= 0:
            break
        left -= sizes[index]
        early.add(index)
    return frozenset(early)


def plan_storages(
    timeline: SavedTimeline,
    room_bytes: float,
    tiers: dict[InputChoice, TierSpeed],
    window_bytes: int,
    *,
    fixed_window: bool = False,
) -> StoragePlan:
    """Returns the plan with the shortest stalls among those that fit.

    Offloaded storages are spread over a part of the forward that begins with it: the shorter this part is, the longer
    are the times between copies and uses, and the more copies are in flight at once. If nothing has to be offloaded, no
    window is needed.

    Args:
        timeline: storages of a micro-batch.
        room_bytes: bytes for the window and for storages that may be kept, besides those that can't be offloaded, and
            the one that backward needs first.
        tiers: speed and capacity of each tier, in the order in which tiers are filled.
        window_bytes: window of micro-batches without a plan.
        fixed_window: whether the plan must have that window.
    """
    best: StoragePlan | None = None
    for window in (window_bytes,) if fixed_window else _windows(timeline, room_bytes, window_bytes):
        room = room_bytes - window - timeline.early_bytes(window)
        if best is not None and room < 0:
            break
        room = max(0.0, room)  # micro-batches have a smaller window if there is no room for this one
        early = timeline.early(window)
        free = sorted(timeline.movable - early)
        excess = sum(timeline.sizes[index] for index in free) - room
        for picked in _spreads(timeline, free, excess):
            choices = _fill_tiers(timeline, picked, tiers)
            stall = stall_seconds(timeline, choices, window, tiers)
            plan = StoragePlan(timeline.sizes, timeline.movable, choices, early, window, stall, 0.0)
            plan = replace(plan, excess_bytes=max(0.0, plan.kept_bytes - room))
            if best is None or (plan.excess_bytes, plan.stall_seconds) < (best.excess_bytes, best.stall_seconds):
                best = plan
    assert best is not None
    return best


def _windows(timeline: SavedTimeline, room_bytes: float, window_bytes: int) -> Iterator[int]:
    """Yields windows to try, ascending: 0 if all storages have room, and those of at least one storage else."""
    offloadable = timeline.movable - timeline.early(0)
    if sum(timeline.sizes[index] for index in offloadable) <= room_bytes:
        yield 0
    largest = max((timeline.sizes[index] for index in offloadable), default=0)
    for halvings in range(HALVINGS, 0, -1):
        if window_bytes >> halvings >= largest:
            yield window_bytes >> halvings
    yield window_bytes
    for doublings in range(1, DOUBLINGS + 1):
        yield max(window_bytes, *timeline.sizes) << doublings


def free_bytes(timeline: SavedTimeline, tiers: dict[InputChoice, TierSpeed], tolerance: float) -> float:
    """Returns the bytes that the fastest tier carries while the micro-batch computes, within a tolerated stall.

    Args:
        timeline: storages of a micro-batch.
        tiers: speed of each tier.
        tolerance: stall that is tolerated, as a share of the micro-batch.
    """
    stall = tolerance * timeline.seconds
    return max(
        min((timeline.forward_seconds + stall) * tier.write, (timeline.backward_seconds + stall) * tier.read)
        for tier in tiers.values()
    )


def smaller_budget(
    timeline: SavedTimeline, plan: StoragePlan, room_bytes: float, tiers: dict[InputChoice, TierSpeed]
) -> float | None:
    """Returns the share of its saved bytes that compiled code should save, and recompute the rest.

    With this share, storages without room are offloaded while the device computes.

    Args:
        timeline: storages of a micro-batch.
        plan: the plan for them.
        room_bytes: as for `plan_storages`.
        tiers: speed of each tier.

    Returns:
        The share, in tenths. `None`: the plan has room for all storages, and stalls the micro-batch for no longer than
        recomputing is expected to take.
    """
    free = sum(timeline.sizes[index] for index in timeline.movable - plan.early)
    excess = free - (room_bytes - plan.window_bytes) - free_bytes(timeline, tiers, TOLERATED_STALL / 2)
    share = 1 - max(0.0, excess) / sum(timeline.sizes)
    value = max(LEAST_BUDGET, min(0.9, floor(10 * share) / 10))
    seconds = RECOMPUTE_COST * (1 - value) ** 2 * timeline.forward_seconds
    stalled = plan.stall_seconds > max(seconds, TOLERATED_STALL * timeline.seconds)
    return value if stalled or plan.excess_bytes else None


def stall_seconds(
    timeline: SavedTimeline,
    choices: Sequence[InputChoice],
    window_bytes: int,
    tiers: dict[InputChoice, TierSpeed],
) -> float:
    """Returns the time that the compute stream waits for transfers, as predicted by a simulation of both links."""
    early = timeline.early(window_bytes)
    offloaded = [choice != "keep" and index not in early for index, choice in enumerate(choices)]
    return _forward_stall(timeline, choices, offloaded, window_bytes, tiers) + _backward_stall(
        timeline, choices, offloaded, early, window_bytes, tiers
    )


def _forward_stall(
    timeline: SavedTimeline,
    choices: Sequence[InputChoice],
    offloaded: Sequence[bool],
    window_bytes: int,
    tiers: dict[InputChoice, TierSpeed],
) -> float:
    stall = 0.0
    free_at = dict.fromkeys(tiers, 0.0)
    in_flight: deque[tuple[float, int]] = deque()  # end and bytes of copies
    in_flight_bytes = 0
    for index, nbytes in enumerate(timeline.sizes):
        if not offloaded[index]:
            continue
        tier = choices[index]
        now = timeline.saved_at[index] + stall
        while in_flight and in_flight[0][0] <= now:
            in_flight_bytes -= in_flight.popleft()[1]
        free_at[tier] = max(now, free_at[tier]) + nbytes / tiers[tier].write
        in_flight.append((free_at[tier], nbytes))
        in_flight_bytes += nbytes
        while in_flight_bytes > window_bytes and len(in_flight) > 1:
            end, evicted = in_flight.popleft()
            in_flight_bytes -= evicted
            stall += max(0.0, end - now)
            now = max(now, end)
    # The memory of all offloaded storages must be free when backward begins.
    end = max((end for end, _ in in_flight), default=0.0)
    return stall + max(0.0, end - timeline.forward_seconds - stall)


def _backward_stall(
    timeline: SavedTimeline,
    choices: Sequence[InputChoice],
    offloaded: Sequence[bool],
    early: frozenset[int],
    window_bytes: int,
    tiers: dict[InputChoice, TierSpeed],
) -> float:
    stall = 0.0
    free_at = dict.fromkeys(tiers, 0.0)
    arrives: dict[int, float] = {}  # storages that are prefetched
    ahead_bytes = sum(timeline.sizes[index] for index in early)  # kept or prefetched, and not used yet
    cursor = 0
    for position, index in enumerate(timeline.order):
        now = timeline.used_at[position] + stall
        if index in early:
            ahead_bytes -= timeline.sizes[index]
        while cursor < len(timeline.order):
            following = timeline.order[cursor]
            nbytes = timeline.sizes[following]
            if offloaded[following] and cursor >= position:
                full = ahead_bytes + nbytes > window_bytes
                if cursor > position and full and (ahead_bytes or not window_bytes):
                    break  # a storage that is larger than the window is prefetched alone
                tier = choices[following]
                free_at[tier] = max(now, free_at[tier]) + nbytes / tiers[tier].read
                arrives[following] = free_at[tier]
                ahead_bytes += nbytes
            cursor += 1
        if index in arrives:
            stall += max(0.0, arrives.pop(index) - now)
            ahead_bytes -= timeline.sizes[index]
    return stall


def _spreads(timeline: SavedTimeline, free: Sequence[int], excess: float) -> Iterator[list[int]]:
    """Yields choices of storages to offload, each of at least `excess` bytes, as far as `free` has so many."""
    if excess <= 0:
        yield []
        return
    total = sum(timeline.sizes[index] for index in free)
    for stretch in range(1, STRETCHES + 1):
        part, part_bytes = [], 0
        for index in free:
            if part_bytes >= excess and part_bytes >= total * stretch / STRETCHES:
                break
            part.append(index)
            part_bytes += timeline.sizes[index]
        share = excess / part_bytes if part_bytes else 0.0
        picked, owed = [], 0.0
        for index in part:
            owed += share * timeline.sizes[index]
            if owed > 0:
                picked.append(index)
                owed -= timeline.sizes[index]
        yield picked


def _fill_tiers(
    timeline: SavedTimeline, picked: Sequence[int], tiers: dict[InputChoice, TierSpeed]
) -> tuple[InputChoice, ...]:
    """Returns the choices with which `picked` storages are offloaded, those with the shortest lifetimes first.

    A tier that is full is followed by the next one, which is slower: its storages have the longest lifetimes.
    """
    choices: list[InputChoice] = ["keep"] * len(timeline.sizes)
    left = {tier: speed.capacity for tier, speed in tiers.items()}
    for index in reversed(picked):  # saved last, used first
        tier = next((tier for tier, room in left.items() if room >= timeline.sizes[index]), None)
        if tier is not None:
            left[tier] -= timeline.sizes[index]
            choices[index] = tier
    return tuple(choices)
