"""Saved tensors of a pipeline schedule's micro-batches are offloaded and prefetched in the order of the schedule."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_ssd.activations import ActivationOffloader, StagePass, config
from lightning_ssd.activations.in_flight import InFlight
from tests.support.numbered import SIZE, NotingEngine, Saving, noted
from tests.support.offloader import change_policy, open_offloader

NBYTES = 4 * SIZE
PER_CHUNK = 3
"""Saved tensors of a micro-batch."""

Passes = tuple[tuple[str, int], ...]

FIRST_STAGE: Passes = (("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2))
LAST_STAGE: Passes = (("F", 0), ("B", 0), ("F", 1), ("B", 1))
GPIPE: Passes = (("F", 0), ("F", 1), ("F", 2), ("B", 0), ("B", 1), ("B", 2))


def step(offloader: ActivationOffloader, passes: Passes) -> None:
    """Runs a schedule of one stage, whose micro-batch `i` saves the numbers `10 * i` to `10 * i + 2`."""
    offloader.begin_micro_batch()
    losses: dict[int, Tensor] = {}
    with offloader.hooks():
        for kind, chunk in passes:
            noted.append((kind, chunk))
            if kind == "F":
                with offloader.stage_pass(StagePass(0, chunk, backward=False)):
                    losses[chunk] = torch.ones(SIZE, requires_grad=True)
                    for number in range(PER_CHUNK):
                        losses[chunk] = Saving.apply(losses[chunk], 10 * chunk + number)  # type: ignore[no-untyped-call]
            else:
                with offloader.stage_pass(StagePass(0, chunk, backward=True)):
                    losses.pop(chunk).sum().backward()
    offloader.end_backward()


@contextmanager
def recorded(path: Path, window: int, *schedules: Passes) -> Iterator[ActivationOffloader]:
    """Yields an offloader that has run schedules; `noted` has the events of the last one."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(config, "make_copy_engine", NotingEngine)
        with open_offloader(path, tier="host") as offloader:
            change_policy(offloader, window_bytes=window * NBYTES)
            for schedule in schedules:
                noted.clear()
                step(offloader, schedule)
            yield offloader


def between(begin: tuple[str, int], end: tuple[str, int] | None) -> list[tuple[str, int]]:
    """Returns the events after `begin` and before `end`."""
    return noted[noted.index(begin) + 1 : None if end is None else noted.index(end)]


def test_a_waiting_micro_batch_is_loaded_in_the_pass_before_its_backward(tmp_path: Path) -> None:
    with recorded(tmp_path, 1, FIRST_STAGE, FIRST_STAGE):
        # The last saved tensor of a micro-batch is needed first.
        assert between(("F", 2), ("B", 1)) == [("load", 12)]
        # Each tensor is loaded before the backward of the one before it ends.
        expected = [("load", 11), ("backward", 12), ("load", 10), ("backward", 11), ("backward", 10)]
        assert between(("B", 1), ("B", 2)) == expected


def test_the_next_backward_is_loaded_once_the_present_one_is(tmp_path: Path) -> None:
    with recorded(tmp_path, 1, GPIPE, GPIPE):
        assert between(("F", 2), ("B", 0)) == [("load", 2)]
        assert between(("B", 0), ("B", 1))[-3:] == [("backward", 1), ("load", 12), ("backward", 0)]


def test_nothing_is_loaded_ahead_of_a_pass_that_does_not_follow(tmp_path: Path) -> None:
    """The third schedule differs from the second one before the first backward."""
    with recorded(tmp_path, 1, FIRST_STAGE, FIRST_STAGE, GPIPE):
        assert between(("F", 2), ("B", 0)) == []
        assert [event for event in noted if event[0] == "backward"] == [
            ("backward", 10 * chunk + number) for chunk in range(3) for number in reversed(range(PER_CHUNK))
        ]


@pytest.mark.parametrize("schedule", [LAST_STAGE, FIRST_STAGE, GPIPE])
def test_tensors_that_are_needed_soon_are_kept(tmp_path: Path, schedule: Passes) -> None:
    """The first tensor of a backward that is near, and those within the window, which is one tensor."""
    near = {LAST_STAGE: (0, 1), FIRST_STAGE: (0, 2), GPIPE: ()}[schedule]
    with recorded(tmp_path, 1, schedule, schedule):
        loaded = {number for event, number in noted if event == "load"}
        for chunk in {chunk for _, chunk in schedule}:
            first = {10 * chunk + 1, 10 * chunk + 2}
            assert 10 * chunk in loaded and (first.isdisjoint(loaded) if chunk in near else first <= loaded)


def test_a_backward_evicts_what_other_micro_batches_have_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own storages in flight are used as they are."""
    monkeypatch.setattr(InFlight, "evict_copied", lambda self: None)  # a device that is far behind
    with recorded(tmp_path, 1, (("F", 0), ("F", 1), ("B", 0), ("B", 1))) as offloader:
        assert {number for event, number in noted if event == "load"} == {10, 11, 12}
        assert offloader.stats().forwarded == 3 * NBYTES


def test_statistics_and_the_pattern_have_all_micro_batches(tmp_path: Path) -> None:
    with recorded(tmp_path, 0, FIRST_STAGE, FIRST_STAGE) as offloader:
        stats, pattern = offloader.stats(), offloader.last_pattern
        assert stats.micro_batches == 2 and stats.saved == 2 * 9 * NBYTES
        assert pattern is not None and pattern.sizes == 9 * (NBYTES,)
        assert pattern.order == (2, 1, 0, 5, 4, 3, 8, 7, 6)
        offloader.begin_micro_batch()
        assert offloader.stats().seconds > 0
